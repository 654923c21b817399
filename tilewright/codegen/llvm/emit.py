"""Loop programs to LLVM IR.

The generated function follows the calling convention of `runtime/plan.py`. Its loops are LLVM loops, except unrolled
ones, which are written out, and vector ones, which become vector instructions: an expression under a vector loop is
either *uniform* (a scalar, the same in every lane) or a vector, and is widened only where it meets one. What decides is
how its index moves with the lane: not at all (a scalar load), by one (a vector load), otherwise (a gather).

Registers: each register buffer element (or vector) is an `alloca`, always accessed at a constant place, so LLVM's
mem2reg turns all of them into SSA values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from llvmlite import ir

from tilewright import te
from tilewright.codegen.llvm import math as vector_math
from tilewright.codegen.llvm import scalars, shuffles
from tilewright.codegen.llvm.sharing import shares_elements
from tilewright.codegen.llvm.types import I1, I64, PTR, Typed, element_type, splat, stored_type, vector_of
from tilewright.dtypes import DType
from tilewright.errors import CodegenError, InternalError
from tilewright.hw import CpuMachine
from tilewright.loops.ir import (
    Across,
    Block,
    Buffer,
    For,
    If,
    Kind,
    Prefetch,
    Program,
    Scope,
    Slide,
    Stmt,
    Store,
    Transpose,
    walk_stmts,
)
from tilewright.loops.tiling import LONGEST_STRIDE
from tilewright.runtime.plan import ALIGNMENT
from tilewright.te.index import bounds, divisor_of, linear, simplify

FAST_FLAGS = ("nsz", "arcp", "contract", "afn")  # never nnan or ninf: NaN and infinity mean something
_STREAMED_BYTES = 16  # the shortest vector that can go past the caches


def emit_program(program: Program, machine: CpuMachine, numerics: str, symbol: str) -> ir.Module:
    """The LLVM module with one public function `symbol` for the program."""
    module = ir.Module(name=symbol)
    module.triple = machine.triple
    flags = () if numerics == "strict" else FAST_FLAGS
    body = _Emitter(module, program, machine, flags).emit_body(symbol + "_body")
    streaming = None
    if any(isinstance(stmt, Store) and stmt.streamed for stmt in walk_stmts(program.body)):
        streaming = _Emitter(module, program, machine, flags, streaming=True).emit_body(symbol + "_streaming")
    _emit_entry(module, symbol, body, streaming, len(program.params))
    return module


def _emit_entry(
    module: ir.Module, symbol: str, body: ir.Function, streaming: ir.Function | None, count: int
) -> None:
    """The public function: unpacks the argument pointers and calls the body, where they are known not to alias; the one
    that stores past the caches if the output is aligned as that demands."""
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR, I64, I64]), symbol)
    entry.attributes.add("nounwind")
    arguments, begin, end = entry.args
    builder = ir.IRBuilder(entry.append_basic_block("entry"))
    pointers = [
        builder.load(builder.gep(arguments, [I64(n)], inbounds=True, source_etype=PTR), typ=PTR)
        for n in range(count)
    ]
    if streaming is not None:
        last_bits = builder.and_(builder.ptrtoint(pointers[-1], I64), I64(ALIGNMENT - 1))
        with builder.if_then(builder.icmp_unsigned("==", last_bits, I64(0))):
            builder.call(streaming, [*pointers, begin, end])
            builder.ret_void()
    builder.call(body, [*pointers, begin, end])
    builder.ret_void()


@dataclass
class _Offset:
    """An index at the lanes of the current vector loop: `base + constant + lane * stride`, or a vector of indices."""

    base: ir.Value | None
    constant: int
    stride: int
    vector: ir.Value | None = None


@dataclass
class _Region:
    """Values computed where they dominate everything emitted until the region is left."""

    known: dict[object, ir.Value] = field(default_factory=dict)


def _reads_local_memory(expr: te.Expr) -> bool:
    """Whether it reads a buffer that may be written between two evaluations: inputs never are."""
    return any(
        isinstance(load.source, Buffer) and load.source.scope is not Scope.GLOBAL for load in te.loads(expr)
    )


def _alignment(buffer: Buffer) -> int:
    return buffer.memory.dtype.bytes


class _Emitter:
    def __init__(
        self,
        module: ir.Module,
        program: Program,
        machine: CpuMachine,
        flags: tuple[str, ...],
        *,
        streaming: bool = False,
    ) -> None:
        self.module = module
        self.program = program
        self.machine = machine
        self.flags = flags
        self.streaming = streaming  # the output is aligned to cache lines
        self.math = vector_math.MathContext(has_fma=machine.has_fma)
        self.pointers: dict[Buffer, ir.Value] = {}
        self.registers: dict[tuple[Buffer, int, int], ir.Value] = {}
        self.bindings: dict[te.Var, int | ir.Value] = {}
        self.lane: te.Var | None = None  # the variable of the vector loop being emitted
        self.masks: list[Typed] = []  # conditions under which the current expression is evaluated
        self.regions: list[_Region] = [_Region()]
        self.apart: dict[
            int, bool
        ] = {}  # of written-out loops, by identity: whether their copies share elements

    # -- structure ------------------------------------------------------------------------------------------------

    def emit_body(self, name: str) -> ir.Function:
        params = self.program.params
        function = ir.Function(
            self.module, ir.FunctionType(ir.VoidType(), [PTR] * len(params) + [I64, I64]), name
        )
        function.linkage = "internal"
        function.attributes.add("nounwind")
        for argument, buffer in zip(function.args, params, strict=False):
            argument.add_attribute("noalias")
            self.pointers[buffer] = argument
        self.begin, self.end = function.args[-2:]
        self.entry = function.append_basic_block("entry")
        start = function.append_basic_block("start")
        self.builder = ir.IRBuilder(start)
        self.statement(self.program.body)
        if self.streaming:
            self.builder.fence("seq_cst")  # what went past the caches is there before anyone hears of the end
        self.builder.ret_void()
        ir.IRBuilder(self.entry).branch(start)
        return function

    def statement(self, stmt: Stmt) -> None:
        if isinstance(stmt, Block):
            for child in stmt.stmts:
                self.statement(child)
        elif isinstance(stmt, Store):
            self.store(stmt)
        elif isinstance(stmt, If):
            self.branch(stmt)
        elif isinstance(stmt, Prefetch):
            self.prefetch(stmt)
        elif isinstance(stmt, Transpose):
            self.transpose(stmt)
        elif isinstance(stmt, Slide):
            self.slide(stmt)
        elif not isinstance(stmt, For) or stmt.kind is Kind.THREAD:
            raise CodegenError(f"{self.program.name} is a program for threads of a GPU")
        elif stmt.kind is Kind.UNROLL:
            self.written_out(stmt)
        elif stmt.kind is Kind.VECTOR:
            self.lane = stmt.var
            self.statement(stmt.body)
            self.lane = None
        else:
            self.loop(stmt)

    def written_out(self, stmt: For) -> None:
        if id(stmt) not in self.apart:
            self.apart[id(stmt)] = shares_elements(stmt)
        apart = self.apart[id(stmt)]
        for value in range(stmt.var.extent):
            self.bindings[stmt.var] = value
            if apart:
                self.regions.append(_Region())
            self.statement(stmt.body)
            if apart:
                self.regions.pop()
                # No instruction: LLVM reads again behind it what it would have kept.
                self.builder.fence("seq_cst", "singlethread")

    def loop(self, stmt: For) -> None:
        parallel = stmt.kind is Kind.PARALLEL
        first, last = (self.begin, self.end) if parallel else (I64(0), I64(stmt.var.extent))
        if not parallel and stmt.var.extent == 0:
            return
        head = self.builder.append_basic_block(f"{stmt.var.name}.loop")
        after = self.builder.append_basic_block(f"{stmt.var.name}.end")
        before = self.builder.block
        if parallel:
            self.builder.cbranch(self.builder.icmp_signed("<", first, last), head, after)
        else:
            self.builder.branch(head)
        self.builder.position_at_end(head)
        counter = self.builder.phi(I64, stmt.var.name)
        counter.add_incoming(first, before)
        self.bindings[stmt.var] = counter
        self.regions.append(_Region())
        self.statement(stmt.body)
        self.regions.pop()
        following = self.builder.add(counter, I64(1), flags=("nsw", "nuw"))
        counter.add_incoming(following, self.builder.block)
        self.builder.cbranch(self.builder.icmp_signed("<", following, last), head, after)
        self.builder.position_at_end(after)

    def branch(self, stmt: If) -> None:
        cond = self.value(stmt.cond).value
        then, after = self.builder.append_basic_block("then"), self.builder.append_basic_block("after")
        other = after if stmt.other is None else self.builder.append_basic_block("else")
        self.builder.cbranch(cond, then, other)
        for block, body in ((then, stmt.then), (other, stmt.other)):
            if body is None:
                continue
            self.builder.position_at_end(block)
            self.regions.append(_Region())
            self.statement(body)
            self.regions.pop()
            self.builder.branch(after)
        self.builder.position_at_end(after)

    def prefetch(self, stmt: Prefetch) -> None:
        name, i32 = "llvm.prefetch.p0", ir.IntType(32)
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(ir.VoidType(), [PTR, i32, i32, i32]), name
        )
        offset = self.offset(stmt.index)
        pointer = self._pointer(stmt.buffer, offset.base, offset.constant)
        self.builder.call(function, [pointer, i32(int(stmt.written)), i32(4 - stmt.level), i32(1)])

    def transpose(self, stmt: Transpose) -> None:
        size = stmt.rows * stmt.columns
        kind = vector_of(element_type(stmt.buffer.dtype), stmt.lanes)
        places = [self.register(stmt.buffer, start, stmt.lanes) for start in range(0, size, stmt.lanes)]
        vectors = [self.builder.load(place, typ=kind) for place in places]
        for vector, place in zip(shuffles.transposed(self.builder, vectors, stmt.rows), places, strict=True):
            self.builder.store(vector, place)

    def slide(self, stmt: Slide) -> None:
        kind = vector_of(element_type(stmt.buffer.dtype), stmt.lanes)
        target = self.register(stmt.buffer, 0, stmt.lanes)
        places = target, self.register(stmt.behind, stmt.place, stmt.lanes)
        one, other = (self.builder.load(place, typ=kind) for place in places)
        vectors, picks = zip(
            *(divmod(stmt.begin + lane, stmt.lanes) for lane in range(stmt.lanes)), strict=True
        )
        self.builder.store(shuffles.picked(self.builder, [one, other], vectors, picks), target)

    @property
    def lanes(self) -> int:
        return self.lane.extent if self.lane is not None else 1

    # -- expressions ----------------------------------------------------------------------------------------------

    def value(self, expr: te.Expr) -> Typed:
        """The value of an expression: a scalar where it is the same in every lane."""
        if isinstance(expr, te.Const):
            return Typed(element_type(expr.dtype)(scalars.constant(expr)), expr.dtype, 1)
        if expr.dtype is DType.I64 and not isinstance(expr, (te.Load, te.Cast, te.Select, Across)):
            return self.index_value(expr)
        if isinstance(expr, te.Load):
            return self.load(expr)
        if isinstance(expr, te.Cast):
            return scalars.convert(self.builder, self.value(expr.value), expr.dtype, self.machine)
        if isinstance(expr, te.Select):
            return self.select(expr)
        if isinstance(expr, Across):
            return self.across(expr)
        assert isinstance(expr, te.Call)
        return self.call(expr.op, [self.value(arg) for arg in expr.args], expr.dtype)

    def call(self, op: str, arguments: list[Typed], dtype: DType) -> Typed:
        lanes = max(argument.lanes for argument in arguments)
        values = [splat(self.builder, argument, lanes).value for argument in arguments]
        operand = arguments[0].dtype
        if op in vector_math.FUNCTIONS and operand.is_float:
            result = vector_math.emit(self.builder, op, *values, context=self.math)
        else:
            result = scalars.EMITTERS[op](
                scalars.Context(self.builder, operand, self.flags, self.machine), *values
            )
        return Typed(result, dtype, lanes)

    def select(self, expr: te.Select) -> Typed:
        decided = self.decided(expr.cond)
        if decided is not None:
            return self.value(expr.then if decided else expr.other)
        cond = self.value(expr.cond)
        with self.masked(cond):
            then = self.value(expr.then)
        with self.masked(Typed(self.builder.not_(cond.value), DType.BOOL, cond.lanes)):
            other = self.value(expr.other)
        lanes = max(cond.lanes, then.lanes, other.lanes)
        chosen = self.builder.select(
            splat(self.builder, cond, lanes).value if cond.lanes > 1 else cond.value,
            splat(self.builder, then, lanes).value,
            splat(self.builder, other, lanes).value,
        )
        return Typed(chosen, expr.dtype, lanes)

    def decided(self, cond: te.Expr) -> bool | None:
        """What a condition on indices is in this copy of an unrolled loop; None where it is not known."""
        if te.loads(cond):
            return None
        bound = {var: self.bindings.get(var) for var in te.variables(cond)}
        values = {var: te.as_index(value) for var, value in bound.items() if isinstance(value, int)}
        known = simplify(te.substitute(cond, values)) if values else None
        return bool(known.value) if isinstance(known, te.Const) else None

    @contextmanager
    def masked(self, cond: Typed) -> Iterator[None]:
        # Values computed under a mask hold only there, so they go into a region of their own.
        self.masks.append(cond)
        self.regions.append(_Region())
        yield
        self.regions.pop()
        self.masks.pop()

    def across(self, expr: Across) -> Typed:
        """Halves are combined until one lane is left: a fixed order, log2(lanes) steps."""
        register = self.register(expr.buffer, expr.offset, expr.lanes)
        vector = self.builder.load(register, typ=vector_of(element_type(expr.dtype), expr.lanes))
        combine, lanes = te.REDUCE_COMBINERS[expr.kind], expr.lanes
        context = scalars.Context(self.builder, expr.dtype, self.flags, self.machine)
        while lanes > 1:
            lanes //= 2
            halves = [self._part(vector, start, lanes) for start in (0, lanes)]
            vector = scalars.EMITTERS[combine](context, *halves)
        return Typed(self.builder.extract_element(vector, I64(0)), expr.dtype, 1)

    def _part(self, vector: ir.Value, start: int, lanes: int) -> ir.Value:
        picks = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(start, start + lanes)))
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), picks)

    # -- indices --------------------------------------------------------------------------------------------------

    def known(self, key: object, make: Callable[[], ir.Value]) -> ir.Value:
        for region in reversed(self.regions):
            if key in region.known:
                return region.known[key]
        value = make()
        self.regions[-1].known[key] = value
        return value

    def moves_with_lane(self, expr: te.Expr) -> bool:
        return self.lane is not None and self.lane in te.variables(expr)

    def offset(self, index: te.Expr) -> _Offset:
        form = linear(index)
        constant, stride = form.constant, 0
        terms: list[tuple[te.Expr, int]] = []
        for atom, coefficient in form.terms.items():
            bound = self.bindings.get(atom) if isinstance(atom, te.Var) else None
            if atom == self.lane:
                stride = coefficient
            elif isinstance(bound, int):
                constant += coefficient * bound
            elif not isinstance(atom, te.Var) and self.moves_with_lane(atom):
                return _Offset(None, 0, 0, self.index_vector(index))
            else:
                terms.append((atom, coefficient))
        return _Offset(self.sum_of(terms), constant, stride)

    def sum_of(self, terms: list[tuple[te.Expr, int]]) -> ir.Value | None:
        if not terms:
            return None
        if any(_reads_local_memory(atom) for atom, _ in terms):
            return self._sum(terms)
        key = ("sum", tuple((atom, c, self.unrolled_in(atom)) for atom, c in terms))
        return self.known(key, lambda: self._sum(terms))

    def unrolled_in(self, expr: te.Expr) -> tuple[int, ...]:
        """The values of unrolled variables in `expr`: the same expression is another value in another copy."""
        if isinstance(expr, te.Var):
            return ()
        bound = ((var.name, self.bindings.get(var)) for var in te.variables(expr))
        return tuple(value for _, value in sorted((n, v) for n, v in bound if isinstance(v, int)))

    def _sum(self, terms: list[tuple[te.Expr, int]]) -> ir.Value:
        total: ir.Value | None = None
        for atom, coefficient in terms:
            value = self.scalar_index(atom)
            if coefficient != 1:
                value = self.builder.mul(value, I64(coefficient), flags=("nsw",))
            total = value if total is None else self.builder.add(total, value, flags=("nsw",))
        assert total is not None
        return total

    def scalar_index(self, atom: te.Expr) -> ir.Value:
        if isinstance(atom, te.Var):
            bound = self.bindings[atom]
            return I64(bound) if isinstance(bound, int) else bound
        if isinstance(atom, te.Call):
            return self.index_call(atom, self.scalar_index_of, 1)
        return self.value(atom).value

    def scalar_index_of(self, expr: te.Expr) -> ir.Value:
        offset = self.offset(expr)
        assert offset.vector is None and offset.stride == 0
        if offset.base is None:
            return I64(offset.constant)
        return (
            self.builder.add(offset.base, I64(offset.constant), flags=("nsw",))
            if offset.constant
            else offset.base
        )

    def index_call(self, atom: te.Call, operand: Callable[[te.Expr], ir.Value], lanes: int) -> ir.Value:
        """A floordiv, mod, min, max, ... of indices; division of what is never negative is a plain unsigned one."""
        values = [operand(arg) for arg in atom.args]
        if atom.op in ("floordiv", "mod"):
            (low, _), (divisor, _) = bounds(atom.args[0]), bounds(atom.args[1])
            if low is not None and low >= 0 and divisor is not None and divisor > 0:
                return (self.builder.udiv if atom.op == "floordiv" else self.builder.urem)(*values)
        context = scalars.Context(self.builder, DType.I64, (), self.machine)
        return scalars.EMITTERS[atom.op](context, *values)

    def index_value(self, expr: te.Expr) -> Typed:
        """An integer expression as a value: a scalar, or one value per lane."""
        offset = self.offset(expr)
        if offset.vector is not None:
            return Typed(offset.vector, DType.I64, self.lanes)
        base = I64(offset.constant)
        if offset.base is not None:
            base = self.builder.add(offset.base, base) if offset.constant else offset.base
        if offset.stride == 0 or self.lanes == 1:
            return Typed(base, DType.I64, 1)
        vector = splat(self.builder, Typed(base, DType.I64, 1), self.lanes).value
        steps = ir.Constant(vector.type, [lane * offset.stride for lane in range(self.lanes)])
        return Typed(self.builder.add(vector, steps), DType.I64, self.lanes)

    def index_vector(self, index: te.Expr) -> ir.Value:
        """The index in every lane, where it is not linear in the lane."""
        form = linear(index)
        total = splat(self.builder, Typed(I64(form.constant), DType.I64, 1), self.lanes).value
        for atom, coefficient in form.terms.items():
            if isinstance(atom, te.Call) and atom.dtype is DType.I64 and self.moves_with_lane(atom):
                term = self.index_call(atom, self._index_lanes, self.lanes)
            else:
                term = splat(self.builder, self.value(atom), self.lanes).value
            if coefficient != 1:
                factor = splat(self.builder, Typed(I64(coefficient), DType.I64, 1), self.lanes).value
                term = self.builder.mul(term, factor)
            total = self.builder.add(total, term)
        return total

    def _index_lanes(self, expr: te.Expr) -> ir.Value:
        return splat(self.builder, self.index_value(expr), self.lanes).value

    # -- memory ---------------------------------------------------------------------------------------------------

    def register(self, buffer: Buffer, offset: int, lanes: int) -> ir.Value:
        key = (buffer, offset, lanes)
        if key not in self.registers:
            kind = vector_of(element_type(buffer.dtype), lanes)
            at_entry = ir.IRBuilder(self.entry)
            self.registers[key] = at_entry.alloca(kind, name=f"{buffer.name}.{offset}")
        return self.registers[key]

    def register_place(self, buffer: Buffer, index: te.Expr) -> tuple[ir.Value, int]:
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
            place, lanes = self.register_place(buffer, index)
            return Typed(
                self.builder.load(place, typ=vector_of(element_type(buffer.dtype), lanes)),
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
            lanes, raw = self.lanes, self._once(key, buffer, lambda: self._load_apart(buffer, offset, masks))
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

    def _pointer(self, buffer: Buffer, base: ir.Value | None, constant: int) -> ir.Value:
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
        return self.builder.gep(pointer, [I64(constant)], source_etype=kind) if constant else pointer

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

    def _load_scalar(self, buffer: Buffer, offset: _Offset, masks: list[Typed]) -> ir.Value:
        active = self._uniform_mask(masks)
        kind = stored_type(buffer.dtype)
        if active is None:
            pointer = self._pointer(buffer, offset.base, offset.constant)
            return self.builder.load(pointer, typ=kind, align=_alignment(buffer))
        place = (
            I64(offset.constant)
            if offset.base is None
            else self.builder.add(offset.base, I64(offset.constant))
        )
        # Where the condition fails, element 0 is read instead and the value is not used.
        safe = self.builder.select(active, place, I64(0))
        return self.builder.load(self._pointer(buffer, safe, 0), typ=kind, align=_alignment(buffer))

    def _load_vector(self, buffer: Buffer, offset: _Offset, masks: list[Typed]) -> ir.Value:
        return self._load_run(buffer, offset.base, offset.constant, self._mask_of(masks))

    def _mask_of(self, masks: list[Typed]) -> ir.Value | None:
        """All conditions together, lane by lane."""
        result: ir.Value | None = None
        for mask in masks:
            lanes = splat(self.builder, mask, self.lanes).value
            result = lanes if result is None else self.builder.and_(result, lanes)
        return result

    def _load_apart(self, buffer: Buffer, offset: _Offset, masks: list[Typed]) -> ir.Value:
        """Elements a few places apart: the vectors that hold them, nothing before the first or behind the last, and
        the elements picked from there."""
        lanes, stride = self.lanes, offset.stride
        starts = [*range(0, lanes * (stride - 1), lanes), (lanes - 1) * (stride - 1)]
        holders = [min(lane * stride // lanes, stride - 1) for lane in range(lanes)]
        places = [lane * stride - starts[holder] for lane, holder in enumerate(holders)]
        mask, vectors = self._mask_of(masks), []
        for number, start in enumerate(starts):
            active = mask
            if mask is not None:
                needed = {p: lane for lane, p in enumerate(places) if holders[lane] == number}
                picks = [needed.get(place, lanes) for place in range(lanes)]
                active = shuffles.shuffled(self.builder, mask, ir.Constant(mask.type, None), picks)
            vectors.append(self._load_run(buffer, offset.base, offset.constant + start, active))
        return shuffles.picked(self.builder, vectors, holders, places)

    def _load_run(
        self, buffer: Buffer, base: ir.Value | None, constant: int, mask: ir.Value | None
    ) -> ir.Value:
        kind = vector_of(stored_type(buffer.dtype), self.lanes)
        pointer = self._pointer(buffer, base, constant)
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

    def _lane_places(self, offset: _Offset) -> list[ir.Value]:
        if offset.vector is not None:
            return [self.builder.extract_element(offset.vector, I64(lane)) for lane in range(self.lanes)]
        base = offset.base if offset.base is not None else I64(0)
        return [
            self.builder.add(base, I64(offset.constant + lane * offset.stride)) for lane in range(self.lanes)
        ]

    def _gather(self, buffer: Buffer, offset: _Offset, masks: list[Typed]) -> ir.Value:
        kind = stored_type(buffer.dtype)
        result: ir.Value = ir.Constant(vector_of(kind, self.lanes), ir.Undefined)
        for lane, place in enumerate(self._lane_places(offset)):
            for mask in masks:
                active = self.builder.extract_element(mask.value, I64(lane)) if mask.lanes > 1 else mask.value
                place = self.builder.select(active, place, I64(0))
            element = self.builder.load(self._pointer(buffer, place, 0), typ=kind, align=_alignment(buffer))
            result = self.builder.insert_element(result, element, I64(lane))
        return result

    def store(self, stmt: Store) -> None:
        buffer = stmt.buffer
        value = self.value(stmt.value)
        if buffer.scope is Scope.REGISTER:
            place, lanes = self.register_place(buffer, stmt.index)
            self.builder.store(splat(self.builder, value, lanes).value, place)
            return
        offset = self.offset(stmt.index)
        raw = scalars.to_memory(self.builder, value.value, buffer.dtype)
        if self.lanes == 1:
            self.builder.store(raw, self._pointer(buffer, offset.base, offset.constant))
            return
        wide = splat(self.builder, Typed(raw, buffer.dtype, value.lanes), self.lanes).value
        if offset.vector is None and offset.stride == 1:
            pointer = self._pointer(buffer, offset.base, offset.constant)
            streamed = self.streaming and stmt.streamed
            if streamed and buffer.dtype is DType.F16:  # which LLVM stores past no cache
                wide = self.builder.bitcast(wide, vector_of(ir.IntType(16), self.lanes))
            stored = self.builder.store(wide, pointer, align=buffer.dtype.bytes)
            if streamed:
                self._past_caches(stored, stmt)
            return
        for lane, place in enumerate(self._lane_places(offset)):
            self.builder.store(self.builder.extract_element(wide, I64(lane)), self._pointer(buffer, place, 0))

    def _past_caches(self, stored: ir.StoreInstr, stmt: Store) -> None:
        """Marks a vector's store as streamed where its place is a multiple of its length."""
        assert self.lane is not None
        first = te.substitute(stmt.index, {self.lane: te.as_index(0)})
        step = math.gcd(divisor_of(first), self.lanes) * stmt.buffer.dtype.bytes
        if step == self.lanes * stmt.buffer.dtype.bytes >= _STREAMED_BYTES:
            stored.align = step
            stored.set_metadata("nontemporal", self.module.add_metadata([ir.IntType(32)(1)]))
