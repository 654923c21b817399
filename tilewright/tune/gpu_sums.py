"""Products whose results are only combined, over rows as by the mean of an image, or over columns: both are one kernel,
or two of which the first leaves little for the second.

    [conv + add + relu]  [mean]   ->   [conv + add + relu + mean of each part]  [mean of the parts]

Where a template computes the product, and the analytical model says that it pays. A part is no longer than a tile.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.cost.gpu import rank, seconds
from tilewright.graph.ir import Node
from tilewright.graph.task import Partition, Task, TaskCall
from tilewright.hw.gpu import GpuMachine
from tilewright.space.sketches.cuda import SKETCHES
from tilewright.space.templates.cuda import TEMPLATES
from tilewright.space.templates.cuda.sums import KINDS, MOST, TensorSums, combined_of
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor.pieces import Piece, with_producer
from tilewright.space.vendor.tall import in_parts

_START = 2e-6  # seconds of a kernel that does little
_FEWEST = 16  # rows or columns of a part
_FILLED = 0.7  # of a tile

Joined = tuple[Partition, dict[str, Piece]]


def with_sums(partition: Partition, pieces: dict[str, Piece], machine: GpuMachine, numerics: str) -> Joined:
    """The partition with such pairs joined, and the piece behind each of its calls."""
    readers: dict[Node, int] = {}
    for call in partition.calls:
        for node in {partition.buffer_of(node) for node in call.inputs}:
            readers[node] = readers.get(node, 0) + 1
    calls: list[TaskCall] = []
    writer: dict[Node, TaskCall] = {}
    found = dict(pieces)
    for call in partition.calls:
        made = [call]
        reduced = _reduced(call, found)
        if reduced is not None:
            buffer = partition.buffer_of(reduced)
            before = writer.get(buffer)
            alone = readers[buffer] == 1 and buffer not in partition.graph.outputs
            if before is not None and alone:
                joined = _joined(before, call, reduced, found, machine, numerics)
                if joined is not None:
                    calls.remove(before)
                    made = [each for each, _ in joined]
                    found.update({each.key: piece for each, piece in joined})
        calls += made
        writer.update({each.output: each for each in made})
    result = Partition(partition.graph, tuple(calls), partition.views)
    result.check()
    return result, {call.key: found[call.key] for call in result.calls if call.key in found}


def _reduced(call: TaskCall, pieces: dict[str, Piece]) -> Node | None:
    """What a call of ours reads to combine its rows or columns, and for nothing else."""
    piece = pieces.get(call.key)
    if piece is None or piece.call is not None:
        return None
    graph = call.task.graph
    found = [node for node in graph.nodes() if node.op in KINDS]
    if len(found) != 1 or not found[0].inputs[0].is_input or combined_of(found[0]) is None:
        return None
    source = found[0].inputs[0]
    return call.inputs[source.attrs["index"]] if len(graph.users()[source]) == 1 else None


def _joined(
    before: TaskCall,
    call: TaskCall,
    reduced: Node,
    pieces: dict[str, Piece],
    machine: GpuMachine,
    numerics: str,
) -> list[tuple[TaskCall, Piece]] | None:
    product = pieces.get(before.key)
    if product is None or product.call is not None or product.config is None:
        return None
    if any(node.op in KINDS for node in before.task.graph.nodes()):  # joined with a reduction already
        return None
    template = next((t for t in (*TEMPLATES, *SKETCHES) if t.name == product.config.template), None)
    applied = None if template is None else template.apply(GpuWork(before.task, machine, numerics))
    if applied is None:
        return None
    limit = seconds(applied.terms(product.config), machine) + _alone(call.task, machine)
    whole = with_producer(call, reduced, before)
    best: tuple[float, list[tuple[TaskCall, Piece]]] | None = None
    for first, rest in _cuts(whole.task):
        for ranked in rank(GpuWork(first.task, machine, numerics), most=1, templates=[TensorSums()]):
            took = ranked.seconds + (0.0 if rest is None else _alone(rest.task, machine))
            if took < (limit if best is None else best[0]):
                chosen = replace(first, config=ranked.config)
                best = took, _calls(whole, chosen, rest)
    return None if best is None else best[1]


def _alone(task: Task, machine: GpuMachine) -> float:
    return _START + task.bytes / machine.memory_bytes_per_second


def _cuts(task: Task) -> list[tuple[Piece, Piece | None]]:
    """All in one kernel, where the reduction is the last and short; or in parts, combined by a second."""
    (node,) = (each for each in task.graph.nodes() if each.op in KINDS)
    of = combined_of(node)
    assert of is not None
    if node is task.output and of.size <= MOST:
        return [(Piece(task, task.graph.inputs, node), None)]
    possible = [
        count
        for count in range(1, of.size + 1)
        if of.size % count == 0 and _FEWEST <= of.size // count <= MOST
    ]
    well = [count for count in possible if _filled(of.size // count) >= _FILLED]
    return [in_parts(task, node, of, count) for count in (well or possible)[:4]]


def _filled(size: int) -> float:
    tile = _FEWEST
    while tile < size:
        tile *= 2
    return size / tile


def _calls(whole: TaskCall, first: Piece, rest: Piece | None) -> list[tuple[TaskCall, Piece]]:
    values = {node: whole.inputs[node.attrs["index"]] for node in (*first.operands, *_inputs(rest))}
    way = str(first.config)
    if rest is None:
        inputs = tuple(values[node] for node in first.operands)
        return [(TaskCall(first.task, inputs, whole.output, whole.name, way), first)]
    between = replace(first.result, name="", source="")
    values[first.result] = between
    made = []
    for piece, output, name in ((first, between, f"{whole.name}.0"), (rest, whole.output, whole.name)):
        inputs = tuple(values[node] for node in piece.operands)
        made.append((TaskCall(piece.task, inputs, output, name, way), piece))
    return made


def _inputs(piece: Piece | None) -> list[Node]:
    return [] if piece is None else [node for node in piece.operands if node.is_input]
