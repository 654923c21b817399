"""Closed-form costs of configs: for a tiled GEMM, and for the stages computed with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright import te
from tilewright.loops.schedule.nest import Leaf, Tile, find_leaf
from tilewright.space.sketches.analysis import (
    Extents,
    bytes_of,
    instructions_of,
    lanes_for,
    loads_in,
    moves_along,
)
from tilewright.space.sketches.sketch import Box, Sketch, Values
from tilewright.space.template import Terms

if TYPE_CHECKING:
    from tilewright.space.sketches.gemm import GemmStage, TiledOutput, TiledStage

Cost = Callable[[Values], Terms]


def together(costs: Sequence[Cost], iterations: Callable[[Values], int]) -> Cost:
    """The sum of these costs in each iteration of a parallel loop; the counts are for the whole loop."""

    def cost(values: Values) -> Terms:
        sums = [sum(column) for column in zip(*(vars(each(values)).values() for each in costs), strict=True)]
        return replace(Terms(*sums), iterations=iterations(values))

    return cost


def stage_cost(sketch: Sketch, name: str, box: Box, iterations: Callable[[Values], int]) -> Cost:
    """The cost of a stage of which a box is computed in each iteration, in vectors."""
    leaf = find_leaf(sketch.start.nest, name)[1]
    lanes = lanes_for(sketch.work.machine, leaf, 1 << 20)
    length = math.prod(var.extent for var in leaf.reduced)
    arithmetic, loads = instructions_of(leaf), len(loads_in(leaf))
    size, near = leaf.target.dtype.bytes, sketch.work.machine.caches.l1 // 2

    def cost(values: Values) -> Terms:
        each = math.prod(box(values))
        stored = each * iterations(values)
        vectors = stored * length / lanes
        # A stage's result is still in L1 for the next stage, or is written to L2 and read again.
        passes = 2.0 if each * length * size > near else 0.0
        return Terms(
            arithmetic=vectors * arithmetic,
            loads=vectors * loads,
            stores=stored / lanes,
            branches=vectors / 4,
            from_l2=passes * stored * length * size,
        )

    return cost


def inner_cost(tiled: TiledStage, sketch: Sketch, iterations: Callable[[Values], int]) -> Cost:
    """The cost of a product whose result stays in a block's scratch memory."""
    gemm = tiled.gemm
    leaf = gemm.leaf_in(sketch.start)
    operands = [OperandCost(gemm, sketch, load) for load in loads_in(leaf)]
    walked = [each for each in operands if each.walked]
    accesses = sum(gemm.lanes if each.gathered else 1 for each in walked)
    instructions = _per_step(leaf)
    positions = {axis: n for n, axis in enumerate(gemm.consumer.stage.axes) if axis is not None}
    near, chains = gemm.work.machine.caches.l1 // 2, gemm.work.machine.chains

    def cost(values: Values) -> Terms:
        rows, vectors, unroll = tiled.tile(values)
        box, times = tiled.box(values), iterations(values)
        width = vectors * gemm.lanes
        down = box[positions[gemm.row]] if gemm.row is not None else 1
        across = box[positions[gemm.axes.vector]]
        tiles = math.prod(box) // (down * across) * -(-down // min(rows, down)) * -(-across // width) * times
        steps = tiles * gemm.length
        each = min(rows, down) * vectors
        copies = [operand.copied(box, times) for operand in walked]
        # Rows that do not fit in L1 are loaded again for each panel.
        data = sum(operand.bytes(box) for operand in operands if not operand.walked)
        again = -(-across // width) if data > near else 1
        panels = sum(operand.bytes(box) for operand in walked)
        return Terms(
            arithmetic=steps * max(each * instructions, chains),
            loads=steps * (min(rows, down) * (len(operands) - len(walked)) + vectors * accesses)
            + _loads(copies),
            stores=tiles * each + _stores(copies),
            branches=steps / unroll + 3.0 * tiles,
            from_l2=float((panels + data * again) * times),
            scalar=tiles * 12.0,
        )

    return cost


def _per_step(leaf: Leaf) -> float:
    """Instructions per step and vector: an FMA for floats; integers are widened, multiplied and added."""
    values = [node for node in te.walk(leaf.value) if node.dtype.short not in ("i64", "bool")]
    computed = sum(isinstance(node, te.Call | te.Select) for node in values)
    converted = sum(isinstance(node, te.Cast) for node in values)
    fused = leaf.kind == "sum" and leaf.target.dtype.is_float
    return computed + converted / 4 + (0.0 if fused else 2.0)


def _loads(copies: Sequence[Terms]) -> float:
    return sum(each.loads for each in copies)


def _stores(copies: Sequence[Terms]) -> float:
    return sum(each.stores for each in copies)


class TiledCost:
    """The terms of a config, counted as in the matmul template."""

    def __init__(self, tiled: TiledOutput, sketch: Sketch) -> None:
        gemm = self.gemm = tiled.gemm
        self.tiled = tiled
        leaf = gemm.leaf_in(sketch.start)
        operands = [OperandCost(gemm, sketch, load) for load in loads_in(leaf)]
        self.walked = [each for each in operands if each.walked]
        self.others = [each for each in operands if not each.walked]
        constants = sketch.start.nest.constants
        self.weights = [each for each in self.walked if each.load.source.name in constants]
        self.free = [each for each in self.walked if each.load.source.name not in constants]
        # Operands with separate data for each row, such as a depthwise convolution's, are not panels that rows share.
        self.own = [each for each in self.free if each.by_row]
        self.panels = [each for each in self.walked if each not in self.own]
        self.free = [each for each in self.free if each not in self.own]
        self.instructions = _per_step(leaf)

    def __call__(self, values: Values) -> Terms:
        shape, gemm = self.tiled.shape(values), self.gemm
        axes, caches = gemm.axes, gemm.work.machine.caches
        repeats = math.prod(axis.extent for axis in axes.shared)
        passes = repeats * shape.blocks * shape.chunks * shape.per_chunk
        tiles = passes * self.tiled.tiles_in_block(shape)
        steps = tiles * gemm.length
        k_blocks = gemm.last_k.extent // shape.k_block if shape.k_block else 1

        at_panel, at_block = self.tiled.at_panel(values), self.tiled.at_block(values)
        panel = sum(each.bytes(at_panel) for each in self.panels)
        block = sum(each.bytes(at_block) for each in self.others)
        data = block * shape.blocks * repeats
        # The part of a panel that all rows of the block read stays in L1, or is loaded again for each tile.
        near = panel // k_blocks + shape.rows * gemm.length * 4 // k_blocks <= caches.l1 * 3 // 4
        panel_reads = passes * panel if near else tiles * panel
        data_reads = data * shape.chunks * shape.per_chunk
        fits = caches.keep(panel + block)
        from_l2 = float(panel_reads) + (data_reads if fits and block > caches.l1 // 2 else 0)
        from_l3 = 0.0 if fits else float(min(data_reads, panel_reads))
        # Panels are loaded from memory once per block of rows, unless the chunk's panels stay in L2.
        chunk_panels = shape.per_chunk if shape.chunks > 1 else shape.panels
        again = shape.blocks if panel * chunk_panels > caches.l2_per_core // 2 else 1
        panels = shape.panels * repeats
        weight = panels * sum(each.bytes(at_panel) for each in self.weights)
        from_l3 += weight * (again - 1)
        data += sum(max(panels * each.bytes(at_panel) * again, each.whole) for each in self.free)
        data += sum(max(passes * each.bytes(at_panel), each.whole) for each in self.own)
        target = gemm.consumer.stage.leaf.target
        written, cores = target.size * target.dtype.bytes, gemm.work.machine.cores
        # Data that the previous kernel left in this core's L2, and data that the next kernel finds there.
        if caches.keep((data + written) / cores + weight / (1 if shape.chunks == 1 else cores)):
            from_l2 += data + 2.0 * written
            from_l3 += data * (min(shape.chunks, cores) - 1)
        else:
            from_l3 += data * shape.chunks + 2.0 * written

        from_memory = float(weight)
        asked = passes * panel / gemm.work.machine.line_bytes if values.get("prefetch") else 0.0
        each = shape.rows * shape.vectors
        epilogue = tiles * each
        partial = (
            2.0 * epilogue * k_blocks if k_blocks > 1 else 0.0
        )  # the sums of a K block are added to the previous ones
        iterations = repeats * shape.chunks * shape.blocks
        copies = [op.copied(at_panel, passes) for op in self.walked]
        copies += [op.copied(at_block, iterations) for op in self.others]
        return Terms(
            arithmetic=steps * max(each * self.instructions, gemm.work.machine.chains)
            + epilogue
            + partial / 2,
            loads=steps * (shape.rows * len(self.others) + shape.vectors * _accesses(self.panels))
            + steps * each * _accesses(self.own)
            + epilogue
            + partial
            + _loads(copies)
            + asked,
            stores=epilogue + partial + _stores(copies),
            branches=steps / shape.unroll + 3.0 * tiles * k_blocks,
            from_l2=from_l2,
            from_l3=from_l3,
            from_memory=from_memory,
            prefetched=from_memory if asked else 0.0,
            iterations=iterations,
            scalar=tiles * k_blocks * 12.0 + passes * 100.0 + steps * max(0, shape.rows - 8) * 0.25,
        )


def _accesses(operands: Sequence[OperandCost]) -> int:
    """Loads for a vector of each."""
    return sum(each.lanes if each.gathered else 1 for each in operands)


class OperandCost:
    """One operand of a product, and whether it is copied before it is read."""

    def __init__(self, gemm: GemmStage, sketch: Sketch, load: te.Load) -> None:
        assert isinstance(load.source, Tile)
        self.load, self.tile = load, load.source
        self.walked = gemm.is_walked(load)
        self.by_row = gemm.row is not None and moves_along(load, gemm.own(gemm.row))
        self.how = sketch.operands.get(load.source.name, "")
        self.gathered = gemm.is_gathered(load) and not self.how
        self.lanes = gemm.lanes
        self.transposed = gemm.is_gathered(load)
        self.box = gemm.operand_box(sketch.start, load.source)

    @property
    def whole(self) -> int:
        return self.tile.size * self.tile.dtype.bytes

    def bytes(self, box: Extents) -> int:
        return bytes_of(self.tile, self.box(box))

    def copied(self, box: Extents, times: int) -> Terms:
        """The cost of copying it `times` times: in vectors, read element by element if the order changes."""
        if self.how in ("", "packed"):
            return Terms(0.0)
        elements = self.bytes(box) / self.tile.dtype.bytes * times
        return Terms(
            0.0, loads=elements if self.transposed else elements / self.lanes, stores=elements / self.lanes
        )
