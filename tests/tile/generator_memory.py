"""What random tile programs do with memory: loads, stores, block pointers, atomics, and loops of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.tile.generator_values import TYPES, Made, Values
from tilewright.dtypes import DType
from tilewright.tile.ir import Block, For, If, TileType, Value

_SHAPES = ((), (4,), (1, 4), (8, 1), (8, 4), (2, 8, 4), (4, 4))
_LARGE = ((64,), (256,), (16, 16), (8, 32), (32, 16), (4, 8, 8))
_WORDS = (DType.I32, DType.I64, DType.U32, DType.U64)
_UNWRITTEN = 3  # what stands in results before the launch
_ATOMICS: dict[str, Callable[..., Any]] = {
    "add": np.add, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Elements of a tensor: their offsets, and which of them there are, if not all."""

    offsets: Made
    mask: Made | None = None

    def active(self, instance: int) -> np.ndarray:
        offsets = self.offsets.arrays[instance]
        return np.ones(offsets.shape, np.bool_) if self.mask is None else self.mask.arrays[instance]

    @property
    def size(self) -> int:
        """The elements that a tensor must have for it."""
        every = [each[self.active(n)] for n, each in enumerate(self.offsets.arrays)]
        return max((int(each.max()) + 1 for each in every if each.size), default=1)


