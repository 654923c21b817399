"""Loads and stores as LLVM instructions.

How an index moves with the lane decides which: not at all (a scalar), by one (a vector), by two to four (vectors, and
the elements picked from them), otherwise a lane at a time. What a condition guards is read under its mask where it
could leave its buffer.

Registers: each register buffer element (or vector) is an `alloca`, always accessed at a constant place, so LLVM's
mem2reg turns all of them into SSA values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir

from tilewright import te
from tilewright.codegen.llvm import scalars, shuffles
from tilewright.codegen.llvm.indices import IndexEmitter, Offset
from tilewright.codegen.llvm.types import I1, PTR, Typed, element_type, i64, splat, stored_type, vector_of
from tilewright.dtypes import DType
from tilewright.errors import InternalError
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Buffer, Location, Program, Scope, Store
from tilewright.loops.tiling import LONGEST_STRIDE
from tilewright.te.index import bounds, divisor_of, simplify

_STREAMED_BYTES = 16  # the shortest vector that can be stored non-temporally


class MemoryEmitter(IndexEmitter):
    entry: ir.Block  # of the function: what is allocated there is allocated once

    def __init__(self, module: ir.Module, program: Program, machine: CpuMachine, *, streaming: bool) -> None:
        super().__init__(machine)
        self.module, self.program = module, program
        self.streaming = streaming  # the output is aligned to cache lines
        self.pointers: dict[Buffer, ir.Value] = {}
        self.registers: dict[tuple[Buffer, int, int], ir.Value] = {}
        self.masks: list[Typed] = []  # conditions under which the current expression is evaluated

    def register(self, buffer: Buffer, offset: int, lanes: int) -> ir.Value:
        key = (buffer, offset, lanes)
        if key not in self.registers:
            kind = vector_of(element_type(buffer.dtype), lanes)
            at_entry = ir.IRBuilder(self.entry)
            self.registers[key] = at_entry.alloca(kind, name=f"{buffer.name}.{offset}")
        return self.registers[key]

    def register_location(self, buffer: Buffer, index: te.Expr) -> tuple[ir.Value, int]:
        offset = self.offset(index)
        if offset.base is not None or offset.vector is not None or offset.stride not in (0, 1):
            raise InternalError(
                f"{self.program.name}: register buffer {buffer.name} accessed at a moving place"
            )
        lanes = self.lanes if offset.stride == 1 else 1
        return self.register(buffer, offset.constant, lanes), lanes

    def load(self, load: te.Load) -> Typed:
        buffer = load.source
        assert isinstance(buffer, Buffer)
        (index,) = load.indices
        if buffer.scope is Scope.REGISTER:
            location, lanes = self.register_location(buffer, index)
            return Typed(
                self.builder.load(location, typ=vector_of(element_type(buffer.dtype), lanes)),
                buffer.dtype,
                lanes,
            )
        offset = self.offset(index)
        masks = self.masks if self._may_leave(index, buffer) else []
        key = (
            "load",
            buffer,
            offset.base,
            offset.constant,
            offset.stride,
            self.lanes,
            tuple(id(m.value) for m in masks),
        )
        if offset.vector is not None:
            lanes, raw = self.lanes, self._gather(buffer, offset, masks)
        elif offset.stride == 0 or self.lanes == 1:
            lanes, raw = 1, self._once(key, buffer, lambda: self._load_scalar(buffer, offset, masks))
        elif offset.stride == 1:
            lanes, raw = self.lanes, self._once(key, buffer, lambda: self._load_vector(buffer, offset, masks))
        elif 2 <= offset.stride <= min(LONGEST_STRIDE, self.lanes):
            lanes, raw = (
                self.lanes,
                self._once(key, buffer, lambda: self._load_separately(buffer, offset, masks)),
            )
        else:
            lanes, raw = self.lanes, self._gather(buffer, offset, masks)
        return Typed(scalars.from_memory(self.builder, raw, buffer.dtype), buffer.dtype, lanes)

    def _once(self, key: object, buffer: Buffer, make: Callable[[], ir.Value]) -> ir.Value:
        """An input never changes, so one load serves; scratch memory does."""
        return self.known(key, make) if buffer.scope is Scope.GLOBAL else make()

    @staticmethod
    def _may_leave(index: te.Expr, buffer: Buffer) -> bool:
        low, high = bounds(simplify(index))
        return low is None or high is None or low < 0 or high >= buffer.size

    def pointer(self, buffer: Buffer, base: ir.Value | None, constant: int) -> ir.Value:
        memory = buffer.memory
        if memory.scope is Scope.SCRATCH and memory not in self.pointers:
            scratch = ir.IRBuilder(self.entry).alloca(ir.ArrayType(stored_type(memory.dtype), memory.size))
            scratch.align, scratch.type = 64, PTR  # llvmlite would have it point to arrays alone
            self.pointers[memory] = scratch
        pointer, kind = self.pointers[memory], stored_type(buffer.dtype)
        if base is not None:
            start = pointer
            pointer = self.known(
                ("pointer", start, buffer.dtype, base),
                lambda: self.builder.gep(start, [base], source_etype=kind),
            )
        return self.builder.gep(pointer, [i64(constant)], source_etype=kind) if constant else pointer

    def _uniform_mask(self, masks: list[Typed]) -> ir.Value | None:
        """Whether any lane is active, as one bit; None where there is no mask."""
        result: ir.Value | None = None
        for mask in masks:
            bit = mask.value
            if mask.lanes > 1:
                name = f"llvm.vector.reduce.or.v{mask.lanes}i1"
                reduce = self.module.globals.get(name) or ir.Function(
                    self.module, ir.FunctionType(I1, [ir.VectorType(I1, mask.lanes)]), name
                )
                bit = self.builder.call(reduce, [bit])
            result = bit if result is None else self.builder.and_(result, bit)
        return result

    def _load_scalar(self, buffer: Buffer, offset: Offset, masks: list[Typed]) -> ir.Value:
        active = self._uniform_mask(masks)
        kind = stored_type(buffer.dtype)
        if active is None:
            pointer = self.pointer(buffer, offset.base, offset.constant)
            return self.builder.load(pointer, typ=kind, align=_alignment(buffer))
        location = (
            i64(offset.constant)
            if offset.base is None
            else self.builder.add(offset.base, i64(offset.constant))
        )
        # Where the condition fails, element 0 is read instead and the value is not used.
        safe = self.builder.select(active, location, i64(0))
        return self.builder.load(self.pointer(buffer, safe, 0), typ=kind, align=_alignment(buffer))

    def _load_vector(self, buffer: Buffer, offset: Offset, masks: list[Typed]) -> ir.Value:
        return self._load_run(buffer, offset.base, offset.constant, self._mask_of(masks))

    def _mask_of(self, masks: list[Typed]) -> ir.Value | None:
        """The conjunction of all conditions, lane by lane."""
        result: ir.Value | None = None
        for mask in masks:
            lanes = splat(self.builder, mask, self.lanes).value
            result = lanes if result is None else self.builder.and_(result, lanes)
        return result

    def _load_separately(self, buffer: Buffer, offset: Offset, masks: list[Typed]) -> ir.Value:
        """Elements a few places apart: the vectors that hold them, nothing before the first or behind the last, and
        the elements picked from there."""
        lanes, stride = self.lanes, offset.stride
        starts = [*range(0, lanes * (stride - 1), lanes), (lanes - 1) * (stride - 1)]
        holders = [min(lane * stride // lanes, stride - 1) for lane in range(lanes)]
        locations = [lane * stride - starts[holder] for lane, holder in enumerate(holders)]
        mask, vectors = self._mask_of(masks), []
        for number, start in enumerate(starts):
            active = mask
            if mask is not None:
                needed = {p: lane for lane, p in enumerate(locations) if holders[lane] == number}
                picks = [needed.get(location, lanes) for location in range(lanes)]
                active = shuffles.shuffled(self.builder, mask, ir.Constant(mask.type, None), picks)
            vectors.append(self._load_run(buffer, offset.base, offset.constant + start, active))
        return shuffles.picked(self.builder, vectors, holders, locations)

    def _load_run(
        self, buffer: Buffer, base: ir.Value | None, constant: int, mask: ir.Value | None
    ) -> ir.Value:
        kind = vector_of(stored_type(buffer.dtype), self.lanes)
        pointer = self.pointer(buffer, base, constant)
        if mask is None:
            return self.builder.load(pointer, typ=kind, align=_alignment(buffer))
        intrinsic = self._masked_load(kind)
        return self.builder.call(
            intrinsic, [pointer, ir.IntType(32)(_alignment(buffer)), mask, ir.Constant(kind, None)]
        )

    def _masked_load(self, kind: ir.VectorType) -> ir.Function:
        element = {"float": "f32", "double": "f64", "half": "f16"}.get(str(kind.element), str(kind.element))
        name = f"llvm.masked.load.v{kind.count}{element}.p0"
        signature = ir.FunctionType(kind, [PTR, ir.IntType(32), ir.VectorType(I1, kind.count), kind])
        return self.module.globals.get(name) or ir.Function(self.module, signature, name)

    def _lane_locations(self, offset: Offset) -> list[ir.Value]:
        if offset.vector is not None:
            return [self.builder.extract_element(offset.vector, i64(lane)) for lane in range(self.lanes)]
        base = offset.base if offset.base is not None else i64(0)
        return [
            self.builder.add(base, i64(offset.constant + lane * offset.stride)) for lane in range(self.lanes)
        ]

    def _gather(self, buffer: Buffer, offset: Offset, masks: list[Typed]) -> ir.Value:
        kind = stored_type(buffer.dtype)
        result: ir.Value = ir.Constant(vector_of(kind, self.lanes), ir.Undefined)
        for lane, location in enumerate(self._lane_locations(offset)):
            for mask in masks:
                active = self.builder.extract_element(mask.value, i64(lane)) if mask.lanes > 1 else mask.value
                location = self.builder.select(active, location, i64(0))
            element = self.builder.load(self.pointer(buffer, location, 0), typ=kind, align=_alignment(buffer))
            result = self.builder.insert_element(result, element, i64(lane))
        return result

    def store(self, stmt: Store) -> None:
        buffer = stmt.buffer
        value = self.value(stmt.value)
        if buffer.scope is Scope.REGISTER:
            location, lanes = self.register_location(buffer, stmt.index)
            self.builder.store(splat(self.builder, value, lanes).value, location)
            return
        offset = self.offset(stmt.index)
        raw = scalars.to_memory(self.builder, value.value, buffer.dtype)
        if self.lanes == 1:
            self.builder.store(raw, self.pointer(buffer, offset.base, offset.constant))
            return
        wide = splat(self.builder, Typed(raw, buffer.dtype, value.lanes), self.lanes).value
        if offset.vector is None and offset.stride == 1:
            pointer = self.pointer(buffer, offset.base, offset.constant)
            streamed = self.streaming and stmt.streamed
            if streamed and buffer.dtype is DType.F16:  # which LLVM stores past no cache
                wide = self.builder.bitcast(wide, vector_of(ir.IntType(16), self.lanes))
            if not streamed and self._is_of_two_halves(stmt):
                self._store_halves(wide, buffer, offset)
                return
            stored = self.builder.store(wide, pointer, align=buffer.dtype.bytes)
            if streamed:
                self._past_caches(stored, stmt)
            return
        for lane, location in enumerate(self._lane_locations(offset)):
            self.builder.store(
                self.builder.extract_element(wide, i64(lane)), self.pointer(buffer, location, 0)
            )

    def _is_of_two_halves(self, stmt: Store) -> bool:
        """Whether the vector is converted from two vectors of f32, which x86 would join by one more shuffle."""
        converted = isinstance(stmt.value, te.Cast) and stmt.buffer.dtype.is_half
        twice = self.lanes == 2 * self.machine.lanes(DType.F32)
        return converted and twice and self.machine.triple.startswith("x86_64")

    def _store_halves(self, wide: ir.Value, buffer: Buffer, offset: Offset) -> None:
        lanes = self.lanes // 2
        nothing = ir.Constant(wide.type, ir.Undefined)
        for first in (0, lanes):
            picks = ir.Constant(vector_of(ir.IntType(32), lanes), list(range(first, first + lanes)))
            half = self.builder.shuffle_vector(wide, nothing, picks)
            pointer = self.pointer(buffer, offset.base, offset.constant + first)
            self.builder.store(half, pointer, align=buffer.dtype.bytes)

    # -- operands of instructions -----------------------------------------------------------------------------------

    def lanes_at(self, location: Location) -> ir.Value:
        """The lanes of an operand as one vector; a scalar where there is one."""
        buffer, size = location.buffer, len(location.offsets)
        kind = vector_of(element_type(buffer.dtype), size)
        if buffer.scope is Scope.REGISTER:
            return self.builder.load(self._register_run(location), typ=kind)
        if location.is_run:
            stored = vector_of(stored_type(buffer.dtype), size)
            raw = self.builder.load(self._element(location, 0), typ=stored, align=_alignment(buffer))
            return scalars.from_memory(self.builder, raw, buffer.dtype)
        read: dict[int, ir.Value] = {}
        for offset in dict.fromkeys(location.offsets):
            pointer = self._element(location, offset)
            raw = self.builder.load(pointer, typ=stored_type(buffer.dtype), align=_alignment(buffer))
            read[offset] = scalars.from_memory(self.builder, raw, buffer.dtype)
        if len(read) == 1:
            return splat(self.builder, Typed(read[location.offsets[0]], buffer.dtype, 1), size).value
        vector: ir.Value = ir.Constant(kind, ir.Undefined)
        for lane, offset in enumerate(location.offsets):
            vector = self.builder.insert_element(vector, read[offset], i64(lane))
        return vector

    def put_lanes(self, location: Location, vector: ir.Value) -> None:
        buffer, size = location.buffer, len(location.offsets)
        if buffer.scope is Scope.REGISTER:
            self.builder.store(vector, self._register_run(location))
            return
        raw = scalars.to_memory(self.builder, vector, buffer.dtype)
        if location.is_run:
            self.builder.store(raw, self._element(location, 0), align=_alignment(buffer))
            return
        for lane, offset in enumerate(location.offsets):
            element = self.builder.extract_element(raw, i64(lane)) if size > 1 else raw
            self.builder.store(element, self._element(location, offset), align=_alignment(buffer))

    def _register_run(self, location: Location) -> ir.Value:
        at = self.offset(location.index)
        if at.base is not None or not location.is_run:
            raise InternalError(
                f"{self.program.name}: register buffer {location.buffer.name} accessed at a moving place"
            )
        return self.register(location.buffer, at.constant, len(location.offsets))

    def _element(self, location: Location, offset: int) -> ir.Value:
        at = self.offset(location.index)
        return self.pointer(location.buffer, at.base, at.constant + offset)

    def _past_caches(self, stored: ir.StoreInstr, stmt: Store) -> None:
        """Marks a vector's store as streamed where its place is a multiple of its length."""
        assert self.lane is not None
        first = te.substitute(stmt.index, {self.lane: te.as_index(0)})
        step = math.gcd(divisor_of(first), self.lanes) * stmt.buffer.dtype.bytes
        if step == self.lanes * stmt.buffer.dtype.bytes >= _STREAMED_BYTES:
            stored.align = step
            stored.set_metadata("nontemporal", self.module.add_metadata([ir.IntType(32)(1)]))


def _alignment(buffer: Buffer) -> int:
    return buffer.memory.dtype.bytes
