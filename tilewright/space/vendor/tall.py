"""Reductions of many rows to few results, where rows are contiguous: in parts, by two kernels.

    red(x, over rows)  ->  partial[p, n] = red(x[rows of part p, n])     (a thread for a few neighbours, in float32)
                           red(partial, over p), and all that is behind

The parts are combined in their order: the result has the same bits every time.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.space.sketches.cuda.shared_sums import NAME as SUMS
from tilewright.space.sketches.cuda.shared_sums import SharedSums
from tilewright.space.space import Config
from tilewright.space.templates.cuda.sums import KINDS, Combined, combined_of
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor.pieces import Piece, Way, cut

NAME = "tall"
_NEIGHBOURS = 8  # results of a thread
_BUSY = 1_024  # threads of a multiprocessor
_NEARLY_ENOUGH = 8  # parts that are not worth a second kernel
_FEWEST_ROWS, _MOST_PARTS = 32, 2_048  # of a part; of a reduction


def parts_of(task: Task, machine: GpuMachine) -> int | None:
    """In how many parts the one reduction of a task keeps a card busy; None where it does so by itself, or is no such
    reduction."""
    found = _reduction(task)
    if found is None:
        return None
    _, rows = found
    wanted = _BUSY * machine.sms * _NEIGHBOURS / (rows.parts * rows.beside)
    if wanted <= _NEARLY_ENOUGH or rows.beside % _NEIGHBOURS:
        return None
    most = min(_MOST_PARTS, rows.size // _FEWEST_ROWS)
    possible = [count for count in range(2, most + 1) if rows.size % count == 0]
    return min(possible, key=lambda count: max(count / wanted, wanted / count), default=None)


def way_tall(task: Task, count: int, inner: Config | None = None) -> Way:
    """`inner`: the config of a sketch for the second piece; None: the default program."""
    found = _reduction(task)
    assert found is not None
    first, rest = in_parts(task, *found, count)
    values = {"count": count, **(dict(inner.values) if inner is not None else {})}
    return Way(Config.of(NAME, values), first.operands, (first, replace(rest, config=inner)))


def way_of_config(task: Task, machine: GpuMachine, numerics: str, config: Config) -> Way | None:
    """The way that `way_tall` gave this config; None where there is no such way."""
    values = dict(config.values)
    found, count = _reduction(task), int(values.pop("count", 0))
    if found is None or not count or found[1].size % count:
        return None
    if not values:
        return way_tall(task, count)
    inner = Config.of(SUMS, values)
    way = way_tall(task, count, inner)
    applied = SharedSums().apply(GpuWork(way.pieces[1].task, machine, numerics))
    return way if applied is not None and inner in applied.space else None


def _reduction(task: Task) -> tuple[Node, Combined] | None:
    """The one reduction of what the task is given, where it is over rows."""
    graph = task.graph
    found = [node for node in graph.nodes() if node.op in KINDS]
    if len(found) != 1 or len(graph.inputs) != 1 or not found[0].inputs[0].is_input:
        return None
    rows = combined_of(found[0])
    if rows is None or rows.along or len(graph.users()[graph.inputs[0]]) > 1:
        return None
    return found[0], rows


def in_parts(task: Task, node: Node, of: Combined, count: int) -> tuple[Piece, Piece]:
    """red(x)  ->  red of (red of each part, in float32)."""
    partial: list[Node] = []

    def rule(each: Node, operands: tuple[Node, ...]) -> Node | None:
        if each is not node:
            return None
        wide = apply("cast", operands[0], dtype=DType.F32)
        parts = (count, of.size // count)
        shape = (of.beside * of.parts, *parts) if of.along else (of.parts, *parts, of.beside)
        partial.append(apply(node.op, apply("reshape", wide, shape=shape), axes=(2,), keepdims=False))
        total = apply(node.op, partial[0], axes=(1,), keepdims=False)
        return apply("reshape", apply("cast", total, dtype=node.dtype), shape=node.shape)

    graph = rebuild(task.graph, rule)
    constants = [graph.inputs[number] for number in task.constants]
    computed = [each for each in graph.nodes() if not (each.is_input or each.is_constant)]
    before = set(Graph(graph.inputs, (partial[0],)).nodes())
    first, rest = cut(
        graph,
        constants,
        [
            ([each for each in computed if each in before], partial[0]),
            ([each for each in computed if each not in before], graph.outputs[0]),
        ],
    )
    return first, rest
