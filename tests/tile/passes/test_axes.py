"""What the axis analysis claims holds for the values that the interpreter computes; and it claims enough."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from tests.tile import kernels
from tests.tile.generator import generate
from tilewright.dtypes import DType
from tilewright.tile.executors import Facts
from tilewright.tile.frontend.builder import Builder
from tilewright.tile.interpret import _Instance
from tilewright.tile.ir import Block, For, Op, Pointer, TileProgram, TileType, Value, walk
from tilewright.tile.kernel import tensor_argument
from tilewright.tile.memory import Memory
from tilewright.tile.passes.axes import AxisInfo, BlockInfo, analyse_axes, block_pointer_axes
from tilewright.tile.pointers import BlockAddress, pointer_to

_SIZES = (1, 2, 4, 8, 16)
Grid = tuple[int, int, int]


def computed(
    program: TileProgram, arrays: dict[str, np.ndarray], scalars: dict[str, int], grid: Grid, instance: int
) -> dict[Value, object]:
    """The last value of each value of a program, in one instance."""
    memory = Memory([tensor_argument(name, array) for name, array in arrays.items()], debug=False)
    memory.grid, memory.current = grid, instance
    values: dict[Value, object] = {}
    for param in program.params:
        known = memory.pointers.get(param.name)
        values[param] = (
            known if known is not None else np.asarray(scalars[param.name], param.type.dtype.numpy)
        )
    with np.errstate(all="ignore"):
        _Instance(memory, instance, False).run(program.body, values)
    return values


def check(info: AxisInfo, value: np.ndarray, what: str, pointer: bool = False) -> None:
    array = np.atleast_1d(value).astype(np.int64)
    # Offsets of 32 bits may wrap around within a group; their addresses then belong to no tensor.
    wrap = 1 << (32 if pointer else 8 * value.dtype.itemsize)
    if info.value is not None:
        assert np.all(array == info.value), what
    for axis, size in enumerate(array.shape):
        along = np.moveaxis(array, axis, -1)
        contiguity, constancy = info.contiguity[axis], info.constancy[axis]
        assert size % contiguity == 0 and size % constancy == 0, what
        groups = along.reshape(-1, contiguity).astype(object)
        steps = (groups - groups[:, :1]) % wrap
        assert np.all(steps == (np.arange(contiguity).astype(object) * info.unit) % wrap), (
            f"{what}: contiguity of axis {axis}"
        )
        assert np.all(groups[:, 0] % min(info.divisor[axis], wrap) == 0), f"{what}: divisor of axis {axis}"
        equal = along.reshape(-1, constancy)
        assert np.all(equal == equal[:, :1]), f"{what}: constancy of axis {axis}"


def hold(
    program: TileProgram,
    arrays: dict[str, np.ndarray],
    scalars: dict[str, int],
    facts: Facts,
    grid: Grid = (8, 1, 1),
    instance: int = 3,
) -> int:
    """How many claims were more than nothing."""
    values, told = computed(program, arrays, scalars, grid, instance), 0
    text = str(program)
    for value, info in analyse_axes(program, facts).items():
        if value not in values:
            continue  # on a way that was not taken
        found = values[value]
        if isinstance(info, BlockInfo):
            assert isinstance(found, BlockAddress)
            parts = [(info.base, found.base)]
            for infos, numbers in (
                (info.shape, found.shape),
                (info.strides, found.strides),
                (info.offsets, found.offsets),
            ):
                parts += zip(infos, numbers, strict=True)
            for part, number in parts:
                check(part, np.asarray(number, np.int64), text)
            addresses, _ = found.locate(value.type, ())
            check(block_pointer_axes(info, value.type), addresses, text)
            continue
        if isinstance(value.type.element, Pointer) or not value.type.dtype.is_float:
            check(
                info,
                np.asarray(found),
                f"{value.type} in\n{text}",
                isinstance(value.type.element, Pointer),
            )
            told += max(info.contiguity) > 1 or max(info.constancy) > 1 or max(info.divisor) > 1
    return told


class _Indices:
    """Random index arithmetic: what kernels compute addresses and masks with, and what no kernel contains."""

    def __init__(self, seed: int) -> None:
        self.random, self.b = random.Random(seed), Builder()
        self.scalars = {
            f"n{i}": self.random.choice([0, 1, 3, 4, 8, 12, 64, 100, 2**31 - 16]) for i in range(3)
        }
        self.params = [Value(TileType(DType.I32), name) for name in self.scalars]
        self.params.append(Value(pointer_to(DType.F32), "x"))
        self.values = [*self.params[:3], self.b.emit("program_id", axis=0)]

    def one(self) -> Value:
        return self.random.choice(self.values)

    def step(self) -> None:
        choice, b = self.random.random(), self.b
        if choice < 0.2:
            start = self.random.choice([0, 0, 4, 3])
            made = b.emit("arange", start=start, end=start + self.random.choice(_SIZES))
        elif choice < 0.3:
            made = b.constant(self.random.choice([-3, 0, 1, 2, 4, 8, 6, 16]))
        elif choice < 0.4:
            made = self.shape()
        elif choice < 0.45:
            made = b.emit("cast", self.one(), dtype=self.random.choice([DType.I64, DType.I16, DType.I32]))
        elif choice < 0.55:
            made = self.loop()
        else:
            made = self.pair()
        if isinstance(made.type, TileType) and len(made.type.shape) <= 3 and np.prod(made.type.shape) <= 512:
            self.values.append(made)

    def shape(self) -> Value:
        value, b = self.one(), self.b
        shape = value.type.shape
        kind = self.random.choice(["expand_dims", "trans", "reshape", "join", "broadcast"])
        if kind == "expand_dims":
            return b.emit(kind, value, axis=self.random.randint(0, len(shape)))
        if kind == "trans":
            order = list(range(len(shape)))
            self.random.shuffle(order)
            return b.emit(kind, value, order=tuple(order))
        if kind == "join":
            return b.emit(kind, value, value)
        if kind == "broadcast":
            return b.emit(kind, value, shape=(2, *(4 if size == 1 else size for size in shape)))
        count = int(np.prod(shape, dtype=int))
        inner = self.random.choice([size for size in _SIZES if count % size == 0])
        return b.emit("reshape", value, shape=(count // inner, inner))

    def pair(self) -> Value:
        x, y = self.one(), self.one()
        try:
            np.broadcast_shapes(x.type.shape, y.type.shape)
        except ValueError:
            return x
        name = self.random.choice(
            ["add", "add", "mul", "sub", "floordiv", "mod", "lt", "le", "max", "select", "addptr"]
        )
        if name == "addptr":
            pointer, offset = self.b.alike(self.params[3], x)
            return x if not x.type.dtype.is_integer else self.offset(pointer, offset)
        if x.type.dtype is DType.BOOL or y.type.dtype is DType.BOOL or x.type.is_pointer or y.type.is_pointer:
            return x
        x, y = self.b.numbers("test", x, y)
        if name == "select":
            return self.b.emit(name, self.b.emit("lt", x, y), x, y)
        return self.b.emit(name, x, y)

    def offset(self, pointer: Value, offset: Value) -> Value:
        self.b.emit("addptr", self.b.emit("addptr", pointer, offset, bytes=4), offset, bytes=4)
        return offset

    def loop(self) -> Value:
        """A value that a loop changes by another."""
        start, by = self.one(), self.one()
        if start.type != by.type or not start.type.dtype.is_integer:
            return start
        bounds = [
            self.b.constant(number) for number in (0, self.random.choice([8, 0]), self.random.choice([4, 3]))
        ]
        index, carried, result = Value(TileType(DType.I32)), Value(start.type), Value(start.type)
        with self.b.inside() as nodes:
            more = self.b.emit(self.random.choice(["add", "mul", "sub"]), carried, by)
        self.b.nodes.append(For(*bounds, (start,), Block((index, carried), tuple(nodes), (more,)), (result,)))
        return result

    def made(self) -> TileProgram:
        for _ in range(20):
            self.step()
        return TileProgram("indices", tuple(self.params), Block((), tuple(self.b.nodes), ()))


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_claims_hold_for_random_index_arithmetic(first: int) -> None:
    told = 0
    for seed in range(first, first + 50):
        indices = _Indices(seed)
        program = indices.made()
        divisors = tuple((n, min(16, v & -v) if v else 16) for n, v in indices.scalars.items())
        told += hold(
            program, {"x": np.zeros(4, np.float32)}, indices.scalars, Facts(True, (*divisors, ("x", 16)))
        )
    assert told > 300


def test_claims_hold_for_random_programs() -> None:
    for seed in range(60):
        made = generate(seed)
        last = math.prod(made.grid) - 1
        hold(made.program, made.arrays, made.numbers, made.facts(1), made.grid, last)


def loads_of(program: TileProgram) -> list[Op]:
    return [n for n in walk(program.body) if isinstance(n, Op) and n.name in ("load", "load_block", "store")]


def test_divisible_columns_give_vectors_and_whole_masks() -> None:
    x = np.zeros((8, 64), np.float32)
    program = kernels.add_row.program(x, x[0], x, 8, 64, BM=4, BN=32)
    divisible = tuple((name, 16) for name in ("x", "row", "out", "columns"))
    for facts, wide in ((Facts(True, divisible), 16), (Facts(True), 1)):
        axes = analyse_axes(program, facts)
        for op in loads_of(program):
            pointer, mask = axes[op.operands[0]], axes[op.operands[2 if op.name == "store" else 1]]
            assert pointer.contiguity[-1] == 32
            assert pointer.divisor[-1] == (16 if wide == 16 else 4)
            assert mask.constancy[-1] == wide


def test_block_pointers_with_stride_one_are_contiguous() -> None:
    a = np.zeros((64, 64), np.float32)
    program = kernels.matmul_gelu.program(a, a, a[0], a, 64, 64, 64, BM=16, BN=32, BK=16)
    axes = analyse_axes(program, Facts(True, tuple((name, 16) for name in ("a", "b", "M", "N", "K"))))
    left, right = (axes[op.operands[0]] for op in loads_of(program) if op.name == "load_block")
    assert isinstance(left, BlockInfo) and isinstance(right, BlockInfo)
    types = [op.operands[0].type for op in loads_of(program) if op.name == "load_block"]
    assert block_pointer_axes(left, types[0]).contiguity == (1, 16)
    assert block_pointer_axes(right, types[1]).contiguity == (1, 32)
    assert all(block_pointer_axes(i, t).divisor[1] == 16 for i, t in ((left, types[0]), (right, types[1])))
