"""Operations of random tile programs whose results are not the same bits everywhere: exp, division, softmax, tf32, and
sums beside a running maximum. Their results are stored, each with a bound on its error.

The bounds are those of `tilewright/tile/__init__.py` for any target, in units of 2^-23 of the result where no other is
said: exp 4 + 1.2 |x|, exp(x - m) besides m - x, division 2, each term of a sum 1. An operand in tf32 has an error of
2^-11 of it, and a result that is rounded to a half one unit of that type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.tile.generator_memory import Accesses
from tests.tile.generator_values import Made
from tilewright.dtypes import DType
from tilewright.tile.ir import Block, For, TileType, Value

_UNIT = 2.0**-23
_TF32 = 2.0**-11
_TINY = 2.0**-120  # below the smallest normal numbers, also as a term of a few sums
_FLOATS = (DType.F32, DType.F16, DType.BF16)
_ROUNDED = {DType.F32: 0.0, DType.F16: 2.0**-10, DType.BF16: 2.0**-7}


@dataclass(frozen=True)
class Near:
    """A value, what it is about in each instance, and how far it may be from that."""

    value: Value
    arrays: list[np.ndarray]  # f64
    bounds: list[np.ndarray]


@dataclass
class Inexact(Accesses):
    bounds: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # of results: the greatest error of each element

    def approximate(self) -> None:
        kinds = (self.power, self.quotient, self.softmax, self.dot_in_tf32, self.loop_of_maxima)
        near = self.random.choice(kinds)()
        if near is not None:
            self.store_near(near)

    def store_near(self, near: Near) -> None:
        assert isinstance(near.value.type, TileType)
        if len(near.value.type.shape) == 2 and self.chance(0.3):
            value = self.b.emit("trans", near.value, order=(1, 0))
            near = Near(value, [each.T for each in near.arrays], [each.T for each in near.bounds])
        assert isinstance(near.value.type, TileType)
        dtype, shape = near.value.type.dtype, near.value.type.shape
        places = self.places(shape, unique=True)
        base = self.result(dtype, places.size, whole=False)
        self.stored(base, places, Made(near.value, [each.astype(dtype.numpy) for each in near.arrays]))
        self.bounds[base.name] = bounds = np.zeros(self.wanted[base.name].shape)
        for n, (at, bound) in enumerate(zip(places.offsets.arrays, near.bounds, strict=True)):
            active = places.active(n)
            bounds[at[active]] = bound[active]

    # -- operands ----------------------------------------------------------------------------------------------------

    def floats(self, *, axes: Sequence[int] = (0, 1, 2, 3), most: float = 1e6) -> Made | None:
        """Finite floats of one of these ranks."""
        made = self.pick(lambda kind: kind.dtype in _FLOATS and len(kind.shape) in axes)
        if made is None:
            return None
        wide = [np.abs(each.astype(np.float64)) for each in made.arrays]
        return made if all(np.all(each <= most) for each in wide) else None  # neither is NaN

    def wide(self, made: Made) -> Made:
        return self.each(self.b.cast(made.value, DType.F32), lambda x: x.astype(np.float32), made)

    def filled(self, number: float, like: Made) -> Value:
        return self.b.broadcast(self.b.constant(number, like.dtype), like.shape)

    def between(self, made: Made, low: float, high: float) -> Made:
        value = self.b.emit("min", made.value, self.filled(high, made))
        value = self.b.emit("max", value, self.filled(low, made))
        return self.each(value, lambda x: np.clip(x, low, high).astype(x.dtype), made)

    def near(self, value: Value, arrays: list[np.ndarray], units: list[np.ndarray]) -> Near:
        """`units`: how many of f32 the results may be off by."""
        assert isinstance(value.type, TileType)
        dtype = value.type.dtype
        bounds = [
            np.abs(array) * (unit * _UNIT + _ROUNDED[dtype]) + (_TINY if dtype is not DType.F16 else 2.0**-24)
            for array, unit in zip(arrays, units, strict=True)
        ]
        return Near(value, arrays, bounds)

    # -- elementwise -------------------------------------------------------------------------------------------------

    def power(self) -> Near | None:
        made = self.floats()
        if made is None:
            return None
        made = self.between(made, -9.0, 9.0)
        wide = [each.astype(np.float64) for each in made.arrays]
        units = [4 + 1.2 * np.abs(each) for each in wide]
        return self.near(self.b.emit("exp", made.value), [np.exp(each) for each in wide], units)

    def quotient(self) -> Near | None:
        """By another tile, or by one number for all of its elements."""
        one, other = self.floats(), self.floats(axes=(0,) if self.chance(0.5) else (0, 1, 2, 3))
        if one is None or other is None or (other.shape and other.shape != one.shape):
            return None
        one, other = self.wide(one), self.wide(other)
        is_zero = self.b.emit("eq", other.value, self.filled(0.0, other))
        value = self.b.emit("select", is_zero, self.filled(3.0, other), other.value)
        other = self.each(value, lambda x: np.where(x == 0, np.float32(3.0), x), other)
        made = self.b.emit("div", one.value, self.b.broadcast(other.value, one.shape))
        arrays = [
            np.asarray(x.astype(np.float64) / y.astype(np.float64))
            for x, y in zip(one.arrays, other.arrays, strict=True)
        ]
        return self.near(made, arrays, [np.full(one.shape, 3.0) for _ in arrays])

    # -- along an axis -----------------------------------------------------------------------------------------------

    def softmax(self) -> Near | None:
        """Its weights, or the sum of them before the division."""
        made = self.floats(axes=(1, 2, 3))
        if made is None:
            return None
        made = self.wide(made)
        axis = self.random.randrange(len(made.shape))

        def put_back(value: Value) -> Value:
            return self.b.broadcast(self.b.emit("expand_dims", value, axis=axis), made.shape)

        most = self.b.emit("reduce", made.value, kind="max", axis=axis)
        powers = self.b.emit("exp", self.b.emit("sub", made.value, put_back(most)))
        total = self.b.emit("reduce", powers, kind="sum", axis=axis)
        count, arrays, units = made.shape[axis], [], []
        sums = self.chance(0.3)
        for array in made.arrays:
            wide = array.astype(np.float64)
            distance = wide.max(axis, keepdims=True) - wide
            # Where it is far, the exponential is nothing beside the greatest one, which is 1.
            exact, units_here = np.exp(-distance), 6 + 3 * distance
            whole = exact.sum(axis, keepdims=True)
            in_sum = (exact * units_here).sum(axis, keepdims=True) / whole + count
            arrays.append(whole.squeeze(axis) if sums else exact / whole)
            units.append(in_sum.squeeze(axis) if sums else units_here + in_sum + 2)
        if sums:
            return self.near(total, arrays, units)
        return self.near(self.b.emit("div", powers, put_back(total)), arrays, units)

    def dot_in_tf32(self) -> Near | None:
        """Of thirds, which lose bits."""
        made = self.floats(axes=(2,), most=1e3)
        if made is None or max(made.shape) > 64:
            return None
        made = self.wide(made)
        third = np.float32(1 / 3)
        value = self.b.emit("mul", made.value, self.filled(float(third), made))
        made = self.each(value, lambda x: np.asarray(x * third), made)
        right = self.b.emit("trans", made.value, order=(1, 0))
        found = self.b.emit("dot", made.value, right, precision="tf32")
        arrays, bounds = [], []
        for array in made.arrays:
            wide = array.astype(np.float64)
            arrays.append(wide @ wide.T)
            each = 2.01 * _TF32 + (made.shape[1] + 2) * _UNIT
            bounds.append(np.abs(wide) @ np.abs(wide).T * each + _TINY)
        return Near(found, arrays, bounds)

    # -- loops -------------------------------------------------------------------------------------------------------

    def loop_of_maxima(self) -> Near | None:
        """The sum of exp(x - maximum) over blocks, with the maximum so far of each lane or of all of them."""
        size, step_count = self.random.choice((4, 16, 64)), self.random.randint(0, 11)
        limit = max(0, step_count * size - self.random.choice((0, 0, 1, size // 2)))
        base, array = self.input(DType.F32, max(1, limit))
        if self.chance(0.4):
            array[np.random.default_rng(self.random.getrandbits(32)).random(array.shape) < 0.3] = -np.inf
        lanes, whole = self.index(size), self.chance(0.4)
        fill = np.float32(-np.inf if self.chance(0.3) else -1e30)
        shape = () if whole else (size,)
        init = [self.b.broadcast(self.b.constant(x, DType.F32), shape) for x in (-float("inf"), 0.0)]
        index = Value(TileType(DType.I32))
        params, results = ([Value(each.type) for each in init] for _ in range(2))
        end = self.number(limit)
        with self.b.inside() as body:
            at = self.b.emit("add", *self.b.alike(index, lanes.value))
            inside = self.b.emit("lt", *self.b.alike(at, end.value))
            pointers = self.b.emit("addptr", *self.b.alike(base, at), bytes=4)
            other = self.b.broadcast(self.b.constant(float(fill), DType.F32), (size,))
            tile = self.b.emit("load", pointers, inside, other, dtype=DType.F32)
            found = self.b.emit("reduce", tile, kind="max", axis=0) if whole else tile
            now = self.b.emit("max", params[0], found)
            power = self.b.emit("exp", self.b.emit("sub", *self.b.alike(tile, now)))
            added = self.b.emit("reduce", power, kind="sum", axis=0) if whole else power
            factor = self.b.emit("exp", self.b.emit("sub", params[0], now))
            total = self.b.emit("add", self.b.emit("mul", params[1], factor), added)
        bounds = (self.b.constant(0), end.value, self.b.constant(size))
        block = Block((index, *params), tuple(body), (now, total))
        self.b.nodes.append(For(*bounds, tuple(init), block, tuple(results)))
        rows = np.full((-(-limit // size), size), fill)
        rows.flat[:limit] = array[:limit]
        best, sums = np.full(shape, -np.inf), np.zeros(shape)
        for row in rows.astype(np.float64):
            new = np.maximum(best, row.max() if whole else row)
            powers = np.exp(row - new)
            sums = sums * np.exp(best - new) + (powers.sum() if whole else powers)
            best = new
        self.keep(self.same(results[0], best.astype(np.float32)))
        units = np.full(shape, 60.0 + 4 * len(rows) + size)  # the exponents that count are above -10
        count = len(self.instances)
        return self.near(results[1], [np.asarray(sums)] * count, [units] * count)
