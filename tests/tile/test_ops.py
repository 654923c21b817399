"""Each operation of the language against NumPy, and the type rules."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright
import tilewright.tile as tl
from tilewright.dtypes import DType
from tilewright.errors import KernelShapeError, KernelTypeError, VerificationError
from tilewright.te.scalars import SCALARS
from tilewright.tile.frontend.builder import Builder, promote
from tilewright.tile.frontend.language import SCALAR_FUNCTIONS
from tilewright.tile.interpret import interpret
from tilewright.tile.ir import Block, Op, TileProgram, TileType, Value
from tilewright.tile.ops import OPS, broadcast_shapes
from tilewright.tile.pointers import pointer_to
from tilewright.tile.verify import verify_tile_program

SIZES = st.sampled_from([1, 2, 4, 8])
SHAPES = st.lists(SIZES, max_size=4).map(tuple)


# -- type rules -------------------------------------------------------------------------------------------------------


@given(SHAPES, SHAPES)
def test_shapes_broadcast_as_in_numpy(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    try:
        wanted = np.broadcast_shapes(a, b)
    except ValueError:
        with pytest.raises(KernelShapeError):
            broadcast_shapes(a, b)
    else:
        assert broadcast_shapes(a, b) == wanted


@given(st.sampled_from(DType), st.sampled_from(DType))
def test_promotion_is_symmetric_and_holds_both(a: DType, b: DType) -> None:
    if any(x is DType.U64 and y.is_integer and not y.is_unsigned for x, y in ((a, b), (b, a))):
        for pair in ((a, b), (b, a)):  # NumPy takes f64, which does not hold all of either
            with pytest.raises(KernelTypeError, match="no integer type holds"):
                promote(*pair)
        return
    both = promote(a, b)
    assert both is promote(b, a)
    if {a, b} == {DType.F16, DType.BF16}:
        assert both is DType.F32
    elif a.is_float == b.is_float:
        assert both.numpy == np.promote_types(a.numpy, b.numpy)
    else:
        assert both is (a if a.is_float else b)


def run(build: Any, *arrays: np.ndarray) -> np.ndarray:
    """What `build` makes of tiles with these elements: the IR is built, verified, printed and interpreted."""
    b = Builder()
    names = [f"x{i}" for i in range(len(arrays))]
    params = [Value(pointer_to(DType.of(array)), name) for array, name in zip(arrays, names, strict=True)]
    tiles = []
    for array, param in zip(arrays, params, strict=True):
        index = b.emit("arange", start=0, end=array.size) if array.size > 1 else b.constant(0)
        pointers = b.emit("addptr", *b.alike(param, index), bytes=array.itemsize)
        flat = b.emit("load", pointers, dtype=DType.of(array))
        tiles.append(flat if array.shape == () else b.emit("reshape", flat, shape=array.shape))
    result = b.value(build(b, *tiles))
    out = np.empty(result.type.shape, result.type.dtype.numpy)
    target = Value(pointer_to(result.type.dtype), "out")
    index = b.emit("arange", start=0, end=out.size) if out.size > 1 else b.constant(0)
    flat = b.emit("reshape", result, shape=(out.size,)) if out.size > 1 else result
    flat = b.emit("reshape", result, shape=()) if out.size == 1 and out.shape else flat
    b.effect("store", b.emit("addptr", *b.alike(target, index), bytes=out.itemsize), flat)
    program = TileProgram("test", (*params, target), Block((), tuple(b.nodes), ()))
    verify_tile_program(program)
    assert str(program).startswith("kernel test(")
    from tilewright.tile.kernel import tensor_argument

    tensors = [
        tensor_argument(name, array) for name, array in zip([*names, "out"], [*arrays, out], strict=True)
    ]
    interpret(program, (1, 1, 1), tensors, {}, debug=True, unwritten=["out"])
    return out


def data(dtype: DType, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype.is_float:
        return np.asarray(rng.random(shape) * 2 + 0.125, dtype.numpy)
    if dtype is DType.BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    return np.asarray(rng.integers(1, 7, shape), dtype.numpy)


# -- elementwise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DType, ids=str)
@pytest.mark.parametrize("name", SCALARS)
def test_scalar_functions(name: str, dtype: DType) -> None:
    scalar = SCALARS[name]
    arrays = [data(dtype, (4, 8), seed) for seed in range(scalar.arity)]
    types = [TileType(dtype, (4, 8))] * scalar.arity
    try:
        OPS[name].rule(types, {})
    except KernelTypeError:
        with pytest.raises(KernelTypeError):
            run(lambda b, *tiles: b.emit(name, *tiles), *arrays)
        return
    found = run(lambda b, *tiles: b.emit(name, *tiles), *arrays)
    with np.errstate(all="ignore"):
        wanted = np.asarray(scalar.numpy(*(array.astype(dtype.compute.numpy) for array in arrays)))
    np.testing.assert_array_equal(found, wanted.astype(bool if scalar.predicate else dtype.numpy))


def test_functions_of_te_are_functions_of_the_language() -> None:
    missing = set(SCALARS) - set(SCALAR_FUNCTIONS) - {"and", "or", "not", "min", "max"}
    assert not missing
    assert all(getattr(tl, name).__doc__ for name in SCALAR_FUNCTIONS)


@settings(max_examples=60, deadline=None)
@given(SHAPES, SHAPES, st.sampled_from(["add", "mul", "sub"]), st.integers(0, 1000))
def test_arithmetic_broadcasts(a: tuple[int, ...], b: tuple[int, ...], name: str, seed: int) -> None:
    x, y = data(DType.F32, a, seed), data(DType.I16, b, seed + 1)
    try:
        np.broadcast_shapes(a, b)
    except ValueError:
        return
    found = run(lambda make, p, q: make.emit(name, *make.numbers(name, p, q)), x, y)
    np.testing.assert_array_equal(found, np.asarray(SCALARS[name].numpy(x, y.astype(np.float32)), np.float32))


def test_a_python_number_takes_the_type_of_the_tile() -> None:
    b = Builder()
    tile = Value(TileType(DType.F16, (4,)))
    assert all(each.type == tile.type for each in b.numbers("+", tile, 2))
    assert b.numbers("+", Value(TileType(DType.I8)), 2.5)[0].type == TileType(DType.F32)
    with pytest.raises(KernelTypeError, match="300 does not fit into i8"):
        b.numbers("+", Value(TileType(DType.I8)), 300)


@pytest.mark.parametrize("source", DType, ids=str)
@pytest.mark.parametrize("target", DType, ids=str)
def test_casts(source: DType, target: DType) -> None:
    x = data(source, (8,))
    found = run(lambda b, tile: tl.cast.apply(b, (tile, target), {}), x)
    np.testing.assert_array_equal(found, x != 0 if target is DType.BOOL else x.astype(target.numpy))


def test_bitcast() -> None:
    x = data(DType.F32, (4, 2))
    np.testing.assert_array_equal(
        run(lambda b, t: tl.cast.apply(b, (t, tl.int32, True), {}), x), x.view(np.int32)
    )


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (lambda b, x: tl.trans.apply(b, (x,), {}), lambda x: x.swapaxes(-1, -2)),
        (lambda b, x: tl.permute.apply(b, (x, 2, 0, 1), {}), lambda x: x.transpose(2, 0, 1)),
        (lambda b, x: tl.reshape.apply(b, (x, 16, 4), {}), lambda x: x.reshape(16, 4)),
        (lambda b, x: tl.ravel.apply(b, (x,), {}), lambda x: x.reshape(-1)),
        (lambda b, x: tl.expand_dims.apply(b, (x, (0, -1)), {}), lambda x: x[None, ..., None]),
        (lambda b, x: tl.join.apply(b, (x, 3.0), {}), lambda x: np.stack([x, np.full_like(x, 3)], -1)),
        (
            lambda b, x: tl.broadcast_to.apply(b, (x, (2, 2, 4, 8)), {}),
            lambda x: np.broadcast_to(x, (2, 2, 4, 8)),
        ),
        (lambda b, x: tl.zeros_like.apply(b, (x,), {}), np.zeros_like),
    ],
)
def test_shapes(build: Any, wanted: Any) -> None:
    x = data(DType.F32, (2, 4, 8))
    np.testing.assert_array_equal(run(build, x), wanted(x))


# -- along an axis ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [DType.F32, DType.F16, DType.BF16, DType.I8, DType.I64, DType.BOOL], ids=str
)
@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("name", ["sum", "max", "min", "argmax", "argmin"])
def test_reductions(name: str, axis: int | None, dtype: DType) -> None:
    x = data(dtype, (4, 8, 2))
    found = run(lambda b, tile: getattr(tl, name).apply(b, (tile, axis), {}), x)
    wide = x.astype(np.float32) if dtype.is_half else x
    wanted = getattr(np, name)(wide, axis=axis)
    if name.startswith("arg") or (name == "sum" and dtype in (DType.I8, DType.BOOL)):
        assert found.dtype == np.int32
    else:
        assert found.dtype == x.dtype
        wanted = np.asarray(wanted).astype(x.dtype)
    np.testing.assert_array_equal(found, wanted)
    kept = run(lambda b, tile: getattr(tl, name).apply(b, (tile, axis, True), {}), x)
    assert kept.shape == np.max(x, axis=axis, keepdims=True).shape


@pytest.mark.parametrize("axis", [0, 1])
def test_cumsum_and_sort(axis: int) -> None:
    x = data(DType.F16, (8, 4))
    found = run(lambda b, tile: tl.cumsum.apply(b, (tile, axis), {}), x)
    np.testing.assert_array_equal(found, np.cumsum(x, axis, np.float32).astype(np.float16))
    for down in (False, True):
        found = run(lambda b, tile, down=down: tl.sort.apply(b, (tile, axis, down), {}), x)
        np.testing.assert_array_equal(found, np.flip(np.sort(x, axis), axis) if down else np.sort(x, axis))


# -- dot --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32, DType.F64, DType.I8, DType.U8], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_dot(dtype: DType, batch: tuple[int, ...]) -> None:
    a, b = data(dtype, (*batch, 4, 16)), data(dtype, (*batch, 16, 8), 1)
    found = run(lambda make, x, y: tl.dot.apply(make, (x, y), {}), a, b)
    assert found.dtype == (np.int32 if dtype.is_integer else np.float64 if dtype is DType.F64 else np.float32)
    np.testing.assert_allclose(found, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5)
    acc = np.ones_like(found)
    more = run(lambda make, x, y, z: tl.dot.apply(make, (x, y, z), {}), a, b, acc)
    np.testing.assert_allclose(more, found + 1, rtol=1e-6)


def test_tf32_keeps_ten_bits() -> None:
    a = np.full((1, 1), 1 + 2**-10 + 2**-13, np.float32)
    one = np.ones((1, 1), np.float32)
    found = run(lambda make, x, y: tl.dot.apply(make, (x, y), {"input_precision": "tf32"}), a, one)
    assert found[0, 0] == 1 + 2**-10
    assert run(lambda make, x, y: tl.dot.apply(make, (x, y), {}), a, one)[0, 0] == a[0, 0]


def test_int8_sums_wrap_only_beyond_32_bits() -> None:
    a, b = np.full((1, 256), -128, np.int8), np.full((256, 1), -128, np.int8)
    assert run(lambda make, x, y: tl.dot.apply(make, (x, y), {}), a, b)[0, 0] == 128 * 128 * 256


# -- memory -----------------------------------------------------------------------------------------------------------


@tilewright.kernel
def histogram(x, counts, old, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bins = tl.load(x + at, mask=at < n, other=0)
    before = tl.atomic_add(counts + bins, 1, mask=at < n)
    tl.store(old + at, before, mask=at < n)


def test_atomic_add_counts_every_lane() -> None:
    x = np.random.default_rng(0).integers(0, 4, 50).astype(np.int32)
    counts, old = np.zeros(4, np.int32), np.empty(50, np.int32)
    histogram[(4,)](x, counts, old, 50, BLOCK=16, debug=True)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=4))
    for value in range(4):
        assert sorted(old[x == value]) == list(range(counts[value])), "each lane found another count"


@tilewright.kernel
def copy_block(x, out, rows, columns, sm, sn, m, n, NAN: tl.constexpr):
    source = tl.make_block_ptr(x, (rows, columns), (sm, sn), (m, n), (4, 8), order=(1, 0))
    target = tl.make_block_ptr(out, (4, 8), (8, 1), (0, 0), (4, 8), order=(1, 0))
    tl.store(target, tl.load(source, boundary_check=(0, 1), padding_option="nan" if NAN else "zero"))


@pytest.mark.parametrize(("m", "n"), [(0, 0), (-2, 3), (4, -5), (20, 20)])
@pytest.mark.parametrize("nan", [False, True])
def test_block_pointers_pad_outside(m: int, n: int, nan: bool) -> None:
    base = data(DType.F32, (12, 6))
    x = base.T  # a view with strides of its own
    out = np.empty((4, 8), np.float32)
    copy_block[(1,)](x, out, 6, 12, 1, 6, m, n, NAN=nan)
    wanted = np.full((4, 8), np.nan if nan else 0, np.float32)
    for i in range(4):
        for j in range(8):
            if 0 <= m + i < 6 and 0 <= n + j < 12:
                wanted[i, j] = x[m + i, n + j]
    np.testing.assert_array_equal(out, wanted)


def test_views_and_negative_strides_without_copies() -> None:
    @tilewright.kernel
    def double(x, stride, BLOCK: tl.constexpr):
        at = x + tl.arange(0, BLOCK) * stride
        tl.store(at, tl.load(at) * 2)

    base = np.arange(16, dtype=ml_dtypes.bfloat16)
    double[1](base[::-2], -2, BLOCK=8, debug=True)
    wanted = np.arange(16, dtype=np.float32)
    wanted[1::2] *= 2
    np.testing.assert_array_equal(base.astype(np.float32), wanted)


# -- the verifier -----------------------------------------------------------------------------------------------------


def test_an_illegal_program_is_refused() -> None:
    x = Value(TileType(DType.F32, (4,)), "x")
    y = Value(TileType(DType.F32, (4,)), "y")
    wrong = Value(TileType(DType.F32, (8,)), "z")

    def check(*nodes: Op, match: str) -> None:
        with pytest.raises(VerificationError, match=match):
            verify_tile_program(TileProgram("p", (x,), Block((), nodes, ())))

    check(Op("neg", (y,), (Value(y.type),)), match="not defined there")
    check(Op("neg", (x,), (wrong,)), match="the rule gives")
    check(Op("neg", (x,), (y,)), Op("neg", (x,), (y,)), match="defined twice")
    check(Op("frobnicate", (x,), (y,)), match="the operation frobnicate is not known")
    check(Op("add", (x,), (y,)), match="has 1 operands")
    check(Op("floordiv", (x, x), (y,)), match="takes i64")
    odd = Value(TileType(DType.F32, (3,)))
    check(
        Op("constant", (), (odd,), (("value", 1.0), ("dtype", DType.F32))),
        match="the rule gives|power of two",
    )
