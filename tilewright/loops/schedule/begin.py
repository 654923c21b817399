"""The initial nest of a schedule: one plain loop nest for each stage, producers first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.loops.ir import Scope
from tilewright.loops.schedule.caches import cache_write
from tilewright.loops.schedule.nest import Loop, Nest, Node, Tile, stage_nest
from tilewright.te.index import simplify


def begin(
    output: te.Tensor, inputs: Sequence[te.Tensor], name: str = "kernel", constants: Collection[int] = ()
) -> Nest:
    """One nest for each stage of `output`; intermediate stages are kept in scratch memory.

    The output is only ever written, so an output that is itself a reduction is computed in a local tile
    (`cache_write`) and copied.
    """
    assert isinstance(output, te.Compute), "a task computes something"
    names: set[str] = set()
    tiles: dict[te.Source, Tile] = {}
    for tensor in inputs:
        tiles[tensor] = Tile(_unused(tensor.name, names), tensor.dtype, tensor.shape, Scope.GLOBAL)
    body: list[Node] = []
    for stage in te.stages(output):
        scope = Scope.GLOBAL if stage is output else Scope.SCRATCH
        tile = Tile(_unused(stage.name, names), stage.dtype, stage.shape, scope)
        body.extend(_stage(stage, tile, tiles))
        tiles[stage] = tile
    nest = Nest(
        name,
        tuple(tiles[tensor] for tensor in inputs),
        tiles[output],
        tuple(body),
        frozenset(tiles[inputs[number]].name for number in constants),
        (None,) * len(inputs),
    )
    return nest if output.reduction is None else cache_write(nest, nest.output.name)


def _unused(name: str, names: set[str]) -> str:
    unused, number = name, 2
    while unused in names:
        unused, number = f"{name}_{number}", number + 1
    names.add(unused)
    return unused


def _stage(stage: te.Compute, tile: Tile, tiles: dict[te.Source, Tile]) -> tuple[Node, ...]:
    def rule(node: te.Expr) -> te.Expr | None:
        if not isinstance(node, te.Load):
            return None
        if node.source not in tiles:
            raise ScheduleError(f"stage {tile.name} reads {node.source.name}, which is not among the inputs")
        return te.Load(tiles[node.source], tuple(map(simplify, node.indices)))

    reduction = stage.reduction
    body = te.rewrite(stage.body if reduction is None else reduction.body, rule)
    values: dict[te.Var, te.Expr] = {}
    loops: list[Loop] = []
    for axis in () if reduction is None else reduction.axes:
        renamed = te.Var(f"{tile.name}.{axis.name}", axis.extent)
        values[axis] = renamed if axis.extent != 1 else te.as_index(0)
        if axis.extent != 1:
            loops.append(Loop(renamed, ()))

    def value(indices: tuple[te.Expr, ...]) -> te.Expr:
        return te.substitute(body, {**values, **dict(zip(stage.axes, indices, strict=True))})

    return stage_nest(tile.name, tile, loops, None if reduction is None else reduction.kind, value)
