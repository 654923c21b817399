"""Elements of tiles: what an expression of elementwise operations, views and loads is at one location.

Integers keep their form along the lanes (the same in all, or equally spaced) as long as possible: addresses that are
the size of an element apart become vector loads and stores. Spaced i32 offsets of pointers are taken not to wrap around
between two lanes of one vector; if they do, the address is not an element of a tensor. Other numbers of which that is
not known lose their form where they are widened: see `widens_evenly`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from tilewright.codegen.llvm import math as vector_math
from tilewright.codegen.llvm import scalars
from tilewright.codegen.llvm.tiles.tile_loops import ALIGNED, TileLoops
from tilewright.codegen.llvm.tiles.values import (
    BlockPointer,
    Buffer,
    Chunk,
    Element,
    Lazy,
    Location,
    bytes_of,
    lane_numbers,
    memory_type,
    register_type,
    tile_type,
    wrapped,
)
from tilewright.codegen.llvm.types import I1, I32, I64, PTR, Typed, splat, vector_of
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.te.scalars import SCALARS
from tilewright.tile.atomics import ATOMICS, mask_of
from tilewright.tile.ir import Op, Pointer, Value
from tilewright.tile.passes.axes import AxisInfo, Info
from tilewright.tile.passes.exponents import nonpositive, sums_exponentials

SPACED = (DType.I32, DType.I64)  # whose chunks may be equally spaced
# Bytes that loads prefetch ahead, to L1, where the hardware prefetcher follows single instructions: an unrolled loop
# has many, each with a long stride, and it is late for all of them. On a Zen 5, a cross-entropy over rows of 32,000 to
# 50,257 floats took 8 to 17% less time than with 4 KiB, and a layer norm 19% less with 4 KiB than with 2.
_AHEAD = 8192
_OF_OFFSETS = ("add", "sub", "mul", "broadcast", "expand_dims", "trans")
_TRUE = ir.Constant(I1, 1)  # a mask of which this is the value is left out


class Expressions(TileLoops):
    """The emitted value of each value of the program so far."""

    def __init__(self, module: ir.Module, machine: CpuMachine) -> None:
        super().__init__(module, machine)
        self.env: dict[Value, Any] = {}
        self.grid: tuple[list[ir.Value], list[ir.Value]]  # program ids, and how many programs
        self.memo: dict[Any, Chunk] = {}
        self.holds: frozenset[Value] = frozenset()  # comparisons that are true in the code that is written
        self.made_by: dict[Value, Op] = {}
        self.users: dict[Value, list[Any]] = {}
        self.axes: Mapping[Value, Info] = {}
        self.root = 0  # the number of the loop over a tile
        self.first_read: dict[Op, int] = {}  # the loop in which a load is evaluated first
        self.loads_ahead = not machine.prefetches_by_page and self.lanes > 1
        self.math = vector_math.MathContext(
            has_fma=machine.has_fma, has_scaling="avx512dq" in machine.features
        )

    # -- arithmetic --------------------------------------------------------------------------------------------------

    def convert(self, value: ir.Value, source: DType, to: DType) -> ir.Value:
        if (
            isinstance(value, ir.Constant)
            and isinstance(value.constant, int)
            and source in SPACED
            and to in SPACED
        ):
            return ir.Constant(register_type(to), wrapped(value.constant, register_type(to)))
        lanes = value.type.count if isinstance(value.type, ir.VectorType) else 1
        return scalars.convert(self.builder, Typed(value, source, lanes), to, self.machine).value

    def scalar(self, name: str, dtype: DType, *args: ir.Value) -> ir.Value:
        """A function of te.scalars; halves are computed in f32, and rounded once."""
        if dtype.is_half:
            wide = [self.convert(arg, dtype, DType.F32) for arg in args]
            result = self.scalar(name, DType.F32, *wide)
            return result if SCALARS[name].predicate else self.convert(result, DType.F32, dtype)
        if name in scalars.EMITTERS:
            # Which zero min and max give is not specified.
            flags = ("nsz",) if name in ("min", "max") else ()
            context = scalars.ScalarContext(self.builder, dtype, flags, self.machine)
            return scalars.EMITTERS[name](context, *args)
        return vector_math.emit(self.builder, name, *args, context=self.math)

    def spread(self, chunk: Chunk, lanes: int, kind: ir.Type | None = None) -> ir.Value:
        """The chunk as a vector, or as a scalar if it has one lane."""
        if lanes == 1:
            return chunk.value
        if chunk.step is not None:
            first = splat(self.builder, Typed(chunk.value, DType.I64, 1), lanes).value
            return self.builder.add(first, lane_numbers(lanes, chunk.value.type, chunk.step))
        if chunk.uniform:
            return splat(self.builder, Typed(chunk.value, DType.I64, 1), lanes).value
        return chunk.value

    def constant(self, number: Any, dtype: DType) -> ir.Constant:
        if dtype is DType.BF16:
            number = int(np.asarray(number, dtype.numpy).view(np.uint16))
        elif dtype.is_float:
            number = float(np.asarray(number, dtype.numpy))
        else:
            number = int(number)
        return ir.Constant(register_type(dtype), number)

    # -- elements ----------------------------------------------------------------------------------------------------

    def at(self, value: Value, location: Location) -> Chunk:
        key = (value, location.key)
        if key not in self.memo:
            self.memo[key] = self._at(value, location)
        return self.memo[key]

    def _at(self, value: Value, location: Location) -> Chunk:
        if value in self.holds:
            return Chunk(_TRUE, location.lanes)
        known = self.env[value]
        if isinstance(known, Buffer):
            return self.read(known, location)
        if not isinstance(known, Lazy):
            return Chunk(known, location.lanes)
        op = known.op
        name, attrs, lanes = op.name, op.settings, location.lanes
        if name == "arange":
            first = self.plus(self._index(location.index[0], I32), attrs["start"])
            return Chunk(first, lanes, 1 if location.axis == 0 else None)
        if name in ("broadcast", "expand_dims", "trans"):
            return self.at(op.operands[0], self.below(op, op.operands[0], location))
        if name in ("load", "load_block"):
            return self.load(op, location)
        return self.elementwise(op, [self.at(each, location) for each in op.operands], lanes)

    def below(self, op: Op, operand: Value, location: Location) -> Location:
        """The location in an operand of what is at a location of a lazy tile."""
        if op.name == "broadcast":
            return self._narrowed(location, tile_type(operand).shape)
        if op.name == "expand_dims":
            axis = op.settings["axis"] % (len(location.index))
            kept = (*location.index[:axis], *location.index[axis + 1 :])
            lane = location.axis - (location.axis > axis) if location.axis != axis else -1
            return Location(kept, lane, location.lanes)
        if op.name == "trans":
            order = op.settings["order"]
            index = tuple(location.index[order.index(axis)] for axis in range(len(order)))
            lane = order[location.axis] if location.axis >= 0 else -1
            return Location(index, lane, location.lanes)
        return location

    def _narrowed(self, location: Location, shape: tuple[int, ...]) -> Location:
        """The location in the operand of a broadcast."""
        cut = len(location.index) - len(shape)
        index = tuple(I64(0) if n == 1 else i for i, n in zip(location.index[cut:], shape, strict=True))
        axis = location.axis - cut
        return Location(index, axis if axis >= 0 and shape[axis] > 1 else -1, location.lanes)

    def _index(self, index: ir.Value, kind: ir.Type) -> ir.Value:
        if isinstance(index, ir.Constant):
            return ir.Constant(kind, index.constant)
        return index if index.type == kind else self.builder.trunc(index, kind)

    def elementwise(self, op: Op, chunks: list[Chunk], lanes: int) -> Chunk:
        """An elementwise operation on chunks; scalars are chunks of one lane."""
        types = [tile_type(each) for each in op.operands]
        if op.name == "and" and any(chunk.value is _TRUE for chunk in chunks):
            return chunks[chunks[0].value is _TRUE]
        uniform = all(chunk.uniform for chunk in chunks)
        if not uniform:
            spaced = self._spaced(op, chunks, lanes)
            if spaced is not None:
                return spaced
        values = [chunk.value if uniform else self.spread(chunk, lanes) for chunk in chunks]
        name, attrs, builder = op.name, op.settings, self.builder
        if name == "cast":
            made = self.convert(values[0], types[0].dtype, attrs["dtype"])
        elif name == "bitcast":
            lanes_here = 1 if uniform else lanes
            raw = scalars.to_memory(builder, values[0], types[0].dtype)
            raw = builder.bitcast(raw, vector_of(memory_type(attrs["dtype"]), lanes_here))
            made = scalars.from_memory(builder, raw, attrs["dtype"])
        elif name == "select":
            made = builder.select(*values)
        elif name == "addptr":
            wide = self.convert(values[1], types[1].dtype, DType.I64)
            size = ir.Constant(I64, attrs["bytes"])
            if isinstance(wide.type, ir.VectorType):
                size = ir.Constant(wide.type, [attrs["bytes"]] * lanes)
            made = builder.add(values[0], builder.mul(wide, size))
        elif (
            name == "exp"
            and lanes > 1
            and types[0].dtype is DType.F32
            and nonpositive(self.made_by, op.operands[0])
        ):
            scaled = self.scalar("mul", DType.F32, values[0], self._like(math.log2(math.e), values[0]))
            made = self.scalar("exp2_nonpositive", DType.F32, scaled)
        elif name == "div" and lanes > 1 and not uniform and chunks[1].uniform:
            scales = not sums_exponentials(self.made_by, op.operands[1])
            made = self._divided(values[0], chunks[1].value, types[0].dtype, scales=scales)
        else:
            made = self.scalar(name, types[0].dtype, *values)
        return Chunk(made, lanes)

    def _like(self, number: float, value: ir.Value) -> ir.Constant:
        """A f32 constant, in every lane if the value is a vector."""
        if isinstance(value.type, ir.VectorType):
            return ir.Constant(value.type, [self.constant(number, DType.F32).constant] * value.type.count)
        return self.constant(number, DType.F32)

    def _divided(self, vector: ir.Value, by: ir.Value, dtype: DType, *, scales: bool) -> ir.Value:
        """A vector divided by one number: multiplied by its reciprocal, which is computed once, accurate to two units
        in the last place. `scales`: divisors that are very large or very small are first scaled to the middle of the
        range, and the quotient is scaled back."""
        builder, lanes = self.builder, vector.type.count
        if dtype.is_half:
            return self.scalar("div", dtype, vector, self.spread(Chunk(by, lanes), lanes))
        if not scales:
            reciprocal = builder.fdiv(self.constant(1.0, dtype), by)
            return builder.fmul(vector, self.spread(Chunk(reciprocal, lanes), lanes))
        size = self.scalar("abs", dtype, by)
        far = 2.0 ** (64 if dtype is DType.F32 else 512)
        factor = self.constant(1.0, dtype)
        for kind, bound, number in ((">", far, 1 / far), ("<", 1 / far, far)):
            reaches = builder.fcmp_ordered(kind, size, self.constant(bound, dtype))
            factor = builder.select(reaches, self.constant(number, dtype), factor)
        reciprocal = builder.fdiv(self.constant(1.0, dtype), builder.fmul(by, factor))
        one, two = (self.spread(Chunk(each, lanes), lanes) for each in (reciprocal, factor))
        return builder.fmul(builder.fmul(vector, one), two)

    def _spaced(self, op: Op, chunks: list[Chunk], lanes: int) -> Chunk | None:
        """Integer arithmetic whose result is still equally spaced."""
        if any(not chunk.uniform and chunk.step is None for chunk in chunks):
            return None
        name, builder = op.name, self.builder
        element = tile_type(op.operands[-1]).element
        if element not in SPACED:
            return None
        steps = [chunk.step or 0 for chunk in chunks]
        if name == "cast" and op.settings["dtype"] in SPACED:
            if not self.widens_evenly(op):
                return None
            made = self.convert(chunks[0].value, element, op.settings["dtype"])
            return self._stepping(made, lanes, steps[0])
        if name == "addptr":
            wide = self.convert(chunks[1].value, element, DType.I64)
            size = op.settings["bytes"]
            made = builder.add(chunks[0].value, self.times(wide, size))
            return Chunk(made, lanes, steps[0] + steps[1] * size)
        if name in ("add", "sub"):
            sign = 1 if name == "add" else -1
            made = getattr(builder, name)(chunks[0].value, chunks[1].value)
            return self._stepping(made, lanes, steps[0] + sign * steps[1])
        if name == "mul":
            for one, other in (chunks, chunks[::-1]):
                if one.uniform and isinstance(one.value, ir.Constant) and other.step is not None:
                    made = builder.mul(other.value, one.value)
                    return self._stepping(made, lanes, other.step * one.value.constant)
        return None

    @staticmethod
    def _stepping(first: ir.Value, lanes: int, step: int) -> Chunk:
        return Chunk(first, lanes, wrapped(step, first.type))

    def widens_evenly(self, op: Op) -> bool:
        """Whether a cast keeps indices equally spaced: they do not wrap around within a vector, or are offsets of
        pointers only."""
        source, target = tile_type(op.operands[0]), tile_type(op.results[0])
        if target.dtype.bytes <= source.dtype.bytes:
            return True
        known = self.axes.get(op.results[0])
        if isinstance(known, AxisInfo) and all(
            max(contiguity, constancy) >= min(size, self.lanes)
            for contiguity, constancy, size in zip(
                known.contiguity, known.constancy, source.shape, strict=True
            )
        ):
            return True
        return self._only_offsets(op.results[0])

    def _only_offsets(self, value: Value) -> bool:
        """Whether a value is used for nothing but the addresses of loads and stores."""
        return all(
            isinstance(user, Op)
            and (user.name == "addptr" or (user.name in _OF_OFFSETS and self._only_offsets(user.results[0])))
            for user in self.users.get(value, ())
        )

    # -- memory ------------------------------------------------------------------------------------------------------

    def element_pointer(self, buffer: Buffer, index: Sequence[ir.Value]) -> ir.Value:
        offset: ir.Value = I64(0)
        for i, stride in zip(index, buffer.strides, strict=True):
            scaled = self.times(i, stride)
            if isinstance(scaled, ir.Constant):
                offset = self.plus(offset, scaled.constant)
            elif isinstance(offset, ir.Constant):
                offset = self.plus(scaled, offset.constant)
            else:
                offset = self.builder.add(offset, scaled, flags=("nsw",))
        return self.builder.gep(
            buffer.pointer, [offset], inbounds=True, source_etype=memory_type(buffer.element)
        )

    def read(self, buffer: Buffer, location: Location) -> Chunk:
        pointer, kind = self.element_pointer(buffer, location.index), memory_type(buffer.element)
        if location.axis < 0:
            return Chunk(self._register(self.builder.load(pointer, typ=kind), buffer.element), location.lanes)
        stride = buffer.strides[location.axis]
        if stride == 1:
            raw = self.builder.load(
                pointer, align=self._alignment(buffer, location), typ=vector_of(kind, location.lanes)
            )
        else:
            raw = ir.Constant(vector_of(kind, location.lanes), ir.Undefined)
            for lane in range(location.lanes):
                at = self.builder.gep(pointer, [I64(lane * stride)], inbounds=True, source_etype=kind)
                raw = self.builder.insert_element(raw, self.builder.load(at, typ=kind), I32(lane))
        return Chunk(self._register(raw, buffer.element), location.lanes)

    def write(self, buffer: Buffer, location: Location, chunk: Chunk) -> None:
        value = self.spread(chunk, location.lanes if location.axis >= 0 else 1)
        raw = (
            value
            if isinstance(buffer.element, Pointer)
            else scalars.to_memory(self.builder, value, buffer.element)
        )
        pointer = self.element_pointer(buffer, location.index)
        stride = buffer.strides[location.axis] if location.axis >= 0 else 1
        if location.axis < 0 or stride == 1:
            vector = location.axis >= 0
            self.builder.store(raw, pointer, align=self._alignment(buffer, location) if vector else None)
            return
        for lane in range(location.lanes):
            at = self.builder.gep(
                pointer, [I64(lane * stride)], inbounds=True, source_etype=memory_type(buffer.element)
            )
            self.builder.store(self.builder.extract_element(raw, I32(lane)), at)

    @staticmethod
    def _alignment(buffer: Buffer, location: Location) -> int:
        return min(ALIGNED, location.lanes * bytes_of(buffer.element))

    def _register(self, raw: ir.Value, element: Element) -> ir.Value:
        return raw if isinstance(element, Pointer) else scalars.from_memory(self.builder, raw, element)

    def address(self, op: Op, location: Location) -> tuple[Chunk, Chunk | None]:
        """The addresses of an access, and its mask."""
        if op.name in ("load", "store") or op.name in ATOMICS:
            address, given = self.at(op.operands[0], location), mask_of(op)
            mask = None if given is None else self.at(given, location)
            return address, mask if mask is None or mask.value is not _TRUE else None
        pointer: BlockPointer = self.env[op.operands[0]]
        builder, size = self.builder, pointer.type.dtype.bytes
        inside: Chunk | None = None
        address, step = pointer.base, 0
        vector: ir.Value | None = None
        for axis, index in enumerate(location.index):
            position = builder.add(pointer.offsets[axis], index)
            stride = pointer.strides[axis]
            address = builder.add(address, self.times(builder.mul(position, stride), size))
            along = axis == location.axis
            if along and isinstance(stride, ir.Constant):
                step = stride.constant * size
            elif along:
                by = splat(builder, Typed(self.times(stride, size), DType.I64, 1), location.lanes).value
                vector = builder.mul(by, lane_numbers(location.lanes, I64))
            if axis in op.settings["check"]:
                limit = self._inside(position, pointer.shape[axis], location.lanes if along else 1)
                inside = limit if inside is None else self._and(inside, limit, location.lanes)
        if vector is not None:
            first = splat(builder, Typed(address, DType.I64, 1), location.lanes).value
            return Chunk(builder.add(first, vector), location.lanes), inside
        return Chunk(address, location.lanes, step if location.axis >= 0 else None), inside

    def _and(self, a: Chunk, b: Chunk, lanes: int) -> Chunk:
        if a.uniform and b.uniform:
            return Chunk(self.builder.and_(a.value, b.value), lanes)
        return Chunk(self.builder.and_(self.spread(a, lanes), self.spread(b, lanes)), lanes)

    def _inside(self, position: ir.Value, extent: ir.Value, lanes: int) -> Chunk:
        """0 <= position + lane < extent."""
        builder = self.builder
        if lanes == 1:
            low = builder.icmp_signed(">=", position, I64(0))
            return Chunk(builder.and_(low, builder.icmp_signed("<", position, extent)), 1)
        numbers = lane_numbers(lanes, I32)
        bounds = []
        for bound in (
            builder.sub(extent, position),
            builder.neg(position),
        ):  # in 32 bits: only 0 ... lanes matter
            above = builder.select(builder.icmp_signed(">", bound, I64(lanes)), I64(lanes), bound)
            clamped = builder.select(builder.icmp_signed("<", above, I64(0)), I64(0), above)
            narrow = builder.trunc(clamped, I32)
            bounds.append(splat(builder, Typed(narrow, DType.I32, 1), lanes).value)
        below = builder.icmp_signed("<", numbers, bounds[0])
        return Chunk(builder.and_(below, builder.icmp_signed(">=", numbers, bounds[1])), lanes)

    def load(self, op: Op, location: Location) -> Chunk:
        dtype, lanes, builder = tile_type(op.results[0]).dtype, location.lanes, self.builder
        address, mask = self.address(op, location)
        kind = memory_type(dtype)
        other: Chunk | None = None
        if op.name == "load" and len(op.operands) == 3 and mask is not None:
            other = self.at(op.operands[2], location)
        elif op.name == "load_block" and mask is not None:
            nan = op.settings["padding"] == "nan"
            other = Chunk(self.constant(float("nan") if nan else 0, dtype), lanes)
        if address.uniform and (mask is None or mask.uniform):
            pointer = address.value
            if mask is not None:  # nothing is touched: it reads a location of the thread's own
                spare = builder.ptrtoint(self.alloca(I64, 1, 8), I64)
                pointer = builder.select(mask.value, pointer, spare)
            found = self._register(
                builder.load(builder.inttoptr(pointer, PTR), align=dtype.bytes, typ=kind), dtype
            )
            if mask is None or other is None:
                return Chunk(found, lanes)
            if other.uniform:
                return Chunk(builder.select(mask.value, found, other.value), lanes)
            chosen = self.spread(Chunk(mask.value, lanes), lanes)
            return Chunk(builder.select(chosen, self.spread(Chunk(found, lanes), lanes), other.value), lanes)
        vector = vector_of(kind, lanes)
        masks = None if mask is None else self.spread(mask, lanes)
        nothing: ir.Value = ir.Constant(vector, None)
        if other is not None:
            nothing = scalars.to_memory(builder, self.spread(other, lanes), dtype)
        short = self._suffix(kind, lanes)
        if address.step == dtype.bytes:
            pointer = builder.inttoptr(address.value, PTR)
            if self._reads_ahead(op):
                ahead = builder.inttoptr(builder.add(address.value, I64(_AHEAD)), PTR)
                self.intrinsic("llvm.prefetch.p0", ir.VoidType(), ahead, I32(0), I32(3), I32(1))
            if masks is None:
                raw = builder.load(pointer, align=dtype.bytes, typ=vector)
            else:
                raw = self.intrinsic(
                    f"llvm.masked.load.{short}.p0", vector, pointer, I32(dtype.bytes), masks, nothing
                )
        else:
            pointers = builder.inttoptr(self.spread(address, lanes), ir.VectorType(PTR, lanes))
            every = ir.Constant(ir.VectorType(I1, lanes), [1] * lanes)
            name = f"llvm.masked.gather.{short}.v{lanes}p0"
            raw = self.intrinsic(
                name, vector, pointers, I32(dtype.bytes), every if masks is None else masks, nothing
            )
        return Chunk(self._register(raw, dtype), lanes)

    def _reads_ahead(self, op: Op) -> bool:
        """Whether a load of vectors prefetches: not again what an earlier loop has left in L1."""
        kind, first = tile_type(op.results[0]), self.first_read.setdefault(op, self.root)
        size = math.prod(kind.shape) * kind.dtype.bytes
        again = first != self.root and size <= self.machine.caches.l1
        vector = min(kind.shape[-1], self.lanes) * kind.dtype.bytes
        return self.loads_ahead and not again and vector * 2 >= self.machine.line_bytes

    @staticmethod
    def _suffix(kind: ir.Type, lanes: int) -> str:
        short = {"float": "f32", "double": "f64", "half": "f16"}.get(str(kind), str(kind))
        return f"v{lanes}{short}"

    def store(self, op: Op, location: Location, chunk: Chunk, *, streamed: bool = False) -> None:
        """Store one chunk to the program's memory; `streamed`: non-temporal if it is a whole aligned vector."""
        dtype, lanes, builder = tile_type(op.operands[1]).dtype, location.lanes, self.builder
        address, mask = self.address(op, location)
        kind = memory_type(dtype)
        if lanes == 1:
            pointer = address.value
            if mask is not None:
                spare = builder.ptrtoint(self.alloca(I64, 1, 8), I64)
                pointer = builder.select(mask.value, pointer, spare)
            raw = scalars.to_memory(builder, chunk.value, dtype)
            builder.store(raw, builder.inttoptr(pointer, PTR), align=dtype.bytes)
            return
        raw = scalars.to_memory(builder, self.spread(chunk, lanes), dtype)
        masks = (
            ir.Constant(ir.VectorType(I1, lanes), [1] * lanes) if mask is None else self.spread(mask, lanes)
        )
        short = self._suffix(kind, lanes)
        if address.step == dtype.bytes:
            pointer = builder.inttoptr(address.value, PTR)

            def stored() -> None:
                if mask is None:
                    builder.store(raw, pointer, align=dtype.bytes)
                else:
                    name = f"llvm.masked.store.{short}.p0"
                    self.intrinsic(name, ir.VoidType(), raw, pointer, I32(dtype.bytes), masks)

            if not streamed:
                stored()
                return
            size = lanes * dtype.bytes
            fits = builder.icmp_unsigned("==", builder.and_(address.value, I64(size - 1)), I64(0))
            if mask is not None:
                bits = ir.IntType(lanes)
                fits = builder.and_(
                    fits, builder.icmp_unsigned("==", builder.bitcast(masks, bits), ir.Constant(bits, -1))
                )
            with builder.if_else(fits, likely=True) as (then, other):
                with then:
                    written = builder.store(raw, pointer, align=size)
                    written.set_metadata("nontemporal", self.module.add_metadata([I32(1)]))
                with other:
                    stored()
            return
        pointers = builder.inttoptr(self.spread(address, lanes), ir.VectorType(PTR, lanes))
        name = f"llvm.masked.scatter.{short}.v{lanes}p0"
        self.intrinsic(name, ir.VoidType(), raw, pointers, I32(dtype.bytes), masks)
