"""Of the configs for a task those that no other does better by construction: hundreds to a few thousand.

What can be ruled out without a time is left out of a template's space; the spaces of other templates stay whole.
Searches take the whole spaces, of which they look at a part: this is for measuring everything (`tune_left.py`).

Of a contraction:

tile      register tiles that starve the FMA ports, for loads or for too few sums at a time, or that compute
          more than a little twice at the ends of axes, are left out; so is code that could be unrolled further
block     of blocks that come to the same size, one; none that leaves a core idle or does rows again where others do
          not; none that together with a panel does not fit L2, where others do; of those that are left
          the largest, which read the panels least often
k_block   the longest blocks of a panel that fit L1 alongside a tile's data, and all of it at once
prefetch  the next block goes to L1 where it fits there alongside this one, so that it is not farther away
          than it could be, and to the second where it would displace what is being read; or it is not prefetched
stage     data that a register tile finds in runs is the same data in the same runs once it is copied: it is staged
          only if blocks of a panel take it from beyond L2, a part of each run at a time

Of Winograd's algorithm, for each size of its tiles: no register tiles that starve the ports as above, no blocks and
shares that leave a core idle or compute tiles and panels again, all of these together; and no block whose scratch does
not fit L2, where others do. Of products by seven the same, with the longest code that does not spill,
and the weight prefetched to L1 or not at all. Of Winograd's inner-product trick, of
blocks that come to the same size one, and the rest as of Winograd's algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from tilewright.dtypes import DType
from tilewright.loops.tiling import extent_of
from tilewright.space.candidates import Candidates
from tilewright.space.implementation import Implementation, Kernel
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied
from tilewright.space.templates.cpu.contraction import AppliedContraction
from tilewright.space.templates.cpu.contraction_terms import ContractionTiling
from tilewright.space.templates.cpu.fast_algebra.paired import AppliedPaired
from tilewright.space.templates.cpu.fast_algebra.paired_nest import PairedTiling as PairedShape
from tilewright.space.templates.cpu.fast_algebra.strassen import AppliedStrassen
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import PRODUCTS
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import StrassenTiling as StrassenShape
from tilewright.space.templates.cpu.winograd import AppliedWinograd
from tilewright.space.templates.cpu.winograd_nest import WinogradTiling as WinogradShape
from tilewright.space.terms import Counted

_Tile = tuple[int, int]  # rows, vectors

_SUMS = 8  # at a time, below which an FMA waits for the one before
_LOADS_EACH = 1.6  # FMAs for which there is time while a load is issued
_TILE_SLACK = 1.15  # of the best tile's instructions
_DEAL_SLACK = 1.12  # of the time of the slowest thread, dealt out as well as possible
_LARGEST = 3  # blocks for a number of chunks: a larger one reads the panels less often
_K_BLOCKS = 2  # lengths of blocks
_FIRST_CACHE = 1.1  # of its size: what is a little too large still finds most of itself there
_SECOND_CACHE = 1.0


@dataclass(frozen=True)
class Narrowed:
    """A template applied to a task, with a part of its space."""

    whole: Applied
    space: Space

    def terms(self, config: Config) -> Counted | None:
        return self.whole.terms(config)

    def program(self, config: Config) -> Kernel | Implementation:
        return self.whole.program(config)


def nondominated(candidates: Candidates) -> Candidates:
    return Candidates(candidates.work, only=tuple(map(_narrowed, candidates.applied)))


def _narrowed(applied: Applied) -> Applied:
    for kind, rules in _RULES:
        if isinstance(applied, kind):
            return Narrowed(applied, rules(applied).space)
    return applied


@dataclass(frozen=True)
class NondominatedContraction:
    applied: AppliedContraction

    @cached_property
    def space(self) -> Space:
        whole = self.applied.space
        kept: dict[str, set[int]] = {
            "rows": {rows for rows, _ in self._tiles},
            "vectors": {vectors for _, vectors in self._tiles},
            "unroll": set(self._tiles.values()),
            "block": set().union(*self._blocks.values()),
            "k_block": set().union(*self._in_k_blocks.values()),
        }
        knobs = (_with_choices(knob, kept.get(knob.name, knob.choices)) for knob in whole.knobs)
        return Space(whole.template, tuple(knobs), self._legal, whole.together)

    def _legal(self, values: Mapping[str, Value]) -> bool:
        tile = int(values["rows"]), int(values["vectors"])
        if tile not in self._tiles or int(values["unroll"]) != self._tiles[tile]:
            return False
        shape = self.applied.shape_of(values)
        return (
            int(values["block"]) in self._blocks[tile]
            and (shape.block, shape.chunks) in self._deals[tile]
            and shape.k_block in self._in_k_blocks[tile]
            and shape.prefetch in (0, self._next_k_block_goes_to(shape))
            and (not shape.staged or self._staging_moves_something(shape))
            and self.applied.space.legal(values)
        )

    # -- register tiles -------------------------------------------------------------------------------------------

    @cached_property
    def _tiles(self) -> dict[_Tile, int]:
        """How far the code of each is unrolled."""
        choices = {knob.name: tuple(map(int, knob.choices)) for knob in self.applied.space.knobs[:3]}
        scores = {
            (rows, vectors): self._instructions(rows, vectors)
            for rows in choices["rows"]
            for vectors in choices["vectors"]
            if (rows * vectors + vectors + 1) * self.applied.registers_each
            <= self.applied.machine.vector_registers
        }
        best = min(scores.values())
        return {
            (rows, vectors): max(
                n for n in choices["unroll"] if self.applied.can_be_written_out(rows, vectors, n)
            )
            for (rows, vectors), score in scores.items()
            if score <= _TILE_SLACK * best
        }

    def _instructions(self, rows: int, vectors: int) -> float:
        """For all results, up to a factor: of the ports that are busy longest."""
        gemm, lanes = self.applied.gemm, self.applied.lanes
        down = gemm.rows[-1].extent if gemm.rows else 1
        columns = -(-self.applied.columns.extent // lanes)
        last = columns % vectors if self.applied.narrows else 0
        panels = -(-columns // vectors) - (last > 0)
        narrow = _busiest_port(rows, last) if last else 0.0
        return -(-down // rows) * (panels * _busiest_port(rows, vectors) + narrow)

    # -- blocks of rows and chunks of panels ----------------------------------------------------------------------

    @cached_property
    def _blocks(self) -> dict[_Tile, frozenset[int]]:
        """Values of the knob: the first of those that come to the same size."""
        found: dict[_Tile, frozenset[int]] = {}
        for tile in self._tiles:
            by_size: dict[int, int] = {}
            for block in self._choices("block"):
                by_size.setdefault(self._of_tile(tile, block=block).block, block)
            found[tile] = frozenset(by_size.values())
        return found

    @cached_property
    def _deals(self) -> dict[_Tile, frozenset[tuple[int, int]]]:
        """(size of a block, chunks) that keep all cores busy about equally long, in L2 if that can be."""
        found: dict[_Tile, frozenset[tuple[int, int]]] = {}
        for tile, blocks in self._blocks.items():
            shapes = [
                shape
                for block in blocks
                for chunks in self._choices("chunks")
                if (shape := self._of_tile(tile, block=block, chunks=chunks)).chunks == chunks
            ]
            fitting = [shape for shape in shapes if self._fits(shape)] or shapes
            best = min(map(self._slowest, fitting))
            even = [shape for shape in fitting if self._slowest(shape) <= _DEAL_SLACK * best]
            even.sort(key=lambda shape: -shape.block)
            found[tile] = frozenset(
                (shape.block, chunks)
                for chunks in self._choices("chunks")
                for shape in [each for each in even if each.chunks == chunks][:_LARGEST]
            )
        return found

    def _of_tile(self, tile: _Tile, **values: int) -> ContractionTiling:
        """A config's shape; what it does not depend on is as it comes."""
        whole = {knob.name: knob.choices[0] for knob in self.applied.space.knobs}
        return self.applied.shape_of({**whole, "rows": tile[0], "vectors": tile[1], **values})

    def _slowest(self, shape: ContractionTiling) -> float:
        """The work of the slowest thread, as a share of all there is."""
        gemm, cores = self.applied.gemm, self.applied.machine.cores
        outer = gemm.rows[0].extent if gemm.rows else 1
        iterations = extent_of(gemm.shared) * shape.chunks * shape.blocks
        twice = shape.blocks * shape.block / outer * shape.chunks * shape.per_chunk / shape.panels.count
        return -(-iterations // cores) / iterations * twice

    def _fits(self, shape: ContractionTiling) -> bool:
        panel = shape.panels.size * self.applied.gemm.length * self.applied.gemm.weight_bytes
        room = _SECOND_CACHE * self.applied.machine.caches.l2_per_core
        return panel + self.applied.block_bytes(shape) <= room

    # -- blocks of a panel ----------------------------------------------------------------------------------------

    @cached_property
    def _in_k_blocks(self) -> dict[_Tile, frozenset[int]]:
        gemm, room = self.applied.gemm, _FIRST_CACHE * self.applied.machine.caches.l1
        found: dict[_Tile, frozenset[int]] = {}
        for tile in self._tiles:
            shape = self._of_tile(tile)
            each = shape.panels.size * gemm.weight_bytes + shape.rows * gemm.data.dtype.bytes  # for a tap
            fitting = [n for n in self._choices("k_block") if 0 < n * gemm.inner_k * each <= room]
            found[tile] = frozenset({0, *sorted(fitting)[-_K_BLOCKS:]})
        return found

    def _next_k_block_goes_to(self, shape: ContractionTiling) -> int:
        """The level of the cache; of a weight that is not packed the next panel, which is farther away."""
        gemm = self.applied.gemm
        if not gemm.constant_weight:
            return 2
        k_size = shape.k_block * gemm.inner_k or gemm.length
        both = 2 * shape.panels.size * gemm.weight_bytes + shape.rows * gemm.data.dtype.bytes  # for a tap
        return 1 if k_size * both <= _FIRST_CACHE * self.applied.machine.caches.l1 else 2

    def _staging_moves_something(self, shape: ContractionTiling) -> bool:
        if self.applied.must_stage or not self.applied.in_runs:
            return True
        gemm = self.applied.gemm
        data = extent_of((*gemm.rows, *gemm.k_axes)) * gemm.data.dtype.bytes
        return shape.k_block > 0 and data > self.applied.machine.caches.l2_per_core

    def _choices(self, name: str) -> tuple[int, ...]:
        return next(tuple(map(int, knob.choices)) for knob in self.applied.space.knobs if knob.name == name)


S = TypeVar("S")


@dataclass(frozen=True)
class _BestDealt(Generic[S]):
    """The configs whose scratch memory fits L2, if any does, and whose slowest thread takes little longer than that of
    the best of these."""

    applied: Any
    slack: ClassVar[float]  # of the time of the slowest thread

    @cached_property
    def space(self) -> Space:
        whole = self.applied.space
        return Space(whole.template, whole.knobs, self._legal, whole.together)

    def _legal(self, values: Mapping[str, Value]) -> bool:
        if not self._is_considered(values):
            return False
        shape = self.applied.shape_of(values)
        fitting, best = self._best[self._compared_with(shape)]
        return fitting == self._fits(shape) and self._slowest(shape) <= self.slack * best

    @cached_property
    def _best(self) -> dict[object, tuple[bool, float]]:
        """For those that are compared with each other: whether any fits L2, and the least of `_slowest` of these."""
        every: dict[object, list[S]] = {}
        for config in self.applied.space.configs():
            if self._is_considered(dict(config.values)):
                shape = self.applied.shape_of(dict(config.values))
                every.setdefault(self._compared_with(shape), []).append(shape)
        found = {}
        for key, shapes in every.items():
            fitting = [shape for shape in shapes if self._fits(shape)]
            found[key] = bool(fitting), min(map(self._slowest, fitting or shapes))
        return found

    def _fits(self, shape: S) -> bool:
        return self._scratch_bytes(shape) <= _SECOND_CACHE * self.applied.machine.caches.l2_per_core

    def _is_considered(self, values: Mapping[str, Value]) -> bool:
        return bool(self.applied.space.legal(values))

    def _compared_with(self, shape: S) -> object:
        return None

    def _scratch_bytes(self, shape: S) -> int:
        raise NotImplementedError

    def _slowest(self, shape: S) -> float:
        """The instructions of the thread with the most products, of the ports that are busy longest."""
        raise NotImplementedError


class NondominatedWinograd(_BestDealt[WinogradShape]):
    slack = _TILE_SLACK * _DEAL_SLACK

    def _compared_with(self, shape: WinogradShape) -> int:
        return shape.outputs

    def _scratch_bytes(self, shape: WinogradShape) -> int:
        return (shape.seen_size + shape.products_size) * DType.F32.bytes

    def _slowest(self, shape: WinogradShape) -> float:
        iterations = -(-shape.panel_groups * shape.blocks // self.applied.machine.cores)
        tiles = iterations * shape.share * shape.channel_blocks * shape.elements * shape.row_tiles
        return tiles * shape.channels * _busiest_port(shape.rows, shape.vectors)


class NondominatedStrassen(_BestDealt[StrassenShape]):
    slack = _TILE_SLACK

    def _is_considered(self, values: Mapping[str, Value]) -> bool:
        """Whether it is legal, and neither longer code would be, nor is the weight prefetched from farther away."""
        longest = max(map(int, next(k.choices for k in self.applied.space.knobs if k.name == "unroll")))
        if values["prefetch"] == 2 or not self.applied.space.legal(values):
            return False
        return values["unroll"] == longest or not self.applied.space.legal({**values, "unroll": longest})

    def _scratch_bytes(self, shape: StrassenShape) -> int:
        return shape.scratch_bytes

    def _slowest(self, shape: StrassenShape) -> float:
        iterations = -(-shape.chunks * shape.blocks // self.applied.machine.cores)
        steps = iterations * shape.per_chunk * PRODUCTS * shape.tiles * shape.k_blocks * shape.k_block
        if shape.single:
            steps += iterations * 2 * shape.tiles * self.applied.k.extent
        return steps * _busiest_port(shape.rows, shape.vectors)


class NondominatedPaired(_BestDealt[PairedShape]):
    slack = _DEAL_SLACK

    def _legal(self, values: Mapping[str, Value]) -> bool:
        if not super()._legal(values):
            return False
        shape = self.applied.shape_of(values)
        return values["block"] == self._blocks[shape.rows][shape.block]

    @cached_property
    def _blocks(self) -> dict[int, dict[int, int]]:
        """For each number of rows and size of a block the first value of the knob that comes to it."""
        found: dict[int, dict[int, int]] = {}
        for config in self.applied.space.configs():
            shape = self.applied.shape_of(dict(config.values))
            found.setdefault(shape.rows, {}).setdefault(shape.block, config.int("block"))
        return found

    def _scratch_bytes(self, shape: PairedShape) -> int:
        return shape.scratch_bytes

    def _slowest(self, shape: PairedShape) -> float:
        iterations = -(-shape.chunks * shape.blocks // self.applied.machine.cores)
        return float(iterations * shape.per_chunk * shape.tiles * self.applied.instructions(shape))


_RULES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (AppliedContraction, NondominatedContraction),
    (AppliedWinograd, NondominatedWinograd),
    (AppliedStrassen, NondominatedStrassen),
    (AppliedPaired, NondominatedPaired),
)


def _busiest_port(rows: int, vectors: int) -> float:
    """Instructions in a step of a register tile, in those of the FMA ports."""
    return max(rows * vectors, _SUMS, _LOADS_EACH * (rows + vectors))


def _with_choices(knob: Knob, kept: Collection[Value]) -> Knob:
    return Knob(knob.name, tuple(choice for choice in knob.choices if choice in kept), None, knob.ordered)
