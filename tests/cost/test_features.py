"""What is said of a program to a model that learns."""

from __future__ import annotations

import numpy as np
import pytest

from tests.space.checked import Inputs
from tests.work import python_calls
from tilewright.cost.features import (
    BUFFERS,
    COMPUTATION,
    CURVE,
    FEATURES,
    PROGRAM_FEATURES,
    program_features,
    statement_tokens,
)
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.loops.ir import Program
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work

LANES = host().vector_bytes // 4


def default(x: Inputs, output: Node) -> Program:
    return Candidates.of(Work(x.task(output), host()), sketches=False).program(Config("default", ()))


def named(program: Program) -> list[dict[str, float]]:
    """Of each statement, magnitudes instead of their logarithms."""
    rows = statement_tokens(program, most=100)[:, : len(FEATURES)]
    return [dict(zip(FEATURES, 2**row - 1, strict=True)) for row in rows]


def test_there_are_as_many_as_in_ansor_and_each_has_a_name_of_its_own() -> None:
    assert (len(COMPUTATION), BUFFERS * 18, CURVE) == (57, 90, 10)
    assert len(FEATURES) == 164 == len(set(FEATURES))
    assert len(set(PROGRAM_FEATURES)) == len(PROGRAM_FEATURES)


def test_an_elementwise_program() -> None:
    x = Inputs()
    rows = named(default(x, apply("add", x(64, LANES), x(64, LANES))))
    total = 64 * LANES
    assert sum(row["float_addsub"] for row in rows) == pytest.approx(total)
    (row,) = [row for row in rows if row["float_addsub"]]
    assert row["vector_length"] == pytest.approx(LANES) and row["vector_at_inner_spatial"] == 1
    assert row["executions"] == pytest.approx(total)
    for number in range(3):  # two are read and one is written, each once
        assert row[f"buffer{number}_unique_bytes"] == pytest.approx(4 * total)
        assert row[f"buffer{number}_not_reused"] == 1
        assert row[f"buffer{number}_stride"] == pytest.approx(1)
    assert sum(row[f"buffer{number}_writes"] for number in range(5)) == 1
    assert row["buffer3_bytes"] == row["on_gpu"] == row["thread_x"] == 0
    assert row["intensity0"] == pytest.approx(row["intensity9"])  # every byte is used once, in every loop


def test_a_product_uses_what_it_reads_again() -> None:
    x = Inputs()
    task = x.task(apply("matmul", x(48, 96), x(96, 4 * LANES, constant=True)))
    candidates = Candidates.of(Work(task, host()), sketches=False)
    values = {
        "rows": 4,
        "vectors": 2,
        "unroll": 4,
        "block": 0,
        "chunks": 1,
        "k_block": 0,
        "prefetch": 0,
        "stage": False,
    }
    program = candidates.program(Config.of("contraction", values))
    (row,) = [row for row in named(program) if row["float_mad"]]
    assert row["float_mad"] == pytest.approx(48 * 96 * 4 * LANES)
    assert row["unroll_product"] == pytest.approx(4 * 2 * 4)
    assert row["unroll_at_inner_spatial"] + row["unroll_at_middle_spatial"] == 1
    assert row["buffer0_reused_in_loop"] == row["buffer1_reused_in_loop"] == 1
    assert row["intensity9"] > 4 * row["intensity0"]
    assert row["allocated_bytes"] == pytest.approx(4 * 2 * LANES * 4)


def test_more_work_is_more_of_everything_that_counts() -> None:
    def features(rows: int) -> dict[str, float]:
        x = Inputs()
        program = default(x, apply("exp", x(rows, 4 * LANES)))
        return dict(zip(PROGRAM_FEATURES, program_features(program), strict=True))

    less, more = features(8), features(64)
    for name in ("all.float_math", "all.executions", "main.buffer0_bytes", "main.buffer0_unique_lines"):
        assert more[name] == pytest.approx(less[name] + 3, abs=0.1), name  # logarithms to base 2


def test_they_are_numbers_and_always_the_same() -> None:
    x = Inputs()
    program = default(x, apply("softmax", x(12, 40), axis=1))
    one, other = program_features(program), program_features(program)
    np.testing.assert_array_equal(one, other)
    assert one.shape == (len(PROGRAM_FEATURES),) and np.isfinite(one).all()


@pytest.mark.parametrize("columns", [32, 128, 4096])
def test_they_take_little_work(columns: int) -> None:
    """About a millisecond: a few calls for each statement and loop, however often it runs."""
    x = Inputs()
    program = default(x, apply("softmax", x(64, columns), axis=1))
    assert python_calls(lambda: program_features(program)) < 6_000
