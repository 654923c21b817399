"""A record holds as long as its config leads to the same code."""

from __future__ import annotations

from tests.db.samples import VERSIONS, work
from tilewright.codegen.generator import code_of
from tilewright.db.versions import Versions, holds
from tilewright.loops.default import default_program
from tilewright.space.implementation import Implementation


def implementation(rows: int) -> Implementation:
    formula = work(rows).formula
    assert formula is not None
    return Implementation.single(work(rows).task, default_program(formula, work().machine))


def test_what_was_timed_holds_while_the_code_is_the_same() -> None:
    machine = work().machine
    code = code_of(implementation(8), machine, "fast")
    assert code == code_of(implementation(8), machine, "fast") != code_of(implementation(9), machine, "fast")
    assert holds(code, VERSIONS, implementation(8), machine, "fast")  # other sources, the same code
    assert not holds(code, VERSIONS, implementation(9), machine, "fast")
    assert not holds(
        "", VERSIONS, implementation(8), machine, "fast"
    )  # other sources, and no record of the code
    assert holds("", Versions.now(), implementation(9), machine, "fast")  # the same sources
