"""Contractions without tensor cores, tiled as `SSSRRSRS`: spatial tiles of blocks, virtual threads and threads, two
levels of reduction tiles, and spatial tiles in registers.

    for blocks, tiles of (VM TM RM) x (VN TN RN):                     (parallel; S)
      for steps of BK:                                                (serial; R; STAGES tiles are under way)
        for threads: tiles of left, right                             (copies)
        for threads, TM x TN:                                         (S)
          for parts of a tile:                                        (serial; R)
            registers of left[VM RM], right[VN RN]                    (S)
            for k, acc[VM RM, VN RN] += left * right                  (unrolled; R, S)
      for threads: out = value(acc)

A thread has VM x VN patches of RM x RN results, far from each other, so that neighbouring threads read neighbouring
elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gpu import WARP, GpuMachine
from tilewright.hw.tensor_cores import multiply_add
from tilewright.loops.gpu.thread_index import at_positions, index_at_positions, under
from tilewright.loops.ir import Buffer, For, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import with_results
from tilewright.space.contraction import TwoFactorContraction, contraction_of
from tilewright.space.mapping import Mapping, mappings
from tilewright.space.sketches.cuda.fetch import Fetched, TileOperand
from tilewright.space.sketches.cuda.pipeline import REGISTER_STAGES, TileLoop, pipelined
from tilewright.space.sketches.cuda.structure import InTiles, Structure
from tilewright.space.space import Knob, Space
from tilewright.space.template import Applied, GpuTerms, GpuWork
from tilewright.support.batch import Number, Truth, least, rounded, select
from tilewright.te.index import coefficient, simplify

NAME = "sketch:tiled"
DTYPES = (DType.F32, DType.F16, DType.BF16)
_MIN, _MAX = 32, 256  # minimum and maximum threads of a block
_MAX_SUMS = 64  # maximum per thread
_MIN_SUMS = 4
_NARROWEST, _WIDEST = 32, 256  # minimum and maximum results of a block along one side
_MAX_COPIES = 32  # maximum per thread and step
_MAX_REGISTERS = 240
PART = 4  # steps along K that are in registers at once
_HELD = 0.4  # registers per element of a factor: not all are live at once
_COPY = 6  # instructions per copied chunk
_GATHER = 14  # additional instructions for a chunk whose index needs divisions or conditions
_MAX_MAPPINGS = 2


@dataclass(frozen=True)
class ThreadTiles:
    mapping: int
    tm: int  # threads
    tn: int
    vm: int  # virtual threads
    vn: int
    rm: int  # results in registers
    rn: int
    bk: int
    stages: int
    prefetch: bool  # elements are loaded into registers a part of a tile before they are multiplied
    fused: bool  # also across tiles

    @property
    def threads(self) -> int:
        return self.tm * self.tn

    @property
    def bm(self) -> int:
        return self.vm * self.tm * self.rm

    @property
    def bn(self) -> int:
        return self.vn * self.tn * self.rn


class Tiled:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        if work.formula is None or not work.machine.async_copy:
            return None
        found = contraction_of(work.formula, DTYPES)
        if found is None:
            return None
        mappings_found = [
            mapping for mapping in mappings(found, multiply_add(found.dtype)) if not mapping.outer
        ][:_MAX_MAPPINGS]
        return AppliedTiled(found, mappings_found, work.machine) if mappings_found else None


@dataclass(frozen=True)
class _Patches:
    """One side of a thread's results: `v` patches of `r` neighbours, `threads` x `r` apart; `position` is the
    thread's index."""

    tile: Fetched
    v: int
    r: int
    threads: int
    position: te.Expr

    @property
    def count(self) -> int:
        return self.v * self.r

    @property
    def buffer(self) -> Buffer:
        return Buffer(f"{self.tile.name}_held", DType.F32, self.count * PART, Scope.REGISTER)

    def at(self, v: te.Expr | int, r: te.Expr | int) -> te.Expr:
        """The index of the thread's result in the tile."""
        return te.as_index(v) * (self.threads * self.r) + self.position * self.r + te.as_index(r)

    def held(self, number: te.Expr, k: te.Expr) -> te.Expr:
        """The index in `buffer` of the element for a result; the order is that of the tile."""
        return k * self.count + number if self.tile.transposed else number * PART + k

    def load(self, part: te.Expr) -> Stmt:
        """Load along the rows of the tile, in vectors."""
        v, r, k = te.Var("pv", self.v), te.Var("pr", self.r), te.Var("pk", PART)
        index = self.tile.position(self.at(v, r), part * PART + k)
        element = te.cast(te.Load(self.tile.buffer, (simplify(index),)), DType.F32)
        store = Store(self.buffer, simplify(self.held(v * self.r + r, k)), element)
        if self.tile.transposed:
            return nest([(k, Kind.UNROLL), (v, Kind.UNROLL), (r, Kind.VECTOR)], store)
        return nest([(v, Kind.UNROLL), (r, Kind.UNROLL), (k, Kind.VECTOR)], store)


