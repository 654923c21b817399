"""Program -> CUDA C++.

An iteration of the parallel loop is a block, one of a thread loop a thread; register buffers are arrays that the
compiler keeps in registers, since unrolled loops are marked so; scratch memory is shared memory, with a barrier before
each thread loop that touches it, unless all of its data was copied and awaited. A vector loop accesses memory in
packs where a vector begins at a multiple of its length, and computes lane by lane. Loads of a
`streamed` store are issued where they stand, because the compiler would sink them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import resources

from tilewright import te
from tilewright.codegen.cuda import scalars
from tilewright.codegen.cuda.indices import (
    INT_MAX,
    fits,
    index_expressions,
    is_index,
    is_pack,
    is_plain_division,
    loads_of_all_lanes,
)
from tilewright.codegen.cuda.names import with_identifiers
from tilewright.codegen.cuda.rings import RingText
from tilewright.codegen.cuda.shared import (
    alignment,
    block_threads,
    is_asynchronous,
    is_small,
    most_small,
    placed,
    reads_shared,
    touches_shared,
    writes_shared,
)
from tilewright.dtypes import DType
from tilewright.errors import CodegenError
from tilewright.hw.intrinsics import Fragment, PtxAssembly
from tilewright.hw.memory import LOOP_SCOPES
from tilewright.hw.warpgroups import WARPGROUP
from tilewright.loops.ir import (
    Across,
    Await,
    Block,
    BoxCopy,
    Buffer,
    Combine,
    Commit,
    Copy,
    Fill,
    Filled,
    For,
    If,
    Invoke,
    Kind,
    Multiplied,
    Pop,
    Prefetch,
    Program,
    Push,
    Release,
    Roles,
    Scope,
    Slide,
    Stmt,
    Store,
    Transpose,
    Warp,
    foreign_scope,
    local_buffers,
    thread_count,
    walk_stmts,
)
from tilewright.te.index import Linear, linear, simplify

_REGISTER_BYTES = 4
_FEW_BLOCKS = 4096  # a few times what a card runs at once
AWAIT_TURN = "await_turn();"
_IN_FLIGHT = "on_the_way"


@lru_cache(maxsize=8)
def included(name: str) -> str:
    """The text of one of the files alongside this one."""
    return resources.files("tilewright.codegen.cuda").joinpath(name).read_text()


def emit_program(program: Program, symbol: str) -> str:
    """The CUDA source of a kernel called `symbol`, which takes the program's parameters in their order."""
    foreign = foreign_scope(program, LOOP_SCOPES)
    if foreign is not None:
        raise CodegenError(f"{program.name}: {foreign}")
    program = with_identifiers(program)
    headers = ["prelude.cuh", *(["tensor_cores.cuh"] if is_asynchronous(program.body) else [])]
    headers += ["cluster.cuh"] if program.cluster > 1 else []
    emitter = _Emitter(program, symbol)
    headers += ["copy_engine.cuh"] if emitter.rings.is_needed else []
    return "\n".join([*map(included, headers), emitter.rings.functions() + emitter.text()])


def beginning(blocks: int) -> list[str]:
    """The first line of a kernel of so many blocks. With many, an early start gains nothing, and each would pay."""
    return [f"  {AWAIT_TURN}"] if blocks <= _FEW_BLOCKS else []


def emit_statement(stmt: Stmt, params: tuple[Buffer, ...], indent: int = 1) -> str:
    """A statement as part of a kernel that is written by hand: its free variables and its buffers are there."""
    emitter = _Emitter(Program("statement", params, stmt), "")
    emitter.indent = indent
    emitter.statement(stmt)
    return "\n".join(emitter.lines) + "\n"


def emit_value(expr: te.Expr) -> str:
    """An expression of plain indices, for the same use."""
    return _Emitter(Program("value", (), Block(())), "").inline(expr)


