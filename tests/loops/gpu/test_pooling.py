"""Pooling along memory: neighbours share what they read of a row, border and all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.loops.test_default import assert_computes, random_arrays
from tilewright import te
from tilewright.codegen.cuda.build import build
from tilewright.dtypes import DType
from tilewright.hw.gpu import A100, H200
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu import pooling
from tilewright.loops.gpu.default import default_program
from tilewright.loops.interpret import interpret_program
from tilewright.loops.verify import verify_program


def pool(
    kind: str, size: int, taps: int, stride: int, low: int, dtype: DType = DType.F16
) -> tuple[te.Tensor, list[te.Tensor]]:
    """Of 3 planes with a border, and something added after."""
    count = (size + 2 * low - taps) // stride + 1
    x, more = te.Tensor("x", (3, size, size), dtype), te.Tensor("more", (3, 1, count), dtype)
    ky, kx = te.reduce_axes([taps, taps])
    outside = te.const(float("-inf") if kind == "max" else 0.0, DType.F32)

    def element(c: te.Expr, i: te.Expr, j: te.Expr) -> te.Expr:
        row, column = i * stride + ky - low, j * stride + kx - low
        inside = te.all_of(
            [te.call("le", 0, e) for e in (row, column)] + [te.call("lt", e, size) for e in (row, column)]
        )
        assert inside is not None
        value = te.cast(x[c, row, column], DType.F32)
        return te.reduce_over(kind, te.Select(inside, value, outside) if low else value, [ky, kx])

    total = te.compute("total", (3, count, count), DType.F32, element)
    output = te.compute(
        "out",
        (3, count, count),
        dtype,
        lambda c, i, j: te.cast(total[c, i, j] + te.cast(more[c, 0, j], DType.F32), dtype),
    )
    return output, [x, more]


CASES = [
    ("max", 16, 3, 2, 1, "4"),
    ("sum", 16, 3, 1, 1, "8"),
    ("max", 16, 2, 2, 0, "4"),
    ("sum", 24, 5, 2, 2, "4"),
    ("max", 8, 3, 1, 1, "8"),
]


@pytest.mark.parametrize(("kind", "size", "taps", "stride", "low", "neighbours"), CASES)
def test_neighbours_share_what_they_read(
    kind: str, size: int, taps: int, stride: int, low: int, neighbours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "_BUSY", 1)
    output, inputs = pool(kind, size, taps, stride, low)
    small = replace(H200, sms=1)
    program = default_program(formula_of(output, inputs, keep_rounding=True), small)
    verify_program(program)
    assert program.decisions == f"pooled: {kind} of {taps * taps}, 256 threads of {neighbours}"
    arrays = random_arrays(inputs)
    assert_computes(interpret_program(program, arrays), output, dict(zip(inputs, arrays, strict=True)))


def test_what_cannot_be_read_at_once_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "_BUSY", 1)
    for size, taps, stride, low in ((15, 3, 2, 1), (14, 2, 2, 0), (16, 9, 1, 4)):
        output, inputs = pool("max", size, taps, stride, low)
        program = default_program(formula_of(output, inputs), replace(H200, sms=1))
        assert program.decisions.startswith("columns"), (size, taps)


def test_it_compiles_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "_BUSY", 1)
    output, inputs = pool("max", 16, 3, 2, 1)
    for machine in (A100, H200):
        program = default_program(formula_of(output, inputs), replace(machine, sms=1))
        kernel = build(program, machine, "fast", None)
        assert not kernel.resources.spilled_bytes
