"""Random tile programs, each with its value computed directly in NumPy.

A program loads tiles of random types and shapes, combines values that it has by random operations (elementwise with
broadcasting, casts, shapes, reductions, scans, dot, and loops or branches with carried values), and stores some
results.
Beside each value of the IR stands its array, which NumPy functions give that do not come from `tile/ops.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import KernelTypeError
from tilewright.tile.frontend.builder import Builder, promote
from tilewright.tile.frontend.scans import associative_scan, reduce
from tilewright.tile.ir import Block, For, If, TileProgram, TileType, Value, While
from tilewright.tile.ops import pointer_to

_UNSIGNED = (DType.U8, DType.U16, DType.U32, DType.U64)
_TYPES = (DType.F32, DType.I32, DType.I16, *_UNSIGNED, DType.F16, DType.BF16, DType.BOOL)
_WRAPPING = (DType.I32, DType.I16, *_UNSIGNED)
_SHAPES = ((), (4,), (1, 4), (8, 1), (8, 4), (2, 8, 4), (4, 4))


@dataclass
class Generated:
    program: TileProgram
    arrays: dict[str, np.ndarray]  # the inputs, and outputs to be written
    wanted: dict[str, np.ndarray]


@dataclass
class _Maker:
    random: random.Random
    b: Builder = field(default_factory=Builder)
    params: list[Value] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    values: list[tuple[Value, np.ndarray]] = field(default_factory=list)

    def pointers(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Value:
        """The addresses of a dense tensor's elements, as a tile."""
        param = Value(pointer_to(dtype), name)
        self.params.append(param)
        if shape == ():
            return param
        count = int(np.prod(shape))
        index = self.b.emit("reshape", self.b.emit("arange", start=0, end=count), shape=shape)
        return self.b.emit("addptr", *self.b.alike(param, index), bytes=dtype.bytes)

    def load(self) -> None:
        dtype, shape = self.random.choice(_TYPES), self.random.choice(_SHAPES)
        numbers = np.random.default_rng(self.random.getrandbits(32)).integers(0, 9, shape)
        array = np.asarray(numbers if dtype is not DType.BOOL else numbers > 4).astype(dtype.numpy)
        name = f"x{len(self.params)}"
        self.arrays[name] = array
        self.values.append((self.b.emit("load", self.pointers(name, dtype, shape), dtype=dtype), array))

    def pick(self, ok: Any = lambda value: True) -> tuple[Value, np.ndarray] | None:
        found = [each for each in self.values if ok(each[0].type)]
        return self.random.choice(found) if found else None

    def step(self) -> None:
        kinds = (self.arithmetic, self.compare, self.cast, self.reduce, self.shape, self.where, self.dot)
        made = self.random.choice((*kinds, self.scan, self.loop, self.leaving, self.branch))()
        if made is not None:
            value, array = made
            assert value.type == TileType(DType.of(array), array.shape), (
                value.type,
                array.dtype,
                array.shape,
            )
            self.values.append(made)

    # -- operations: (value, array), or None where nothing fits ------------------------------------------------------

    def pair(self) -> tuple[list[Value], list[np.ndarray]] | None:
        """Two values that broadcast, in their common type."""
        one, two = self.pick(), self.pick()
        if one is None or two is None:
            return None
        try:
            shape = np.broadcast_shapes(one[1].shape, two[1].shape)
        except ValueError:
            return None
        try:
            dtype = promote(one[0].type.dtype, two[0].type.dtype)
        except KernelTypeError:  # u64 and a signed integer
            return None
        arrays = [np.broadcast_to(_converted(each[1], dtype), shape) for each in (one, two)]
        return self.b.numbers("test", one[0], two[0]), arrays

    def arithmetic(self) -> Any:
        found = self.pair()
        if found is None:
            return None
        values, (x, y) = found
        dtype = DType.of(x)
        if dtype is DType.BOOL:
            name, function = self.random.choice([("and", np.logical_and), ("or", np.logical_or)])
            return self.b.emit(name, *values), np.asarray(function(x, y))
        table = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax}
        name = self.random.choice(list(table))
        x, y = x.astype(dtype.compute.numpy), y.astype(dtype.compute.numpy)
        return self.b.emit(name, *values), np.asarray(table[name](x, y)).astype(dtype.numpy)

    def compare(self) -> Any:
        found = self.pair()
        if found is None:
            return None
        values, (x, y) = found
        name, function = self.random.choice([("lt", np.less), ("le", np.less_equal), ("eq", np.equal)])
        return self.b.emit(name, *values), np.asarray(function(x, y))

    def cast(self) -> Any:
        value, array = self.pick() or self.values[0]
        target = self.random.choice(_TYPES)
        if DType.of(array).is_float and not target.is_float:
            target = DType.BOOL  # a float may not fit into an integer
        return self.b.emit("cast", value, dtype=target), _converted(array, target)

    def reduce(self) -> Any:
        found = self.pick(lambda kind: kind.shape != ())
        if found is None:
            return None
        value, array = found
        axis, kind = (
            self.random.randrange(array.ndim),
            self.random.choice(["sum", "max", "argmin", "sort", "cumsum"]),
        )
        dtype = DType.of(array)
        wide = array.astype(dtype.compute.numpy)
        total = DType.I32 if not dtype.is_float and dtype.bytes < 4 else dtype
        if kind == "sort":
            made = self.b.emit("sort", value, axis=axis, descending=False)
            return made, np.sort(wide, axis).astype(array.dtype)
        if kind == "cumsum":
            made = self.b.emit("cumsum", value, axis=axis)
            return made, np.add.accumulate(wide, axis, dtype=total.compute.numpy).astype(total.numpy)
        made = self.b.emit("reduce", value, kind=kind, axis=axis)
        if kind == "argmin":
            return made, np.asarray(np.argmin(wide, axis), np.int32)
        if kind == "max":
            return made, np.asarray(np.maximum.reduce(wide, axis)).astype(array.dtype)
        return made, np.asarray(np.add.reduce(wide, axis, dtype=total.compute.numpy)).astype(total.numpy)

    def shape(self) -> Any:
        value, array = self.pick() or self.values[0]
        kind = self.random.choice(["trans", "expand_dims", "reshape", "join", "flip", "split"])
        if kind == "flip" and array.ndim:
            axis = self.random.randrange(array.ndim)
            return self.b.emit("flip", value, axis=axis), np.flip(array, axis)
        if kind == "split" and array.ndim:
            index, pairs = self.random.randrange(2), (*array.shape[:-1], array.shape[-1] // 2, 2)
            if not pairs[-2]:
                return None
            parts = self.b.emit("reshape", value, shape=pairs)
            return self.b.emit("split", parts, index=index), array.reshape(pairs)[..., index]
        if kind == "trans":
            order = list(range(array.ndim))
            self.random.shuffle(order)
            return self.b.emit("trans", value, order=tuple(order)), array.transpose(order)
        if array.ndim > 3:
            return None
        if kind == "expand_dims":
            axis = self.random.randint(0, array.ndim)
            return self.b.emit("expand_dims", value, axis=axis), np.expand_dims(array, axis)
        if kind == "join":
            return self.b.emit("join", value, value), np.stack([array, array], -1)
        return self.b.emit("reshape", value, shape=(array.size,)), array.reshape(-1)

    def where(self) -> Any:
        found, chosen = self.pair(), self.pick(lambda kind: kind.dtype is DType.BOOL)
        if found is None or chosen is None or found[1][0].shape != chosen[1].shape:
            return None
        values, (x, y) = found
        return self.b.emit("select", chosen[0], *values), np.where(chosen[1], x, y)

    def dot(self) -> Any:
        found = self.pick(
            lambda kind: len(kind.shape) == 2 and kind.dtype in (DType.F32, DType.F16, DType.U8)
        )
        if found is None:
            return None
        value, array = found
        right = self.b.emit("trans", value, order=(1, 0))
        exact = array.astype(np.float64)
        made = exact @ exact.T
        if not np.all(np.abs(made) < 2**24) or not np.array_equal(exact, np.rint(exact)):
            return None  # only sums that are exact in any order can be compared bit for bit
        into = np.int32 if DType.of(array).is_integer else np.float32
        return self.b.emit("dot", value, right, precision="ieee"), made.astype(into)

    def scan(self) -> Any:
        """By x + y, or by the later one of two, which does not commute: exact for integers in any grouping."""
        found = self.pick(lambda kind: kind.shape != () and kind.dtype in _WRAPPING)
        if found is None:
            return None
        value, array = found
        axis, reverse = self.random.randrange(array.ndim), self.random.random() < 0.3
        if self.random.random() < 0.3:
            made = reduce.implementation(self.b, value, axis, lambda a, b: b)
            return made, np.asarray(np.take(array, -1, axis))
        made = associative_scan.implementation(
            self.b, value, axis, lambda a, b: self.b.emit("add", a, b), reverse
        )
        turned = np.flip(array, axis) if reverse else array
        wanted = np.add.accumulate(turned, axis, dtype=array.dtype)
        return made, np.flip(wanted, axis) if reverse else wanted

    def leaving(self) -> Any:
        """A `while` that a flag ends: acc doubles until it has done so `times` times."""
        found = self.pick(lambda kind: kind.dtype in _WRAPPING)
        if found is None:
            return None
        value, array = found
        times = self.random.randint(0, 3)
        init = (self.b.constant(0), self.b.constant(False), value)
        tested, inside, results = ([Value(each.type) for each in init] for _ in range(3))
        with self.b.inside() as condition:
            going = self.b.emit("not", tested[1])
        with self.b.inside() as body:
            done = self.b.emit("le", self.b.constant(times), inside[0])
            with self.b.inside() as other:
                doubled = self.b.emit("add", inside[2], inside[2])
            acc = Value(value.type)
            self.b.nodes.append(
                If(done, Block((), (), (inside[2],)), Block((), tuple(other), (doubled,)), (acc,))
            )
            count = self.b.emit("add", inside[0], self.b.constant(1))
        self.b.nodes.append(
            While(
                init,
                Block(tuple(tested), tuple(condition), (going,)),
                Block(tuple(inside), tuple(body), (count, done, acc)),
                tuple(results),
            )
        )
        wanted = array
        for _ in range(times):
            wanted = wanted + wanted
        return results[2], np.asarray(wanted)

    def loop(self) -> Any:
        """acc = acc + (x ^ x + x), some times: what is added is the same in all iterations."""
        found = self.pick(lambda kind: kind.dtype in _WRAPPING)
        if found is None:
            return None
        value, array = found
        times = self.random.randint(0, 4)
        bounds = [self.b.constant(number) for number in (0, times, 1)]
        index, acc, result = Value(TileType(DType.I32)), Value(value.type), Value(value.type)
        with self.b.inside() as nodes:
            added = self.b.emit("add", self.b.emit("xor", value, value), value)
            total = self.b.emit("add", acc, added)
        self.b.nodes.append(For(*bounds, (value,), Block((index, acc), tuple(nodes), (total,)), (result,)))
        wanted = array
        for _ in range(times):
            wanted = wanted + array
        return result, np.asarray(wanted)

    def branch(self) -> Any:
        condition = self.pick(lambda kind: kind == TileType(DType.BOOL))
        found = self.pick(lambda kind: kind.dtype in (DType.F32, DType.I32, DType.U32))
        if condition is None or found is None:
            return None
        value, array = found
        with self.b.inside() as then:
            negated = self.b.emit("neg", value)
        result = Value(value.type)
        self.b.nodes.append(
            If(condition[0], Block((), tuple(then), (negated,)), Block((), (), (value,)), (result,))
        )
        return result, np.asarray(np.negative(array) if condition[1] else array)


def _converted(array: np.ndarray, dtype: DType) -> np.ndarray:
    return np.asarray(array != 0) if dtype is DType.BOOL else array.astype(dtype.numpy)


def generate(seed: int) -> Generated:
    maker = _Maker(random.Random(seed))
    with np.errstate(all="ignore"):
        for _ in range(maker.random.randint(1, 3)):
            maker.load()
        for _ in range(maker.random.randint(3, 14)):
            maker.step()
    wanted = {}
    for value, array in maker.values[-3:]:
        name = f"out{len(maker.params)}"
        pointers = maker.pointers(name, DType.of(array), array.shape)
        maker.b.effect("store", pointers, value)
        maker.arrays[name] = np.zeros(array.shape, array.dtype)
        wanted[name] = np.asarray(array)
    program = TileProgram(f"random_{seed}", tuple(maker.params), Block((), tuple(maker.b.nodes), ()))
    return Generated(program, maker.arrays, wanted)
