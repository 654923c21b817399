"""Programs for GPUs mean what their tensor expressions mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.loops.formulas import EXAMPLES, Example
from tests.loops.test_default import assert_computes, random_arrays
from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tilewright import te
from tilewright.codegen.cuda.build import build
from tilewright.codegen.cuda.emit import emit_program
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.hw.gpu import A100, H200, GpuMachine
from tilewright.loops.formula import formula_of
from tilewright.loops.gpu.default import default_program
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Program, Store, walk_stmts
from tilewright.loops.softmax_exp import with_softmax_exp
from tilewright.loops.verify import verify_program
from tilewright.space.template import normal_form


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
@pytest.mark.parametrize("machine", [A100, H200], ids=lambda m: m.capability)
def test_program_means_the_expression(example: Example, machine: GpuMachine) -> None:
    output, inputs = example.make()
    program = default_program(formula_of(output, inputs, keep_rounding=True), machine)
    verify_program(program)
    arrays = random_arrays(inputs)
    assert_computes(interpret_program(program, arrays), output, dict(zip(inputs, arrays, strict=True)))


def rows_of(rows: int, columns: int, dtype: DType = DType.F32) -> tuple[te.Tensor, list[te.Tensor]]:
    """A softmax, with its exponentials in two passes."""
    x = te.Tensor("x", (rows, columns), dtype)
    (r,) = te.reduce_axes([columns])
    top = te.compute("top", (rows,), DType.F32, lambda i: te.reduce_over("max", x[i, r], [r]))
    total = te.compute(
        "total", (rows,), DType.F32, lambda i: te.reduce_over("sum", te.call("exp", x[i, r] - top[i]), [r])
    )
    return te.compute(
        "out", (rows, columns), dtype, lambda i, j: te.call("exp", x[i, j] - top[i]) / total[i]
    ), [x]


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(3, 40, DType.F32), (5, 197, DType.F16), (2, 256, DType.F16)],
)
def test_rows_in_registers(rows: int, columns: int, dtype: DType) -> None:
    output, inputs = rows_of(rows, columns, dtype)
    program = default_program(with_softmax_exp(formula_of(output, inputs)), H200)
    verify_program(program)
    assert program.decisions.startswith("rows")
    (x,) = random_arrays(inputs)
    weights = np.exp(x.astype(float) - x.astype(float).max(1, keepdims=True))
    expected = weights / weights.sum(1, keepdims=True)
    got = interpret_program(program, [x]).reshape(x.shape).astype(float)
    np.testing.assert_allclose(got, expected, rtol=2e-3 if dtype.is_half else 1e-5, atol=1e-7)
    exponentials = sum(
        isinstance(node, te.Call) and node.op == "exp2_nonpositive"
        for stmt in walk_stmts(program.body)
        if isinstance(stmt, Store)
        for node in te.walk(stmt.value)
    )
    assert exponentials == 1, "what is kept is not computed again"


def test_what_only_a_part_of_a_row_has_is_not_kept_of_all_of_it() -> None:
    inputs = Inputs()
    both = apply("concat", apply("exp", inputs(5, 40)), inputs(5, 37), axis=1)
    task = inputs.task(apply("add", both, apply("sum", both, axes=(1,), keepdims=True)))
    formula = normal_form(task, "fast")
    assert formula is not None
    program = default_program(formula, H200)
    verify_program(program)
    assert program.decisions.startswith("rows")
    arrays = [array(*node.shape, seed=n) for n, node in enumerate(task.graph.inputs)]
    (expected,) = evaluate(task.graph, arrays, precise=True)
    got = interpret_program(program, [each.reshape(-1) for each in arrays]).reshape(expected.shape)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_rows_that_are_no_vectors_go_through_shared_memory() -> None:
    """Of a card so small that a few rows fill it."""
    output, inputs = rows_of(16, 37, DType.F16)
    program = default_program(with_softmax_exp(formula_of(output, inputs)), replace(H200, sms=1))
    verify_program(program)
    assert "in shared memory" in program.decisions
    (x,) = random_arrays(inputs)
    weights = np.exp(x.astype(float) - x.astype(float).max(1, keepdims=True))
    got = interpret_program(program, [x]).reshape(x.shape).astype(float)
    np.testing.assert_allclose(got, weights / weights.sum(1, keepdims=True), rtol=2e-3, atol=1e-7)


def test_results_take_no_position_that_another_thread_still_reads() -> None:
    """A row's sum added to the row the other way round."""
    x = te.Tensor("x", (16, 37), DType.F16)
    (r,) = te.reduce_axes([37])
    total = te.compute("total", (16,), DType.F32, lambda i: te.reduce_over("sum", x[i, r], [r]))
    output = te.compute("out", (16, 37), DType.F16, lambda i, j: x[i, 36 - j] + total[i])
    program = default_program(formula_of(output, [x], keep_rounding=True), replace(H200, sms=1))
    assert "in shared memory" in program.decisions
    (array,) = random_arrays([x])
    assert_computes(interpret_program(program, [array]), output, {x: array})


