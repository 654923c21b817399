"""Loop programs to LLVM IR.

The generated function follows the calling convention of `runtime/plan.py`. Its loops are LLVM loops, except unrolled
ones, which are written out, and vector ones, which become vector instructions: an expression under a vector loop is
either *uniform* (a scalar, the same in every lane) or a vector, and is widened only where it meets one. Indices are in
`indices.py`, loads and stores in `memory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from tilewright import te
from tilewright.codegen.llvm import math as vector_math
from tilewright.codegen.llvm import native, scalars, shuffles
from tilewright.codegen.llvm.memory import MemoryEmitter
from tilewright.codegen.llvm.sharing import shares_elements
from tilewright.codegen.llvm.types import I64, PTR, Typed, element_type, number, numbers, splat, vector_of
from tilewright.dtypes import DType
from tilewright.errors import CodegenError
from tilewright.hw import CpuMachine
from tilewright.hw.memory import scopes_of
from tilewright.loops.ir import (
    Across,
    Block,
    Buffer,
    For,
    If,
    Invoke,
    Kind,
    Pop,
    Prefetch,
    Program,
    Push,
    Scope,
    Slide,
    Stmt,
    Store,
    Transpose,
    foreign_scope,
    walk_stmts,
)
from tilewright.runtime.plan import ALIGNMENT
from tilewright.te.index import simplify

# Never nnan or ninf: NaN and infinity mean something. Nor arcp: a division by what a loop does not change would become
# a multiplication by its reciprocal, which is infinite for a subnormal number.
FAST_FLAGS = ("nsz", "contract", "afn")
_STREAMED_BYTES = 16  # the shortest vector that can be stored non-temporally


def emit_program(program: Program, machine: CpuMachine, numerics: str, symbol: str) -> ir.Module:
    """The LLVM module with one public function `symbol` for the program."""
    foreign = foreign_scope(program, scopes_of(machine))
    if foreign is not None:
        raise CodegenError(f"{program.name}: {foreign}")
    module = ir.Module(name=symbol)
    module.triple = machine.triple
    flags = () if numerics == "strict" else FAST_FLAGS
    body = _Emitter(module, program, machine, flags).emit_body(symbol + "_body")
    streaming = None
    if any(isinstance(stmt, Store) and stmt.streamed for stmt in walk_stmts(program.body)):
        streaming = _Emitter(module, program, machine, flags, streaming=True).emit_body(symbol + "_streaming")
    _emit_entry(module, machine, symbol, body, streaming, len(program.params))
    return module


def _emit_entry(
    module: ir.Module,
    machine: CpuMachine,
    symbol: str,
    body: ir.Function,
    streaming: ir.Function | None,
    count: int,
) -> None:
    """The public function: unpacks the argument pointers and calls the body, where they are known not to alias; the one
    that uses non-temporal stores if the output is aligned as that demands."""
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR, I64, I64]), symbol)
    _set_attributes(entry, machine)
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


def _set_attributes(function: ir.Function, machine: CpuMachine) -> None:
    function.attributes.add("nounwind")
    if machine.vscale:  # of this length, and no other: what makes vectors of a fixed number of lanes SVE's
        # An attribute with arguments, which llvmlite's own `add` knows nothing of.
        set.add(function.attributes, f"vscale_range({machine.vscale},{machine.vscale})")


class _Emitter(MemoryEmitter):
    def __init__(
        self,
        module: ir.Module,
        program: Program,
        machine: CpuMachine,
        flags: tuple[str, ...],
        *,
        streaming: bool = False,
    ) -> None:
        super().__init__(module, program, machine, streaming=streaming)
        self.flags = flags
        self.math = vector_math.MathContext(has_fma=machine.has_fma)
        # Of written-out loops, by identity: whether their copies share elements.
        self.separate_stores: dict[int, bool] = {}
        # Of expressions, by identity: whether they may read outside of a buffer.
        self.unsafe: dict[int, tuple[te.Expr, bool]] = {}
        # What the statement being written has computed, by the identity of the expression: the outermost first, then
        # under one mask after another.
        self.computed: list[dict[int, tuple[te.Expr, Typed]]] = [{}]

    # -- structure ------------------------------------------------------------------------------------------------

    def emit_body(self, name: str) -> ir.Function:
        params = self.program.params
        function = ir.Function(
            self.module, ir.FunctionType(ir.VoidType(), [PTR] * len(params) + [I64, I64]), name
        )
        function.linkage = "internal"
        _set_attributes(function, self.machine)
        for argument, buffer in zip(function.args, params, strict=False):
            argument.add_attribute("noalias")
            self.pointers[buffer] = argument
        self.begin, self.end = function.args[-2:]
        self.entry = function.append_basic_block("entry")
        start = function.append_basic_block("start")
        self.builder = ir.IRBuilder(start)
        self.statement(self.program.body)
        if self.streaming:
            self.builder.fence("seq_cst")  # non-temporal stores are visible before anyone hears of the end
        self.builder.ret_void()
        ir.IRBuilder(self.entry).branch(start)
        return function

    def statement(self, stmt: Stmt) -> None:
        self.computed = [{}]
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
        elif isinstance(stmt, Invoke):
            self.invoke(stmt)
        elif isinstance(stmt, Push | Pop):
            pass  # one stream: what a token waits for has been done
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
        if id(stmt) not in self.separate_stores:
            self.separate_stores[id(stmt)] = shares_elements(stmt)
        separate_stores = self.separate_stores[id(stmt)]
        for value in range(stmt.var.extent):
            self.bindings[stmt.var] = value
            if not separate_stores:
                self.statement(stmt.body)
                continue
            with self.region():
                self.statement(stmt.body)
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
        with self.region():
            self.statement(stmt.body)
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
            with self.region():
                self.statement(body)
            self.builder.branch(after)
        self.builder.position_at_end(after)

    def prefetch(self, stmt: Prefetch) -> None:
        name, i32 = "llvm.prefetch.p0", ir.IntType(32)
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(ir.VoidType(), [PTR, i32, i32, i32]), name
        )
        offset = self.offset(stmt.index)
        pointer = self.pointer(stmt.buffer, offset.base, offset.constant)
        self.builder.call(function, [pointer, i32(int(stmt.written)), i32(4 - stmt.level), i32(1)])

    def transpose(self, stmt: Transpose) -> None:
        size = stmt.rows * stmt.columns
        kind = vector_of(element_type(stmt.buffer.dtype), stmt.lanes)
        locations = [self.register(stmt.buffer, start, stmt.lanes) for start in range(0, size, stmt.lanes)]
        vectors = [self.builder.load(location, typ=kind) for location in locations]
        for vector, location in zip(
            shuffles.transposed(self.builder, vectors, stmt.rows), locations, strict=True
        ):
            self.builder.store(vector, location)

    def slide(self, stmt: Slide) -> None:
        kind = vector_of(element_type(stmt.buffer.dtype), stmt.lanes)
        target = self.register(stmt.buffer, 0, stmt.lanes)
        locations = target, self.register(stmt.following, stmt.position, stmt.lanes)
        one, other = (self.builder.load(location, typ=kind) for location in locations)
        vectors, picks = zip(
            *(divmod(stmt.begin + lane, stmt.lanes) for lane in range(stmt.lanes)), strict=True
        )
        self.builder.store(shuffles.picked(self.builder, [one, other], vectors, picks), target)

    def invoke(self, stmt: Invoke) -> None:
        """An instruction that accumulates, and does not take what its result holds, has its own combined with that."""
        intrinsic = stmt.intrinsic
        locations = {
            part.tensor.name: location
            for part, location in zip(intrinsic.fragments, stmt.operands, strict=True)
        }
        values = {name: self.lanes_at(locations[name]) for name in native.arguments_of(intrinsic)}
        result = native.call(self.builder, self.machine, intrinsic, values)
        output, reduction = intrinsic.output, intrinsic.stage.reduction
        if reduction is not None and output.name not in values:
            context = scalars.ScalarContext(self.builder, output.dtype, self.flags, self.machine)
            combine = scalars.EMITTERS[te.REDUCE_COMBINERS[reduction.kind]]
            result = combine(context, self.lanes_at(stmt.operands[0]), result)
        self.put_lanes(stmt.operands[0], result)

    # -- expressions ----------------------------------------------------------------------------------------------

    def value(self, expr: te.Expr) -> Typed:
        if isinstance(expr, te.Const):
            return Typed(number(element_type(expr.dtype), scalars.constant(expr)), expr.dtype, 1)
        if expr.dtype is DType.I64 and not isinstance(expr, (te.Load, te.Cast, te.Select, Across)):
            return self.index_value(expr)
        if isinstance(expr, te.Load):
            return self.load(expr)
        if isinstance(expr, Across):
            return self.across(expr)
        for computed in reversed(self.computed):
            if id(expr) in computed:
                return computed[id(expr)][1]
        result = self._computed(expr)
        self.computed[-1][id(expr)] = expr, result  # the expression too: its identity must stay its own
        return result

    def _computed(self, expr: te.Expr) -> Typed:
        if isinstance(expr, te.Cast):
            value, exact = self.value(expr.value), not self.flags
            return scalars.convert(self.builder, value, expr.dtype, self.machine, exact=exact)
        if isinstance(expr, te.Select):
            return self.select(expr)
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
                scalars.ScalarContext(self.builder, operand, self.flags, self.machine), *values
            )
        return Typed(result, dtype, lanes)

    def select(self, expr: te.Select) -> Typed:
        decided = self.decided(expr.cond)
        if decided is not None:
            return self.value(expr.then if decided else expr.other)
        cond = self.value(expr.cond)
        if self.needs_mask(expr.then) or self.needs_mask(expr.other):
            with self.masked(cond):
                then = self.value(expr.then)
            with self.masked(Typed(self.builder.not_(cond.value), DType.BOOL, cond.lanes)):
                other = self.value(expr.other)
        else:  # what both arms share is computed once
            then, other = self.value(expr.then), self.value(expr.other)
        lanes = max(cond.lanes, then.lanes, other.lanes)
        chosen = self.builder.select(
            splat(self.builder, cond, lanes).value if cond.lanes > 1 else cond.value,
            splat(self.builder, then, lanes).value,
            splat(self.builder, other, lanes).value,
        )
        return Typed(chosen, expr.dtype, lanes)

    def needs_mask(self, expr: te.Expr) -> bool:
        """Whether it has a load that may be outside of its buffer where the condition around it does not hold."""
        known = self.unsafe.get(id(expr))
        if known is None:
            leaves = (
                isinstance(expr, te.Load)
                and isinstance(expr.source, Buffer)
                and expr.source.scope is not Scope.REGISTER
                and self._may_leave(expr.indices[0], expr.source)
            )
            known = expr, leaves or any(map(self.needs_mask, te.children(expr)))
            self.unsafe[id(expr)] = known
        return known[1]

    def decided(self, cond: te.Expr) -> bool | None:
        """The value of a condition on indices in this copy of an unrolled loop; None if it is unknown."""
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
        self.computed.append({})
        with self.region():
            yield
        self.computed.pop()
        self.masks.pop()

    def across(self, expr: Across) -> Typed:
        """Halves are combined until one lane is left: a fixed order, log2(lanes) steps."""
        register = self.register(expr.buffer, expr.offset, expr.lanes)
        vector = self.builder.load(register, typ=vector_of(element_type(expr.dtype), expr.lanes))
        combine, lanes = te.REDUCE_COMBINERS[expr.kind], expr.lanes
        context = scalars.ScalarContext(self.builder, expr.dtype, self.flags, self.machine)
        while lanes > 1:
            lanes //= 2
            halves = [self._part(vector, start, lanes) for start in (0, lanes)]
            vector = scalars.EMITTERS[combine](context, *halves)
        return Typed(self.builder.extract_element(vector, I64(0)), expr.dtype, 1)

    def _part(self, vector: ir.Value, start: int, lanes: int) -> ir.Value:
        picks = numbers(ir.IntType(32), tuple(range(start, start + lanes)))
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), picks)
