"""Chains of matmuls, convolutions and norms of rows by blocks of rows, with the results between them in L2.

    relu(conv3x3(x, a) + c) -> conv1x1(., b)      y = gelu(x @ a + c) -> y @ b + x      layer_norm(x) @ a

    for every block of rows:                                          (parallel)
      between0[rows of the block] = the first contraction of these rows
      out[rows of the block] = the second contraction of between0

The first may be any that `contraction` computes; blocks of an image are some of its rows of pixels. The others multiply
the rows that the block has: `CONDITIONS` lists what that takes. Each stage is a nest of `contraction` over one block,
with its register tiles and packed panels, so the weights are read again for each block. That is the price; what is
saved is the traffic of the results between, and a start of the threads. A norm, before a contraction or after one, is
computed for the rows of a block as a kernel of its own would do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.chain import Refused
from tilewright.loops.formula import Formula
from tilewright.loops.ir import SCRATCH_LIMIT, Buffer, Kind, Program, Scope, Stmt, block, nest
from tilewright.loops.rowwise import row_block
from tilewright.loops.tiling import Tiles, extent_of, indices_of, with_values
from tilewright.space.chain import Stage, stages_of
from tilewright.space.row_norm import RowNorm, is_norm, row_norm_of
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, CpuWork, Terms
from tilewright.space.templates.cpu.block_norm import BlockNorm
from tilewright.space.templates.cpu.contraction import AppliedContraction
from tilewright.space.templates.cpu.contraction_nest import ContractionNest
from tilewright.space.templates.cpu.contraction_terms import PREFETCHED_COST, ContractionTiling
from tilewright.space.templates.cpu.gemm import Gemm, coordinates, gemm_of
from tilewright.support.arith import ceil_div
from tilewright.te.index import linear, simplify

NAME = "row_block_chain"
_ROWS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # approximate rows of a block
_TILES = ("14x2", "12x2", "10x2", "8x2", "8x3", "6x4", "6x3", "5x5", "4x6", "14x1", "12x1", "8x1", "6x2",
          "4x4", "4x3", "4x2", "4x1", "2x2", "2x1", "1x4", "1x2", "1x1")  # fmt: skip
_UNROLL = 4


# -- which chains -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainWork:
    """The stages of a chain as GEMMs and norms, each over the buffers of the whole task. An iteration of the parallel
    loop has one value of each axis in `lead`, some of `rows`, and all of those in `inner`."""

    stages: tuple[Stage, ...]
    parts: tuple[Gemm | RowNorm, ...]
    lead: tuple[te.Var, ...]
    rows: te.Var
    inner: tuple[te.Var, ...]
    params: tuple[Buffer, ...]

    @property
    def pixels(self) -> int:
        """Rows of the matrices for each value of `rows`."""
        return extent_of(self.inner)

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        return tuple(part for part in self.parts if isinstance(part, Gemm))

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(extent_of(columns_of(part)) for part in self.parts)


def columns_of(part: Gemm | RowNorm) -> tuple[te.Var, ...]:
    return (part.vector,) if isinstance(part, Gemm) else part.columns


@dataclass(frozen=True)
class Condition:
    """A condition on two neighbouring stages, and the reason to give if it does not hold."""

    holds: Callable[[Stage, Gemm | RowNorm, Gemm | RowNorm], bool]
    reason: str


CONDITIONS = (
    Condition(
        lambda stage, one, two: _is_float32(one.formula) and _is_float32(two.formula),
        "it does not multiply 32-bit floats throughout",
    ),
    Condition(
        lambda stage, one, two: _is_plain(one) and _is_plain(two),
        "its GEMMs are batched, or have groups or blocks of channels",
    ),
    Condition(
        lambda stage, one, two: _has_own_weight(one) and _has_own_weight(two),
        "the weight of a GEMM is not constant, or is read elsewhere too",
    ),
    Condition(
        lambda stage, one, two: _reads_it_alone(two, stage),
        "the second GEMM does not read the result of the first alone",
    ),
    Condition(
        lambda stage, one, two: _reads_its_rows(one, two, stage),
        "the second GEMM reads other rows than the block computes",
    ),
)


def _is_float32(formula: Formula) -> bool:
    buffers = (*formula.inputs, formula.output, formula.reductions[0].result)
    return all(buffer.dtype is DType.F32 for buffer in buffers)


def _is_plain(part: Gemm | RowNorm) -> bool:
    return isinstance(part, RowNorm) or (type(part) is Gemm and not part.shared)


def _has_own_weight(part: Gemm | RowNorm) -> bool:
    if isinstance(part, RowNorm):
        return True
    loads = [load for expr in part.formula.expressions() for load in te.loads(expr)]
    own = sum(load.source == part.weight_load.source for load in loads)
    return part.constant_weight and own == 1


def _reads_it_alone(part: Gemm | RowNorm, stage: Stage) -> bool:
    if isinstance(part, RowNorm):
        return True
    return isinstance(part.data, te.Load) and part.data.source == stage.source


def _reads_its_rows(one: Gemm | RowNorm, two: Gemm | RowNorm, stage: Stage) -> bool:
    """Whether row m of the second reads row m of the first, from its first column to its last."""
    width = extent_of(columns_of(one))
    if extent_of(one.rows) != extent_of(two.rows) or not two.rows:
        return False
    if len(two.rows) > 1 and _extents(one) != _extents(two):
        return False
    if isinstance(two, RowNorm):
        assert stage.source is not None
        return two.length == width and two.reads_rows_of(stage.source)
    if len(two.k_axes) != 1 or two.length != width:
        return False
    assert isinstance(two.data, te.Load)
    form, step = linear(two.data.indices[0]), width
    wanted: dict[te.Expr, int] = {two.k_axes[0]: 1}
    for axis in reversed(two.rows):
        wanted[axis] = step
        step *= axis.extent
    return form.terms == wanted and not form.constant


def _extents(part: Gemm | RowNorm) -> list[int]:
    return [axis.extent for axis in part.rows]


def _part_of(stage: Stage) -> Gemm | RowNorm | Refused:
    if is_norm(stage):
        return row_norm_of(stage.formula)
    gemm = gemm_of(stage.formula)
    if gemm is None or not gemm.rows:
        return Refused(f"{stage.sub.task.label} is not a GEMM or a convolution with a constant weight")
    return gemm


def chain_work(work: CpuWork) -> ChainWork | Refused:
    """The stages as GEMMs and norms; Refused if a block cannot compute them."""
    stages = stages_of(work)
    if isinstance(stages, Refused):
        return stages
    parts: list[Gemm | RowNorm] = []
    for stage in stages:
        part = _part_of(stage)
        if isinstance(part, Refused):
            return part
        parts.append(part)
    for stage, (one, two) in zip(stages[1:], pairwise(parts), strict=True):
        for condition in CONDITIONS:
            if not condition.holds(stage, one, two):
                return Refused(condition.reason)
    gemms = [part for part in parts if isinstance(part, Gemm)]
    weights = {gemm.weight_load.source for gemm in gemms}
    read = [b for stage in stages for b in stage.formula.inputs if b in weights]
    if len(read) > len(weights) or len(weights) < len(gemms):
        return Refused("the weight of a GEMM is not constant, or is read elsewhere too")
    first = parts[0]
    if isinstance(first, Gemm) and coordinates(first) is None and not isinstance(first.data, te.Load):
        return Refused(f"the operand of {stages[0].sub.task.label} cannot be copied by blocks")
    if any(part.rows != part.formula.axes[: len(part.rows)] for part in parts):
        return Refused("its rows are not the outermost axes of a result")
    at = max(0, len(first.rows) - 2)
    params = tuple(
        Buffer(f"x{number}", node.dtype, node.type.size) for number, node in enumerate(work.task.graph.inputs)
    )
    made = (*params, *(stage.formula.output for stage in stages))
    if any(buffer not in made for stage in stages for buffer in stage.formula.inputs):
        return Refused("an operand is not read as it is stored")
    return ChainWork(stages, tuple(parts), first.rows[:at], first.rows[at], first.rows[at + 1 :], params)


class RowBlockChain:
    name = NAME

    def apply(self, work: CpuWork) -> Applied | None:
        found = chain_work(work)
        return None if isinstance(found, Refused) else AppliedRowBlockChain(work, found)

    def refusal(self, work: CpuWork) -> str | None:
        """Why it does not compute a task; None if it does."""
        found = chain_work(work)
        if isinstance(found, Refused):
            return found.reason
        applied = AppliedRowBlockChain(work, found)
        if next(iter(applied.space.configs()), None) is None:
            least = min(applied.between_bytes(size) for size in applied.block_sizes)
            return (
                f"the results between its GEMMs take at least {least} bytes for a block, of the {applied.room}"
                " that a core keeps"
            )
        return None


# -- configs ----------------------------------------------------------------------------------------------------------


class AppliedRowBlockChain:
    def __init__(self, work: CpuWork, chain: ChainWork) -> None:
        self.work, self.chain, self.machine = work, chain, work.machine
        self.room = min(SCRATCH_LIMIT, self.machine.caches.l2_per_core) * 7 // 8
        self._stages: dict[int, tuple[AppliedContraction | BlockNorm, ...]] = {}
        self._legal_stages: dict[tuple[int, int, str, int, int], bool] = {}

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Values of `chain.rows` in a block: whole rows of pixels of an image."""
        extent, each = self.chain.rows.extent, self.chain.pixels
        sizes = sorted({min(extent, ceil_div(rows, each)) for rows in _ROWS})
        return tuple(dict.fromkeys(ceil_div(extent, ceil_div(extent, size)) for size in sizes))

    def between_bytes(self, size: int) -> int:
        return 4 * size * self.chain.pixels * sum(self.chain.widths[:-1])

    @cached_property
    def space(self) -> Space:
        knobs = [Knob("block", self.block_sizes)]
        together: list[tuple[str, ...]] = []
        for number, stage in enumerate(self.contractions_for(self.block_sizes[0])):
            cuts = next(knob.choices for knob in stage.space.knobs if knob.name == "k_block")
            wide = -(-stage.gemm.vector.extent // stage.lanes)
            tiles = [
                tile
                for tile in _TILES
                if int(tile.split("x")[1]) <= wide
                and any(
                    self._is_stage_legal(size, number, tile, int(cut), 0)
                    for size in self.block_sizes
                    for cut in cuts
                )
            ]
            knobs += [
                Knob(f"tile{number}", tuple(tiles), ordered=False),
                Knob(f"k_block{number}", cuts),
                Knob(f"prefetch{number}", (0, 1, 2)),
            ]
            together += [(f"tile{number}",), (f"k_block{number}", f"prefetch{number}")]
        return Space(NAME, tuple(knobs), self._legal, together=(("block",), *together))

    def stages_for(self, size: int) -> tuple[AppliedContraction | BlockNorm, ...]:
        """The contractions and norms of one block of this size."""
        if size not in self._stages:
            self._stages[size] = tuple(
                AppliedContraction(self.work, part, coordinates(part))
                if isinstance(part, Gemm)
                else BlockNorm(part, self.machine, number == len(self.chain.parts) - 1)
                for number, part in enumerate(self._parts_for(size))
            )
        return self._stages[size]

    def contractions_for(self, size: int) -> tuple[AppliedContraction, ...]:
        """The contractions alone, which have knobs."""
        return tuple(stage for stage in self.stages_for(size) if isinstance(stage, AppliedContraction))

    def _legal(self, values: Mapping[str, Value]) -> bool:
        size = int(values["block"])
        if self.between_bytes(size) > self.room:
            return False
        for number in range(len(self.chain.gemms)):
            tile, cut, ahead = (values[f"{knob}{number}"] for knob in ("tile", "k_block", "prefetch"))
            if not self._is_stage_legal(size, number, str(tile), int(cut), int(ahead)):
                return False
        return self._scratch(size, values) <= SCRATCH_LIMIT

    def _is_stage_legal(self, size: int, number: int, tile: str, cut: int, ahead: int) -> bool:
        """Kept, because a search of the space asks for each many times."""
        key = size, number, tile, cut, ahead
        if key not in self._legal_stages:
            stage = self.contractions_for(size)[number]
            values = _stage_values(stage, tile, cut, ahead)
            rows = stage.gemm.rows[-1].extent if stage.gemm.rows else 1
            self._legal_stages[key] = int(values["rows"]) <= rows and stage.space.legal(values)
        return self._legal_stages[key]

    def _scratch(self, size: int, values: Mapping[str, Value]) -> int:
        held = self.between_bytes(size)
        held += sum(stage.scratch_bytes for stage in self.stages_for(size) if isinstance(stage, BlockNorm))
        for stage, tiling in zip(self.contractions_for(size), self._tilings(values), strict=True):
            held += 4 * int(stage.partial_size(tiling)) * (tiling.k_block > 0)
            held += 4 * math.prod(map(int, stage.staged_extents(tiling))) if tiling.staged else 0
            held += 4 * tiling.rows * tiling.vectors * stage.lanes  # the sums of chunks of K
        return held

    def _tiles(self, values: Mapping[str, Value]) -> list[dict[str, int]]:
        """The values of the knobs of `contraction` for each stage."""
        found = []
        for number, stage in enumerate(self.contractions_for(int(values["block"]))):
            tile, cut, ahead = (values[f"{knob}{number}"] for knob in ("tile", "k_block", "prefetch"))
            found.append(_stage_values(stage, str(tile), int(cut), int(ahead)))
        return found

    def _tilings(self, values: Mapping[str, Value]) -> list[ContractionTiling]:
        stages = self.contractions_for(int(values["block"]))
        return [stage.shape_of(tile) for stage, tile in zip(stages, self._tiles(values), strict=True)]

    # -- one block ------------------------------------------------------------------------------------------------

    @cached_property
    def _first(self) -> te.Var:
        """The block's first value of `chain.rows`."""
        return te.Var("first_row", self.chain.rows.extent)

    def _parts_for(self, size: int) -> list[Gemm | RowNorm]:
        chain, pixels = self.chain, self.chain.pixels
        flat = te.Var("first_in_all", extent_of(chain.parts[0].rows))  # the same as an index of all rows
        small: dict[Buffer, Buffer] = {}
        parts: list[Gemm | RowNorm] = []
        for number, (stage, part) in enumerate(zip(chain.stages, chain.parts, strict=True)):
            if len(part.rows) > 1 or number == 0:
                axis, rest = part.rows[len(chain.lead)], part.rows[len(chain.lead) + 1 :]
                mine, start = te.Var(axis.name + "_in", size), self._first
            else:
                (axis,), rest = part.rows, ()
                mine, start = te.Var(axis.name + "_in", size * pixels), flat
            at: dict[te.Var, te.Expr] = {axis: start + mine if mine.extent > 1 else start}
            at |= dict(zip(part.rows, chain.lead, strict=False)) if axis != part.rows[0] else {}
            axes = (*((mine,) if mine.extent > 1 else ()), *rest, *columns_of(part))
            formula = _blocked(stage.formula, at, axes, {self._first, flat, *chain.lead}, small)
            if number < len(chain.stages) - 1:
                width = extent_of(columns_of(part))
                own = replace(formula.output, size=size * pixels * width, scope=Scope.SCRATCH)
                small[stage.formula.output] = own
                formula = replace(
                    formula, output=own, store=_from_zero(formula.store, {self._first, flat, *chain.lead})
                )
            if isinstance(part, RowNorm):
                parts.append(replace(part, formula=formula))
                continue
            found = gemm_of(formula)
            assert found is not None
            parts.append(found)
        return parts

    # -- what it costs ----------------------------------------------------------------------------------------------

    @property
    def _in_all(self) -> int:
        return extent_of(self.chain.lead)

    def terms(self, config: Config) -> Terms:
        """Those of `contraction` for each block, with the weights again from L3 for each but the first, and the
        results between in L2."""
        values = dict(config.values)
        size = config.int("block")
        blocks = self._in_all * ceil_div(self.chain.rows.extent, size)
        parts: list[Terms] = []
        l2 = l3 = memory = prefetched = 0.0
        tiles = iter(self._tiles(values))
        for stage in self.stages_for(size):
            if isinstance(stage, BlockNorm):
                parts.append(stage.terms)
                continue
            tile = next(tiles)
            parts.append(stage.terms_of(tile))
            gemm = stage.gemm
            weight = float(gemm.length * gemm.vector.extent * gemm.weight_bytes)
            again = weight * (blocks - 1)
            memory += weight
            if tile["prefetch"]:
                prefetched += weight
                again *= PREFETCHED_COST
            # Weights that fit beside the results between stay in L2 from one block to the next.
            stay = self.machine.caches.keep(weight + self.between_bytes(size))
            l3 += 0.0 if stay else again
            l2 += again if stay else 0.0
        between = self.between_bytes(size) * blocks
        out = self.chain.stages[-1].formula.output
        read = sum(b.size * 4.0 for b in self.chain.params if b not in self._weights)
        return Terms(
            arithmetic=blocks * sum(part.arithmetic for part in parts),
            loads=blocks * sum(part.loads for part in parts),
            stores=blocks * sum(part.stores for part in parts),
            branches=blocks * sum(part.branches for part in parts),
            from_l2=blocks * sum(part.from_l2 for part in parts) + l2 + between,
            from_l3=l3 + read + 2.0 * out.size * out.dtype.bytes,
            from_memory=memory,
            prefetched=prefetched,
            iterations=blocks,
            scalar=blocks * sum(part.scalar for part in parts),
        )

    @cached_property
    def _weights(self) -> set[te.Source]:
        return {gemm.weight_load.source for gemm in self.chain.gemms}

    # -- the program ------------------------------------------------------------------------------------------------

    def program(self, config: Config) -> Program:
        values, size = dict(config.values), config.int("block")
        chain = self.chain
        tilings = iter(self._tilings(values))
        nests: list[ContractionNest] = []
        bodies: list[Stmt] = []
        for number, stage in enumerate(self.stages_for(size)):
            if isinstance(stage, BlockNorm):
                bodies.append(row_block(stage.formula, self.machine, f"_{number}"))
                continue
            nests.append(ContractionNest(stage, next(tilings), str(number)))
            bodies.append(nests[-1].body())
        blocks = Tiles(chain.rows, size)
        tile = te.Var("block", blocks.count)
        loops = [axis for axis in (*chain.lead, tile) if axis.extent > 1]
        parallel = te.Var("p", extent_of(loops))
        first = blocks.start_of(tile)
        flat: te.Expr = te.as_index(0)
        for axis in chain.lead:
            flat = flat * axis.extent + axis
        flat = (flat * chain.rows.extent + first) * chain.pixels
        at = {self._first: first, te.Var("first_in_all", extent_of(chain.parts[0].rows)): flat}
        body = with_values(block(*bodies), at)
        body = nest([(parallel, Kind.PARALLEL)], with_values(body, indices_of(parallel, loops)))
        packed = {each.packed.original: each.packed for each in nests if each.packed is not None}
        params = tuple(packed[b].buffer if b in packed else b for b in chain.params)
        packings = tuple(packed[b].packing if b in packed else None for b in chain.params)
        output = chain.stages[-1].formula.output
        return Program("chain", (*params, output), body, str(config), packings)


def _stage_values(stage: AppliedContraction, tile: str, cut: int, ahead: int) -> dict[str, int]:
    """The knobs of `contraction` for one stage."""
    rows, vectors = map(int, tile.split("x"))
    return {
        "rows": rows,
        "vectors": vectors,
        "unroll": _UNROLL if stage.gemm.length >= _UNROLL else 1,
        "block": 0,
        "chunks": 1,
        "k_block": cut,
        "prefetch": ahead,
        "stage": stage.must_stage,
    }


def _blocked(
    formula: Formula,
    at: Mapping[te.Var, te.Expr],
    axes: tuple[te.Var, ...],
    starts: set[te.Var],
    small: Mapping[Buffer, Buffer],
) -> Formula:
    """The formula for one block: its axes at `at`, and results between read from the block's own."""

    def moved(expr: te.Expr) -> te.Expr:
        return simplify(te.rewrite(te.substitute(expr, dict(at)), own))

    def own(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and isinstance(node.source, Buffer) and node.source in small:
            return te.Load(small[node.source], tuple(_from_zero(index, starts) for index in node.indices))
        return None

    changed = formula.map(moved)
    return replace(changed, axes=axes, inputs=tuple(small.get(buffer, buffer) for buffer in formula.inputs))


def _from_zero(index: te.Expr, starts: set[te.Var]) -> te.Expr:
    """The index within the block."""
    return simplify(te.substitute(index, dict.fromkeys(starts, te.as_index(0))))
