"""The values of random tile programs: each beside its arrays, one for each instance, which NumPy functions give that do
not come from `tile/ops.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import KernelTypeError
from tilewright.tile.frontend.builder import Builder, promote
from tilewright.tile.frontend.scans import associative_scan, reduce
from tilewright.tile.ir import Block, For, If, TileType, Value, While
from tilewright.tile.pointers import pointer_to

UNSIGNED = (DType.U8, DType.U16, DType.U32, DType.U64)
TYPES = (DType.F32, DType.I32, DType.I16, *UNSIGNED, DType.F16, DType.BF16, DType.BOOL)
WRAPPING = (DType.I32, DType.I16, *UNSIGNED)
_EXACT = 2.0**24  # whole numbers of f32 below it are exact, and sums of them in any order

Index = tuple[int, int, int]


@dataclass(frozen=True)
class Made:
    """A value and what it is in each instance of the grid."""

    value: Value
    arrays: list[np.ndarray]

    @property
    def kind(self) -> TileType:
        assert isinstance(self.value.type, TileType)
        return self.value.type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kind.shape

    @property
    def dtype(self) -> DType:
        return self.kind.dtype


@dataclass
class Values:
    random: random.Random
    grid: Index
    b: Builder = field(default_factory=Builder)
    params: list[Value] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    values: list[Made] = field(default_factory=list)

    # -- building ----------------------------------------------------------------------------------------------------

    @property
    def instances(self) -> list[Index]:
        x, y, z = self.grid
        return [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def tensor(self, dtype: DType) -> Value:
        param = Value(pointer_to(dtype), f"p{len(self.params)}")
        self.params.append(param)
        return param

    def number(self, value: int) -> Made:
        """An integer, as a constant or as a parameter."""
        if self.chance(0.5):
            made = self.b.constant(value)
        else:
            made = Value(TileType(DType.I32), f"n{len(self.params)}")
            self.params.append(made)
            self.numbers[made.name] = value
        return self.same(made, np.int32(value))

    def same(self, value: Value, array: Any) -> Made:
        return Made(value, [np.asarray(array)] * len(self.instances))

    def each(self, value: Value, function: Callable[..., Any], *given: Made) -> Made:
        """A value whose arrays are a function of those of other values."""
        arrays = [
            np.asarray(function(*parts)) for parts in zip(*(each.arrays for each in given), strict=True)
        ]
        return Made(value, arrays)

    def index(self, count: int) -> Made:
        return self.same(self.b.emit("arange", start=0, end=count), np.arange(count, dtype=np.int32))

    def reshaped(self, made: Made, shape: tuple[int, ...]) -> Made:
        return self.each(self.b.emit("reshape", made.value, shape=shape), lambda x: x.reshape(shape), made)

    def combined(self, name: str, function: Callable[..., Any], one: Made, other: Made | int) -> Made:
        """Of two values of one type, or of one and a constant of its type."""
        if isinstance(other, int):
            other = self.same(self.b.constant(other, one.dtype), one.dtype.numpy.type(other))
        values = self.b.alike(one.value, other.value)
        return self.each(self.b.emit(name, *values), function, one, other)

    def instance(self, axis: int) -> Made:
        arrays = [np.asarray(each[axis], np.int32) for each in self.instances]
        return Made(self.b.emit("program_id", axis=axis), arrays)

    def linear_instance(self) -> Made:
        """The number of the instance in the grid."""
        made = self.instance(0)
        size = self.grid[0]
        for axis in (1, 2):
            if self.grid[axis] > 1:
                before = (
                    self.same(self.b.emit("num_programs", axis=0), np.int32(size))
                    if axis == 1
                    else self.number(size)
                )
                moved = self.combined("mul", np.multiply, self.instance(axis), before)
                made = self.combined("add", np.add, made, moved)
                size *= self.grid[axis]
        return made

    def pick(self, ok: Callable[[TileType], bool] = lambda kind: True) -> Made | None:
        found = [each for each in self.values if ok(each.kind)]
        return self.random.choice(found) if found else None

    def keep(self, made: Made | None) -> None:
        if made is None:
            return
        for array in made.arrays:
            assert made.kind == TileType(DType.of(array), array.shape), (made.kind, array.dtype, array.shape)
        self.values.append(made)

    # -- operations: a value, or None where nothing fits -------------------------------------------------------------

    def pair(self) -> tuple[Made, Made] | None:
        """Two values that broadcast, in their common type and shape."""
        one, two = self.pick(), self.pick()
        if one is None or two is None:
            return None
        try:
            shape = np.broadcast_shapes(one.shape, two.shape)
            dtype = promote(one.dtype, two.dtype)
        except (ValueError, KernelTypeError):  # also u64 and a signed integer
            return None
        if np.prod(shape, dtype=int) > 4096:
            return None

        def common(array: np.ndarray) -> np.ndarray:
            return np.broadcast_to(converted(array, dtype), shape)

        values = self.b.numbers("test", one.value, two.value)
        left, right = (self.each(v, common, made) for v, made in zip(values, (one, two), strict=True))
        return left, right

    def arithmetic(self) -> Made | None:
        found = self.pair()
        if found is None:
            return None
        x, y = found
        dtype = x.dtype
        if dtype is DType.BOOL:
            name, function = self.random.choice([("and", np.logical_and), ("or", np.logical_or)])
            return self.combined(name, function, x, y)
        table = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax}
        name = self.random.choice(list(table))

        def once(a: np.ndarray, c: np.ndarray) -> np.ndarray:
            wide = dtype.compute.numpy
            return np.asarray(table[name](a.astype(wide), c.astype(wide))).astype(dtype.numpy)

        return self.combined(name, once, x, y)

    def compare(self) -> Made | None:
        found = self.pair()
        if found is None:
            return None
        name, function = self.random.choice([("lt", np.less), ("le", np.less_equal), ("eq", np.equal)])
        return self.combined(name, function, *found)

    def cast(self) -> Made | None:
        made = self.pick()
        if made is None:
            return None
        target = self.random.choice(TYPES)
        if made.dtype.is_float and not target.is_float:
            target = DType.BOOL  # a float may not fit into an integer
        value = self.b.emit("cast", made.value, dtype=target)
        return self.each(value, lambda x: converted(x, target), made)

    def reduce(self) -> Made | None:
        made = self.pick(lambda kind: kind.shape != ())
        if made is None:
            return None
        axis = self.random.randrange(len(made.shape))
        kind = self.random.choice(["sum", "max", "argmin", "sort", "cumsum"])
        dtype = made.dtype
        wide, plain = dtype.compute.numpy, dtype.numpy
        total = DType.I32 if not dtype.is_float and dtype.bytes < 4 else dtype
        if kind in ("sum", "cumsum") and not all(_exact_sums(x) for x in made.arrays):
            return None
        if kind == "sort":
            value = self.b.emit("sort", made.value, axis=axis, descending=False)
            return self.each(value, lambda x: np.sort(x.astype(wide), axis).astype(plain), made)
        added = total.compute.numpy
        if kind == "cumsum":
            value = self.b.emit("cumsum", made.value, axis=axis)
            function = np.add.accumulate
            return self.each(
                value, lambda x: function(x.astype(wide), axis, dtype=added).astype(total.numpy), made
            )
        value = self.b.emit("reduce", made.value, kind=kind, axis=axis)
        functions = {
            "argmin": lambda x: np.argmin(x.astype(wide), axis).astype(np.int32),
            "max": lambda x: np.asarray(np.maximum.reduce(x.astype(wide), axis)).astype(plain),
            "sum": lambda x: np.asarray(np.add.reduce(x.astype(wide), axis, dtype=added)).astype(total.numpy),
        }
        return self.each(value, functions[kind], made)

    def shape(self) -> Made | None:
        made = self.pick()
        if made is None:
            return None
        value, shape = made.value, made.shape
        kind = self.random.choice(["trans", "expand_dims", "reshape", "join", "flip", "split"])
        if kind == "flip" and shape:
            axis = self.random.randrange(len(shape))
            return self.each(self.b.emit("flip", value, axis=axis), lambda x: np.flip(x, axis), made)
        if kind == "split" and shape:
            index, pairs = self.random.randrange(2), (*shape[:-1], shape[-1] // 2, 2)
            if not pairs[-2]:
                return None
            part = self.b.emit("split", self.b.emit("reshape", value, shape=pairs), index=index)
            return self.each(part, lambda x: x.reshape(pairs)[..., index], made)
        if kind == "trans":
            order = list(range(len(shape)))
            self.random.shuffle(order)
            turned = self.b.emit("trans", value, order=tuple(order))
            return self.each(turned, lambda x: x.transpose(order), made)
        if len(shape) > 3:
            return None
        if kind == "expand_dims":
            axis = self.random.randint(0, len(shape))
            wider = self.b.emit("expand_dims", value, axis=axis)
            return self.each(wider, lambda x: np.expand_dims(x, axis), made)
        if kind == "join" and np.prod(shape, dtype=int) <= 2048:
            return self.each(self.b.emit("join", value, value), lambda x: np.stack([x, x], -1), made)
        return self.reshaped(made, (int(np.prod(shape, dtype=int)),))

    def where(self) -> Made | None:
        found, chosen = self.pair(), self.pick(lambda kind: kind.dtype is DType.BOOL)
        if found is None or chosen is None or found[0].shape != chosen.shape:
            return None
        value = self.b.emit("select", chosen.value, found[0].value, found[1].value)
        return self.each(value, np.where, chosen, *found)

    def dot(self) -> Made | None:
        made = self.pick(lambda kind: len(kind.shape) == 2 and kind.dtype in (DType.F32, DType.F16, DType.U8))
        if made is None or max(made.shape) > 64:
            return None
        for array in made.arrays:
            exact = array.astype(np.float64)
            if not np.array_equal(exact, np.rint(exact)) or np.any(np.abs(exact) @ np.abs(exact).T >= _EXACT):
                return None  # only sums that are exact in any order can be compared bit for bit
        into = np.int32 if made.dtype.is_integer else np.float32
        right = self.b.emit("trans", made.value, order=(1, 0))
        value = self.b.emit("dot", made.value, right, precision="ieee")
        return self.each(value, lambda x: (x.astype(np.float64) @ x.astype(np.float64).T).astype(into), made)

    def scan(self) -> Made | None:
        """By x + y, or by the later one of two, which does not commute: exact for integers in any grouping."""
        made = self.pick(lambda kind: kind.shape != () and kind.dtype in WRAPPING)
        if made is None:
            return None
        axis, reverse = self.random.randrange(len(made.shape)), self.chance(0.3)
        if self.chance(0.3):
            last = reduce.implementation(self.b, made.value, axis, lambda a, b: b)
            return self.each(last, lambda x: np.take(x, -1, axis), made)
        value = associative_scan.implementation(
            self.b, made.value, axis, lambda a, b: self.b.emit("add", a, b), reverse
        )

        def sums(x: np.ndarray) -> np.ndarray:
            turned = np.flip(x, axis) if reverse else x
            wanted = np.add.accumulate(turned, axis, dtype=x.dtype)
            return np.flip(wanted, axis) if reverse else wanted

        return self.each(value, sums, made)

    def count(self) -> tuple[Made, list[int]]:
        """A number of iterations, which may differ between instances."""
        if self.chance(0.3):
            times = self.combined(
                "add", np.add, self.instance(self.random.randrange(3)), self.random.randint(0, 2)
            )
        else:
            times = self.number(self.random.randint(0, 4))
        return times, [int(each) for each in times.arrays]

    def leaving(self) -> Made | None:
        """A `while` that a flag ends: acc doubles until it has done so `times` times."""
        made = self.pick(lambda kind: kind.dtype in WRAPPING)
        if made is None:
            return None
        times, counts = self.count()
        init = (self.b.constant(0), self.b.constant(False), made.value)
        tested, inside, results = ([Value(each.type) for each in init] for _ in range(3))
        with self.b.inside() as condition:
            going = self.b.emit("not", tested[1])
        with self.b.inside() as body:
            done = self.b.emit("le", times.value, inside[0])
            with self.b.inside() as other:
                doubled = self.b.emit("add", inside[2], inside[2])
            acc = Value(made.value.type)
            self.b.nodes.append(
                If(done, Block((), (), (inside[2],)), Block((), tuple(other), (doubled,)), (acc,))
            )
            number = self.b.emit("add", inside[0], self.b.constant(1))
        self.b.nodes.append(
            While(
                init,
                Block(tuple(tested), tuple(condition), (going,)),
                Block(tuple(inside), tuple(body), (number, done, acc)),
                tuple(results),
            )
        )
        arrays = []
        for wanted, count in zip(made.arrays, counts, strict=True):
            for _ in range(count):
                wanted = np.asarray(wanted + wanted)
            arrays.append(wanted)
        return Made(results[2], arrays)

    def loop(self) -> Made | None:
        """acc = acc + (x ^ x + x) in a loop; each iteration adds the same value."""
        made = self.pick(lambda kind: kind.dtype in WRAPPING)
        if made is None:
            return None
        times, counts = self.count()
        bounds = self.b.constant(0), times.value, self.b.constant(1)
        index, acc, result = Value(TileType(DType.I32)), Value(made.value.type), Value(made.value.type)
        with self.b.inside() as nodes:
            added = self.b.emit("add", self.b.emit("xor", made.value, made.value), made.value)
            total = self.b.emit("add", acc, added)
        self.b.nodes.append(
            For(*bounds, (made.value,), Block((index, acc), tuple(nodes), (total,)), (result,))
        )
        arrays = []
        for array, count in zip(made.arrays, counts, strict=True):
            wanted = array
            for _ in range(count):
                wanted = np.asarray(wanted + array)
            arrays.append(wanted)
        return Made(result, arrays)

    def branch(self) -> Made | None:
        condition = self.pick(lambda kind: kind == TileType(DType.BOOL))
        made = self.pick(lambda kind: kind.dtype in (DType.F32, DType.I32, DType.U32))
        if condition is None or made is None:
            return None
        with self.b.inside() as then:
            negated = self.b.emit("neg", made.value)
        result = Value(made.value.type)
        branches = Block((), tuple(then), (negated,)), Block((), (), (made.value,))
        self.b.nodes.append(If(condition.value, *branches, (result,)))
        return self.each(result, lambda c, x: np.negative(x) if c else x, condition, made)


def converted(array: np.ndarray, dtype: DType) -> np.ndarray:
    return np.asarray(array != 0) if dtype is DType.BOOL else array.astype(dtype.numpy)


def _exact_sums(array: np.ndarray) -> bool:
    """Whether the elements can be added in any order with one result."""
    if not DType.of(array).is_float:
        return True
    exact = array.astype(np.float64)
    return bool(np.array_equal(exact, np.rint(exact)) and np.abs(exact).sum() < _EXACT)
