"""The verifier of loop programs; `ir.py` states the semantics that it checks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from operator import or_

from tilewright import te
from tilewright.errors import VerificationError
from tilewright.hw.bulk_copies import ALIGNMENT, MAX_BOX
from tilewright.hw.gpu import WARP
from tilewright.hw.intrinsics import Fragment, Intrinsic
from tilewright.hw.memory import LOOP_SCOPES
from tilewright.hw.warpgroups import ATOM_ROWS, ROW_BYTES
from tilewright.loops.clusters import may_be_shared
from tilewright.loops.guards import Guard, bounds_under
from tilewright.loops.ir import (
    SCRATCH_LIMIT,
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
    Location,
    Multiplied,
    Pop,
    Prefetch,
    Program,
    Push,
    Release,
    Ring,
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
)
from tilewright.te.index import Bounds, bounds, coefficient, divisor_of, linear, simplify

_LEAVES = (te.Var, te.Const)  # which have nothing to verify
_COPY_BYTES = 16  # maximum bytes copied by one instruction


def verify_program(program: Program, scopes: Collection[Scope] = LOOP_SCOPES) -> None:
    """Raise VerificationError, naming the statement, if the program breaks a rule. `scopes`: those of the target
    (`hw.memory.scopes_of`)."""
    foreign = foreign_scope(program, scopes)
    if foreign is not None:
        raise VerificationError(f"program {program.name}: {foreign}")
    _Verifier(program).check()


class _Verifier:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.loops: list[For] = []
        self.accessed: set[Buffer] = set()  # local buffers that are read or written
        # The starts of a register buffer's vectors, as bit masks by number of lanes.
        self.vectors: dict[Buffer, dict[int, int]] = {}
        self.threads = thread_count(program)
        self.guards: tuple[Guard, ...] = ()  # conditions of enclosing branches
        self.written: dict[Buffer, int] = {}  # written elements of register buffers, as bit masks
        self.awaited: list[tuple[Buffer, int]] = []  # elements that branches read before they are written
        self.role = ""  # of the threads that the statement is for
        self.filled_by: dict[Ring, tuple[frozenset[Buffer], str]] = {}  # the buffers in its slots, and a role

    def fail(self, what: str) -> None:
        where = " > ".join(f"{loop.kind.value} {loop.var.name}" for loop in self.loops) or "top"
        raise VerificationError(f"program {self.program.name}, at {where}: {what}")

    def check(self) -> None:
        *inputs, output = self.program.params
        self.inputs, self.output = set(inputs), output
        names = [buffer.name for buffer in self.program.params]
        if len(set(names)) != len(names):
            self.fail("two parameters have one name")
        scratch = [b for b in local_buffers(self.program) if b.scope is Scope.SCRATCH]
        held = sum(buffer.size * buffer.dtype.bytes for buffer in scratch)
        if held > SCRATCH_LIMIT:
            self.fail(f"{held} bytes of scratch memory, of at most {SCRATCH_LIMIT}")
        if self.program.parallel_extent % self.program.together:
            self.fail(f"{self.program.parallel_extent} blocks in clusters of {self.program.together}")
        self.statement(self.program.body, outermost=True)
        for buffer, elements in self.awaited:
            self.defined(buffer, elements)
        for buffer, starts in self.vectors.items():
            self.disjoint(buffer, starts)
        for buffer in self.accessed - set(local_buffers(self.program)):
            self.fail(f"{buffer.scope.value} buffer {buffer.name} is read and never written")

    def statement(self, stmt: Stmt, outermost: bool = False) -> None:
        if self.role == "producer" and not isinstance(stmt, Block | For | If | Fill):
            self.fail(f"a producer only fills rings, and this is a {type(stmt).__name__}")
        if isinstance(stmt, Block):
            for child in stmt.stmts:
                self.statement(child)
        elif isinstance(stmt, For):
            self.loop(stmt, outermost)
        elif isinstance(stmt, If):
            self.branch(stmt)
        elif isinstance(stmt, Prefetch):
            self.bound(stmt.index)
            self.expression(stmt.index, self.guards)
        elif isinstance(stmt, Transpose):
            self.transpose(stmt)
        elif isinstance(stmt, Slide):
            self.slide(stmt)
        elif isinstance(stmt, Combine):
            self.combine(stmt)
        elif isinstance(stmt, Copy):
            self.copy(stmt)
        elif isinstance(stmt, Commit | Await):
            self.between_threads(type(stmt).__name__.lower())
        elif isinstance(stmt, BoxCopy):
            self.fail(f"a box of {stmt.source.buffer.name} is copied outside of a fill")
        elif isinstance(stmt, Fill):
            self.fill(stmt)
        elif isinstance(stmt, Filled | Release):
            self.at_ring(stmt)
        elif isinstance(stmt, Multiplied):
            self.between_threads("multiplied")
        elif isinstance(stmt, Roles):
            self.roles(stmt)
        elif isinstance(stmt, Push | Pop):
            if stmt.source == stmt.target:
                self.fail(f"{stmt.source} waits for itself in queue {stmt.queue}")
        elif isinstance(stmt, Warp):
            self.warp(stmt)
        elif isinstance(stmt, Invoke):
            self.invoke(stmt)
        else:
            self.store(stmt)

    def branch(self, stmt: If) -> None:
        self.bound(stmt.cond)
        self.expression(stmt.cond, self.guards)
        outer = self.guards
        self.guards = (*outer, (stmt.cond, True))
        self.statement(stmt.then)
        if stmt.other is not None:
            self.guards = (*outer, (stmt.cond, False))
            self.statement(stmt.other)
        self.guards = outer

    def bound(self, *expressions: te.Expr) -> None:
        bound = {loop.var for loop in self.loops}
        for expr in expressions:
            unbound = {var for var in te.variables(expr) if var.extent > 1} - bound
            if unbound:
                self.fail(f"{sorted(var.name for var in unbound)} used outside of their loops")

    def loop(self, loop: For, outermost: bool) -> None:
        if any(outer.var.name == loop.var.name for outer in self.loops):
            self.fail(f"variable {loop.var.name} is bound twice")
        if loop.kind is Kind.PARALLEL and not outermost:
            self.fail("only the outermost statement may be parallel")
        if loop.kind is Kind.VIRTUAL:
            self.fail("virtual threads are interleaved by a pass before anything runs them")
        if self.role == "producer" and loop.kind not in (Kind.SERIAL, Kind.UNROLL):
            self.fail(f"a producer is one thread, and loop {loop.var.name} is {loop.kind.value}")
        if loop.kind is Kind.THREAD:
            if any(outer.kind is Kind.THREAD for outer in self.loops):
                self.fail("a thread loop is inside another")
            if loop.var.extent != self.threads:
                self.fail("thread loops of different extents")
        if any(outer.kind is Kind.VECTOR for outer in self.loops):
            self.fail("a vector loop holds only stores")
        if loop.kind is Kind.VECTOR and not _only_stores(loop.body):
            self.fail("a vector loop holds only stores")
        self.loops.append(loop)
        self.statement(loop.body)
        self.loops.pop()

    def writes(self, buffer: Buffer) -> None:
        if buffer in self.inputs:
            self.fail(f"{buffer.name} is an input and is written")
        if buffer.of is not None:
            self.fail(f"{buffer.name} is a view and is written")
        if buffer.scope is Scope.GLOBAL and buffer != self.output:
            self.fail(f"{buffer.name} is written and is not the output")

    def store(self, stmt: Store) -> None:
        self.writes(stmt.buffer)
        if stmt.value.dtype is not stmt.buffer.dtype:
            self.fail(
                f"a {stmt.value.dtype} is stored into {stmt.buffer.name}, which holds {stmt.buffer.dtype}"
            )
        self.bound(stmt.index, stmt.value)
        self.access(stmt.buffer, stmt.index, self.guards)
        self.expression(stmt.value, self.guards)
        if stmt.buffer.scope is Scope.REGISTER:
            self.write(stmt.buffer, _elements(stmt.index))

    def expression(self, expr: te.Expr, guards: tuple[Guard, ...]) -> None:
        if isinstance(expr, te.Reduce):
            self.fail("a reduction is left in an expression")
        if isinstance(expr, te.Select):
            self.expression(expr.cond, guards)
            self.expression(expr.then, (*guards, (expr.cond, True)))
            self.expression(expr.other, (*guards, (expr.cond, False)))
            return
        if isinstance(expr, te.Load):
            if not isinstance(expr.source, Buffer) or len(expr.indices) != 1:
                self.fail(f"{expr.source.name} is read with {len(expr.indices)} indices")
            assert isinstance(expr.source, Buffer)
            if expr.source.memory == self.output:
                self.fail("the output is read")
            self.access(expr.source, expr.indices[0], guards)
            if expr.source.scope is Scope.REGISTER:
                self.read(expr.source, _elements(expr.indices[0]), guards)
        if isinstance(expr, Across):
            if expr.offset + expr.lanes > expr.buffer.size:
                self.fail(f"lanes beyond {expr.buffer.name}")
            self.vector(expr.buffer, 1 << expr.offset, expr.lanes)
            self.read(expr.buffer, _run(expr.offset, expr.lanes), guards)
        for child in te.children(expr):
            if child.__class__ not in _LEAVES:
                self.expression(child, guards)

    def access(self, buffer: Buffer, index: te.Expr, guards: tuple[Guard, ...]) -> None:
        reached: Bounds | None = bounds(simplify(index))
        if not _inside(reached, buffer) and not te.loads(
            index
        ):  # indices that depend on data are clamped where they are made
            asked = {var for condition, _ in guards for var in te.variables(condition)}
            # For a local buffer, only bounds that the guards test are accepted.
            fixed = buffer.scope is not Scope.GLOBAL and not asked & te.variables(index)
            reached = bounds_under(index, guards) if guards and not fixed else reached
            if reached is not None and not _inside(reached, buffer):
                low, high = reached
                self.fail(f"{buffer.name}[{buffer.size}] is accessed at {low}..{high}")
        if buffer.scope is not Scope.GLOBAL:
            self.accessed.add(buffer.memory)
        if buffer.scope is Scope.REGISTER:
            if buffer.of is not None:
                self.fail(f"{buffer.name} is a view of registers")
            self.register_access(buffer, index)

    def register_access(self, buffer: Buffer, index: te.Expr) -> None:
        lane = next((loop.var for loop in self.loops if loop.kind is Kind.VECTOR), None)
        fixed = {loop.var for loop in self.loops if loop.kind in (Kind.UNROLL, Kind.VECTOR)}
        if te.variables(simplify(index)) - fixed:
            self.fail(f"register buffer {buffer.name} is accessed at a place that moves with a loop")
        stride = coefficient(index, lane) if lane is not None else 0
        if stride not in (0, 1):
            self.fail(f"register buffer {buffer.name} is accessed with stride {stride}")
        lanes = lane.extent if lane is not None and stride == 1 else 1
        starts = _elements(index, without=lane if lanes > 1 else None)
        if starts is not None:
            self.vector(buffer, starts, lanes)

    def read(self, buffer: Buffer, elements: int | None, guards: tuple[Guard, ...]) -> None:
        """Elements that nothing has written yet are undefined in the first iteration of enclosing loops. A branch may
        skip that iteration; what it reads must be written somewhere."""
        if elements is None:
            return
        if guards:
            self.awaited.append((buffer, elements))
        else:
            self.defined(buffer, elements)

    def defined(self, buffer: Buffer, elements: int) -> None:
        missing = elements & ~self.written.get(buffer, 0)
        if missing:
            first = (missing & -missing).bit_length() - 1
            self.fail(f"register buffer {buffer.name}[{first}] is read before it is written")

    def write(self, buffer: Buffer, elements: int | None) -> None:
        """None: unknown which, so all of them may be written."""
        self.written[buffer] = self.written.get(buffer, 0) | (
            _run(0, buffer.size) if elements is None else elements
        )

    def vector(self, buffer: Buffer, starts: int, lanes: int) -> None:
        if self.threads > 1:
            return  # registers of a GPU thread are scalars
        found = self.vectors.setdefault(buffer, {})
        found[lanes] = found.get(lanes, 0) | starts

    def disjoint(self, buffer: Buffer, starts: dict[int, int]) -> None:
        """Each vector is a separate register: no element may be in two of them."""
        seen = 0
        for lanes, begins in sorted(starts.items()):
            for lane in range(lanes):
                if seen & begins << lane:
                    self.fail(
                        f"register buffer {buffer.name} is accessed in vectors of {lanes} lanes that overlap others"
                    )
                seen |= begins << lane

    def transpose(self, stmt: Transpose) -> None:
        size = stmt.rows * stmt.columns
        if stmt.buffer.scope is not Scope.REGISTER:
            self.fail(f"{stmt.buffer.name} is transposed and is not in registers")
        if size > stmt.buffer.size or size % stmt.lanes:
            self.fail(
                f"{stmt.rows} x {stmt.columns} elements of {stmt.buffer.name} are not a tile of vectors"
            )
        starts = sum(1 << start for start in range(0, size, stmt.lanes))
        self.vector(stmt.buffer, starts, stmt.lanes)
        self.write(stmt.buffer, _run(0, size))

    def slide(self, stmt: Slide) -> None:
        for buffer, position in ((stmt.buffer, 0), (stmt.following, stmt.position)):
            if buffer.scope is not Scope.REGISTER or not 0 <= position <= buffer.size - stmt.lanes:
                self.fail(f"{buffer.name}[{position}] is not a register vector of {stmt.lanes} lanes")
            self.vector(buffer, 1 << position, stmt.lanes)
        if stmt.buffer == stmt.following or not 0 <= stmt.begin <= stmt.lanes:
            self.fail(f"{stmt.buffer.name} and {stmt.following.name} have no vector from {stmt.begin} on")
        self.write(stmt.buffer, _run(0, stmt.lanes))

    def combine(self, stmt: Combine) -> None:
        if any(loop.kind is Kind.THREAD for loop in self.loops):
            self.fail("threads are combined inside a thread loop")
        even = stmt.group % WARP == 0 or stmt.group & (stmt.group - 1) == 0
        if stmt.group < 1 or not even or self.threads % stmt.group:
            self.fail(f"groups of {stmt.group} among {self.threads} threads")
        if stmt.buffer.scope is not Scope.REGISTER or not 0 <= stmt.offset < stmt.buffer.size:
            self.fail(f"{stmt.buffer.name}[{stmt.offset}] is not a register")
        self.vector(stmt.buffer, 1 << stmt.offset, 1)
        self.read(stmt.buffer, 1 << stmt.offset, self.guards)

    def between_threads(self, what: str) -> None:
        if any(loop.kind is Kind.THREAD for loop in self.loops):
            self.fail(f"{what} inside a thread loop")

    def copy(self, stmt: Copy) -> None:
        if stmt.buffer.scope is not Scope.SCRATCH or stmt.source not in self.inputs:
            self.fail(
                f"a copy from {stmt.source.name} to {stmt.buffer.name}: not from an input to scratch memory"
            )
        if stmt.buffer.dtype is not stmt.source.dtype or stmt.lanes * stmt.buffer.dtype.bytes > _COPY_BYTES:
            self.fail(f"a copy of {stmt.lanes} {stmt.source.dtype} as {stmt.buffer.dtype}")
        guards = self.guards
        if stmt.cond is not None:
            self.bound(stmt.cond)
            guards = (*guards, (stmt.cond, True))
        self.bound(stmt.index, stmt.source_index)
        for buffer, index, under in (
            (stmt.buffer, stmt.index, self.guards),
            (stmt.source, stmt.source_index, guards),
        ):
            self.access(buffer, index, under)
            # A copy that starts at a multiple of its lanes ends within the same aligned group. Bounds alone do not
            # show that if an index is a remainder.
            if buffer.size % stmt.lanes or divisor_of(simplify(index)) % stmt.lanes:
                self.access(buffer, index + (stmt.lanes - 1), under)

    # -- rings --------------------------------------------------------------------------------------------------------

    def roles(self, stmt: Roles) -> None:
        if any(loop.kind is not Kind.PARALLEL for loop in self.loops) or self.guards or self.role:
            self.fail("roles divide the whole work of a block")
        self.role = "producer"
        self.statement(stmt.producer)
        self.role = "consumer"
        self.statement(stmt.consumer)
        self.role = ""

    def fill(self, stmt: Fill) -> None:
        self.between_threads("fill")
        if self.role == "consumer":
            self.fail(f"the consumer fills {stmt.ring.name}")
        if stmt.ring.slots < 2 or not stmt.copies:
            self.fail(f"{stmt.ring.name} has {stmt.ring.slots} slots for {len(stmt.copies)} boxes")
        found = frozenset(copy.buffer for copy in stmt.copies), self.role
        if self.filled_by.setdefault(stmt.ring, found) != found:
            self.fail(f"{stmt.ring.name} is filled with different buffers, or by different roles")
        self.bound(stmt.number)
        for copy in stmt.copies:
            self.box(copy)

    def box(self, copy: BoxCopy) -> None:
        box, source, name = copy.box, copy.source, copy.source.buffer.name
        size = box.dtype.bytes
        if copy.buffer.scope is not Scope.SCRATCH or source.buffer not in self.inputs:
            self.fail(f"a box from {name} to {copy.buffer.name}: not from an input to scratch memory")
        if not copy.buffer.dtype is source.buffer.dtype is box.dtype:
            self.fail(f"a box of {box.dtype} from {source.buffer.dtype} to {copy.buffer.dtype}")
        if box.rows > MAX_BOX or box.rows % ATOM_ROWS or box.row_bytes not in ROW_BYTES:
            self.fail(f"a box of {box.rows} rows of {box.row_bytes} bytes")
        if (
            source.stride * size % ALIGNMENT
            or (source.rows - 1) * source.stride + source.columns > source.buffer.size
        ):
            self.fail(
                f"{name}[{source.buffer.size}] is no matrix of {source.rows} x {source.columns}, its rows"
                f" {source.stride} elements apart"
            )
        self.bound(copy.index, copy.row, copy.column)
        if copy.shared:
            blocks = next((loop.var for loop in self.loops if loop.kind is Kind.PARALLEL), None)
            if (
                blocks is None
                or not may_be_shared(copy, blocks, self.program.together)
                or self.role != "producer"
            ):
                self.fail(f"a box of {name} is not the same for {self.program.together} neighbouring blocks")
        atom = ATOM_ROWS * box.columns
        if divisor_of(simplify(copy.index)) % atom or copy.buffer.size % atom:
            self.fail(f"a box in {copy.buffer.name} does not begin at a multiple of {atom} elements")
        self.access(copy.buffer, copy.index, self.guards)
        self.access(copy.buffer, copy.index + (box.rows * box.columns - 1), self.guards)

    def at_ring(self, stmt: Filled | Release) -> None:
        word = "awaited" if isinstance(stmt, Filled) else "released"
        self.between_threads(word)
        self.bound(stmt.number)
        if stmt.ring not in self.filled_by:
            self.fail(f"{stmt.ring.name} is {word} and nothing has filled it")

    def warp(self, stmt: Warp) -> None:
        self.between_threads(stmt.instruction.name)
        if self.threads % stmt.threads or stmt.thread.extent != self.threads:
            self.fail(f"{stmt.instruction.name} among {self.threads} threads")
        if stmt.running and stmt.threads == WARP:
            self.fail(f"{stmt.instruction.name} is complete when it ends")
        for fragment, (buffer, index), pitch in zip(
            stmt.instruction.fragments, stmt.operands, stmt.operand_pitches, strict=True
        ):
            if pitch and (pitch * buffer.dtype.bytes not in ROW_BYTES or fragment.scope is Scope.REGISTER):
                self.fail(f"{stmt.instruction.name}: {buffer.name} in rows of {pitch} elements")
            if buffer.scope is not fragment.scope or buffer.dtype is not fragment.tensor.dtype:
                self.fail(
                    f"{stmt.instruction.name}: {buffer.name} cannot be its operand {fragment.tensor.name}"
                )
            self.loops.append(For(stmt.thread, Kind.THREAD, Block(())))
            self.bound(index)
            for end in (0, _last(fragment, pitch)):
                self.access(buffer, index + end, self.guards)
            self.loops.pop()
        fragments = [
            (buffer, index, fragment.size)
            for fragment, (buffer, index) in zip(stmt.instruction.fragments, stmt.operands, strict=True)
        ]
        self.operands(fragments, stmt.instruction)

    def operands(self, operands: Sequence[tuple[Buffer, te.Expr, int]], intrinsic: Intrinsic) -> None:
        """The operands of an instruction: the result, which is written, and the others; their starts and elements."""
        for number, (buffer, index, size) in enumerate(operands):
            if buffer.scope is Scope.REGISTER and (number or intrinsic.accumulates):
                self.read(buffer, _elements(index, size), self.guards)
        buffer, index, size = operands[0]
        if buffer.scope is Scope.REGISTER:
            self.write(buffer, _elements(index, size))

    def invoke(self, stmt: Invoke) -> None:
        name = stmt.intrinsic.name
        if any(loop.kind in (Kind.VECTOR, Kind.THREAD) for loop in self.loops):
            self.fail(f"{name} inside a vector or a thread loop")
        result, *inputs = stmt.operands
        self.writes(result.buffer)
        if len(set(result.offsets)) != len(result.offsets):
            self.fail(f"{name}: two lanes of the result are one element of {result.buffer.name}")
        reads = [*inputs, *([result] if stmt.intrinsic.accumulates else [])]
        if any(position.buffer.memory == self.output for position in reads):
            self.fail("the output is read")
        for fragment, position in zip(stmt.intrinsic.fragments, stmt.operands, strict=True):
            if position.buffer.dtype is not fragment.tensor.dtype or len(position.offsets) != fragment.size:
                self.fail(f"{name}: {position.buffer.name} cannot be its operand {fragment.tensor.name}")
            self.bound(position.index)
            self.position(name, position)
        self.operands(
            [(position.buffer, position.index, len(position.offsets)) for position in stmt.operands],
            stmt.intrinsic,
        )

    def position(self, name: str, position: Location) -> None:
        buffer = position.buffer
        if buffer.scope is not Scope.REGISTER:
            for end in (min(position.offsets), max(position.offsets)):
                self.access(buffer, simplify(position.index + end), self.guards)
            return
        fixed = {loop.var for loop in self.loops if loop.kind is Kind.UNROLL}
        if not position.is_run or te.variables(simplify(position.index)) - fixed:
            self.fail(f"{name}: {buffer.name} is in registers, and is not a vector at a constant index")
        reached = bounds(simplify(position.index + (len(position.offsets) - 1)))
        if not _inside(bounds(simplify(position.index)), buffer) or not _inside(reached, buffer):
            self.fail(f"{name}: it accesses what is outside of {buffer.name}[{buffer.size}]")
        starts = _elements(position.index)
        if starts is not None:
            self.vector(buffer, starts, len(position.offsets))


def _last(fragment: Fragment, pitch: int) -> int:
    """The distance of an operand's last element from its first; in a matrix, before its chunks are swizzled."""
    rows = fragment.tensor.shape[0]
    return (rows - 1) * pitch + fragment.tensor.shape[1] - 1 if pitch else fragment.size - 1


def _inside(reached: Bounds | None, buffer: Buffer) -> bool:
    return reached is None or (
        reached[0] is not None and reached[1] is not None and reached[0] >= 0 and reached[1] < buffer.size
    )


def _run(begin: int, count: int) -> int:
    """A bit mask of `count` neighbours."""
    return ((1 << count) - 1) << begin


def _elements(index: te.Expr, size: int = 1, without: te.Var | None = None) -> int | None:
    """The elements of a register buffer that an access from `index` on reaches, over all values of the unrolled loops
    except `without`, as a bit mask; None if unknown."""
    form = linear(index)
    found = _run(0, size)
    begin = form.constant
    for var, step in form.terms.items():
        if not isinstance(var, te.Var):
            return None
        if var == without:
            continue
        last = step * (var.extent - 1)
        begin += min(0, last)
        found = reduce(or_, (found << abs(step) * n for n in range(1, var.extent)), found)
    return found << begin if begin >= 0 else None


def _only_stores(stmt: Stmt) -> bool:
    return isinstance(stmt, Store) or (isinstance(stmt, Block) and all(map(_only_stores, stmt.stmts)))
