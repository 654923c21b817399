"""Machine code does what the loop program says: same values, whatever the vector width, numerics and partition."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.codegen.llvm.native import run_program
from tests.loops.formulas import EXAMPLES, Example, matmul
from tests.loops.test_default import random_arrays
from tilewright import te
from tilewright.codegen.llvm import math as vector_math
from tilewright.codegen.llvm import scalars, toolchain
from tilewright.codegen.llvm.build import llvm_ir
from tilewright.dtypes import DType
from tilewright.errors import CodegenError
from tilewright.hw import CpuMachine, host
from tilewright.loops.default import default_program
from tilewright.loops.formula import formula_of
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Block, Buffer, For, Kind, Program, Scope, Store
from tilewright.loops.verify import verify_program
from tilewright.te.scalars import SCALARS

HERE = host()
NARROW = dataclasses.replace(HERE, vector_bytes=16, vector_registers=16)


def program_of(example: Example, machine=HERE) -> tuple[Program, list[np.ndarray]]:
    output, inputs = example.make()
    return default_program(formula_of(output, inputs, keep_rounding=True), machine), random_arrays(inputs)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
@pytest.mark.parametrize(
    ("machine", "numerics", "pieces"), [(HERE, "fast", 1), (HERE, "strict", 3), (NARROW, "strict", 2)]
)
def test_machine_code_means_the_program(example: Example, machine, numerics: str, pieces: int) -> None:
    program, arrays = program_of(example, machine)
    expected = interpret_program(program, arrays)
    got = run_program(program, arrays, machine=machine, numerics=numerics, pieces=pieces)
    if expected.dtype.kind in "iub":
        np.testing.assert_array_equal(got, expected)
    else:
        half = program.params[-1].dtype.is_half
        np.testing.assert_allclose(
            got.astype(float), expected.astype(float), rtol=1e-2 if half else 2e-6, atol=1e-6
        )


def test_every_scalar_function_has_an_emitter() -> None:
    assert set(SCALARS) == set(scalars.EMITTERS) | (set(SCALARS) & vector_math.FUNCTIONS)


NOT_OF_ANY_FLOAT = {
    "floordiv",
    "mod",
    "shl",
    "shr",
    "and",
    "or",
    "xor",
    "not",
    "rsqrt",
    "exp2_nonpositive",
    "exp2_rough",
    "floor_pow2",
    "dot4",
}
FLOAT_OPS = [n for n in SCALARS if n not in NOT_OF_ANY_FLOAT]
INT_OPS = [
    "add",
    "sub",
    "mul",
    "min",
    "max",
    "neg",
    "abs",
    "floordiv",
    "mod",
    "shl",
    "shr",
    "and",
    "or",
    "xor",
    "not",
    "eq",
    "ne",
    "lt",
    "le",
]


def elementwise(op: str, dtype: DType, size: int = 67) -> tuple[te.Tensor, list[te.Tensor]]:
    scalar = SCALARS[op]
    inputs = [te.Tensor(f"x{n}", (size,), dtype) for n in range(scalar.arity)]
    result = DType.BOOL if scalar.predicate else dtype
    return te.compute("out", (size,), result, lambda i: te.call(op, *(x[i] for x in inputs))), inputs


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
@pytest.mark.parametrize("op", FLOAT_OPS)
def test_float_functions_with_special_values(op: str, dtype: DType) -> None:
    output, inputs = elementwise(op, dtype)
    rng = np.random.default_rng(1)
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 0.5, -2.5]
    arrays = []
    for number in range(len(inputs)):
        array = rng.standard_normal(67) * 3
        array[: len(special)] = np.roll(special, number)
        arrays.append(array.astype(dtype.numpy))
    with np.errstate(all="ignore"):
        expected = SCALARS[op].numpy(*arrays)
    got = run_program(default_program(formula_of(output, inputs), HERE), arrays, numerics="strict")
    if expected.dtype == bool:
        np.testing.assert_array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=4e-7 if dtype is DType.F32 else 2e-15, atol=0)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
def test_the_weight_of_a_softmax(dtype: DType) -> None:
    output, inputs = elementwise("exp2_nonpositive", dtype, size=4099)
    lowest = float(np.finfo(dtype.numpy).min)
    special = [0.0, -0.0, -1.0, -0.5, -np.inf, np.nan, lowest, -126.4, -126.6, -1022.4, -1022.6]
    falling = np.linspace(-1100 if dtype is DType.F64 else -130, 0, 4099 - len(special))
    array = np.concatenate([special, falling]).astype(dtype.numpy)
    got = run_program(default_program(formula_of(output, inputs), HERE), [array], numerics="strict")
    expected = SCALARS["exp2_nonpositive"].numpy(array)
    # Of what is below the normal numbers, some may be left.
    smallest = float(np.finfo(dtype.numpy).tiny)
    np.testing.assert_allclose(got, expected, rtol=3e-7 if dtype is DType.F32 else 1e-15, atol=smallest)
    assert got[0] == got[1] == 1 and got[4] == got[6] == 0


# By how many products of vectors a cycle has room for: where there is but one, tables stand in for some.
X86 = ("znver4", "icelake-server") if HERE.triple.startswith("x86_64") else ()


@pytest.mark.parametrize(
    "machine", [NARROW, *(dataclasses.replace(HERE, cpu=cpu) for cpu in X86)], ids=["narrow", *X86]
)
def test_a_rough_power_of_two(machine: CpuMachine) -> None:
    special = [0.0, -0.0, 1.0, -1.0, 64.0, -np.inf, np.inf, np.nan, -3e38, 3e38, 129.0, -126.9, 1e6, -1e6]
    spread = np.linspace(-126, 127, 4099 - len(special))
    array = np.concatenate([special, spread]).astype(np.float32)
    output, inputs = elementwise("exp2_rough", DType.F32, size=array.size)
    got = run_program(default_program(formula_of(output, inputs), machine), [array], machine=machine)
    expected = SCALARS["exp2_rough"].numpy(array)
    np.testing.assert_allclose(got, expected, rtol=7e-7, atol=float(np.finfo(np.float32).tiny))
    assert got[5] == got[8] == 0


@pytest.mark.parametrize("dtype", [DType.I8, DType.U8, DType.I16, DType.I32, DType.I64])
@pytest.mark.parametrize("op", INT_OPS)
def test_integer_functions(op: str, dtype: DType) -> None:
    output, inputs = elementwise(op, dtype)
    info = np.iinfo(dtype.numpy)
    rng = np.random.default_rng(2)
    # Index arithmetic is exact by definition, so 64-bit values stay where nothing overflows.
    low, high = (-(2**31), 2**31) if dtype is DType.I64 else (info.min, info.max)
    arrays = [rng.integers(low, high, 67).astype(dtype.numpy) for _ in inputs]
    if op in ("floordiv", "mod"):
        arrays[1][arrays[1] == 0] = 3
    if op in ("shl", "shr"):
        arrays[1] = rng.integers(0, dtype.bytes * 8, 67).astype(dtype.numpy)
    with np.errstate(all="ignore"):
        expected = SCALARS[op].numpy(*arrays)
    got = run_program(default_program(formula_of(output, inputs), HERE), arrays)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("target", list(DType))
@pytest.mark.parametrize("source", list(DType))
def test_conversions(source: DType, target: DType) -> None:
    x = te.Tensor("x", (37,), source)
    output = te.compute("out", (37,), target, lambda i: te.cast(te.Load(x, (i,)), target))
    rng = np.random.default_rng(3)
    numbers = rng.integers(0, 100, 37) + (rng.random(37) if source.is_float else 0)
    array = numbers.astype(source.numpy)
    expected = array.astype(target.numpy) if target is not DType.BOOL else array != 0
    program = default_program(formula_of(output, [x], keep_rounding=True), HERE)
    np.testing.assert_array_equal(run_program(program, [array]), expected)


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_rounding_to_half_precision_is_numpys(numerics: str) -> None:
    """With fast numerics numbers that are subnormal in f32 may be 0: the processor's own conversion takes them so."""
    rng = np.random.default_rng(4)
    array = rng.integers(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32).view(np.float32)
    array[:64] = rng.integers(1, 2**23, 64).astype(np.uint32).view(np.float32)  # subnormal
    for dtype in (DType.BF16, DType.F16):
        x = te.Tensor("x", array.shape, DType.F32)
        output = te.compute("out", array.shape, dtype, lambda i, x=x: x[i])
        with np.errstate(all="ignore"):
            expected = array.astype(dtype.numpy)
        got = run_program(default_program(formula_of(output, [x]), HERE), [array], numerics=numerics)
        if numerics == "fast":
            subnormal = np.abs(array) < np.finfo(np.float32).tiny
            flushed = subnormal & (got.astype(np.float32) == 0)
            expected[flushed] = np.copysign(np.zeros_like(array), array)[flushed].astype(dtype.numpy)
        number = ~np.isnan(expected.astype(np.float32))
        np.testing.assert_array_equal(got.view(np.uint16)[number], expected.view(np.uint16)[number])
        assert np.isnan(got[~number].astype(np.float32)).all()