def test_many_short_rows_share_a_warp_and_a_long_one_is_divided_among_blocks() -> None:
    def made(rows: int, columns: int) -> Program:
        output, inputs = rows_of(rows, columns, DType.F16)
        return default_program(with_softmax_exp(formula_of(output, inputs)), H200)

    assert "16 of 256 threads each" in made(400_000, 197).decisions
    assert "32 of 256 threads each" in made(10_000, 197).decisions
    long = made(500, 65_536)
    assert "2048 of 2048 threads each in 8 blocks" in long.decisions
    kernel = build(long, H200, "fast", None)
    assert (kernel.blocks, kernel.threads) == (4_000, 256)
    assert not kernel.resources.spilled_bytes


@pytest.mark.parametrize("extents", [(56, 64), (36, 40), (33, 35)])
def test_transposed_tiles(extents: tuple[int, int]) -> None:
    """In vectors of 8 and of 4, and one by one; whole tiles, and not."""
    x = te.Tensor("x", extents, DType.F16)
    output = te.compute("y", extents[::-1], DType.F16, lambda j, i: x[i, j] + x[i, j])
    program = default_program(formula_of(output, [x], keep_rounding=True), H200)
    verify_program(program)
    (array,) = random_arrays([x])
    assert_computes(interpret_program(program, [array]), output, {x: array})
    lanes = next(lanes for lanes in (8, 4, 2, 1) if not any(extent % lanes for extent in extents))
    assert ("at once" not in program.decisions) if lanes == 1 else (f"{lanes} at once" in program.decisions)


@pytest.mark.parametrize(("stride", "taps", "width"), [(1, 3, 8), (2, 3, 8), (1, 5, 6), (2, 2, 4)])
@pytest.mark.parametrize("bordered", [False, True])
def test_windows_share_what_they_read(stride: int, taps: int, width: int, bordered: bool) -> None:
    """Of a card so small that a few results keep it busy."""
    channels, height, low = 8, 3, 1 if bordered else 0
    extents = [(n - 1) * stride + taps - 2 * low for n in (height, width)]
    x = te.Tensor("x", (2, *extents, channels), DType.F16)
    w = te.Tensor("w", (taps, taps, channels), DType.F16)
    ky, kx = te.reduce_axes([taps, taps])

    def element(n: te.Expr, y: te.Expr, z: te.Expr, c: te.Expr) -> te.Expr:
        row, column = y * stride + ky - low, z * stride + kx - low
        value = te.cast(x[n, row, column, c], DType.F32)
        if bordered:
            inside = [(row, extents[0]), (column, extents[1])]
            conditions = [te.call("le", 0, i) for i, _ in inside] + [te.call("lt", i, e) for i, e in inside]
            condition = te.all_of(conditions)
            assert condition is not None
            value = te.Select(condition, value, te.const(0.0, DType.F32))
        return te.reduce_over("sum", value * te.cast(w[ky, kx, c], DType.F32), [ky, kx])

    total = te.compute("total", (2, height, width, channels), DType.F32, element)
    output = te.compute(
        "out",
        (2, height, width, channels),
        DType.F32,
        lambda n, y, z, c: te.call("max", total[n, y, z, c], 0.0),
    )
    small = replace(H200, sms=1, threads_sm=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewright.loops.gpu.windows._BUSY", 1)
        program = default_program(formula_of(output, [x, w]), small)
    verify_program(program)
    assert program.decisions.startswith("windows")
    arrays = random_arrays([x, w])
    assert_computes(interpret_program(program, arrays), output, dict(zip([x, w], arrays, strict=True)))


def test_a_group_of_channels_is_one_row() -> None:
    """What is read once stays in registers though channels have parameters of their own, and results are vectors."""
    x = Inputs()
    data, weight, bias = x(2, 6, 8, 8, dtype=DType.F16), x(6, dtype=DType.F16), x(6, dtype=DType.F16)
    task = x.task(apply("group_norm", data, weight, bias, groups=2, eps=1e-5))
    formula = normal_form(task, "fast")
    assert formula is not None
    program = default_program(formula, H200)
    verify_program(program)
    text = emit_program(program, "norm")
    assert program.decisions.startswith("rows")
    assert text.count("(x0 + ") == 1 and "*reinterpret_cast<Pack<f16, 8>*>(out" in text
    arrays = [array(*node.shape, seed=n, dtype=node.dtype) for n, node in enumerate(task.graph.inputs)]
    (expected,) = evaluate(task.graph, arrays, precise=True)
    got = interpret_program(program, arrays).astype(float).reshape(expected.shape)
    np.testing.assert_allclose(got, expected, rtol=4e-3, atol=4e-3)
