"""Multi-level tiling with a fused consumer: a reduction with data reuse, in six levels of loops."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright import te
from tilewright.dtypes import DType
from tilewright.space.sketches.acts import NativeTile
from tilewright.space.sketches.analysis import (
    consumer_of,
    depends_on_data,
    has_reuse,
    is_reduction,
    loads_in,
    loops_of,
    moves_along,
    needs,
    stage_of,
)
from tilewright.space.sketches.gemm import GemmStage, TiledOutput, TiledStage
from tilewright.space.sketches.sketch import Sketch


class MultiLevelTiling:
    """Six levels of loops, S S R S R S, the innermost tile in registers.

        product[i, j] += a[i, k] * b[k, j]     ->     S S R S R S, the innermost tile in registers,
        out[i, j] = max(product[i, j], 0)             and `out` of each tile after it

    The docstring of `gemm.py` shows the loops.
    """

    name = "tile"
    alone = False

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        found = tiled(sketch, self.name, micro=False)
        return [each for each in found if not suits_micro_kernel(each)]


def suits_micro_kernel(sketch: Sketch) -> bool:
    """Whether the last product is a sum of products of two elements in memory, one independent of the vector axis,
    the other independent of the row axis."""
    gemm = sketch.products[-1].gemm
    leaf, row = gemm.stage.leaf, gemm.row
    if leaf.kind != "sum" or leaf.target.dtype not in (DType.F32, DType.F64) or row is None:
        return False
    value = leaf.value
    if not (isinstance(value, te.Call) and value.op == "mul"):
        return False
    moves = [
        (moves_along(operand, gemm.own(row)), gemm.is_walked(operand))
        for operand in value.args
        if isinstance(operand, te.Load)
    ]
    return sorted(moves) == [(False, True), (True, False)]


def tiled(sketch: Sketch, name: str, *, micro: bool, native: NativeTile | None = None) -> Sequence[Sketch]:
    """Tile the next stage if it is a reduction with data reuse and a single reader. With an intrinsic, the reader
    must be the output, and nothing else may split the innermost reduction axis."""
    if not is_reduction(sketch.start, sketch.stage):
        return ()
    stage = stage_of(sketch.start, sketch.stage)
    consumer = consumer_of(sketch.start, sketch.stage)
    if (
        consumer is None
        or not has_reuse(stage)
        or depends_on_data(stage.leaf)
        or not loops_of(consumer.stage)
    ):
        return ()
    gemm = GemmStage(sketch.work, consumer, stage, micro, native)
    if not any(gemm.is_walked(load) for load in loads_in(stage.leaf)):
        return ()
    if native is not None and not _fits(gemm, native):
        return ()
    if consumer.name in sketch.bare and sketch.frame is not None and native is None:
        rename = {knob: sketch.unused(knob) for knob in ("rows", "vectors", "unroll")}
        inner = TiledStage(gemm, sketch.frame.block_loop, rename, sketch.boxes[consumer.name])
        return [
            sketch.visited(
                inner.move(),
                name=name,
                gemm=inner,
                boxes={sketch.stage: lambda values: gemm.box_of(inner.box(values))},
            )
        ]
    if sketch.frame is not None or consumer.name != sketch.output:
        return ()
    inputs_only = all(
        not is_reduction(sketch.start, other)
        for other in needs(sketch.start, sketch.output)
        if other != sketch.stage
    )
    frame = TiledOutput(gemm)
    return [
        sketch.visited(
            *frame.moves(k_blocks=stage.leaf.kind == "sum" and native is None, chunks=inputs_only),
            name=name,
            frame=frame,
            gemm=frame,
            boxes={sketch.stage: lambda values: gemm.box_of(frame.at_block(values))},
        )
    ]


def _fits(gemm: GemmStage, native: NativeTile) -> bool:
    """Whether a whole number of intrinsics fills a register tile."""
    rows = 1 if gemm.row is None else gemm.row.extent
    return (
        native.rows <= rows
        and native.lanes <= gemm.axes.vector.extent
        and gemm.last_k.extent % native.k_axes == 0
        and gemm.tile_is_legal(native.rows, 1, 1)
    )
