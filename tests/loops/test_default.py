"""Default programs mean what their tensor expressions mean, for machines of several kinds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.loops.formulas import EXAMPLES, Example, matmul
from tests.te.bounds import assert_within_bounds
from tilewright import te
from tilewright.hw import CpuMachine, host
from tilewright.loops.default import default_program
from tilewright.loops.formula import formula_of
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import For, Kind, walk_stmts
from tilewright.loops.text import print_program
from tilewright.loops.verify import verify_program
from tilewright.te.interpret import interpret


def machines() -> list[CpuMachine]:
    here = host()
    return [
        dataclasses.replace(here, vector_bytes=size, vector_registers=registers)
        for size, registers in ((16, 16), (32, 16), (64, 32))
    ]


def random_arrays(tensors: list[te.Tensor]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = []
    for tensor in tensors:
        if tensor.dtype.is_float:
            arrays.append(rng.standard_normal(tensor.shape).astype(tensor.dtype.numpy))
        else:
            arrays.append(rng.integers(0, 12, tensor.shape).astype(tensor.dtype.numpy))
    return arrays


def assert_computes(got: np.ndarray, output: te.Tensor, values: dict[te.Tensor, np.ndarray]) -> None:
    """That `got`, flat, is what the expression is for these inputs; the interpreter of expressions agrees."""
    expected = interpret(output, values)
    if output.dtype.is_float:
        assert_within_bounds(expected, output, values, "interpreted")
        assert_within_bounds(got, output, values)
    else:
        np.testing.assert_array_equal(got.reshape(expected.shape), expected)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
@pytest.mark.parametrize("machine", machines(), ids=lambda m: f"{m.vector_bytes * 8}bit")
def test_program_means_the_expression(example: Example, machine: CpuMachine) -> None:
    output, inputs = example.make()
    program = default_program(formula_of(output, inputs, keep_rounding=True), machine)
    verify_program(program)
    arrays = random_arrays(inputs)
    assert_computes(interpret_program(program, arrays), output, dict(zip(inputs, arrays, strict=True)))


def test_axes_are_joined_and_split() -> None:
    x = te.Tensor("x", (4, 6, 8), te.Load(te.Tensor("t", (1,), EXAMPLE_DTYPE), (te.as_index(0),)).dtype)
    whole = formula_of(te.compute("y", x.shape, x.dtype, lambda i, j, k: x[i, j, k] * 2.0), [x])
    assert [axis.extent for axis in whole.axes] == [4 * 6 * 8]
    flat = te.compute("flat", (24, 8), x.dtype, lambda i, k: x[i // 6, i % 6, k])
    transposed = te.compute("turned", (8, 24), x.dtype, lambda k, i: flat[i, k])
    assert [axis.extent for axis in formula_of(transposed, [x]).axes] == [8, 24]


EXAMPLE_DTYPE = EXAMPLES[0].make()[0].dtype


def test_contraction_keeps_its_accumulators_within_the_registers() -> None:
    for machine in machines():
        output, inputs = matmul(64, 256, 128)
        program = default_program(formula_of(output, inputs), machine)
        unrolled = {s.var.name: s.var.extent for s in walk_stmts(program.body) if isinstance(s, For)}
        tile = unrolled.get("m", 1) * unrolled.get("u", 1)
        assert tile >= 8, "a tile this small cannot fill the pipeline"
        assert tile + unrolled.get("u", 1) + 1 <= machine.vector_registers


def test_outer_loop_is_parallel_and_inner_is_vector() -> None:
    output, inputs = matmul(64, 256, 128)
    program = default_program(formula_of(output, inputs), host())
    kinds = [s.kind for s in walk_stmts(program.body) if isinstance(s, For)]
    assert kinds[0] is Kind.PARALLEL
    assert Kind.VECTOR in kinds
    assert program.parallel_extent > 1


def test_text_is_stable() -> None:
    texts = {print_program(default_program(formula_of(*EXAMPLES[0].make()), host())) for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize("columns", [256, 250, 40])
def test_a_constant_operand_is_packed(columns: int) -> None:
    """The program that reads the packed operand computes the same, whether or not the tile divides the axis."""
    output, inputs = matmul(7, columns, 9)
    for machine in machines():
        program = default_program(formula_of(output, inputs, constants=[1]), machine)
        verify_program(program)
        packing = program.packings[1]
        assert packing is not None and program.packings[0] is None
        arrays = random_arrays(inputs)
        expected = interpret(output, dict(zip(inputs, arrays, strict=True)))
        arrays[1] = packing.pack(arrays[1])
        got = interpret_program(program, arrays).reshape(expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_what_is_read_in_other_ways_is_not_packed() -> None:
    output, inputs = matmul(7, 256, 9)
    assert not any(default_program(formula_of(output, inputs, constants=[0, 2]), host()).packings)
