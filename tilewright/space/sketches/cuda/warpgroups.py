"""Matmuls by warpgroups (sm_90a): tiles of both factors come by the tensor copy engine, in a ring of slots; warpgroups
multiply them (`wgmma`), 64 rows each; the epilogue is computed from registers.

    for blocks, tiles of BM x BN:                                     (parallel)
      for steps of 64:                                                (serial; STAGES slots)
        left[BM, 64], right[BN, 64]                                   (boxes; by a producer of its own with ROLES)
        for warpgroups: acc[64, BN] += left * right                   (instructions, running into the next step)
      out = value(acc)                                                (pairs)

It needs factors that are boxes of matrices in memory, with the reduction contiguous. No GPU has measured it yet: the
constants of its cost are not calibrated, and it is only chosen by tuning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.bulk_copies import ALIGNMENT, Box
from tilewright.hw.warpgroups import ROWS, WARPGROUP, role_registers, warpgroup_multiply
from tilewright.loops.gpu.thread_index import at_positions, index_at_positions, step_of, under
from tilewright.loops.ir import (
    BoxCopy,
    Buffer,
    For,
    Kind,
    Program,
    Scope,
    SourceMatrix,
    Stmt,
    Store,
    Warp,
    block,
    nest,
)
from tilewright.loops.passes.load_and_use import ProgramAccesses, pipelines
from tilewright.loops.passes.pipeline import planned
from tilewright.loops.tiling import extent_of, with_results
from tilewright.space.contraction import Factor, TwoFactorContraction, contraction_of
from tilewright.space.mapping import Mapping, mappings
from tilewright.space.sketches.cuda.blocks import BlockGrid
from tilewright.space.sketches.cuda.structure import InTiles
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, GpuTerms, GpuWork
from tilewright.space.terms import TileGrid
from tilewright.support.batch import Truth, Values, least, most, select
from tilewright.te.index import linear, simplify

NAME = "sketch:warpgroups"
DTYPES = (DType.F16, DType.BF16)
_BK, _DEPTH = 64, 16  # of a tile: rows of 128 bytes; of an instruction
_PAIR = 2
_BARRIERS = 16  # bytes of a slot's
_MAX_WARPGROUPS = 3  # that multiply, of a block
_STEP_INSTRUCTIONS = 16  # of a warp in each step


@dataclass(frozen=True)
class WarpgroupTiles:
    mapping: int
    bm: int
    bn: int
    stages: int
    roles: bool

    @property
    def warpgroups(self) -> int:
        """Those that multiply."""
        return self.bm // ROWS

    @property
    def threads(self) -> int:
        """Of a block, also those of a producer."""
        return WARPGROUP * (self.warpgroups + self.roles)


@dataclass(frozen=True)
class BoxedOperand:
    """A factor as boxes of a matrix: a tile begins in row `row`, further by where it begins along the walked axes, and
    in column `column`, further by where it begins along k. Both name axes of the batch."""

    matrix: SourceMatrix
    row: te.Expr
    column: te.Expr

    def copy(
        self, buffer: Buffer, rows: int, start: te.Expr, step: te.Expr, batch: dict[te.Var, te.Expr]
    ) -> BoxCopy:
        def at(expr: te.Expr) -> te.Expr:
            return simplify(te.substitute(expr, batch))

        box = Box(buffer.dtype, rows, _BK)
        return BoxCopy(
            buffer, te.as_index(0), self.matrix, at(self.row + start), at(self.column + step * _BK), box
        )


def boxed(factor: Factor, walked: tuple[te.Var, ...], k: tuple[te.Var, ...]) -> BoxedOperand | str:
    """The factor as a matrix of boxes, or why it is none."""
    if factor.value is not None:
        return "it is computed"
    if factor.guard is not None:
        return "a condition decides where it is zero"
    form = linear(factor.load.indices[0])
    axes = {atom: c for atom, c in form.terms.items() if isinstance(atom, te.Var)}
    stride = step_of(form.terms, walked)
    if len(axes) < len(form.terms) or not stride:
        return "its index is not linear"
    if step_of(form.terms, k) != 1:
        return "neighbours along the reduction are not neighbours in memory"
    if stride * factor.dtype.bytes % ALIGNMENT:
        return f"its rows do not begin at multiples of {ALIGNMENT} bytes"
    first, column_start = divmod(form.constant, stride)
    row, column = te.as_index(first), te.as_index(column_start)
    across = False  # whether an axis of the batch moves along the rows
    for axis, c in axes.items():
        if axis in walked or axis in k:
            continue
        if c % stride == 0:
            row = row + axis * (c // stride)
        else:
            column, across = column + axis * c, True
    deep = extent_of(k)
    if across and deep % _BK:
        return "elements past its last column belong to another part of the batch"
    columns = stride if across else column_start + deep
    if columns > stride:
        return "its rows overlap"
    size = factor.buffer.size
    return BoxedOperand(
        SourceMatrix(factor.buffer, (size - columns) // stride + 1, columns, stride), row, column
    )


class WarpgroupMatmul:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        found = _of(work)
        return None if isinstance(found, str) else found

    def refusal(self, work: GpuWork) -> str | None:
        found = _of(work)
        return found if isinstance(found, str) else None


def _of(work: GpuWork) -> AppliedWarpgroups | str:
    if not (work.machine.bulk_copy and work.machine.warpgroup_mma):
        return f"{work.machine.name} has no tensor copy engine with instructions of warpgroups"
    if work.formula is None:
        return "the task has no normal form"
    contraction = contraction_of(work.formula, DTYPES)
    if contraction is None:
        return "the task is no contraction of two 16-bit factors"
    instruction = warpgroup_multiply(ROWS, contraction.dtype)
    kept: list[tuple[Mapping, tuple[BoxedOperand, BoxedOperand]]] = []
    whys: list[str] = []
    for mapping in mappings(contraction, instruction):
        if mapping.outer or extent_of(mapping.k) <= _BK:
            whys.append("the reduction has one step, or several axes apart")
            continue
        pair = boxed(mapping.left, mapping.m, mapping.k), boxed(mapping.right, mapping.n, mapping.k)
        refused = [
            f"{f.buffer.name}: {p}"
            for f, p in zip((mapping.left, mapping.right), pair, strict=True)
            if isinstance(p, str)
        ]
        whys += refused
        if not refused:
            kept.append((mapping, pair))  # type: ignore[arg-type]
    if not kept:
        return whys[0] if whys else "the task has no axes of a matmul"
    return AppliedWarpgroups(contraction, kept, work)


@dataclass(frozen=True)
class WarpgroupKernel:
    work: TwoFactorContraction
    mapping: Mapping
    read: tuple[BoxedOperand, BoxedOperand]
    tiles: WarpgroupTiles

    @property
    def blocks(self) -> BlockGrid:
        return BlockGrid(self.mapping, self.tiles.bm, self.tiles.bn)

    @property
    def steps(self) -> int:
        return -(-extent_of(self.mapping.k) // _BK)

    @property
    def tile_bytes(self) -> int:
        return (self.tiles.bm + self.tiles.bn) * _BK * self.work.dtype.bytes

    @property
    def shared_bytes(self) -> int:
        return self.tiles.stages * (self.tile_bytes + _BARRIERS)

    @property
    def registers(self) -> Any:
        """Of a thread when a block begins: with several warpgroups that multiply, as many as there are."""
        t = self.tiles
        all_of_them = (1 << 16) // t.threads // 8 * 8
        return select(t.roles & (t.warpgroups > 1), all_of_them, t.bn // 2 + 40)

    # -- the program --------------------------------------------------------------------------------------------------

    def program(self) -> Program:
        t, formula, dtype = self.tiles, self.work.formula, self.work.dtype
        thread = te.Var("t", WARPGROUP * t.warpgroups)
        blocks = self.blocks
        (m0, n0), batch = blocks.starts, blocks.batch
        left = Buffer("left", dtype, t.bm * _BK, Scope.SCRATCH)
        right = Buffer("right", dtype, t.bn * _BK, Scope.SCRATCH)
        acc = Buffer("acc", DType.F32, t.bn // 2, Scope.REGISTER)
        step, part, e = te.Var("step", self.steps), te.Var("part", _BK // _DEPTH), te.Var("e", acc.size)
        multiply = Warp(
            warpgroup_multiply(t.bn, dtype),
            thread,
            (
                (acc, te.as_index(0)),
                (left, thread // WARPGROUP * (ROWS * _BK) + part * _DEPTH),
                (right, part * _DEPTH),
            ),
            (0, _BK, _BK),
        )
        clear = For(thread, Kind.THREAD, nest([(e, Kind.UNROLL)], Store(acc, e, te.const(0.0, DType.F32))))
        loop = For(
            step,
            Kind.SERIAL,
            block(
                self.read[0].copy(left, t.bm, m0, step, batch),
                self.read[1].copy(right, t.bn, n0, step, batch),
                For(part, Kind.UNROLL, multiply),
            ),
        )
        body = block(clear, loop, self._write(acc, thread, m0, n0, batch))
        m, n, k = self.mapping.sizes
        words = f"warpgroups: {m} x {n} x {k} by {t.bm} x {t.bn} x {_BK}, {multiply.instruction.name.split('.')[3]}"
        params = (*formula.inputs, formula.output)
        program = Program(formula.name, params, nest([(blocks.number, Kind.PARALLEL)], body))
        known, counts = ProgramAccesses(program), {"left": t.stages, "right": t.stages}
        plan = planned(known, counts, specialise=t.roles)
        made = replace(plan, registers=role_registers(t.warpgroups) if t.roles else None).program()
        words += f", {t.stages} stages{', by a producer of its own' if t.roles else ''}; {pipelines(known, counts)}"
        return replace(made, decisions=words)

    def _write(
        self, acc: Buffer, thread: te.Var, m0: te.Expr, n0: te.Expr, batch: dict[te.Var, te.Expr]
    ) -> Stmt:
        """The results of each thread, from its registers: pairs of neighbours where the output has them."""
        t, formula, mapping = self.tiles, self.work.formula, self.mapping
        lanes = _PAIR if self._in_pairs else 1
        turn, lane = te.Var("turn", acc.size // lanes), te.Var("v", lanes)
        fragment = warpgroup_multiply(t.bn, self.work.dtype).fragments[0]
        number: te.Expr = turn * lanes + lane if lanes > 1 else turn
        row, column = fragment.element(thread % WARPGROUP, number)
        row = simplify(thread // WARPGROUP * ROWS + row)
        total = te.Load(acc, (simplify(number),))

        def placed(expr: te.Expr) -> te.Expr:
            at = at_positions(at_positions(expr, mapping.n, n0 + column), mapping.m, m0 + row)
            return simplify(te.substitute(at, batch))

        position = index_at_positions(
            index_at_positions(formula.store, mapping.n, n0 + column), mapping.m, m0 + row
        )
        store = Store(
            formula.output,
            simplify(te.substitute(position, batch)),
            with_results(placed(formula.value), {self.work.reduction.result: total}),
        )
        first = te.substitute(column, {lane: te.as_index(0)}) if lanes > 1 else column
        conditions = [
            te.call("lt", simplify(start + at), te.as_index(extent_of(axes)))
            for start, at, axes, size in ((m0, row, mapping.m, t.bm), (n0, first, mapping.n, t.bn))
            if extent_of(axes) % size
        ]
        body = under(te.all_of(conditions), nest([(lane, Kind.VECTOR)], store))
        return For(thread, Kind.THREAD, nest([(turn, Kind.UNROLL)], body))

    @property
    def _in_pairs(self) -> bool:
        form, last = linear(self.work.formula.store), self.mapping.n[-1]
        others = [c for atom, c in form.terms.items() if atom != last]
        even = all(number % _PAIR == 0 for number in (last.extent, form.constant, *others))
        return form.terms.get(last) == 1 and even

    # -- its cost -----------------------------------------------------------------------------------------------------

    def terms(self) -> GpuTerms:
        t, size = self.tiles, self.work.dtype.bytes
        blocks, results = self.blocks, t.bm * t.bn
        operands = (
            (t.bm + t.warpgroups * t.bn) * _BK * size
        )  # that instructions read: the right one, each warpgroup
        grid = TileGrid(blocks.rows, blocks.columns, blocks.together, size * t.bm * _BK, size * t.bn * _BK)
        warps = 4 * t.warpgroups
        return GpuTerms(
            blocks=blocks.count,
            threads=t.threads,
            registers=least(255, self.registers),
            shared_bytes=self.shared_bytes,
            steps=self.steps,
            stages=t.stages,
            flops=2.0 * t.bm * t.bn * _BK,
            scalar=1.0 * warps * _STEP_INSTRUCTIONS,
            copies=0.0 * t.bm,
            shared_traffic=1.0 * (self.tile_bytes + operands),
            loaded=1.0 * self.tile_bytes,
            memory=float(self.work.formula.moved),
            write_loaded=self.work.formula.epilogue_reads * results,
            written=1.0 * results * self.work.formula.output.dtype.bytes,
            write_shared=0.0 * results,
            grid=grid,
            warpgroups=t.warpgroups,
            roles=t.roles,
        )


class AppliedWarpgroups:
    def __init__(
        self,
        contraction: TwoFactorContraction,
        found: list[tuple[Mapping, tuple[BoxedOperand, BoxedOperand]]],
        work: GpuWork,
    ) -> None:
        self.contraction, self.found, self.machine = contraction, found, work.machine

    @cached_property
    def space(self) -> Space:
        m, n = (max(mapping.sizes[at] for mapping, _ in self.found) for at in range(2))

        def sizes(extent: int, *choices: int) -> tuple[int, ...]:
            """Sizes up to twice the extent."""
            return tuple(size for size in choices if size < 2 * extent or size == choices[0])

        knobs = (
            Knob("mapping", tuple(range(len(self.found))), ordered=False),
            Knob("bm", sizes(m, 64, 128, 192)),
            Knob("bn", sizes(n, 64, 96, 128, 192, 256)),
            Knob("stages", (2, 3, 4, 5, 6, 7, 8)),
            Knob("roles", (True, False), ordered=False),
        )
        return Space(NAME, knobs, self.legal, together=(tuple(knob.name for knob in knobs),), batched=True)

    def legal(self, values: Values) -> Truth:
        return InTiles._by_mapping(values, self._legal)

    def _legal(self, values: Values) -> Truth:
        kernel = self._kernel(values)
        t = kernel.tiles
        fits = (kernel.shared_bytes <= self.machine.shared_block) & (t.stages <= 1 + kernel.steps)
        # Two blocks of one tile each share what one of two would have for itself: more slots do not help then.
        return fits & (t.warpgroups <= _MAX_WARPGROUPS) & (most(t.bm, t.bn) <= 4 * least(t.bm, t.bn))

    def _kernel(self, values: Values) -> WarpgroupKernel:
        mapping, read = self.found[values["mapping"]]
        return WarpgroupKernel(self.contraction, mapping, read, WarpgroupTiles(**values))

    def program(self, config: Config) -> Program:
        return self._kernel(dict(config.values)).program()

    def terms(self, config: Config) -> GpuTerms:
        return self._kernel(dict(config.values)).terms()

    def terms_of(self, values: Values) -> GpuTerms:
        """The terms of many configs at once."""
        found: GpuTerms = InTiles._by_mapping(values, lambda own: self._kernel(own).terms())
        return found