def test_division_by_zero_does_not_trap() -> None:
    for op in ("floordiv", "mod"):
        output, inputs = elementwise(op, DType.I32, 9)
        arrays = [np.full(9, np.iinfo(np.int32).min, np.int32), np.array([0, -1] * 4 + [0], np.int32)]
        run_program(default_program(formula_of(output, inputs), HERE), arrays)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_what_is_divided_by_the_root_of_infinity_is_nothing(dtype: DType, numerics: str) -> None:
    """Each number by its own root, and a row by that of a sum."""
    x, squares = te.Tensor("x", (4, 40), dtype), te.Tensor("s", (4, 40), dtype)
    roots = te.compute("out", (4, 40), dtype, lambda i, j: x[i, j] / te.call("sqrt", squares[i, j]))
    (axis,) = te.reduce_axes([40])
    total = te.compute("total", (4,), dtype, lambda i: te.reduce_over("sum", squares[i, axis], [axis]))
    rows = te.compute("out", (4, 40), dtype, lambda i, j: x[i, j] / te.call("sqrt", total[i]))
    for output in (roots, rows):
        program = default_program(formula_of(output, [x, squares]), HERE)
        arrays = [np.full(160, value, dtype.numpy) for value in (3.0, np.inf)]
        np.testing.assert_array_equal(run_program(program, arrays, numerics=numerics), np.zeros(160))


