"""Operations along an axis: reductions, cumsum, sort, dot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llvmlite import ir

from tilewright.codegen.llvm.tiles.bounds import Bounds
from tilewright.codegen.llvm.tiles.values import Buffer, Chunk, Location, register_type, tile_type
from tilewright.codegen.llvm.types import I32, I64, Typed, splat, vector_of
from tilewright.dtypes import DType
from tilewright.tile.ir import Op, Value
from tilewright.tile.ops import sum_type
from tilewright.tile.passes.exponents import may_ignore_nan

_VECTORS = 2  # along a row of the accumulators that a dot keeps in registers


def _neutral(combine: str, dtype: DType) -> ir.Constant:
    """The neutral element of a reduction."""
    kind = register_type(dtype)
    if dtype.is_float:
        return ir.Constant(
            kind, {"add": -0.0, "max": float("-inf"), "greater": float("-inf"), "min": float("inf")}[combine]
        )
    if combine == "add":
        return ir.Constant(kind, 0)
    if dtype is DType.BOOL or dtype.is_unsigned:
        return ir.Constant(kind, 0 if combine == "max" else (1 << kind.width) - 1)
    return ir.Constant(kind, -(1 << kind.width - 1) if combine == "max" else (1 << kind.width - 1) - 1)


class Along(Bounds):
    def reduce(self, op: Op, value: Value, result: Buffer | None, unroll: int = 1) -> ir.Value | None:
        """Reduce a tile into `result`; return the scalar if the tile has one axis. Several accumulators hide the
        latency of additions."""
        kind, axis = op.settings["kind"], op.settings["axis"] % len(tile_type(value).shape)
        if kind.startswith("arg"):
            return self._arg(op, value, axis, result)
        shape, dtype = tile_type(value).shape, tile_type(value).dtype
        into = sum_type(dtype) if kind == "sum" else dtype
        wide = into.compute if into.is_float else into
        combine = "add" if kind == "sum" else kind
        if dtype.is_float and may_ignore_nan(self.made_by, self.users, op):
            combine = "greater"
        if axis != len(shape) - 1:
            kept = shape[:axis] + shape[axis + 1 :]
            with self.over(kept) as locations:
                for location in locations:
                    self._reduce_at(location, value, axis, unroll, combine, wide, into, result)
            return None
        lanes = min(shape[-1], self.lanes)
        with self._nest(list(shape[:-1])) as outer:

            def along(step: ir.Value) -> Location:
                return Location((*outer, step), len(shape) - 1 if lanes > 1 else -1, lanes)

            vector = self._reduced(value, shape[-1], lanes, unroll, combine, wide, along, lanes)
            done = self.convert(self._across(vector, combine, wide), wide, into)
            if result is None:
                return done
            self.write(result, Location(tuple(outer)), Chunk(done, 1))
        return None

    def _reduce_at(
        self,
        location: Location,
        value: Value,
        axis: int,
        unroll: int,
        combine: str,
        wide: DType,
        into: DType,
        result: Buffer | None,
    ) -> None:
        """The elements of the result at one location, which run along another axis than the reduced one."""

        def across(step: ir.Value) -> Location:
            index = (*location.index[:axis], step, *location.index[axis:])
            lane = location.axis + (location.axis >= axis) if location.axis >= 0 else -1
            return Location(index, lane, location.lanes)

        extent = tile_type(value).shape[axis]
        total = self._reduced(value, extent, 1, unroll, combine, wide, across, location.lanes)
        assert result is not None
        self.write(result, location, Chunk(self.convert(total, wide, into), location.lanes))

    def _reduced(
        self,
        value: Value,
        extent: int,
        step: int,
        unroll: int,
        combine: str,
        wide: DType,
        locate: Callable[[ir.Value], Location],
        lanes: int,
    ) -> ir.Value:
        """Combine the elements at `locate(0)`, `locate(step)`, ..."""
        builder, dtype = self.builder, tile_type(value).dtype
        unroll = self.whole((extent,)) if step > 1 and self.whole((extent,)) else min(unroll, extent // step)
        kind = vector_of(register_type(wide), lanes)
        whole = extent == step * unroll
        cells = [self.alloca(kind) for _ in range(unroll)]
        if not whole:
            neutral = splat(builder, Typed(_neutral(combine, wide), wide, 1), lanes).value
            for cell in cells:
                builder.store(neutral, cell)

        def combined(start: ir.Value, count: int) -> None:
            self.memo = {}
            for number, cell in enumerate(cells[:count]):
                location = locate(self.plus(start, number * step))
                item = self.convert(self.spread(self.at(value, location), lanes), dtype, wide)
                self.kept(location)
                if not whole:
                    item = self._step(combine, wide, builder.load(cell, typ=kind), item)
                builder.store(item, cell)

        if step > 1:
            self.in_parts([value], extent, unroll, locate, combined)
        else:
            with self.loop(extent, step * unroll) as start:
                combined(start, unroll)
        parts = [builder.load(cell, typ=kind) for cell in cells]
        return self._pairwise(parts, lambda a, b: self._step(combine, wide, a, b))

    def kept(self, location: Location) -> None:
        """Write values that code after the loop needs; the emitter implements it."""

    def _accumulate(self, cell: ir.Value, combine: str, wide: DType, step: ir.Value, item: ir.Value) -> None:
        builder = self.builder
        if isinstance(step, ir.Constant):
            builder.store(item, cell)
            return
        first = builder.icmp_signed("==", step, I64(0))
        with builder.if_else(first) as (then, other):
            with then:
                builder.store(item, cell)
            with other:
                builder.store(self.scalar(combine, wide, builder.load(cell, typ=item.type), item), cell)

    def _step(self, combine: str, dtype: DType, a: ir.Value, b: ir.Value) -> ir.Value:
        """Two elements of a reduction combined. "greater" is the maximum of numbers: one instruction, and four with
        NaN."""
        if combine == "greater":
            return self.builder.select(self.builder.fcmp_ordered(">", b, a), b, a)
        return self.scalar(combine, dtype, a, b)

    def _across(self, vector: ir.Value, combine: str, wide: DType) -> ir.Value:
        """Combine all lanes, first half with second half."""
        builder = self.builder
        if combine in ("add", "greater") or not wide.is_float or not isinstance(vector.type, ir.VectorType):
            return self._halves(vector, lambda a, b: self._step(combine, wide, a, b))
        # One test for NaN beside the steps, which need not propagate it then.
        sign, bits = (">" if combine == "max" else "<"), ir.IntType(vector.type.count)
        unordered = builder.bitcast(builder.fcmp_unordered("uno", vector, vector), bits)
        nan = self.constant(float("nan"), wide)
        number = self._halves(vector, lambda a, b: builder.select(builder.fcmp_ordered(sign, a, b), a, b))
        return builder.select(builder.icmp_unsigned("!=", unordered, ir.Constant(bits, 0)), nan, number)

    def _pairwise(
        self, parts: list[ir.Value], combined: Callable[[ir.Value, ir.Value], ir.Value]
    ) -> ir.Value:
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [combined(*pair) for pair in zip(parts[:half], parts[half:], strict=True)]
        return parts[0]

    def _halves(self, vector: ir.Value, combined: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        builder = self.builder
        while isinstance(vector.type, ir.VectorType):
            half = vector.type.count // 2
            if half == 1:
                low, high = (builder.extract_element(vector, I32(n)) for n in range(2))
            else:
                numbers = [ir.Constant(ir.VectorType(I32, half), list(range(n, n + half))) for n in (0, half)]
                low, high = (builder.shuffle_vector(vector, vector, each) for each in numbers)
            vector = combined(low, high)
        return vector

    def _arg(self, op: Op, value: Value, axis: int, result: Buffer | None) -> ir.Value | None:
        """The first best element, with its index; NaN is better than any number."""
        builder, shape = self.builder, tile_type(value).shape
        dtype = tile_type(value).dtype
        wide = dtype.compute if dtype.is_float else dtype
        kept = [*shape[:axis], *shape[axis + 1 :]]
        best, where = self.alloca(register_type(wide)), self.alloca(I32)
        with self._nest(kept) as outer:
            with self.loop(shape[axis]) as step:
                self.memo = {}
                location = Location((*outer[:axis], step, *outer[axis:]))
                item = self.convert(self.at(value, location).value, dtype, wide)
                old = builder.load(best, typ=item.type)
                pair = (old, item) if op.settings["kind"] == "argmax" else (item, old)
                better = self.scalar("lt", wide, *pair)
                if wide.is_float:
                    fresh = builder.fcmp_unordered("uno", item, item)
                    better = builder.and_(builder.or_(better, fresh), builder.fcmp_ordered("ord", old, old))
                better = builder.or_(better, builder.icmp_signed("==", step, I64(0)))
                with builder.if_then(better):
                    builder.store(item, best)
                    builder.store(self._index(step, I32), where)
            found = builder.load(where, typ=I32)
            if result is None:
                return found
            self.write(result, Location(tuple(outer)), Chunk(found, 1))
        return None

    def cumsum(self, value: Value, axis: int, result: Buffer) -> None:
        shape, dtype = tile_type(value).shape, tile_type(value).dtype
        into = sum_type(dtype)
        wide = into.compute if into.is_float else into
        total = self.alloca(register_type(wide))
        axis %= len(shape)
        with self._nest([*shape[:axis], *shape[axis + 1 :]]) as outer, self.loop(shape[axis]) as step:
            self.memo = {}
            location = Location((*outer[:axis], step, *outer[axis:]))
            item = self.convert(self.at(value, location).value, dtype, wide)
            self._accumulate(total, "add", wide, step, item)
            found = self.builder.load(total, typ=item.type)
            self.write(result, location, Chunk(self.convert(found, wide, into), 1))

    def sort(self, result: Buffer, axis: int, descending: bool) -> None:
        """Bitonic sort in place: compare pairs (i, i ^ distance) in rounds."""
        axis %= len(result.shape)
        size, builder = result.shape[axis], self.builder
        assert isinstance(result.element, DType)
        dtype = result.element
        with self._nest([*result.shape[:axis], *result.shape[axis + 1 :]]) as outer:
            for level in range(1, size.bit_length()):
                for distance in [1 << d for d in reversed(range(level))]:
                    with self.loop(size // 2) as number:
                        low = builder.and_(number, I64(distance - 1))
                        first = builder.or_(builder.shl(builder.xor(number, low), I64(1)), low)
                        second = builder.or_(first, I64(distance))
                        locations = [Location((*outer[:axis], n, *outer[axis:])) for n in (first, second)]
                        one, two = (self.read(result, location).value for location in locations)
                        up = builder.icmp_signed("==", builder.and_(first, I64(1 << level)), I64(0))
                        less = [self._sorts_before(dtype, *pair) for pair in ((two, one), (one, two))]
                        if descending:
                            less.reverse()
                        swap = builder.select(up, less[0], less[1])
                        self.write(result, locations[0], Chunk(builder.select(swap, two, one), 1))
                        self.write(result, locations[1], Chunk(builder.select(swap, one, two), 1))

    def _sorts_before(self, dtype: DType, a: ir.Value, b: ir.Value) -> ir.Value:
        """Whether a < b; NaN is greater than all numbers."""
        less = self.scalar("lt", dtype, a, b)
        if not dtype.is_float:
            return less
        wide = [self.convert(x, dtype, dtype.compute) for x in (a, b)]
        number = self.builder.fcmp_ordered("ord", wide[0], wide[0])
        return self.builder.or_(
            less, self.builder.and_(number, self.builder.fcmp_unordered("uno", wide[1], wide[1]))
        )

    def dot(self, a: Buffer, b: Buffer, c: Buffer, count: ir.Value | None, *, fresh: bool) -> None:
        """c += a b, or c = a b if c is fresh, by a function that all dots of these shapes and types call. `count`:
        compute only so many rows."""
        assert isinstance(c.element, DType)
        shapes = "_".join("x".join(map(str, each.shape)) for each in (a, b))
        name = f"{self.module.name}_dot_{c.element.short}_{shapes}_{'fresh' if fresh else 'add'}"
        name += "" if count is None else "_rows"
        arguments = [each.pointer for each in (a, b, c)] + ([] if count is None else [count])
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(
                self.module, ir.FunctionType(ir.VoidType(), [each.type for each in arguments]), name
            )
            function.linkage = "internal"
            for attribute in ("nounwind", "noinline"):
                function.attributes.add(attribute)
            for argument in function.args[:3]:
                argument.attributes.add("noalias")
            outside = self.builder, self.entry
            self.entry = function.append_basic_block("entry")
            start = function.append_basic_block("start")
            self.builder = ir.IRBuilder(start)
            left, right, sums = (
                replace(each, pointer=p) for each, p in zip((a, b, c), function.args[:3], strict=True)
            )
            rows = a.shape[-2] if count is None else function.args[3]
            self._dot_body(left, right, sums, rows, fresh=fresh)
            self.builder.ret_void()
            ir.IRBuilder(self.entry).branch(start)
            self.builder, self.entry = outside
        self.builder.call(function, arguments)

    def _dot_body(self, a: Buffer, b: Buffer, c: Buffer, count: ir.Value | int, *, fresh: bool) -> None:
        """The body of the function: a block of c stays in registers during the loop over k."""
        *batch, rows, depth = a.shape
        columns = b.shape[-1]
        lanes = min(columns, self.lanes)
        vectors = min(_VECTORS, columns // lanes)
        # Accumulators take half of the registers: the rest holds vectors of b and elements of a on their way.
        block = min(max(1, self.machine.vector_registers // 2 // vectors), rows)
        builder = self.builder
        assert isinstance(c.element, DType)
        dtype = c.element
        kind = vector_of(register_type(dtype), lanes)
        axis = len(c.shape) - 1 if lanes > 1 else -1
        with (
            self._nest(batch) as outer,
            self.loop(columns, lanes * vectors) as n,
            self.loop(count, block) as m,
        ):
            cells = {}
            for i in range(block):
                for j in range(vectors):
                    cells[i, j] = self.alloca(kind)
                    location = Location((*outer, self.plus(m, i), self.plus(n, j * lanes)), axis, lanes)
                    zero = ir.Constant(kind, [0.0 if dtype.is_float else 0] * lanes if lanes > 1 else 0)
                    builder.store(zero if fresh else self.read(c, location).value, cells[i, j])
            unroll = 4 if depth % 4 == 0 else 1
            with self.loop(depth, unroll) as start:
                for u in range(unroll):
                    k = self.plus(start, u)
                    right = [
                        self.read(b, Location((*outer, k, self.plus(n, j * lanes)), axis, lanes)).value
                        for j in range(vectors)
                    ]
                    for i in range(block):
                        item = self.read(a, Location((*outer, self.plus(m, i), k))).value
                        left = splat(builder, Typed(item, dtype, 1), lanes).value
                        for j in range(vectors):
                            old = builder.load(cells[i, j], typ=kind)
                            builder.store(self._fma(dtype, left, right[j], old), cells[i, j])
            for (i, j), cell in cells.items():
                location = Location((*outer, self.plus(m, i), self.plus(n, j * lanes)), axis, lanes)
                self.write(c, location, Chunk(builder.load(cell, typ=kind), lanes))

    def _fma(self, dtype: DType, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        if dtype.is_float:
            return self.scalar("fma", dtype, a, b, c)
        return self.builder.add(c, self.builder.mul(a, b))
