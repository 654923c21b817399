"""A product and the reduction of its results, as one task: one kernel, or two of which the first leaves little for the
second.

    red(epilogue(a @ b), over rows or columns)  ->  partial[p, n] = red(epilogue(a @ b)[rows of part p, n])
                                                    red(partial, over p), and all that is behind

A part is no longer than a tile; one that is all of it needs no second kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.graph.ir import Node
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.space.space import Config
from tilewright.space.templates.cuda.sums import KINDS, MOST, Combined, TensorSums, combined_of
from tilewright.space.templates.cuda.sums import NAME as SUMS
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor.pieces import Piece, Way
from tilewright.space.vendor.tall import in_parts

NAME = "summed"
_FEWEST = 16  # rows or columns of a part
_FILLED = 0.7  # of a tile
_CUTS = 4  # of the fewest parts, that are weighed against each other


def cuts_of(task: Task) -> list[tuple[int, tuple[Piece, ...]]]:
    """Of each way to cut the task, the number of parts, and the pieces; 0 is all in one kernel."""
    found = reduction_of(task)
    if found is None:
        return []
    node, of = found
    if node is task.output and of.size <= MOST:
        return [(0, _pieces(task, node, of, 0))]
    possible = [
        count
        for count in range(1, of.size + 1)
        if of.size % count == 0 and _FEWEST <= of.size // count <= MOST
    ]
    well = [count for count in possible if _filled(of.size // count) >= _FILLED]
    return [(count, _pieces(task, node, of, count)) for count in (well or possible)[:_CUTS]]


def reduction_of(task: Task) -> tuple[Node, Combined] | None:
    """The one reduction of a task, where it is over rows or columns."""
    found = [node for node in task.graph.nodes() if node.op in KINDS]
    of = combined_of(found[0]) if len(found) == 1 else None
    return None if of is None else (found[0], of)


def _filled(size: int) -> float:
    tile = _FEWEST
    while tile < size:
        tile *= 2
    return size / tile


def _pieces(task: Task, node: Node, of: Combined, count: int) -> tuple[Piece, ...]:
    if not count:
        return (Piece(task, task.graph.inputs, task.output),)
    return in_parts(task, node, of, count)


def way_summed(count: int, pieces: Sequence[Piece], inner: Config) -> Way:
    """`inner`: the template's config for the first piece, which has the product."""
    made = (replace(pieces[0], config=inner), *pieces[1:])
    inputs = {node.attrs["index"]: node for piece in made for node in piece.operands if node.is_input}
    config = Config.of(NAME, {"parts": count, **dict(inner.values)})
    return Way(config, tuple(inputs[number] for number in sorted(inputs)), made)


def way_of_config(task: Task, machine: GpuMachine, numerics: str, config: Config) -> Way | None:
    """The way that `way_summed` gave this config; None where there is no such way."""
    values = dict(config.values)
    parts, inner = values.pop("parts", None), Config.of(SUMS, values)
    for count, pieces in cuts_of(task):
        if count == parts:
            applied = TensorSums().apply(GpuWork(pieces[0].task, machine, numerics))
            return way_summed(count, pieces, inner) if applied and inner in applied.space else None
    return None