def test_a_contraction_does_not_spill() -> None:
    output, inputs = matmul(64, 256, 128)
    program = default_program(formula_of(output, inputs), HERE)
    text = toolchain.assembly(llvm_ir(program, HERE, "fast", "kernel"), HERE, comments=True)
    spills = [line for line in text.splitlines() if "Spill" in line or "Reload" in line]
    vector_spills = [line for line in spills if "mm" in line.split("#")[0]]
    assert not vector_spills, vector_spills[:4]


def test_half_precision_without_its_instructions_is_refused() -> None:
    bare = dataclasses.replace(
        HERE,
        features=tuple(f for f in HERE.features if f != "f16c" and not f.startswith("avx")),
        vector_bytes=16,
    )
    if not bare.triple.startswith("x86_64"):
        pytest.skip("an x86 question")
    x = te.Tensor("x", (8,), DType.F16)
    program = default_program(formula_of(te.compute("out", (8,), DType.F16, lambda i: x[i] + 1.0), [x]), bare)
    with pytest.raises(CodegenError, match="f16c"):
        llvm_ir(program, bare, "fast", "kernel")


# -- four bytes at a time

_EXTREME_BYTES = [0, 1, 127, 128, 129, 255]


def _machines_for_dot4() -> list[CpuMachine]:
    """This machine, and the same without what it has for bytes: every expansion that it can run."""
    without = tuple(f for f in HERE.features if f not in ("avx512vnni", "avxvnni"))
    plain = dataclasses.replace(HERE, features=without, absent=(*HERE.absent, "avx512vnni", "avxvnni"))
    bare = tuple(f for f in without if "avx" not in f)
    machines = [HERE, NARROW, plain, dataclasses.replace(plain, vector_bytes=16)]
    if HERE.vector_bytes == 64:
        machines += [dataclasses.replace(m, vector_bytes=32, vector_registers=16) for m in (HERE, plain)]
    return [*machines, dataclasses.replace(plain, features=tuple(f for f in bare if f != "sse2"))]


@pytest.mark.parametrize("machine", _machines_for_dot4(), ids=lambda m: f"{m.vector_bytes}-{m.dot4_bytes}")
@pytest.mark.parametrize("size", [1, 67])
def test_dot4_is_exact(machine: CpuMachine, size: int) -> None:
    output, inputs = elementwise("dot4", DType.I32, size)
    rng = np.random.default_rng(5)
    a, b = (rng.choice(_EXTREME_BYTES, (size, 4)).astype(np.uint8).view(np.int32).reshape(-1) for _ in "ab")
    c = rng.integers(-(2**31), 2**31, size).astype(np.int32)
    unsigned, signed = a.view(np.uint8).astype(np.int64), b.view(np.int8).astype(np.int64)
    expected = ((unsigned * signed).reshape(size, 4).sum(1) + c).astype(np.int32)
    np.testing.assert_array_equal(SCALARS["dot4"].numpy(a, b, c), expected)
    program = default_program(formula_of(output, inputs), machine)
    np.testing.assert_array_equal(run_program(program, [a, b, c], machine=machine), expected)


def test_dot4_is_one_instruction_where_there_is_one() -> None:
    output, inputs = elementwise("dot4", DType.I32, 256)
    text = toolchain.assembly(
        llvm_ir(default_program(formula_of(output, inputs), HERE), HERE, "fast", "k"), HERE
    )
    assert ("vpdpbusd" in text) == (HERE.triple.startswith("x86_64") and HERE.dot4_bytes > 0)
    assert "vpmaddubsw" not in text  # it saturates


def test_bytes_read_as_words() -> None:
    """Of an input and of scratch memory, wherever they begin; what makes no whole word is not in the view."""
    x, out = Buffer("x", DType.U8, 71), Buffer("out", DType.I32, 2 * 17)
    kept = Buffer("kept", DType.U8, 71, Scope.SCRATCH)
    word, byte = te.Var("w", 17), te.Var("b", 71)
    copy = For(byte, Kind.SERIAL, Store(kept, byte, te.Load(x, (byte,))))
    read = [
        For(word, Kind.VECTOR, Store(out, word + 17 * n, te.Load(buffer.read_as(DType.I32), (word,))))
        for n, buffer in enumerate((x, kept))
    ]
    program = Program("words", (x, out), Block((copy, *read)))
    verify_program(program)
    unaligned = np.random.default_rng(7).integers(0, 256, 72).astype(np.uint8)[1:]
    expected = np.tile(unaligned[:68].copy().view(np.int32), 2)
    np.testing.assert_array_equal(interpret_program(program, [unaligned]), expected)
    np.testing.assert_array_equal(run_program(program, [unaligned]), expected)
