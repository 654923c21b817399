"""Which written-out loops read elements again in another copy, and that machine code of them stays right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.llvm.native import run_program
from tilewright import te
from tilewright.codegen.llvm.build import llvm_ir
from tilewright.codegen.llvm.sharing import shares_elements
from tilewright.dtypes import DType
from tilewright.hw import host
from tilewright.loops.ir import Buffer, For, Kind, Program, Scope, Stmt, Store, block, nest

F32 = DType.F32


def window(taps: int, rows: int, step: int, lanes: int) -> tuple[Program, For]:
    """acc[row, :] = sum over taps of x[step * row + tap] * w[tap, :], and its loop over taps."""
    x, w = Buffer("x", F32, step * (rows - 1) + taps), Buffer("w", F32, taps * lanes)
    out, acc = Buffer("out", F32, rows * lanes), Buffer("acc", F32, rows * lanes, Scope.REGISTER)
    tap, row, lane, part = te.Var("k", taps), te.Var("r", rows), te.Var("v", lanes), te.Var("p", 1)
    element = row * lanes + lane
    kept = te.Load(acc, (element,))
    product = te.call("fma", te.Load(x, (row * step + tap,)), te.Load(w, (tap * lanes + lane,)), kept)

    def tile(stmt: Stmt) -> Stmt:
        return nest([(row, Kind.UNROLL), (lane, Kind.VECTOR)], stmt)

    summed = For(tap, Kind.UNROLL, tile(Store(acc, element, product)))
    zero, written = tile(Store(acc, element, te.const(0.0, F32))), tile(Store(out, element, kept))
    body = nest([(part, Kind.PARALLEL)], block(zero, summed, written))
    return Program("window", (x, w, out), body, ""), summed


@settings(max_examples=10, deadline=None)
@given(taps=st.integers(1, 7), rows=st.integers(1, 6), step=st.integers(1, 9))
def test_copies_share_where_windows_overlap(taps: int, rows: int, step: int) -> None:
    program, loop = window(taps, rows, step, 8)
    positions = [(row * step + tap, tap) for row in range(rows) for tap in range(taps)]
    overlap = len({position for position, _ in positions}) < len(set(positions))
    assert shares_elements(loop) == overlap
    assert ("singlethread" in llvm_ir(program, host(), "fast", "window")) == overlap
    x, w = (np.random.default_rng(0).standard_normal(b.size).astype(np.float32) for b in program.params[:2])
    seen = x[np.arange(rows)[:, None] * step + np.arange(taps)]
    expected = (seen @ w.reshape(taps, 8)).reshape(-1)
    np.testing.assert_allclose(run_program(program, [x, w]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_lanes", [True, False])
def test_only_sums_of_elements_in_all_lanes_count(in_lanes: bool) -> None:
    _, loop = window(3, 4, 1, 8 if in_lanes else 1)
    row_loop = loop.body
    assert isinstance(row_loop, For)
    assert shares_elements(loop) == in_lanes
    assert not shares_elements(row_loop)
