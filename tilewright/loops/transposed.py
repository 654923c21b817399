"""Transposes: elements read along one axis and written along another, tile by tile in registers.

    for every block of tiles:                        (parallel)
      for every tile in it:
        tile[b, :] = x[b, a : a + lanes]             (vectors along the axis that is contiguous in x)
        transpose tile
        out[a, :] = value(tile[a, :])                (vectors along the axis that is contiguous in the output)

A tile covers a whole axis of two to four elements: if neighbours along the other axis are contiguous in memory (the
channels of an image), the tile is one run, read or written in whole vectors. Repeated elements (an upsampled image)
form such a tile with equal rows.

For tensors larger than the last-level cache, the order of writes matters most: the tiles of a block follow the
written axis, two at a time if they fit, so that each output row gets a run of lines. Reads are then single lines of
many rows. So they are prefetched a block ahead into L2, row by row, and memory sees long runs on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer, Kind, Prefetch, Program, Scope, Stmt, Store, Transpose, block, nest
from tilewright.loops.tiling import (
    Tiles,
    extent_of,
    indices_of,
    is_streamed,
    parallel_nest,
    row_major,
    with_values,
)
from tilewright.loops.transpose_pattern import TransposePattern, transpose_pattern_of
from tilewright.loops.transpose_unaligned import unaligned_transpose_program
from tilewright.support.arith import ceil_div
from tilewright.te.index import coefficient, divisor_of

_BLOCK = 4  # tiles of a block, along both axes or along the shorter side
_RUN = 64  # short tiles along the read axis, if everything comes from memory
_AHEAD = 8  # prefetch distance in such tiles
_READ = 2 << 10  # bytes of each row that a block reads, if the next one is prefetched
_KEPT = 8  # blocks that fill L2: two of them stay there among other data


def transposed_program(formula: Formula, machine: CpuMachine) -> Program | None:
    """The program; None if the formula is not a transpose in tiles."""
    pattern = transpose_pattern_of(formula, machine)
    if pattern is None:
        return None
    streamed = is_streamed(formula, machine)
    if streamed and not pattern.writes_run and not _writes_lines(formula, pattern, machine):
        return unaligned_transpose_program(formula, machine, pattern) or _program(
            formula, machine, pattern, streamed=False
        )
    return _program(formula, machine, pattern, streamed=streamed)


@dataclass(frozen=True)
class _Cut:
    """An axis split into blocks, as equal as possible, and these into tiles."""

    axis: te.Var
    size: int
    most: int  # tiles in a block

    @property
    def blocks(self) -> Tiles:
        tiles = ceil_div(self.axis.extent, self.size)
        equal = ceil_div(tiles, ceil_div(tiles, self.most))
        return Tiles(self.axis, self.size * min(equal, self.axis.extent // self.size))

    @property
    def inside(self) -> te.Var:
        """The loop over the tiles of a block."""
        return te.Var(f"{self.axis.name}_i", self.blocks.size // self.size)

    def start(self) -> te.Expr:
        return self.blocks.start() + self.inside * self.size


def _program(formula: Formula, machine: CpuMachine, pattern: TransposePattern, *, streamed: bool) -> Program:
    prefetches = streamed and _reads_lines(pattern, machine)  # of the next block
    written, read = (
        _cut(formula, pattern, machine) if prefetches else _cut_for_registers(pattern, streamed=streamed)
    )
    size, held = pattern.rows * pattern.columns, written.size // pattern.rows
    tiles = [Buffer(f"tile{n or ''}", pattern.load.dtype, size, Scope.REGISTER) for n in range(held)]
    inside = [read.inside, written.inside] if prefetches else [written.inside, read.inside]
    outside = [axis for axis in formula.axes if axis not in (pattern.read, pattern.written)]
    blocks = [*outside, read.blocks.var, written.blocks.var]
    step, lane = te.Var("u", size // pattern.lanes), te.Var("v", pattern.lanes)
    steps, in_lanes = [(step, Kind.UNROLL)], [(lane, Kind.VECTOR)]
    element = step * pattern.lanes + lane

    def placed(expr: te.Expr, at_written: te.Expr | int, at_read: te.Expr | int) -> te.Expr:
        return te.substitute(
            expr, {pattern.written: written.start() + at_written, pattern.read: read.start() + at_read}
        )

    def value_from(source: Buffer, position: te.Expr, at: tuple[te.Expr | int, te.Expr | int]) -> te.Expr:
        origin, loaded = placed(pattern.load, *at), te.Load(source, (position,))
        return te.rewrite(placed(formula.value, *at), lambda node: loaded if node == origin else None)

    source, (offset,) = pattern.load.source, pattern.load.indices
    assert isinstance(source, Buffer)

    def prefetched_with_load() -> list[Stmt]:
        """Prefetch what is read a few tiles later in the same rows."""
        if prefetches or not streamed or not coefficient(offset, pattern.written) or pattern.reads_run:
            return []
        later = read.inside + _AHEAD
        at = {
            pattern.written: written.start() + later // read.inside.extent * pattern.rows + step,
            pattern.read: read.blocks.start() + later % read.inside.extent * pattern.columns,
        }
        return [Prefetch(source, te.substitute(offset, at), level=1)]

    def prefetched_with_store(number: int) -> list[Stmt]:
        """Prefetch a line of the next block with each store of this one; measured, this is the faster position."""
        if not prefetches:
            return []
        together = read.inside * written.inside.extent + written.inside
        line = _line_of_block(
            pattern, together, held * pattern.rows, step * held + number, read.inside.extent
        )
        at = {pattern.written: written.blocks.start(), pattern.read: read.blocks.start()}
        following = indices_of(row_major(blocks) + 1, blocks)
        return [Prefetch(source, te.substitute(te.substitute(offset, at) + line, following), level=2)]

    def transposed(number: int, tile: Buffer) -> Stmt:
        row = step + number * pattern.rows
        position = placed(offset, 0, 0) + element if pattern.reads_run else placed(offset, row, lane)
        moved = nest(in_lanes, Store(tile, element, te.Load(source, (position,))))
        fill = nest(steps, block(moved, *prefetched_with_load()))
        return block(fill, Transpose(tile, pattern.rows, pattern.columns, pattern.lanes))

    def stored(number: int, tile: Buffer) -> Stmt:
        """Store a vector of tile `number`."""
        at = (0, 0) if pattern.writes_run else (lane + number * pattern.rows, step)
        position = placed(formula.store, *at)
        value = value_from(tile, element, at)
        index = position + element if pattern.writes_run else position
        moved = nest(in_lanes, Store(formula.output, index, value, streamed))
        return block(moved, *prefetched_with_store(number))

    together = list(enumerate(tiles))
    write = nest(steps, block(*(stored(number, tile) for number, tile in together)))
    body = block(*(transposed(number, tile) for number, tile in together), write)
    body = nest([(loop, Kind.SERIAL) for loop in inside], body)
    body = parallel_nest(blocks, 2 * size * held * extent_of(inside), body)
    decisions = f"transposed: tiles of {pattern}" + (", streamed" if streamed else "")
    return Program(formula.name, (*formula.inputs, formula.output), with_values(body, {}), decisions)


def _cut_for_registers(pattern: TransposePattern, *, streamed: bool) -> tuple[_Cut, _Cut]:
    """The axes (written, read) in small blocks; in blocks that are long along the read axis, if everything comes from
    memory."""
    return (
        _Cut(pattern.written, pattern.rows, _BLOCK),
        _Cut(pattern.read, pattern.columns, _RUN if streamed else _BLOCK),
    )


def _cut(formula: Formula, pattern: TransposePattern, machine: CpuMachine) -> tuple[_Cut, _Cut]:
    """The axes (written, read) in blocks that fit L2: runs along the read axis, from as many rows.

    Two tiles together write two lines to each output row. That takes all registers, so it is used only if elements
    are moved unchanged. It pays if rows continue after the block; for shorter rows, one tile at a time is faster.
    """
    width = pattern.load.dtype.bytes * pattern.columns
    read = _Cut(pattern.read, pattern.columns, max(1, _READ // width))
    rows = machine.caches.l2_per_core // _KEPT // (width * read.inside.extent)
    single = _Cut(pattern.written, pattern.rows, max(1, rows // pattern.rows))
    fits = formula.value == pattern.load and 2 * pattern.rows <= min(
        machine.vector_registers, pattern.written.extent
    )
    if not fits or read.blocks.count == 1:
        return single, read
    pair = _Cut(pattern.written, 2 * pattern.rows, max(1, rows // (2 * pattern.rows)))
    return (pair if pair.blocks.waste <= single.blocks.waste else single), read


def _line_of_block(
    pattern: TransposePattern, together: te.Expr, count: int, number: te.Expr, lines: int
) -> te.Expr:
    """The position, within a block, of line `together * count + number`: row by row, `lines` per row. The index is
    divided once for all `count` if possible, because finding each line's row and column takes as long as transposing
    the tiles."""
    pitch = coefficient(pattern.load.indices[0], pattern.written)
    assert pitch is not None
    first, to_next_row = together * count, pitch - lines * pattern.columns
    if to_next_row == 0:
        return (first + number) * pattern.columns
    if count % lines == 0:
        return (together * (count // lines) + number // lines) * pitch + number % lines * pattern.columns
    if lines < count:
        return (first + number) // lines * pitch + (first + number) % lines * pattern.columns
    line = first % lines + number
    position = first // lines * pitch + line * pattern.columns
    return position if lines % count == 0 else position + line // lines * to_next_row


def _reads_lines(pattern: TransposePattern, machine: CpuMachine) -> bool:
    """Whether a tile's rows are read from line-aligned addresses; otherwise each load touches two lines. If indices
    are loaded, there are none after the last block."""
    (offset,) = pattern.load.indices
    begin = te.substitute(offset, {pattern.read: te.as_index(0)})
    square = not pattern.reads_run and not pattern.writes_run and not te.loads(begin)
    return square and divisor_of(begin) * pattern.load.dtype.bytes % machine.line_bytes == 0


def _writes_lines(formula: Formula, pattern: TransposePattern, machine: CpuMachine) -> bool:
    """Whether each vector of the result is a whole cache line."""
    vector = pattern.lanes * formula.output.dtype.bytes
    whole = vector == machine.line_bytes and pattern.written.extent % pattern.lanes == 0
    return (
        whole
        and divisor_of(te.substitute(formula.store, {pattern.written: te.as_index(0)})) % pattern.lanes == 0
    )