@dataclass
class Accesses(Values):
    wanted: dict[str, np.ndarray] = field(default_factory=dict)
    unwritten: list[str] = field(default_factory=list)  # results, which nothing has written before

    def some_shape(self) -> tuple[int, ...]:
        return self.random.choice(_SHAPES if self.chance(0.7) else _LARGE)

    def data(self, dtype: DType, size: int | tuple[int, ...]) -> np.ndarray:
        numbers = np.random.default_rng(self.random.getrandbits(32)).integers(0, 9, size)
        return np.asarray(numbers if dtype is not DType.BOOL else numbers > 4).astype(dtype.numpy)

    def input(self, dtype: DType, size: int) -> tuple[Value, np.ndarray]:
        param = self.tensor(dtype)
        self.arrays[param.name] = array = self.data(dtype, size + self.random.choice((0, 0, 1, 5)))
        return param, array

    def result(self, dtype: DType, size: int, *, whole: bool) -> Value:
        """`whole`: every element is stored to."""
        param = self.tensor(dtype)
        size += 0 if whole else self.random.choice((0, 3))
        self.arrays[param.name] = np.full(size, _UNWRITTEN).astype(dtype.numpy)
        self.wanted[param.name] = self.arrays[param.name].copy()
        self.unwritten.append(param.name)
        return param

    # -- which elements ----------------------------------------------------------------------------------------------

    def moved(self, offsets: Made, by: int) -> Made:
        return self.combined("add", np.add, offsets, by) if by else offsets

    def places(self, shape: tuple[int, ...], *, unique: bool) -> Places:
        """`unique`: no two elements, also of two instances, are one."""
        kinds = ["linear", "reversed", "xor", "strided", "matrix", *([] if unique else ["shared", "modulo"])]
        kind = self.random.choice(kinds)
        if kind == "matrix" and len(shape) == 2:
            return self.matrix(shape[0], shape[1])
        count = int(np.prod(shape, dtype=int))
        at = self.same(self.b.constant(0), np.int32(0)) if shape == () else self.index(count)
        if kind == "reversed":
            at = self.combined("sub", np.subtract, self.number(count - 1), at)
        elif kind == "xor" and count > 1:
            at = self.combined("xor", np.bitwise_xor, at, self.random.randrange(count))
        elif kind == "modulo":
            at = self.combined("mod", np.mod, at, self.random.randint(1, 5))
        if kind == "strided":
            at = self.combined("mul", np.multiply, at, len(self.instances))
            at = self.combined("add", np.add, at, self.linear_instance())
        elif kind != "shared" and (unique or self.chance(0.8)):
            first = self.combined("mul", np.multiply, self.linear_instance(), self.number(count))
            at = self.combined("add", np.add, first, at)
        if shape and len(shape) > 1:
            at = self.reshaped(at, shape)
        return Places(at, self.limit(at) if self.chance(0.5) else None)

    def limit(self, at: Made) -> Made:
        """A mask: those below a number, or where a value of the program says so."""
        chosen = self.pick(lambda kind: kind == TileType(DType.BOOL, at.shape))
        if chosen is not None and self.chance(0.3):
            return chosen
        most = max(int(each.max()) for each in at.arrays)
        return self.combined("lt", np.less, at, self.number(self.random.randint(0, most + 2)))

    def matrix(self, rows: int, columns: int) -> Places:
        """Blocks of a matrix, as most kernels take them: rows by the first axis of the grid, columns by the second, and
        a matrix for each index of the third."""
        ragged = self.chance(0.6)
        height = rows * self.grid[0] - (self.random.randrange(rows) if ragged else 0)
        width = columns * self.grid[1] - (self.random.randrange(columns) if ragged else 0)
        stride = width + self.random.choice((0, 0, 3))
        m = self.reshaped(self.blocked(0, rows), (rows, 1))
        n = self.reshaped(self.blocked(1, columns), (1, columns))
        at = self.combined("mul", np.multiply, m, self.number(stride))
        at = self.combined("add", np.add, at, n)
        if self.grid[2] > 1:
            first = self.combined("mul", np.multiply, self.instance(2), self.number(stride * height))
            at = self.combined("add", np.add, at, first)
        if not ragged:
            return Places(at)
        inside = self.combined(
            "and",
            np.logical_and,
            self.combined("lt", np.less, m, self.number(height)),
            self.combined("lt", np.less, n, self.number(width)),
        )
        return Places(at, inside)

    def blocked(self, axis: int, size: int) -> Made:
        first = self.combined("mul", np.multiply, self.instance(axis), size)
        return self.combined("add", np.add, first, self.index(size))

    def pointers(self, base: Value, offsets: Made) -> Value:
        size = base.type.dtype.bytes  # type: ignore[union-attr]
        return self.b.emit("addptr", *self.b.alike(base, offsets.value), bytes=size)

    # -- loads -------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        if self.chance(0.25):
            self.keep(self.load_block())
            return
        dtype, places = self.random.choice(TYPES), self.places(self.some_shape(), unique=False)
        base, array = self.input(dtype, places.size)
        self.keep(self.loaded(base, array, places))

    def loaded(self, base: Value, array: np.ndarray, places: Places) -> Made:
        dtype = DType.of(array)
        pointers = self.pointers(base, places.offsets)
        if places.mask is None:
            value = self.b.emit("load", pointers, dtype=dtype)
            return self.each(value, lambda at: array[at], places.offsets)
        number = self.random.choice((0, 0, 1, 7)) if dtype is not DType.BOOL else False
        other = self.b.constant(float(number) if dtype.is_float else number, dtype)
        other = self.b.broadcast(other, places.offsets.shape)
        if self.chance(0.7):
            value = self.b.emit("load", pointers, places.mask.value, other, dtype=dtype)
        else:  # undefined where the mask is false
            value = self.b.emit("load", pointers, places.mask.value, dtype=dtype)
            value = self.b.emit("select", places.mask.value, value, other)

        def taken(at: np.ndarray, inside: np.ndarray) -> np.ndarray:
            found = array[np.where(inside, at, 0)]
            return np.where(inside, found, dtype.numpy.type(number)).astype(dtype.numpy)

        return self.each(value, taken, places.offsets, places.mask)

    # -- block pointers ----------------------------------------------------------------------------------------------

    def block_pointer(
        self,
        base: Value,
        sizes: Sequence[int],
        strides: Sequence[int],
        offsets: Sequence[Made],
        block: tuple[int, ...],
    ) -> Value:
        order = tuple(sorted(range(len(block)), key=lambda axis: strides[axis]))
        numbers = [self.number(each) for each in (*sizes, *strides)]
        given = [self.b.cast(each.value, DType.I64) for each in (*numbers, *offsets)]
        return self.b.emit("make_block_ptr", base, *given, block=block, order=order)

    def load_block(self) -> Made:
        dtype = self.random.choice([each for each in TYPES if each is not DType.BOOL])
        block = self.random.choice(((4, 8), (8, 4), (16, 16), (1, 8), (32, 8)))
        sizes = tuple(
            n * self.grid[axis] - self.random.choice((0, 0, 1, n // 2)) for axis, n in enumerate(block)
        )
        sizes = tuple(max(1, each) for each in sizes)
        by_rows = self.chance(0.7)
        inner = sizes[1 if by_rows else 0] + self.random.choice((0, 0, 1, 8))
        strides = (inner, 1) if by_rows else (1, inner)
        base, array = self.input(dtype, inner * sizes[0 if by_rows else 1])
        shift = [self.random.choice((0, 0, 0, -1, 2)) for _ in block]
        offsets = [
            self.moved(self.combined("mul", np.multiply, self.instance(axis), block[axis]), shift[axis])
            for axis in range(2)
        ]
        pointer = self.block_pointer(base, sizes, strides, offsets, block)
        if self.chance(0.3):
            by = [self.random.choice((0, block[0], -block[0])), self.random.choice((0, 1))]
            pointer = self.b.emit("advance", pointer, *(self.b.constant(n, DType.I64) for n in by))
            offsets = [
                Made(each.value, [np.asarray(at + n) for at in each.arrays])
                for each, n in zip(offsets, by, strict=True)
            ]
        check = tuple(
            axis
            for axis in range(2)
            if self.chance(0.3)
            or any(not 0 <= int(at) <= sizes[axis] - block[axis] for at in offsets[axis].arrays)
        )
        padding = "nan" if dtype.is_float and self.chance(0.3) else "zero"
        value = self.b.emit("load_block", pointer, check=check, padding=padding, type=pointer.type)
        fill = dtype.numpy.type(np.nan if padding == "nan" else 0)

        def taken(m: np.ndarray, n: np.ndarray) -> np.ndarray:
            rows, columns = m + np.arange(block[0])[:, None], n + np.arange(block[1])[None, :]
            inside = (rows >= 0) & (rows < sizes[0]) & (columns >= 0) & (columns < sizes[1])
            at = np.where(inside, rows * strides[0] + columns * strides[1], 0)
            return np.where(inside, array[at], fill).astype(dtype.numpy)

        made = self.each(value, taken, *offsets)
        if padding == "zero":
            return made
        return self.combined("eq", np.equal, made, made)  # where it is padded, as what follows has no NaN

    # -- stores ------------------------------------------------------------------------------------------------------

    def store(self, made: Made) -> None:
        if len(made.shape) == 2 and made.dtype is not DType.BOOL and self.chance(0.3):
            self.store_block(made)
            return
        places = self.places(made.shape, unique=True)
        base = self.result(made.dtype, places.size, whole=False)
        self.stored(base, places, made)

    def stored(self, base: Value, places: Places, made: Made) -> None:
        masks = [] if places.mask is None else [places.mask.value]
        self.b.effect("store", self.pointers(base, places.offsets), made.value, *masks)
        for n, (at, array) in enumerate(zip(places.offsets.arrays, made.arrays, strict=True)):
            active = places.active(n)
            self.wanted[base.name][at[active]] = array[active]

    def store_block(self, made: Made) -> None:
        block = made.shape
        ragged = [self.random.choice((0, 0, 1)) if n > 1 else 0 for n in block]
        sizes = [n * self.grid[axis] - ragged[axis] for axis, n in enumerate(block)]
        by_rows = self.chance(0.7)
        strides = (sizes[1], 1) if by_rows else (1, sizes[0])
        base = self.result(made.dtype, sizes[0] * sizes[1] * self.grid[2], whole=False)
        start = base
        if self.grid[2] > 1:
            first = self.combined("mul", np.multiply, self.instance(2), sizes[0] * sizes[1])
            start = self.pointers(base, first)
        offsets = [self.combined("mul", np.multiply, self.instance(axis), block[axis]) for axis in range(2)]
        pointer = self.block_pointer(start, sizes, strides, offsets, block)
        check = tuple(axis for axis in range(2) if ragged[axis] or self.chance(0.3))
        self.b.effect("store_block", pointer, made.value, check=check, type=pointer.type)
        for (_, _, z), m, n, array in zip(
            self.instances, *(each.arrays for each in offsets), made.arrays, strict=True
        ):
            whole = self.wanted[base.name][z * sizes[0] * sizes[1] :][: sizes[0] * sizes[1]]
            matrix = whole.reshape(sizes) if by_rows else whole.reshape(sizes[::-1]).T
            into = matrix[int(m) : int(m) + block[0], int(n) : int(n) + block[1]]
            into[...] = array[: into.shape[0], : into.shape[1]]

    # -- atomics -----------------------------------------------------------------------------------------------------

    def bins(self, dtype: DType, size: int) -> Value:
        param = self.tensor(dtype)
        self.arrays[param.name] = self.data(dtype, size)
        self.wanted[param.name] = self.arrays[param.name].copy()
        return param

    def atomic(self) -> None:
        """On elements that instances and lanes share, by a function whose order does not matter; or on elements of
        their own, where the old values are known."""
        if self.chance(0.4):
            self.keep(self.own_atomic())
            return
        kind = self.random.choice(list(_ATOMICS))
        dtype = self.random.choice((*_WORDS, DType.F32) if kind == "add" else _WORDS)
        shape, size = self.some_shape(), self.random.choice((1, 4, 7))
        places = self.places(shape, unique=False)
        at = self.combined("mod", np.mod, places.offsets, size)
        places = Places(at, places.mask)
        values = self.operand(dtype, shape)
        base = self.bins(dtype, size)
        if self.chance(0.3):  # by some instances only
            chosen = self.combined("le", np.less_equal, self.linear_instance(), self.random.randrange(4))
            with self.b.inside() as then:
                self.changed(kind, base, places, values)
            self.b.nodes.append(If(chosen.value, Block((), tuple(then), ()), Block((), (), ()), ()))
            taken = [bool(each) for each in chosen.arrays]
        else:
            self.changed(kind, base, places, values)
            taken = [True] * len(self.instances)
        for n, (offsets, array) in enumerate(zip(at.arrays, values.arrays, strict=True)):
            active = places.active(n)
            if taken[n]:
                _ATOMICS[kind].at(self.wanted[base.name], offsets[active], array[active])  # type: ignore[attr-defined]

    def operand(self, dtype: DType, shape: tuple[int, ...]) -> Made:
        """Small whole numbers of this type and shape."""
        made = self.pick(lambda kind: kind.shape == shape and kind.dtype in (DType.I32, DType.U8, DType.BOOL))
        if made is None or dtype is DType.F32:
            count = int(np.prod(shape, dtype=int))
            at = self.index(count) if shape else self.linear_instance()
            made = self.combined("mod", np.mod, at, 5)
            made = self.reshaped(made, shape) if len(shape) > 1 else made
        value = self.b.cast(made.value, dtype)
        return self.each(value, lambda x: x.astype(dtype.numpy), made)

    def changed(self, kind: str, base: Value, places: Places, values: Made) -> Value:
        masks = [] if places.mask is None else [places.mask.value]
        pointers = self.pointers(base, places.offsets)
        return self.b.emit(f"atomic_{kind}", *self.b.alike(pointers, values.value), *masks)

    def own_atomic(self) -> Made:
        kind = self.random.choice((*_ATOMICS, "xchg", "cas"))
        dtype = self.random.choice((*_WORDS, DType.F32) if kind in ("add", "xchg") else _WORDS)
        shape = self.some_shape()
        places, values = self.places(shape, unique=True), self.operand(dtype, shape)
        if kind == "cas":
            places = Places(places.offsets)
        base = self.bins(dtype, places.size)
        if kind == "cas":
            expected = self.operand(dtype, shape)
            pointers = self.pointers(base, places.offsets)
            found = self.b.emit("atomic_cas", pointers, expected.value, values.value)
        else:
            expected, found = values, self.changed(kind, base, places, values)
        if places.mask is not None:  # undefined where the mask is false
            zero = self.b.broadcast(self.b.constant(0 if dtype.is_integer else 0.0, dtype), shape)
            found = self.b.emit("select", places.mask.value, found, zero)
        arrays = []
        for n, (at, new, old) in enumerate(
            zip(places.offsets.arrays, values.arrays, expected.arrays, strict=True)
        ):
            active, memory = places.active(n), self.wanted[base.name]
            before = np.where(active, memory[np.where(active, at, 0)], dtype.numpy.type(0))
            if kind == "cas":
                after = np.where(before == old, new, before)
            else:
                after = new if kind == "xchg" else _ATOMICS[kind](before, new)
            memory[at[active]] = after[active]
            arrays.append(np.asarray(before))
        return Made(found, arrays)

    # -- loops -------------------------------------------------------------------------------------------------------

    def loop_of_loads(self) -> Made:
        """acc = acc + x[start + i * step], masked, by an index or by pointers that the loop carries."""
        dtype, shape = self.random.choice((DType.I32, DType.U32, DType.I16)), self.some_shape()
        start = self.places(shape, unique=False)
        times, counts = self.count()
        step = self.random.choice((0, 1, int(np.prod(shape, dtype=int))))
        base, array = self.input(dtype, start.size + step * max(1, *counts))
        carried = self.chance(0.5)
        zero = self.b.broadcast(self.b.constant(0, dtype), shape)
        pointers = self.pointers(base, start.offsets)
        init = (zero, pointers) if carried else (zero,)
        index = Value(TileType(DType.I32))
        params, results = ([Value(each.type) for each in init] for _ in range(2))
        with self.b.inside() as body:
            by = self.b.constant(step) if carried else self.b.emit("mul", index, self.b.constant(step))
            size = dtype.bytes
            first = params[1] if carried else pointers
            here = first if carried else self.b.emit("addptr", *self.b.alike(first, by), bytes=size)
            given = [] if start.mask is None else [start.mask.value, zero]
            total = self.b.emit("add", params[0], self.b.emit("load", here, *given, dtype=dtype))
            after = [self.b.emit("addptr", *self.b.alike(first, by), bytes=size)] if carried else []
        bounds = self.b.constant(0), times.value, self.b.constant(1)
        block = Block((index, *params), tuple(body), (total, *after))
        self.b.nodes.append(For(*bounds, init, block, tuple(results)))
        arrays = []
        for n, at in enumerate(start.offsets.arrays):
            active, sums = start.active(n), np.zeros(shape, dtype.numpy)
            for i in range(counts[n]):
                found = array[np.where(active, at + i * step, 0)]
                sums = np.asarray(sums + np.where(active, found, 0).astype(dtype.numpy))
            arrays.append(sums)
        return Made(results[0], arrays)

    def loop_of_dots(self) -> Made:
        """acc = acc + a[m, k] @ b[k, n], as in a matmul, with a tail of K; on a GPU copied ahead."""
        dtype = self.random.choice((DType.F16, DType.F32, DType.BF16))
        rows, columns, depth = (self.random.choice((16, 32)) for _ in range(3))
        steps = self.random.randint(1, 4)
        total_k = steps * depth - self.random.choice((0, 0, 1, depth // 2))
        height, width = rows * self.grid[0], columns * self.grid[1]
        left, x = self.input(dtype, height * total_k)
        right, y = self.input(dtype, total_k * width)
        m, n, k = self.blocked(0, rows), self.blocked(1, columns), self.index(depth)
        acc = self.b.broadcast(self.b.constant(0.0), (rows, columns))
        index, param, result = Value(TileType(DType.I32)), Value(acc.type), Value(acc.type)
        limit, across, down = self.number(total_k), self.number(total_k), self.number(width)
        m, n = self.reshaped(m, (rows, 1)), self.reshaped(n, (1, columns))
        blocks = self.chance(0.4)
        if blocks:
            zero = self.same(self.b.constant(0), np.int32(0))
            starts = [
                self.combined("mul", np.multiply, self.instance(axis), size)
                for axis, size in ((0, rows), (1, columns))
            ]
            first = [
                self.block_pointer(left, (height, total_k), (total_k, 1), (starts[0], zero), (rows, depth)),
                self.block_pointer(right, (total_k, width), (width, 1), (zero, starts[1]), (depth, columns)),
            ]
            init = (acc, *first)
            params, results = ([Value(each.type) for each in init] for _ in range(2))
            with self.b.inside() as body:
                a = self.b.emit("load_block", params[1], check=(1,), padding="zero", type=params[1].type)
                c = self.b.emit("load_block", params[2], check=(0,), padding="zero", type=params[2].type)
                total = self.b.emit("dot", a, c, params[0], precision="ieee")
                none, by = self.b.constant(0, DType.I64), self.b.constant(depth, DType.I64)
                after = [
                    self.b.emit("advance", params[1], none, by),
                    self.b.emit("advance", params[2], by, none),
                ]
            block = Block((index, *params), tuple(body), (total, *after))
            bounds = (self.b.constant(0), self.b.constant(steps), self.b.constant(1))
            self.b.nodes.append(For(*bounds, init, block, tuple(results)))
            result = results[0]
        else:
            nothing = [
                self.b.broadcast(self.b.constant(0.0, dtype), each)
                for each in ((rows, depth), (depth, columns))
            ]
            with self.b.inside() as body:
                at = self.b.emit("add", *self.b.alike(index, k.value))
                ks = [self.b.emit("reshape", at, shape=each) for each in ((1, depth), (depth, 1))]
                inside = [self.b.emit("lt", *self.b.alike(each, limit.value)) for each in ks]
                masks = [
                    self.b.broadcast(each, shape)
                    for each, shape in zip(inside, ((rows, depth), (depth, columns)), strict=True)
                ]
                offsets = [
                    self.b.emit(
                        "add", *self.b.alike(self.b.emit("mul", *self.b.alike(m.value, across.value)), ks[0])
                    ),
                    self.b.emit(
                        "add", *self.b.alike(self.b.emit("mul", *self.b.alike(ks[1], down.value)), n.value)
                    ),
                ]
                tiles = [
                    self.b.emit(
                        "load",
                        self.b.emit("addptr", *self.b.alike(base, each), bytes=dtype.bytes),
                        mask,
                        other,
                        dtype=dtype,
                    )
                    for base, each, mask, other in zip((left, right), offsets, masks, nothing, strict=True)
                ]
                total = self.b.emit("dot", *tiles, param, precision="ieee")
            bounds = (self.b.constant(0), limit.value, self.b.constant(depth))
            self.b.nodes.append(For(*bounds, (acc,), Block((index, param), tuple(body), (total,)), (result,)))
        exact = x[: height * total_k].reshape(height, total_k).astype(np.float64) @ (
            y[: total_k * width].reshape(total_k, width).astype(np.float64)
        )
        arrays = [
            exact[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].astype(np.float32)
            for i, j, _ in self.instances
        ]
        return Made(result, arrays)

    def loop_of_atomics(self) -> None:
        """Each iteration adds to the next bin."""
        shape, size = self.some_shape(), self.random.choice((3, 8))
        places, values = self.places(shape, unique=False), self.operand(DType.I32, shape)
        times, counts = self.count()
        base = self.bins(DType.I32, size)
        index = Value(TileType(DType.I32))
        with self.b.inside() as body:
            at = self.b.emit("add", *self.b.alike(places.offsets.value, index))
            at = self.b.emit("mod", *self.b.alike(at, self.b.constant(size)))
            self.changed("add", base, Places(Made(at, []), places.mask), values)
        bounds = self.b.constant(0), times.value, self.b.constant(1)
        self.b.nodes.append(For(*bounds, (), Block((index,), tuple(body), ()), ()))
        for n, (offsets, array) in enumerate(zip(places.offsets.arrays, values.arrays, strict=True)):
            active = places.active(n)
            for i in range(counts[n]):
                np.add.at(self.wanted[base.name], (offsets[active] + i) % size, array[active])
