"""Loops over tiles in parts: where every bound of an expression holds, and the rest.

    n = arange(0, 1024)                            for n in 0 ... 992:  load x[n:n+16]
    load(x + n, mask=n < 1000)            ->       for n in 992 ... 1024:  load x[n:n+16] where n < 1000

A bound is a comparison of indices that is true up to some element of a row, or for a whole row. The first part has no
masks: a masked vector costs four more instructions than a plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from tilewright.codegen.llvm.tiles.expressions import SPACED, Expressions
from tilewright.codegen.llvm.tiles.values import Lazy, Location, tile_type
from tilewright.codegen.llvm.types import I64
from tilewright.dtypes import DType
from tilewright.te.scalars import SCALARS
from tilewright.tile.ir import Op, TileType, Value

_LOADS = ("load", "load_block")
_CHEAP = frozenset(
    [
        "abs",
        "add",
        "and",
        "eq",
        "fma",
        "le",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "select",
        "shl",
        "shr",
        "sub",
        "xor",
    ]
)


class Bounds(Expressions):
    def expression(self, roots: Iterable[Value]) -> list[Value]:
        """The lazy tiles that the roots are computed from."""
        found: dict[Value, None] = {}
        waiting = list(roots)
        while waiting:
            value = waiting.pop()
            if value in found or not isinstance(self.env.get(value), Lazy):
                continue
            found[value] = None
            waiting += [each for each in self.env[value].op.operands if isinstance(each.type, TileType)]
        return list(found)

    def loses_lanes(self, op: Op) -> bool:
        """Whether neighbours along the last axis are not neighbours in the operand."""
        if op.name == "expand_dims":
            rank = len(tile_type(op.results[0]).shape)
            return bool(op.settings["axis"] % rank == rank - 1)
        if op.name == "broadcast":
            return tile_type(op.operands[0]).shape[-1:] == (1,) and tile_type(op.results[0]).shape[-1] > 1
        return op.name == "trans"

    def lane_step(self, value: Value) -> int | None:
        """The difference between neighbours along the last axis of an integer or pointer tile, in elements; None:
        unknown."""
        known = self.env.get(value)
        if not tile_type(value).shape:
            return 0
        if not isinstance(known, Lazy):
            return None
        op = known.op
        if op.name == "arange":
            return 1
        if op.name in ("broadcast", "expand_dims"):
            return 0 if self.loses_lanes(op) else self.lane_step(op.operands[0])
        if op.name == "cast":
            step = self.lane_step(op.operands[0])
            spaced = {tile_type(each).element for each in (op.operands[0], value)} <= set(SPACED)
            return step if step == 0 or (spaced and self.widens_evenly(op)) else None
        if op.name in ("add", "sub", "addptr", "mul"):
            steps = [self.lane_step(each) for each in op.operands]
            if None in steps:
                return None
            one, two = (step or 0 for step in steps)
            if op.name == "mul":
                return 0 if one == two == 0 else None
            return one - two if op.name == "sub" else one + two
        return None

    def each(
        self,
        roots: Sequence[Value],
        shape: Sequence[int],
        unroll: int,
        body: Callable[[list[Location]], None],
        mask: Value | None = None,
    ) -> None:
        """`body` for all locations of a tile, as `over`, in the parts of the roots. With a `mask` it is left out where
        the mask is false in a whole vector."""
        if not shape:
            body([Location(())])
            return
        lanes, unroll = self.vectors(shape, unroll)
        axis = len(shape) - 1 if lanes > 1 else -1
        with self._nest(list(shape[:-1])) as outer:

            def locate(start: ir.Value) -> Location:
                return Location((*outer, start), axis, lanes)

            def vectors(start: ir.Value, count: int) -> None:
                body([locate(self.plus(start, number * lanes)) for number in range(count)])

            # Rows of a tile that only move data wait for memory: loops in parts cost each of them more than masks do.
            is_row = math.prod(shape[:-1]) == 1
            computes = is_row or any(self._is_function(each) for each in self.expression(roots))
            self.in_parts(roots if computes else (), shape[-1], unroll, locate, vectors, mask)

    def _is_function(self, value: Value) -> bool:
        name = self.env[value].op.name
        return name in SCALARS and name not in _CHEAP

    def in_parts(
        self,
        roots: Sequence[Value],
        extent: int,
        unroll: int,
        locate: Callable[[ir.Value], Location],
        body: Callable[[ir.Value, int], None],
        mask: Value | None = None,
    ) -> None:
        """`body` for all numbers below the extent: it is given one, and how many vectors to take from there. The roots'
        elements are at `locate` of a number."""
        builder = self.builder
        start = ir.Constant(I64, 0)
        first = locate(start)
        lanes = first.lanes
        step = lanes * unroll
        bounds = self._bounds(roots, first, start)
        if not bounds:
            with self.loop(extent, step) as at:
                body(at, unroll)
            return
        count = self._count(bounds, extent)
        is_cut = bounds.keys() <= self._conjuncts(mask)
        wraps = self._wraps(bounds, extent) if is_cut else None
        self.memo = {}
        if extent <= step:
            whole = builder.icmp_signed(">=", count, I64(extent))
            with builder.if_else(whole, likely=True) as (then, other):
                with then, self._holding(bounds):
                    body(I64(0), unroll)
                with other:
                    body(I64(0), unroll)
            return
        above = builder.select(builder.icmp_signed("<", count, I64(0)), I64(0), count)
        unrolled, whole = (builder.and_(above, I64(-size)) for size in (step, lanes))
        with self.loop(unrolled, step) as at, self._holding(bounds):
            body(at, unroll)
        if unroll > 1:
            with self.loop(builder.sub(whole, unrolled), lanes) as at, self._holding(bounds):
                body(builder.add(unrolled, at, flags=("nsw", "nuw")), 1)
        end: ir.Value = I64(extent)
        if wraps is not None:
            end = builder.and_(builder.add(above, I64(lanes - 1)), I64(-lanes))
            end = builder.select(wraps, I64(extent), end)
        with self.loop(builder.sub(end, whole), lanes) as at:
            body(builder.add(whole, at, flags=("nsw", "nuw")), 1)

    @contextmanager
    def _holding(self, bounds: dict[Value, Location]) -> Iterator[None]:
        self.holds = frozenset(bounds)
        yield
        self.holds, self.memo = frozenset(), {}

    def _bounds(self, roots: Sequence[Value], first: Location, start: ir.Value) -> dict[Value, Location]:
        """The bounds in an expression, with their locations where the roots are at `first`. `start`: the index there
        that the loop changes."""
        if first.axis < 0:
            return {}
        found: dict[Value, Location] = {}
        seen: dict[Value, set[object]] = {}
        waiting = [(root, first) for root in roots]
        while waiting:
            value, location = waiting.pop()
            known = self.env.get(value)
            locations = seen.setdefault(value, set())
            if not isinstance(known, Lazy) or location.key in locations:
                continue
            locations.add(location.key)
            if known.op.name in ("lt", "le") and self._is_bound(known.op, location, start):
                found[value] = location
                continue
            tiles = [
                each for each in known.op.operands if isinstance(each.type, TileType) and each.type.shape
            ]
            waiting += [(each, self.below(known.op, each, location)) for each in tiles]
        return {value: location for value, location in found.items() if len(seen[value]) == 1}

    def _is_bound(self, op: Op, location: Location, start: ir.Value) -> bool:
        a, b = op.operands
        if any(self.env[each].op.name in _LOADS for each in self.expression(op.operands)):
            return False  # evaluated before the loop, it could miss what the loop stores
        if tile_type(a).element not in SPACED:
            return False
        steps = self.lane_step(a), self.lane_step(b)
        if not any(index is start for index in location.index):
            return location.axis < 0 and None not in steps
        return location.axis == len(location.index) - 1 and steps in ((1, 0), (0, 0))

    def _wraps(self, bounds: dict[Value, Location], extent: int) -> ir.Value:
        """Whether an index in the bounds wraps around in the row: a bound may hold again after that."""
        builder = self.builder
        found: ir.Value = ir.Constant(ir.IntType(1), 0)
        waiting = [(self.env[value].op.operands[0], location) for value, location in bounds.items()]
        while waiting:
            value, location = waiting.pop()
            known, step = self.env.get(value), self.lane_step(value)
            if not isinstance(known, Lazy) or not step:
                continue
            if known.op.name in ("add", "sub", "cast"):
                dtype = tile_type(value).dtype
                first = self.convert(self.at(value, location).value, dtype, DType.I64)
                far = step * (extent - 1)
                limit = 2 ** (8 * dtype.bytes - 1)
                if far > 0:
                    beyond = builder.icmp_signed(">", first, I64(limit - 1 - far))
                else:
                    beyond = builder.icmp_signed("<", first, I64(-limit - far))
                found = builder.or_(found, beyond)
            tiles = [each for each in known.op.operands if isinstance(each.type, TileType)]
            waiting += [(each, self.below(known.op, each, location)) for each in tiles]
        return found

    def _conjuncts(self, mask: Value | None) -> set[Value]:
        """Comparisons without which a mask is false."""
        found: set[Value] = set()
        waiting = [] if mask is None else [mask]
        while waiting:
            value = waiting.pop()
            found.add(value)
            known = self.env.get(value)
            if isinstance(known, Lazy) and known.op.name in ("and", "broadcast", "expand_dims"):
                waiting += known.op.operands
        return found

    def _count(self, bounds: dict[Value, Location], extent: int) -> ir.Value:
        """The number of elements from the first for which all bounds hold; at most 0 if there are none."""
        builder, count = self.builder, I64(extent)
        for value, location in bounds.items():
            op = self.env[value].op
            a, b = (self.at(each, location) for each in op.operands)
            if a.step != 1:
                chosen = self.at(value, location)
                count = builder.select(chosen.value, count, I64(0))
                continue
            dtype = tile_type(op.operands[0]).dtype
            first, end = (self.convert(each.value, dtype, DType.I64) for each in (a, b))
            room = self.intrinsic("llvm.ssub.sat.i64", I64, end, first)
            if op.name == "le":
                room = self.intrinsic("llvm.sadd.sat.i64", I64, room, I64(1))
            count = builder.select(builder.icmp_signed("<", room, count), room, count)
        return count