class _Emitter:
    def __init__(self, program: Program, symbol: str) -> None:
        self.program, self.symbol = program, symbol
        self.threads = thread_count(program) // program.cluster  # of a block
        combines = [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Combine)]
        self.exchanges, self.all_exchanges = 0, sum(stmt.group > self.threads for stmt in combines)
        self.lines: list[str] = []
        self.indent = 1
        self.names: dict[te.Expr, str] = {}  # expressions that have a variable of their own
        self.packs: dict[te.Expr, str] = {}  # loads of the vector loop that were made for all lanes at once
        self.count = 0
        self.fragments = _fragments(program)
        self.index = "int" if self._indices_are_short() else "long long"
        # Whether shared memory was written, or read, since the last barrier; what is copied to it is awaited instead.
        self.written = self.read = False
        self.thread = ""  # the line that gives a thread loop its variable
        self.guards: list[te.Expr] = []  # what the branches around say
        self.in_flight: list[
            tuple[Copy, tuple[te.Expr, ...]]
        ] = []  # copies through registers, and their guards
        self.rings = RingText(self, program)

    def text(self) -> str:
        *inputs, output = self.program.params
        pointers = [f"const {scalars.c_type(b.dtype)}* __restrict__ {b.name}" for b in inputs]
        pointers.append(f"{scalars.c_type(output.dtype)}* __restrict__ {output.name}")
        pointers += self.rings.parameters
        cluster = self.program.cluster
        roles = [stmt for stmt in walk_stmts(self.program.body) if isinstance(stmt, Roles)]
        # Registers can only be given away where the kernel says that one block is enough.
        alone = ", 1" if any(stmt.registers for stmt in roles) else ""
        bounds = f"__launch_bounds__({block_threads(self.program)}{alone})"
        together = max(cluster, self.program.together)
        if together > 1:
            bounds = f"__cluster_dims__({together}, 1, 1) {bounds}"
        head = f'extern "C" __global__ void {bounds} {self.symbol}({", ".join(pointers)})'
        self.declarations()
        self.statement(self.program.body)
        if self.exchanges:
            self.line("end_cluster();")
        blocks = self.program.parallel_extent * cluster
        return "\n".join([head + " {", *beginning(blocks), *self.lines, "}"]) + "\n"

    def declarations(self) -> None:
        scratch = placed(self.program)
        if scratch and self.program.cluster > 1:
            raise CodegenError(f"{self.program.name}: blocks of a cluster have no scratch memory in common")
        if scratch:
            self.line(f"extern __shared__ __align__({alignment(self.program)}) unsigned char shared[];")
        for buffer, offset in scratch.items():
            kind = scalars.c_type(buffer.dtype)
            self.line(f"{kind}* const {buffer.name} = reinterpret_cast<{kind}*>(shared + {offset});")
            if is_asynchronous(self.program.body):
                self.line(f"const unsigned {buffer.name}_at = shared_address({buffer.name});")
        for buffer in local_buffers(self.program):
            if buffer.scope is Scope.REGISTER:
                kind, size = scalars.c_type(buffer.dtype), buffer.size
                if buffer in self.fragments:
                    kind, size = "u32", size * buffer.dtype.bytes // _REGISTER_BYTES
                self.line(f"{kind} {buffer.name}[{size}];")
        small = [stmt for stmt in walk_stmts(self.program.body) if isinstance(stmt, Copy) and is_small(stmt)]
        if small:
            self.line(f"{scalars.c_type(small[0].buffer.dtype)} {_IN_FLIGHT}[{most_small(self.program)}];")
        thread = next((s.thread for s in walk_stmts(self.program.body) if isinstance(s, Warp)), None)
        if thread is not None:
            self.line(f"const int {thread.name} = threadIdx.x;")
            self.names |= self.rings.uniform(thread)
        self.rings.declarations()

    def _indices_are_short(self) -> bool:
        if any(buffer.size > INT_MAX for buffer in self.program.params):
            return False
        return all(fits(expr) for expr in index_expressions(self.program.body))

    # -- lines --------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    @contextmanager
    def braces(self, head: str) -> Iterator[None]:
        """A block of its own: names given inside are forgotten afterwards."""
        self.line(f"{head} {{".lstrip())
        self.indent += 1
        names = dict(self.names)
        yield
        self.names = names
        self.indent -= 1
        self.line("}")

    # -- statements ---------------------------------------------------------------------------------------------------

    def statement(self, stmt: Stmt) -> None:
        if isinstance(stmt, For | Warp):
            self.rings.begin(stmt)
        if isinstance(stmt, Block):
            for child in stmt.stmts:
                self.statement(child)
        elif isinstance(stmt, For):
            self.loop(stmt)
        elif isinstance(stmt, If):
            names = dict(self.names)
            condition = self.value(stmt.cond)
            self.names = names
            with self.braces(f"if ({condition})"):
                self.guards.append(stmt.cond)
                self.statement(stmt.then)
                self.guards.pop()
            if stmt.other is not None:
                with self.braces("else"):
                    self.guards.append(te.call("not", stmt.cond))
                    self.statement(stmt.other)
                    self.guards.pop()
        elif isinstance(stmt, Combine):
            position = f"{stmt.buffer.name}[{stmt.offset}]"
            over = str(stmt.group)
            if stmt.group > self.threads:
                self.exchanges += 1
                over = f"{self.program.cluster}, {self.threads}, {self.exchanges}"
            self.line(f"{position} = combined<{over}, {stmt.kind.capitalize()}>({position});")
            if self.exchanges and self.exchanges == self.all_exchanges:
                self.line("leave_cluster();")
        elif isinstance(stmt, Copy):
            self.copy(stmt)
        elif isinstance(stmt, Commit):
            self.commit()
        elif isinstance(stmt, Await):
            self.line(f"await_copies<{stmt.pending}>();")
            self.barrier()
        elif isinstance(stmt, Fill | Filled | Release | Multiplied | Roles):
            names = dict(self.names)
            self.rings.statement(stmt)
            self.names = names
        elif isinstance(stmt, Warp):
            self.warp(stmt)
        elif isinstance(stmt, BoxCopy):
            raise CodegenError(f"{self.program.name}: a box is copied outside of a fill")
        elif isinstance(stmt, Prefetch | Transpose | Slide | Invoke | Push | Pop):
            raise CodegenError(f"{self.program.name}: {type(stmt).__name__} is for processors")
        else:
            self.store(stmt)

    def loop(self, loop: For) -> None:
        name, extent = loop.var.name, loop.var.extent
        if loop.kind is Kind.PARALLEL:
            cluster = self.program.cluster
            self.line(f"const {self.index} {name} = blockIdx.x{f' / {cluster}' if cluster > 1 else ''};")
            self.statement(loop.body)
        elif loop.kind is Kind.THREAD:
            self.thread_loop(loop)
        elif loop.kind is Kind.VECTOR:
            self.vector_loop(loop)
        else:
            if loop.kind is Kind.UNROLL:
                self.lines.append("#pragma unroll")
            elif is_asynchronous(loop.body):
                self.lines.append("#pragma unroll 1")
            elif not touches_shared(loop.body):
                self.lines.append("#pragma unroll 4")
            # The end of an iteration meets the beginning of the next.
            self.written |= writes_shared(loop.body)
            self.read |= reads_shared(loop.body)
            with self.braces(f"for ({self.index} {name} = 0; {name} < {extent}; ++{name})"):
                self.statement(loop.body)

    def thread_loop(self, loop: For) -> None:
        writes, reads = writes_shared(loop.body), reads_shared(loop.body)
        if (writes and (self.written or self.read)) or (reads and self.written):
            self.barrier()
        with self.braces(""):
            before = f"blockIdx.x % {self.program.cluster} * {self.threads} + "
            self.thread = (
                f"const int {loop.var.name} = {before if self.program.cluster > 1 else ''}threadIdx.x;"
            )
            self.line(self.thread)
            self.statement(loop.body)
        self.written |= writes
        self.read |= reads

    def barrier(self) -> None:
        role = self.rings.role
        self.line(f"meet_role<{self.threads}>();" if role else "__syncthreads();")
        self.written = self.read = False

    def copy(self, stmt: Copy) -> None:
        names = dict(self.names)
        size = stmt.buffer.dtype.bytes
        condition = "true" if stmt.cond is None else self.both(stmt.cond)
        start = self.hoisted_index(stmt.source.name, stmt.source_index)
        if is_small(stmt):
            name = f"{_IN_FLIGHT}[{len(self.in_flight)}]"
            self.line(f"{name} = {{}};")
            self.line(f"if ({condition}) {name} = *({start});")
            self.in_flight.append((stmt, tuple(self.guards)))
        else:
            at = self.hoisted_index(f"{stmt.buffer.name}_at", stmt.index, size)
            self.line(f"copy_async<{stmt.lanes * size}>({at}, {start}, {condition});")
        self.names = names

    def both(self, condition: te.Expr) -> str:
        """A condition on indices, all of whose parts are computed: a branch for each would keep copies from overlapping
        with what is around them."""
        if isinstance(condition, te.Call) and condition.op == "and" and condition.dtype is DType.BOOL:
            return f"({' & '.join(self.both(part) for part in condition.args)})"
        return self.value(condition)

    def commit(self) -> None:
        """Store the values that were loaded early instead of copied asynchronously."""
        if self.in_flight:
            with self.braces(""):
                self.line(self.thread)
                for number, (copy, guards) in enumerate(self.in_flight):
                    condition = te.all_of(guards)
                    guard = "" if condition is None else f"if ({self.value(condition)}) "
                    position = self.value(copy.index)
                    self.line(f"{guard}{copy.buffer.name}[{position}] = {_IN_FLIGHT}[{number}];")
            self.in_flight = []
        self.line("commit_copies();")

    def warp(self, stmt: Warp) -> None:
        """The instruction with its operands as the assembler writes them: registers in braces, places in brackets."""
        if self.written and any(buffer.scope is Scope.SCRATCH for buffer, _ in stmt.operands):
            self.barrier()
        if stmt.threads == WARPGROUP:
            self.rings.warpgroup(stmt)
            return
        names = dict(self.names)
        instruction, emit = stmt.instruction, stmt.instruction.emit
        if not isinstance(emit, PtxAssembly):
            raise CodegenError(f"{self.program.name}: {instruction.name} is not an instruction of PTX")
        values: list[str] = []
        texts = []
        for fragment, (buffer, index) in zip(instruction.fragments, stmt.operands, strict=True):
            first = len(values)
            if fragment.scope is Scope.SCRATCH:
                values.append(f'"r"({self.hoisted_index(f"{buffer.name}_at", index, buffer.dtype.bytes)})')
                texts.append(f"[%{first}]")
                self.read = True
                continue
            constraint, registers = self.registers(fragment, buffer, index)
            if emit.through and fragment is not instruction.fragments[0]:
                registers = [f"{emit.through}({register})" for register in registers]
            values += [f'"{constraint}"({register})' for register in registers]
            texts.append("{" + ", ".join(f"%{first + n}" for n in range(len(registers))) + "}")
            if fragment is instruction.fragments[0]:
                results = len(values)
                sign = "+" if instruction.accumulates else "="
                values = [value.replace('"', f'"{sign}', 1) for value in values]
        if instruction.accumulates:
            texts.append(texts[0])
        text = f"{emit.mnemonic} {', '.join(texts)};"
        outputs, inputs = ", ".join(values[:results]), ", ".join(values[results:])
        self.line(f'asm volatile("{text}" : {outputs} : {inputs});')
        self.names = names

    def hoisted_index(self, base: str, index: te.Expr, scale: int = 1) -> str:
        """The place `index` behind `base`, its constant part added last: places that differ in it alone then differ by
        what an instruction can add."""
        form = linear(index)
        rest = self.value(Linear(form.terms, 0).expr())
        return f"{base} + {rest if scale == 1 else f'({rest}) * {scale}'} + {form.constant * scale}"

    def registers(self, fragment: Fragment, buffer: Buffer, index: te.Expr) -> tuple[str, list[str]]:
        """The form in which the assembler takes a thread's fragment: elements smaller than a register are packed."""
        each = _REGISTER_BYTES // buffer.dtype.bytes
        first = index if each == 1 else simplify(index // each)
        names = [f"{buffer.name}[{self.inline(simplify(first + n))}]" for n in range(fragment.size // each)]
        return "r" if buffer in self.fragments else "f", names

    def vector_loop(self, loop: For) -> None:
        lane = loop.var
        stores = loop.body.stmts if isinstance(loop.body, Block) else (loop.body,)
        for stmt in stores:
            assert isinstance(stmt, Store)
            with self.braces(""):
                self.vector_store(stmt, lane)

    def vector_store(self, stmt: Store, lane: te.Var) -> None:
        lanes = lane.extent
        for load, condition in loads_of_all_lanes(stmt.value, lane).items():
            if isinstance(load.source, Buffer) and is_pack(load.source, load.indices[0], lane):
                kind = f"Pack<{scalars.c_type(load.dtype)}, {lanes}>"
                name = self.fresh()
                guard = None if condition is None else self.value(condition)
                first = self.value(simplify(te.substitute(load.indices[0], {lane: te.as_index(0)})))
                position = f"reinterpret_cast<const {kind}*>({load.source.name} + {first})"
                issue_load = stmt.streamed and load.source.scope is Scope.GLOBAL
                value = f"issue_load({position})" if issue_load else f"*{position}"
                if guard is None:
                    self.line(f"const {kind} {name} = {value};")
                else:
                    self.line(f"{kind} {name} = {{}};")
                    self.line(f"if ({guard}) {name} = {value};")
                self.packs[load] = f"{name}.at[{lane.name}]"
        packed = is_pack(stmt.buffer, stmt.index, lane)
        result = self.fresh()
        if packed:
            self.line(f"Pack<{scalars.c_type(stmt.buffer.dtype)}, {lanes}> {result};")
        self.lines.append("#pragma unroll")
        with self.braces(f"for (int {lane.name} = 0; {lane.name} < {lanes}; ++{lane.name})"):
            if packed:
                self.line(f"{result}.at[{lane.name}] = {self.value(stmt.value)};")
            else:
                self.store(stmt)
        if packed:
            first = self.value(simplify(te.substitute(stmt.index, {lane: te.as_index(0)})))
            kind = f"Pack<{scalars.c_type(stmt.buffer.dtype)}, {lanes}>"
            self.line(f"*reinterpret_cast<{kind}*>({stmt.buffer.name} + {first}) = {result};")
        self.packs = {}

    def store(self, stmt: Store) -> None:
        names = dict(self.names)
        value = self.value(stmt.value)
        self.line(f"{stmt.buffer.name}[{self.value(stmt.index)}] = {value};")
        self.names = names  # what was read may have another value from now on

    # -- expressions --------------------------------------------------------------------------------------------------

    def fresh(self) -> str:
        self.count += 1
        return f"x_{self.count}"

    def value(self, expr: te.Expr) -> str:
        """C++ text for the value. What occurs twice gets a variable; a choice that reads memory becomes a branch."""
        for node in self.repeated(expr):
            if node not in self.names:
                text = self.inline(node)
                self.names[node] = name = self.fresh()
                self.line(f"const {self.type_of(node)} {name} = {text};")
        return self.inline(expr)

    def repeated(self, expr: te.Expr) -> list[te.Expr]:
        """Sub-expressions that occur more than once outside the arms of choices, inner ones first; no trivial ones."""
        counts: Counter[te.Expr] = Counter()

        def visit(node: te.Expr) -> None:
            counts[node] += 1
            if counts[node] > 1 or node in self.packs or node in self.names:
                return
            for child in (node.cond,) if isinstance(node, te.Select) else te.children(node):
                visit(child)

        visit(expr)
        found = [n for n, c in counts.items() if c > 1 and not isinstance(n, te.Const | te.Var)]
        return [node for node in reversed(found) if node not in self.packs]

    def type_of(self, expr: te.Expr) -> str:
        if is_index(expr):
            return self.index
        return scalars.c_type(expr.dtype)

    def inline(self, expr: te.Expr) -> str:
        if expr in self.names:
            return self.names[expr]
        if isinstance(expr, te.Const):
            return str(int(expr.value)) if is_index(expr) and self.index == "int" else scalars.constant(expr)
        if isinstance(expr, te.Var):
            return expr.name if expr.extent > 1 else "0"
        if isinstance(expr, te.Load):
            if expr in self.packs:
                return self.packs[expr]
            return f"{expr.source.name}[{self.inline(expr.indices[0])}]"
        if isinstance(expr, te.Cast):
            if is_index(expr.value):
                return scalars.conversion(f"i64({self.inline(expr.value)})", DType.I64, expr.dtype)
            return scalars.conversion(self.inline(expr.value), expr.value.dtype, expr.dtype)
        if isinstance(expr, te.Select):
            return self.choice(expr)
        if isinstance(expr, Across):
            raise CodegenError(f"{self.program.name}: lanes of a GPU's thread are not combined")
        assert isinstance(expr, te.Call)
        return self.call(expr)

    def choice(self, expr: te.Select) -> str:
        condition = self.inline(expr.cond)
        if not (te.loads(expr.then) or te.loads(expr.other)):
            return f"({condition} ? {self.inline(expr.then)} : {self.inline(expr.other)})"
        name = self.fresh()
        self.line(f"{self.type_of(expr)} {name};")
        with self.braces(f"if ({condition})"):
            self.line(f"{name} = {self.value(expr.then)};")
        with self.braces("else"):
            self.line(f"{name} = {self.value(expr.other)};")
        self.names[expr] = name
        return name

    def call(self, expr: te.Call) -> str:
        dtype = expr.args[0].dtype
        args = [self.inline(arg) for arg in expr.args]
        if not all(is_index(arg) for arg in expr.args):
            return scalars.call(expr.op, dtype, args)
        if expr.op in ("add", "sub", "mul", "xor"):
            symbol = {"add": "+", "sub": "-", "mul": "*", "xor": "^"}[expr.op]
            return f"({args[0]} {symbol} {args[1]})"
        if expr.op in ("floordiv", "mod") and is_plain_division(expr):
            return f"({args[0]} {'/' if expr.op == 'floordiv' else '%'} {args[1]})"
        if expr.op in ("min", "max"):
            return f"{'minimum' if expr.op == 'min' else 'maximum'}<{self.index}>({args[0]}, {args[1]})"
        if expr.op in ("floordiv", "mod"):
            name = "floor_div" if expr.op == "floordiv" else "floor_mod"
            return f"{name}<{self.index}>({args[0]}, {args[1]})"
        return scalars.call(expr.op, dtype, args)


def _fragments(program: Program) -> set[Buffer]:
    """Register buffers that one instruction loads and others take, as registers without a type."""
    return {
        stmt.operands[0][0]
        for stmt in walk_stmts(program.body)
        if isinstance(stmt, Warp) and not stmt.instruction.accumulates
    }
