"""Tile programs to LLVM IR: one function that runs a range of a launch's program instances.

    void symbol(uint64_t* slots, int64_t begin, int64_t end)     slots: the grid's three sizes, then the parameters

It does not go through the loop IR: that one has loops of fixed extents over buffers of known size, and a verifier that
proves every access inside; tile kernels have bounds and addresses that are values, and `while`. Giving the loop IR all
that would take its proofs away from everything else. What both share is below it: scalar functions, conversions,
the toolchain, the cache, the launcher.

A scalar is a register. A tile is *lazy* (an expression, computed where it is used) or a *buffer* on the stack. Code is
written for roots: a store, a reduction, an operand of dot, what a loop carries. A root is one loop over its tile in
vectors, with the whole expression of elementwise operations and loads in its body. What this expression computes and
later code needs as well goes to a buffer in the same loop. What is broadcast or transposed goes to a buffer first,
unless it is index arithmetic. A load joins the expression of a store only where they cannot touch one element in two
iterations: tensors that are known not to overlap, or one and the same pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from llvmlite import ir

from tilewright.codegen.llvm.tiles.control import Control
from tilewright.codegen.llvm.tiles.values import (
    BlockPointer,
    Buffer,
    Chunk,
    Lazy,
    Location,
    register_type,
    tile_type,
)
from tilewright.codegen.llvm.types import I1, I16, I32, I64, PTR
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.tile.atomics import ATOMICS, mask_of
from tilewright.tile.executors import Facts
from tilewright.tile.ir import (
    Block,
    BlockPointerType,
    For,
    Op,
    TileProgram,
    TileType,
    Value,
    While,
    walk,
)
from tilewright.tile.passes.common_subexpressions import common_subexpressions
from tilewright.tile.passes.dead_code import dead_code
from tilewright.tile.passes.manager import run_passes
from tilewright.tile.passes.observed_rows import RowLimit, observed_rows
from tilewright.tile.passes.paired_exponentials import paired_exponentials
from tilewright.tile.passes.running_maximum import grouped_rescaling
from tilewright.tile.passes.standard import simplified

_VIEWS = ("broadcast", "expand_dims", "trans", "arange")
_CHEAP = ("add", "sub", "mul", "eq", "ne", "lt", "le", "and", "or", "not", "cast", "addptr")
_ALONG = ("reduce", "cumsum", "sort", "dot", "reshape", "join", "split", "flip")


def emit_tile_program(program: TileProgram, facts: Facts, machine: CpuMachine, symbol: str) -> ir.Module:
    module = ir.Module(name=symbol)
    module.triple = machine.triple
    _Emitter(module, machine, _prepared(program), facts).emit(symbol)
    return module


def _prepared(program: TileProgram) -> TileProgram:
    passes = grouped_rescaling, paired_exponentials, common_subexpressions, dead_code
    return run_passes(simplified(program), passes)


class _Emitter(Control):
    streams = False  # whether some code stores non-temporally
    limits: dict[Op, frozenset[RowLimit]]  # of the rows of dots

    def emit(self, symbol: str) -> None:
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [PTR, I64, I64]), symbol)
        function.attributes.add("nounwind")
        slots, begin, end = function.args
        self.limits = observed_rows(self.program)
        self.entry = function.append_basic_block("entry")
        start = function.append_basic_block("start")
        self.builder = builder = ir.IRBuilder(start)

        def slot(number: int, kind: ir.Type) -> ir.Value:
            at = builder.gep(slots, [I64(number)], inbounds=True, source_etype=I64)
            return builder.load(at, typ=kind)

        sizes = [slot(axis, I64) for axis in range(3)]
        self.instances = builder.sitofp(builder.mul(builder.mul(*sizes[:2]), sizes[2]), ir.DoubleType())
        for number, param in enumerate(self.program.params):
            kind = tile_type(param)
            if kind.is_pointer or kind.dtype is not DType.BOOL:
                self.env[param] = slot(3 + number, register_type(kind.element))
            else:
                self.env[param] = builder.trunc(slot(3 + number, I64), I1)
            self.origins[param] = param
        with self.loop(builder.sub(end, begin)) as step:
            number = builder.add(begin, step)
            plane = builder.udiv(number, sizes[0])
            ids = [
                builder.urem(number, sizes[0]),
                builder.urem(plane, sizes[1]),
                builder.udiv(plane, sizes[1]),
            ]
            narrow = [[builder.trunc(each, I32) for each in group] for group in (ids, sizes)]
            self.grid = (narrow[0], narrow[1])
            self.block(self.program.body)
        if self.streams:
            builder.fence("seq_cst")  # non-temporal stores are visible before anyone hears of the end
        builder.ret_void()
        ir.IRBuilder(self.entry).branch(start)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        for node in block.nodes:
            self.where = node.where or self.where
            if isinstance(node, Op):
                self.op(node)
                continue
            self.settle(list(self.pending))
            before = dict(self.pending)
            if isinstance(node, For):
                self._for(node)
            elif isinstance(node, While):
                self._while(node)
            else:
                self._if(node)
            self.pending = before
            self.done.add(node)

    def op(self, op: Op) -> None:
        name = op.name
        if name in ("print", "assert"):
            self.done.add(op)  # assertions are checked in debug mode; programs that print are not compiled
            return
        if name in ("store", "store_block") or name in ATOMICS:
            self._write(op)
            return
        (result,) = op.results
        self.memo = {}
        if isinstance(result.type, BlockPointerType):
            self._block_pointer(op, result)
            return
        self.origins[result] = self.origins.get(op.operands[0]) if op.operands else None
        if name in _ALONG:
            self._along(op, result)
            self.done.add(op)
            return
        if result.type.shape or any(getattr(each.type, "shape", ()) for each in op.operands):
            self.env[result] = Lazy(op)
            if not self._cheap(op):
                self.pending[result] = None
            return
        self.done.add(op)
        if name == "constant":
            self.env[result] = self.constant(op.settings["value"], op.settings["dtype"])
        elif name in ("program_id", "num_programs"):
            self.env[result] = self.grid[name == "num_programs"][op.settings["axis"]]
        elif name == "load":
            self.env[result] = self.load(op, Location(())).value
        elif name in ("broadcast", "trans"):
            self.env[result] = self.env[op.operands[0]]
        else:
            chunks = [Chunk(self.env[each], 1) for each in op.operands]
            self.env[result] = self.elementwise(op, chunks, 1).value

    # -- writes

    def _loads(self, values: Iterable[Value]) -> list[Value]:
        return [v for v in self.expression(values) if self.env[v].op.name in ("load", "load_block")]

    def _write(self, op: Op) -> None:
        pointer, value = op.operands[:2]
        target = self.origins.get(pointer)
        own = set(self._loads([value, *op.operands[2:], pointer]))
        for load in [v for v in list(self.pending) if self.env[v].op.name in ("load", "load_block")]:
            source = self.env[load].op.operands[0]
            origin = self.origins.get(source)
            separate = self.facts.disjoint and None not in (origin, target) and origin is not target
            same = source is pointer and op.name == "store"
            if not (separate or (same and load in own)):
                self.settle([load])
            elif same:
                self.settle([v for v in self.pending if v is not load and load in self.expression([v])])
        shape = pointer.type.block if isinstance(pointer.type, BlockPointerType) else pointer.type.shape
        if op.name in ATOMICS:
            self._atomic(op, shape)
            self.done.add(op)
            return
        self.memo = {}
        if not shape:
            self.store(op, Location(()), Chunk(self.env[value], 1))
            self.done.add(op)
            return
        self.done.add(op)
        roots = [each for each in op.operands if isinstance(each.type, TileType)]
        evaluated = self.begin(roots, shape)
        unroll = self.unrolled(evaluated)

        def stored(streamed: bool) -> None:
            def vectors(locations: list[Location]) -> None:
                self.memo = {}
                chunks = [self.at(value, location) for location in locations]
                for location, chunk in zip(locations, chunks, strict=True):
                    self.kept(location)
                    self.store(op, location, chunk, streamed=streamed)

            self.each(roots, shape, unroll, vectors, None if self.keeping else mask_of(op))
            self.memo = {}

        if unroll > 1 and self._may_stream(tile_type(value), shape):
            self.streams = True
            with self.builder.if_else(self._streams(value, shape)) as (then, other):
                with then:
                    stored(True)
                with other:
                    stored(False)
        else:
            stored(False)
        self.finish(evaluated)

    def _may_stream(self, kind: TileType, shape: tuple[int, ...]) -> bool:
        """Whether a store may be non-temporal: it writes whole vectors of 32-bit or 64-bit floats."""
        lanes = min(shape[-1], self.lanes)
        return kind.dtype in (DType.F32, DType.F64) and lanes * kind.dtype.bytes >= self.machine.vector_bytes

    def _streams(self, value: Value, shape: tuple[int, ...]) -> ir.Value:
        """Whether all instances together store more than the last-level cache holds. An instance stores as many tiles
        as the loops around the store have iterations."""
        builder, double = self.builder, ir.DoubleType()
        count = self.instances
        for trips in self.trips:
            count = builder.fmul(count, trips)
        size = tile_type(value).dtype.bytes * math.prod(shape)
        total = builder.fmul(count, ir.Constant(double, float(size)))
        return builder.fcmp_ordered(">", total, ir.Constant(double, float(self.machine.caches.last)))

    def _atomic(self, op: Op, shape: tuple[int, ...]) -> None:
        """An atomic operation, element by element."""
        builder, (result,) = self.builder, op.results
        dtype, kind = tile_type(op.operands[1]).dtype, op.name.removeprefix("atomic_")
        self.prepare(op.operands, shape)
        target = self.buffer(dtype, shape) if shape else None
        cell = self.alloca(register_type(dtype))
        with self._nest(list(shape)) as index:
            self.memo = {}
            location = Location(tuple(index))
            address, mask = self.address(op, location)
            value = self.at(op.operands[2 if kind == "cas" else 1], location).value
            inside = I1(1) if mask is None else mask.value
            with builder.if_then(inside):
                at = builder.inttoptr(address.value, PTR)
                if dtype.is_half:
                    found = self._atomic_half(at, value, dtype)
                elif kind == "cas":
                    expected = self.at(op.operands[1], location).value
                    outcome = builder.cmpxchg(at, expected, value, "seq_cst", "seq_cst")
                    found = builder.extract_value(outcome, 0)
                elif kind == "xchg" and dtype.is_float:  # as its bits
                    bits = ir.IntType(8 * dtype.bytes)
                    old = builder.atomic_rmw("xchg", at, builder.bitcast(value, bits), "seq_cst")
                    found = builder.bitcast(old, register_type(dtype))
                else:
                    name = "fadd" if kind == "add" and dtype.is_float else kind
                    name = f"u{kind}" if kind in ("max", "min") and dtype.is_unsigned else name
                    found = builder.atomic_rmw(name, at, value, "seq_cst")
                builder.store(found, cell)
            if target is not None:
                self.write(target, location, Chunk(builder.load(cell, typ=register_type(dtype)), 1))
        self.memo = {}
        self.env[result] = target or builder.load(cell, typ=register_type(dtype))

    def _atomic_half(self, at: ir.Value, value: ir.Value, dtype: DType) -> ir.Value:
        builder = self.builder
        head, after = builder.append_basic_block("again"), builder.append_basic_block("added")
        first = builder.load_atomic(at, "monotonic", 2, typ=I16)
        before = builder.block
        builder.branch(head)
        builder.position_at_end(head)
        seen = builder.phi(I16)
        seen.add_incoming(first, before)
        kind = register_type(dtype)
        old = builder.bitcast(seen, kind)
        wanted = builder.bitcast(self.scalar("add", dtype, old, value), I16)
        outcome = builder.cmpxchg(at, seen, wanted, "seq_cst", "seq_cst")
        seen.add_incoming(builder.extract_value(outcome, 0), builder.block)
        builder.cbranch(builder.extract_value(outcome, 1), after, head)
        builder.position_at_end(after)
        return old

    def _along(self, op: Op, result: Value) -> None:
        attrs, kind = op.settings, tile_type(result)
        value = op.operands[0]
        if op.name == "reshape":
            if not tile_type(value).shape:
                whole = self.buffer(kind.element, kind.shape)
                self.write(whole, Location((I64(0),) * len(kind.shape)), Chunk(self.env[value], 1))
                self.env[result] = whole if kind.shape else self.env[value]
                return
            whole = self.materialise(value)
            whole.shared = True
            if kind.shape:
                self.env[result] = Buffer(whole.pointer, whole.element, kind.shape, shared=True)
            else:
                self.env[result] = self.read(whole, Location((I64(0),) * len(whole.shape))).value
            return
        if op.name == "join":
            made = self.buffer(kind.element, kind.shape)
            self.prepare(op.operands, kind.shape[:-1])
            with self._nest(list(kind.shape[:-1])) as index:
                self.memo = {}
                for n, each in enumerate(op.operands):
                    self.write(made, Location((*index, I64(n))), self.at(each, Location(tuple(index))))
            self.memo = {}
            self.env[result] = made
            return
        if op.name in ("split", "flip"):
            self._moved(op, result)
            return
        if op.name == "dot":
            self._dot(op, result)
            return
        if op.name == "sort":
            self.materialise(value)
            made = self.materialise(value, self.buffer(kind.element, kind.shape))
            self.sort(made, attrs["axis"], attrs["descending"])
            self.env[result] = made
            return
        self.done.add(op)
        if op.name == "cumsum" or attrs["kind"].startswith("arg"):
            self.materialise(value)
            evaluated: list[Value] = []
        else:
            evaluated = self.begin([value], tile_type(value).shape)
        made_into = self.buffer(kind.element, kind.shape) if kind.shape else None
        found: Any = made_into
        if op.name == "cumsum":
            assert made_into is not None
            self.cumsum(value, attrs["axis"], made_into)
        else:
            scalar = self.reduce(op, value, made_into, self.unrolled(evaluated))
            found = scalar if made_into is None else made_into
        self.memo = {}
        self.finish(evaluated)
        self.env[result] = found

    def _moved(self, op: Op, result: Value) -> None:
        """Copy elements from other indices of the operand, one by one."""
        kind, attrs = tile_type(result), op.settings
        whole = self.materialise(op.operands[0])
        made = self.buffer(kind.element, kind.shape)
        with self._nest(list(kind.shape)) as index:
            source = (*index, I64(attrs.get("index", 0)))
            if op.name == "flip":
                axis = attrs["axis"] % len(kind.shape)
                turn = self.builder.sub(I64(kind.shape[axis] - 1), index[axis])
                source = (*index[:axis], turn, *index[axis + 1 :])
            self.write(made, Location(tuple(index)), self.read(whole, Location(source)))
        self.memo = {}
        self.env[result] = made if kind.shape else self.read(made, Location(())).value

    def _dot(self, op: Op, result: Value) -> None:
        kind = tile_type(result)
        self.ahead = dict(zip(op.operands[:2], (1, 0), strict=True)) if len(kind.shape) == 2 else {}
        operands = [self._packed(each, kind.dtype, op.settings["precision"]) for each in op.operands[:2]]
        self.ahead = {}
        self.done.add(op)
        target: Buffer | None = None
        if len(op.operands) == 3:
            acc = op.operands[2]
            target = self.materialise(acc)
            if target.shared or target in operands or any(user not in self.done for user in self.users[acc]):
                target = self.materialise(acc, self.buffer(kind.element, kind.shape))
        fresh = target is None
        target = target or self.buffer(kind.element, kind.shape)
        self.dot(operands[0], operands[1], target, self._seen_rows(op), fresh=fresh)
        self.env[result] = target

    def _seen_rows(self, op: Op) -> ir.Value | None:
        """The number of a dot's leading rows that are used; None: all of them may be."""
        builder, rows = self.builder, tile_type(op.results[0]).shape[-2]
        limits = self.limits.get(op, frozenset())
        scalars = {each for limit in limits for each in (limit.start, limit.end) if each is not None}
        if not limits or any(each not in self.env for each in scalars):
            return None
        most: ir.Value = I64(0)
        for limit in limits:
            kind = tile_type(limit.end).dtype
            count = self.convert(self.env[limit.end], kind, DType.I64)
            first: ir.Value = I64(0)
            if limit.start is not None:
                first = self.convert(self.env[limit.start], kind, DType.I64)
                count = builder.sub(count, first)
            if kind is DType.I32:  # where the numbers of rows wrap around, the last ones are small
                wraps = builder.icmp_signed(">", first, I64(2**31 - rows))
                count = builder.select(wraps, I64(rows), count)
            most = builder.select(builder.icmp_signed(">", count, most), count, most)
        return builder.select(builder.icmp_signed("<", most, I64(rows)), most, I64(rows))

    def _packed(self, value: Value, into: DType, precision: str) -> Buffer:
        """An operand of a dot, dense and in the type of its sums. `prefetch` knows what comes next, so that its loads
        prefetch nothing."""
        kept, self.loads_ahead = self.loads_ahead, False
        try:
            return self._dense(value, into, precision)
        finally:
            self.loads_ahead = kept

    def _dense(self, value: Value, into: DType, precision: str) -> Buffer:
        kind = tile_type(value)
        known = self.env[value]
        if isinstance(known, Lazy) and self.transposes(known.op):
            self.materialise(value)
        rounds = precision == "tf32" and kind.dtype is DType.F32
        if kind.dtype is into and not rounds:
            return self.materialise(value)
        made = self.buffer(into, kind.shape)
        evaluated = self.begin([value], kind.shape)

        def written(locations: list[Location]) -> None:
            self.prefetch(value, locations)
            for location in locations:
                self.memo = {}
                item = self.convert(self.spread(self.at(value, location), location.lanes), kind.dtype, into)
                self.kept(location)
                self.write(made, location, Chunk(self._tf32(item) if rounds else item, location.lanes))

        self.each([value], kind.shape, 2, written)
        self.memo = {}
        self.finish(evaluated)
        return made

    def _tf32(self, value: ir.Value) -> ir.Value:
        builder = self.builder
        vector = isinstance(value.type, ir.VectorType)
        kind = ir.VectorType(I32, value.type.count) if vector else I32

        def number(n: int) -> ir.Constant:
            return ir.Constant(kind, [n] * value.type.count if vector else n)

        bits = builder.bitcast(value, kind)
        rounded = builder.and_(builder.add(bits, number(0x1000)), number(0xFFFFE000 - (1 << 32)))
        exponent = builder.and_(bits, number(0x7F800000))
        finite = builder.icmp_unsigned("!=", exponent, number(0x7F800000))
        return builder.select(finite, builder.bitcast(rounded, value.type), value)

    def _block_pointer(self, op: Op, result: Value) -> None:
        assert isinstance(result.type, BlockPointerType)
        self.done.add(op)
        self.origins[result] = self.origins.get(op.operands[0])
        numbers = [self.convert(self.env[each], tile_type(each).dtype, DType.I64) for each in op.operands[1:]]
        if op.name == "advance":
            old: BlockPointer = self.env[op.operands[0]]
            moved = tuple(self.builder.add(a, b) for a, b in zip(old.offsets, numbers, strict=True))
            self.env[result] = BlockPointer(old.base, old.shape, old.strides, moved, old.type)
            return
        rank = len(result.type.block)
        parts = [tuple(numbers[i * rank : (i + 1) * rank]) for i in range(3)]
        self.env[result] = BlockPointer(self.env[op.operands[0]], parts[0], parts[1], parts[2], result.type)


def prints(program: TileProgram) -> bool:
    return any(isinstance(node, Op) and node.name == "print" for node in walk(program.body))


__all__ = ["emit_tile_program", "prints"]