class TiledKernel(Structure[ThreadTiles]):
    @cached_property
    def shared_bytes(self) -> int:
        return sum(o.bytes for o in self.operands) + 256

    @cached_property
    def registers(self) -> Number:
        """Estimated registers of a thread, fitted to what the compiler used for 50 kernels."""
        t = self.tiles
        rows, columns = t.vm * t.rm, t.vn * t.rn
        held = PART * (rows + columns) * select(t.prefetch, REGISTER_STAGES, _HELD)
        return 24 + rows * columns + held + self.copied

    # -- the program ----------------------------------------------------------------------------------------------

    def program(self) -> Program:
        t, formula = self.tiles, self.work.formula
        thread = te.Var("t", t.threads)
        blocks = self.blocks
        starts, batch = blocks.starts, blocks.batch
        left, right = self.operands
        rows = _Patches(left, t.vm, t.rm, t.tm, thread // t.tn)
        columns = _Patches(right, t.vn, t.rn, t.tn, thread % t.tn)
        sums = Buffer("acc", DType.F32, rows.count * columns.count, Scope.REGISTER)
        number = te.Var("e", sums.size)
        clear = nest([(number, Kind.UNROLL)], Store(sums, number, te.const(0.0, DType.F32)))
        body = block(
            For(thread, Kind.THREAD, clear),
            TileLoop(self.operands, starts, batch, thread).loop([_summed(sums, rows, columns, t.bk, thread)]),
            For(thread, Kind.THREAD, self._write(sums, rows, columns, starts, batch)),
        )
        m, n, k = self.mapping.sizes
        words = (
            f"tiled: {m} x {n} x {k} (mapping {t.mapping}) by {t.bm} x {t.bn} x {t.bk}, {t.tm} x {t.tn} threads with"
            f" {t.vm} x {t.vn} patches of {t.rm} x {t.rn}"
        )
        params = (*formula.inputs, formula.output)
        program = Program(formula.name, params, nest([(blocks.number, Kind.PARALLEL)], body), words)
        ahead = (rows.buffer.name, columns.buffer.name) if t.prefetch else ()
        return pipelined(program, self.operands, t.stages, ahead, t.fused)

    def _write(
        self,
        sums: Buffer,
        rows: _Patches,
        columns: _Patches,
        starts: tuple[te.Expr, te.Expr],
        batch: dict[te.Var, te.Expr],
    ) -> Stmt:
        formula, mapping = self.work.formula, self.mapping
        vm, rm, vn, rn = (
            te.Var(name, extent)
            for name, extent in (("vm", rows.v), ("rm", rows.r), ("vn", columns.v), ("rn", columns.r))
        )
        m, n = (
            start + patches.at(v, r)
            for start, patches, v, r in ((starts[0], rows, vm, rm), (starts[1], columns, vn, rn))
        )
        total = te.Load(sums, (simplify((vm * rows.r + rm) * columns.count + vn * columns.r + rn),))
        value = simplify(
            te.substitute(at_positions(at_positions(formula.value, mapping.n, n), mapping.m, m), batch)
        )
        position = index_at_positions(index_at_positions(formula.store, mapping.n, n), mapping.m, m)
        store = Store(
            formula.output,
            simplify(te.substitute(position, batch)),
            with_results(value, {self.work.reduction.result: total}),
        )
        most_m, most_n, _ = mapping.sizes
        conditions = [
            te.call("lt", simplify(at), most)
            for at, most, size in ((m, most_m, self.tiles.bm), (n, most_n, self.tiles.bn))
            if most % size
        ]
        inner = mapping.n[-1]
        whole = coefficient(formula.store, inner) == 1 and inner.extent % columns.r == 0
        if not whole:
            guarded = under(te.all_of(conditions), store)
            return nest([(var, Kind.UNROLL) for var in (vm, rm, vn, rn)], guarded)
        first = [simplify(te.substitute(condition, {rn: te.as_index(0)})) for condition in conditions]
        vector = under(te.all_of(first), nest([(rn, Kind.VECTOR)], store))
        return nest([(var, Kind.UNROLL) for var in (vm, rm, vn)], vector)

    def terms(self) -> GpuTerms:
        t = self.tiles
        size = self.work.dtype.bytes
        tile_bytes = size * (t.bm + t.bn) * t.bk
        copy_count = [o.rows * o.columns / o.lanes / WARP for o in self.operands]
        gathered = sum(
            each for each, o in zip(copy_count, self.operands, strict=True) if o.operand.is_gathered
        )
        read = t.threads * (t.vm * t.rm + t.vn * t.rn) * t.bk  # elements read by all threads
        converted = read / WARP if self.work.dtype.is_half else 0.0
        results = t.bm * t.bn
        return GpuTerms(
            blocks=self.blocks.count,
            threads=t.threads,
            registers=least(255, rounded(self.registers)),
            shared_bytes=self.shared_bytes,
            steps=self.summed.total,
            stages=t.stages,
            flops=0.0,
            scalar=sum(copy_count) * _COPY + gathered * _GATHER,
            ordinary=results * t.bk / WARP + read / WARP / PART + converted,
            copies=sum(copy_count),
            shared_traffic=1.0 * (tile_bytes + read * size),
            loaded=1.0 * tile_bytes,
            memory=float(self.work.formula.moved),
            write_loaded=self.work.formula.epilogue_reads * results,
            written=1.0 * results * self.work.formula.output.dtype.bytes,
            write_shared=0.0,
        )


def _summed(sums: Buffer, rows: _Patches, columns: _Patches, depth: int, thread: te.Var) -> Stmt:
    """Accumulate one tile into a thread's sums, a part after the other."""
    part, k = te.Var("part", depth // PART), te.Var("k", PART)
    i, j = te.Var("i", rows.count), te.Var("j", columns.count)
    total = te.Load(sums, (i * columns.count + j,))
    a, b = (te.Load(side.buffer, (side.held(n, k),)) for side, n in ((rows, i), (columns, j)))
    step = Store(sums, i * columns.count + j, te.call("fma", a, b, total))
    multiplied = nest([(k, Kind.UNROLL), (i, Kind.UNROLL), (j, Kind.UNROLL)], step)
    stmts = [
        For(thread, Kind.THREAD, stmt) for stmt in (block(rows.load(part), columns.load(part)), multiplied)
    ]
    return nest([(part, Kind.SERIAL)], block(*stmts))


class AppliedTiled(InTiles[ThreadTiles]):
    sizes, structured = ThreadTiles, TiledKernel
    most_copies, most_registers = _MAX_COPIES, _MAX_REGISTERS

    def __init__(
        self, work: TwoFactorContraction, mappings_found: list[Mapping], machine: GpuMachine
    ) -> None:
        read = [
            (
                TileOperand(mapping.left, mapping.m, mapping.k),
                TileOperand(mapping.right, mapping.n, mapping.k),
            )
            for mapping in mappings_found
        ]
        super().__init__(work, mappings_found, machine, read)

    @cached_property
    def space(self) -> Space:
        knobs = (
            Knob("mapping", tuple(range(len(self.mappings_found))), ordered=False),
            Knob("tm", (4, 8, 16, 32)),
            Knob("tn", (8, 16, 32)),
            Knob("vm", (1, 2, 4, 8)),
            Knob("vn", (1, 2, 4, 8)),
            Knob("rm", self._vectors(0)),
            Knob("rn", self._vectors(1)),
            Knob("bk", (8, 16)),
            Knob("stages", (1, 2, 3, 4, 5, 6)),
            Knob("prefetch", (False, True), ordered=False),
            Knob("fused", (True, False), ordered=False),
        )
        names = tuple(knob.name for knob in knobs)
        return Space(NAME, knobs, self.legal, together=(names,), batched=True)

    def _vectors(self, side: int) -> tuple[int, ...]:
        """Neighbours per thread along a side: several if they are contiguous in a tile's rows and can be loaded at
        once."""
        return tuple(sorted({PART if read[side].transposed else 1 for read in self.read}))

    def suits(self, t: ThreadTiles) -> Truth:
        sums = t.vm * t.rm * t.vn * t.rn
        suits = (t.threads >= _MIN) & (t.threads <= _MAX) & (sums >= _MIN_SUMS) & (sums <= _MAX_SUMS)
        suits = suits & (t.bm <= _WIDEST) & (t.bn <= _WIDEST)
        # Where there is nothing to fuse, the knob changes nothing.
        suits = suits & (t.fused | (t.prefetch & (t.stages > 1)))
        # A conversion between memory and registers is computed: there is no load that could run ahead.
        converted = self.work.dtype is not DType.F32
        suits = suits & select(t.prefetch, (t.bk != PART) & (not converted), True)
        left, right = self.read[t.mapping]
        suits = suits & ((t.rm > 1) == left.transposed) & ((t.rn > 1) == right.transposed)
        m, n = left.extent, right.extent
        return suits & (t.bm < 2 * max(m, _NARROWEST)) & (t.bn < 2 * max(n, _NARROWEST))
