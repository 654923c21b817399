"""What `exponents.py` finds in a softmax, and what it must not find."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tilewright.tile.ir import Op, TileProgram, Value, operands_of, walk
from tilewright.tile.passes.exponents import may_ignore_nan, nonpositive, sums_exponentials


@tilewright.kernel
def softmaxes(x, out, WHICH: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    value = tl.load(x + at)
    most = tl.max(value, axis=0 if WHICH == "columns" else 1)
    if WHICH == "stored":
        tl.store(out + tl.arange(0, M), most)
    put_back = most[None, :] if WHICH == "columns" or WHICH == "crossed" else most[:, None]
    weight = tl.exp(value - put_back) if WHICH != "powers" else tl.exp(2.0 * (value - put_back))
    if WHICH == "weights":
        tl.store(out + at, weight)
    if WHICH == "other axis":
        tl.store(out + tl.arange(0, N), tl.sum(weight, axis=0))
    total = tl.sum(weight, axis=0 if WHICH == "columns" else 1)
    tl.store(out + at, weight / (total[None, :] if WHICH == "columns" else total[:, None]))


def parts(which: str) -> tuple[dict[Value, Op], dict[Value, list[object]], TileProgram]:
    x = np.zeros((8, 8), np.float32)
    program = softmaxes.program(x, x, WHICH=which, M=8, N=8)
    made: dict[Value, Op] = {}
    users: dict[Value, list[object]] = {}
    for node in walk(program.body):
        for operand in operands_of(node):
            users.setdefault(operand, []).append(node)
        if isinstance(node, Op):
            made.update((result, node) for result in node.results)
    return made, users, program


@pytest.mark.parametrize(
    ("which", "bounded", "ignores"),
    [("rows", True, True), ("columns", True, True), ("stored", True, False), ("weights", True, False),
     ("other axis", True, False), ("crossed", False, False), ("powers", None, False)],
)  # fmt: skip
def test_a_softmax_is_found(which: str, bounded: bool | None, ignores: bool) -> None:
    made, users, program = parts(which)
    by_name: dict[str, Op] = {node.name: node for node in walk(program.body) if isinstance(node, Op)}
    if bounded is not None:
        assert nonpositive(made, by_name["exp"].operands[0]) is bounded
        assert sums_exponentials(made, by_name["div"].operands[1]) is bounded
    maximum = next(op for op in made.values() if op.name == "reduce" and op.settings["kind"] == "max")
    assert may_ignore_nan(made, users, maximum) is ignores
