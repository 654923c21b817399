"""Loops of a tile kernel as Gemmini's instructions: each nest over a tile's elements is matched to one kind, in the
order in which the serial loops around it run.

    for r, c: copy tile <- x      mvin, mvin3      one for each `dim` rows and four blocks of columns
    for m, n: sums = 0            none: the first product replaces what the accumulator holds
    for m, n, k: sums += a * b    preload, compute
    for m, n: out = f(sums)       config_st, mvout

Copies are asynchronous: their instructions may come later, up to the end of their group. They are spread over what else
is between, so that the station has work for the array while they wait for the bus.

A tile of R rows and C columns lies in blocks of `dim` columns, R rows each; a tile with two buffers has them one behind
the other. Zeros that nothing reads are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tilewright import te
from tilewright.codegen.gemmini.tiles.lower import Loops, refuse
from tilewright.codegen.gemmini.tiles.match import Epilogue, Multiply, epilogue, operands_of
from tilewright.errors import InstructionError
from tilewright.hw.gemmini import ACCUMULATOR as ACCUMULATOR_SCOPE
from tilewright.hw.gemmini import SCRATCHPAD
from tilewright.loops.ir import (
    Await,
    Block,
    Buffer,
    Commit,
    Copy,
    For,
    If,
    Kind,
    Program,
    Stmt,
    Store,
    local_buffers,
)
from tilewright.runtime.gemmini.isa import (
    ACCUMULATE,
    ACCUMULATOR,
    COMPUTES,
    FULL,
    MAX_BLOCKS,
    MVINS,
    NONE,
    ONE,
    Array,
    Instruction,
    make,
    scale_bits,
)
from tilewright.support.arith import ceil_div
from tilewright.te.scalars import SCALARS

_MAX_INSTRUCTIONS = 1 << 22
Environment = dict[te.Var, "int | np.ndarray"]


@dataclass
class Selected:
    """Instructions. Each DRAM address is relative to the first element of a parameter, which is given by position."""

    program: list[Instruction]
    operands: dict[int, str]
    spans: dict[str, tuple[int, int]]  # bytes of each parameter that are accessed: first, behind the last
    stored: set[str]
    rows: tuple[int, int]  # that all tiles take of the scratchpad and of the accumulator


def placed(loops: Loops, program: Program, dim: int) -> tuple[dict[str, int], tuple[int, int]]:
    """The first row of each tile, and the rows that all tiles take in each memory."""
    first: dict[str, int] = {}
    used = {SCRATCHPAD: 0, ACCUMULATOR_SCOPE: 0}
    for buffer in local_buffers(program):
        rows, cols = loops.tiles[buffer.name]
        first[buffer.name] = used[buffer.scope]
        used[buffer.scope] += buffer.size // (rows * cols) * rows * ceil_div(cols, dim)
    return first, (used[SCRATCHPAD], used[ACCUMULATOR_SCOPE])


def select(loops: Loops, program: Program, machine: Array) -> Selected:
    """Select instructions. Raises AcceleratorMatchError for accesses without an instruction, or tiles that do not fit
    the memories."""
    first, used = placed(loops, program, machine.dim)
    for scope, name, rows, all_rows in (
        (SCRATCHPAD, "scratchpad", used[0], machine.scratchpad_rows),
        (ACCUMULATOR_SCOPE, "accumulator", used[1], machine.accumulator_rows),
    ):
        if rows > all_rows:
            largest = max((b for b in local_buffers(program) if b.scope is scope), key=lambda b: b.size)
            refuse(
                f"the tiles take {rows} rows of the {name}, which has {all_rows}",
                loops.where[largest.name],
                "use smaller blocks, or an accelerator with a larger memory",
            )
    made = _Selection(loops, first, machine)
    made.stmt(program.body, {})
    made.close_group()
    items = _without_unread_zeros([*made.items, _Item(make("fence"))], machine)
    operands = {at: item.operand for at, item in enumerate(items) if item.operand is not None}
    return Selected([item.instruction for item in items], operands, made.spans, made.stored, used)


@dataclass(frozen=True)
class _Item:
    """An instruction. `operand`: the parameter that its DRAM address is relative to. `block_stride`: of a load, the
    rows from one block to the next."""

    instruction: Instruction
    operand: str | None = None
    block_stride: int = 0


@dataclass
class _Selection:
    loops: Loops
    first: Mapping[str, int]
    machine: Array
    items: list[_Item] = field(default_factory=lambda: [_Item(make("config_ex", a_stride=1))])
    copies: list[_Item] = field(default_factory=list)  # of the group that is open
    begun: int = 0  # where the group's first copy was
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)  # sums that are 0, and not yet written
    config: dict[int, Instruction] = field(default_factory=dict)
    matched: dict[int, tuple[Stmt, Multiply | Epilogue]] = field(default_factory=dict)

    def stmt(self, stmt: Stmt, env: Environment) -> None:
        if isinstance(stmt, Block):
            for each in stmt.stmts:
                self.stmt(each, env)
        elif isinstance(stmt, For) and stmt.kind is Kind.SERIAL:
            for number in range(stmt.var.extent):
                self.stmt(stmt.body, {**env, stmt.var: number})
        elif isinstance(stmt, Commit):
            self.close_group()
        elif not isinstance(stmt, Await):  # the station knows what an instruction waits for
            self._nest(stmt, env)
            if len(self.items) > _MAX_INSTRUCTIONS:
                refuse(
                    f"the launch has more than {_MAX_INSTRUCTIONS} instructions", None, "use larger blocks"
                )

    def close_group(self) -> None:
        """Distribute copies evenly among the instructions since the group's first; a preload stays with its compute."""
        others = self.items[self.begun :]
        del self.items[self.begun :]
        taken = 0
        for at, item in enumerate(others):
            if item.instruction.name == "preload":
                wanted = ceil_div((at + 1) * len(self.copies), len(others))
                self.items += self.copies[taken:wanted]
                taken = max(taken, wanted)
            self.items.append(item)
        self.items += self.copies[taken:]
        self.copies.clear()

    def _nest(self, stmt: Stmt, env: Environment) -> None:
        axes = []
        while isinstance(stmt, For):
            axes.append(stmt.var)
            stmt = stmt.body
        cond = None
        if isinstance(stmt, If):
            cond, stmt = stmt.cond, stmt.then
        if isinstance(stmt, Copy):
            self._copy(stmt, axes, env)
        elif isinstance(stmt, Store) and stmt.buffer.scope is not ACCUMULATOR_SCOPE:
            self._store(stmt, cond, axes, env)
        elif isinstance(stmt, Store) and isinstance(stmt.value, te.Const):
            self.fresh.add(stmt.buffer.name)
        else:
            assert isinstance(stmt, Store)
            self._multiply(stmt, axes, env)

    # -- tiles ----------------------------------------------------------------------------------------------------

    def _base(self, buffer: Buffer, index: te.Expr, env: Environment) -> int:
        """The row of the tile's buffer that holds the access's first element."""
        rows, cols = self.loops.tiles[buffer.name]
        slot, within = divmod(int(_evaluated(index, env)), rows * cols)
        assert within == 0
        return self.first[buffer.name] + slot * rows * ceil_div(cols, self.machine.dim)

    def _grid(self, axes: list[te.Var], rows: int, cols: int, env: Environment) -> Environment:
        """The environment with the indices of all elements of a tile."""
        found = dict(env)
        for axis in axes:
            along = np.arange(axis.extent)
            found[axis] = along[:, None] if axis.name == "r" else along[None, :]
        return found

    def _access(
        self,
        name: str,
        index: te.Expr,
        cond: te.Expr | None,
        tile: tuple[int, int],
        env: Environment,
        size: int,
    ) -> tuple[int, int, tuple[int, int], int]:
        """The byte of element (0, 0), the bytes from one row to the next, which rows are accessed, and how many columns
        of each."""
        where = self.loops.where.get(name)
        inside = np.broadcast_to(np.asarray(True if cond is None else _evaluated(cond, env)), tile)
        at = np.broadcast_to(_evaluated(index, env), tile).astype(np.int64)
        rows, cols = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
        if not rows.size:
            return 0, 0, (0, 0), 0
        low, high, width = int(rows[0]), int(rows[-1]) + 1, int(cols[-1]) + 1
        if cols[0] != 0 or not inside[low:high, :width].all():
            refuse("the elements that a mask leaves must be the first columns of neighbouring rows", where)
        start = int(at[low, 0])
        pitch = int(at[low + 1, 0]) - start if high - low > 1 else 0
        regular = start + pitch * np.arange(high - low)[:, None] + np.arange(width)
        if not np.array_equal(at[low:high, :width], regular) or pitch < 0:
            refuse(
                "an instruction moves rows whose elements lie behind each other, all at one distance",
                where,
                "the last axis of a block must have stride 1, and the strides must not be negative",
            )
        return (start - low * pitch) * size, pitch * size, (low, high), width

    def _touch(self, name: str, dram: int, rows: int, pitch: int, width: int) -> str:
        low, high = self.spans.get(name, (dram, dram))
        self.spans[name] = min(low, dram), max(high, dram + (rows - 1) * pitch + width)
        return name

    def _configure(self, slot: int, instruction: Instruction, items: list[_Item]) -> None:
        if self.config.get(slot) != instruction:
            self.config[slot] = instruction
            items.append(_Item(instruction))

    # -- instructions ---------------------------------------------------------------------------------------------

    def _copy(self, copy: Copy, axes: list[te.Var], env: Environment) -> None:
        tile, dim = self.loops.tiles[copy.buffer.name], self.machine.dim
        rows, cols = tile
        size = copy.source.dtype.bytes
        base = self._base(copy.buffer, copy.index, {**env, **dict.fromkeys(axes, 0)})
        grid = self._grid(axes, rows, cols, env)
        dram, pitch, (low, high), width = self._access(
            copy.buffer.name, copy.source_index, copy.cond, tile, grid, size
        )
        in_accumulator = copy.buffer.scope is ACCUMULATOR_SCOPE
        self.fresh.discard(copy.buffer.name)
        slot = 2 if in_accumulator else self._slot(copy.buffer)
        local = base | (ACCUMULATOR if in_accumulator else 0)
        if not self.copies:
            self.begun = len(self.items)
        config = make("config_ld", slot=slot, stride=pitch, scale=ONE, block_stride=rows)
        self._configure(slot, config, self.copies)
        for begin, end, exists in ((0, low, False), (low, high, True), (high, rows, False)):
            for row in range(begin, end, dim):
                count = min(dim, end - row)
                covered = width if exists else 0
                for col in range(0, cols, MAX_BLOCKS * dim):
                    stop = min(cols, col + MAX_BLOCKS * dim)
                    there = min(covered, stop)
                    to = local + col // dim * rows + row
                    if there > col:
                        source = dram + row * pitch + col * size
                        name = self._touch(copy.source.name, source, count, pitch, (there - col) * size)
                        load = make(MVINS[slot], dram=source, local=to, rows=count, cols=there - col)
                        self.copies.append(_Item(load, name, rows))
                    rest = max(col, ceil_div(there, dim) * dim) if there > col else col
                    if rest < stop:
                        to = local + rest // dim * rows + row
                        load = make(MVINS[slot], local=to, rows=count, cols=stop - rest)
                        self.copies.append(_Item(load, None, rows))

    def _slot(self, buffer: Buffer) -> int:
        """The load configuration for the scratchpad; the operands of a loop alternate between the two."""
        return list(self.loops.tiles).index(buffer.name) % 2

    def _multiply(self, stmt: Store, axes: list[te.Var], env: Environment) -> None:
        found = self._match(stmt, axes)
        assert isinstance(found, Multiply)
        dim, (m, n, k) = self.machine.dim, found.extents
        zero = {**env, **dict.fromkeys(axes, 0)}
        sums, left, right = (
            self._base(each.source, each.indices[0], zero)  # type: ignore[arg-type]
            for each in (found.sums, found.left, found.right)
        )
        fresh = stmt.buffer.name in self.fresh
        self.fresh.discard(stmt.buffer.name)
        for col in range(0, n, dim):
            cols = min(dim, n - col)
            for depth in range(0, k, dim):
                deep = min(dim, k - depth)
                add = 0 if fresh and depth == 0 else ACCUMULATE
                for row in range(0, m, dim):
                    rows = min(dim, m - row)
                    into = ACCUMULATOR | (sums + col // dim * m + row) | add
                    b = NONE if row else right + col // dim * k + depth
                    a = left + depth // dim * m + row
                    preload = make("preload", b=b, rows=deep, cols=cols, c=into, c_rows=rows, c_cols=cols)
                    compute = make(COMPUTES[bool(row)], a=a, rows=rows, cols=deep, d=NONE)
                    self.items += [_Item(preload), _Item(compute)]

    def _store(self, stmt: Store, cond: te.Expr | None, axes: list[te.Var], env: Environment) -> None:
        found = self._match(stmt, axes)
        assert isinstance(found, Epilogue) and isinstance(found.sums.source, Buffer)
        buffer, dim = found.sums.source, self.machine.dim
        rows, cols = tile = self.loops.tiles[buffer.name]
        base = self._base(buffer, found.sums.indices[0], {**env, **dict.fromkeys(axes, 0)})
        if buffer.name in self.fresh:
            self._zeros(buffer, base)
        size = stmt.buffer.dtype.bytes
        name = stmt.buffer.name
        dram, pitch, (low, high), width = self._access(
            name, stmt.index, cond, tile, self._grid(axes, rows, cols, env), size
        )
        if not width:
            return
        if found.scale is None:
            config = make("config_st", stride=pitch, scale=ONE, relu=found.relu)
        else:
            try:
                config = make("config_st", stride=pitch, scale=scale_bits(found.scale), relu=found.relu)
            except InstructionError as error:
                refuse(error.message, self.loops.where.get(name))
        self._configure(3, config, self.items)
        self.stored.add(name)
        full = FULL if found.scale is None else 0
        for row in range(low, high, dim):
            count = min(dim, high - row)
            for col in range(0, width, dim):
                there = min(dim, width - col)
                to = dram + row * pitch + col * size
                self._touch(name, to, count, pitch, there * size)
                local = ACCUMULATOR | full | (base + col // dim * rows + row)
                self.items.append(_Item(make("mvout", dram=to, local=local, rows=count, cols=there), name))

    def _zeros(self, buffer: Buffer, base: int) -> None:
        """Load zeros into sums to which nothing was added."""
        rows, cols = self.loops.tiles[buffer.name]
        dim = self.machine.dim
        self.close_group()
        self._configure(2, make("config_ld", slot=2, scale=ONE, block_stride=rows), self.items)
        for row in range(0, rows * ceil_div(cols, dim), dim):
            count = min(dim, rows * ceil_div(cols, dim) - row)
            load = make("mvin3", local=ACCUMULATOR | base + row, rows=count, cols=dim)
            self.items.append(_Item(load, None, rows))
        self.fresh.discard(buffer.name)

    def _match(self, stmt: Store, axes: list[te.Var]) -> Multiply | Epilogue:
        """The instruction that matches a nest; cached, because loops repeat nests."""
        known = self.matched.get(id(stmt))
        if known is None:
            if stmt.buffer.scope is ACCUMULATOR_SCOPE:
                every = [
                    next((axis for axis in axes if axis.name == name), te.Var(name, 1)) for name in "mnk"
                ]
                found: Multiply | Epilogue | str = operands_of(stmt, every, self.loops.tiles)
            else:
                found = epilogue(stmt.value)
            assert not isinstance(found, str), found
            known = self.matched[id(stmt)] = (stmt, found)
        return known[1]


def _evaluated(expr: te.Expr, env: Environment) -> np.ndarray:
    """The value of an index or a condition for all elements at once."""
    if isinstance(expr, te.Const):
        return np.asarray(expr.value)
    if isinstance(expr, te.Var):
        return np.asarray(env[expr])
    if isinstance(expr, te.Select):
        cond, then, other = (_evaluated(each, env) for each in (expr.cond, expr.then, expr.other))
        return np.where(cond, then, other)
    if isinstance(expr, te.Cast):
        return _evaluated(expr.value, env).astype(expr.dtype.numpy)
    assert isinstance(expr, te.Call), expr
    return np.asarray(SCALARS[expr.op].numpy(*(_evaluated(each, env) for each in expr.args)))


def _without_unread_zeros(items: list[_Item], machine: Array) -> list[_Item]:
    """Remove unread loads: a pipeline loads zeros after the last tile, which no compute reads."""
    read = np.zeros(machine.scratchpad_rows, bool)
    kept = []
    for item in reversed(items):
        instruction, name = item.instruction, item.instruction.name
        if name in COMPUTES:
            read[instruction["a"] : instruction["a"] + instruction["rows"]] = True
        elif name == "preload" and instruction["b"] != NONE:
            read[instruction["b"] : instruction["b"] + instruction["rows"]] = True
        elif name in MVINS and not instruction["local"] & ACCUMULATOR:
            blocks = np.arange(ceil_div(instruction["cols"], machine.dim))[:, None]
            rows = instruction["local"] + blocks * item.block_stride + np.arange(instruction["rows"])
            if item.operand is None and not read[rows].any():
                continue
            read[rows] = False
        kept.append(item)
    return kept[::-1]
