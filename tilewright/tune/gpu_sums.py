"""Products whose results are only combined, over rows as by the mean of an image, or over columns: both as one task.

    [conv + add + relu]  [mean]   ->   [conv + add + relu + mean]

A task of its own, with ways of its own (`space/vendor/summed.py`): where one of them is chosen, the pair is joined.
Fusion leaves the two apart, since only some kernels can do both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tilewright.cost.gpu import rank, seconds
from tilewright.graph.ir import Node
from tilewright.graph.task import Partition, Task, TaskCall
from tilewright.hw.gpu import GpuMachine
from tilewright.space.sketches.cuda import SKETCHES
from tilewright.space.space import Config
from tilewright.space.templates.cuda import TEMPLATES
from tilewright.space.templates.cuda.sums import KINDS, TensorSums, combined_of
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor.pieces import Way, with_producer
from tilewright.space.vendor.summed import NAME, cuts_of, way_summed

_START = 2e-6  # seconds of a kernel that does little
_MOST = 4  # ways of a pair

_PARTED = "apart from each other"  # in the place of a template: the pair is faster as two tasks

# Whether a product and the reduction behind it should be one call, which is the third.
Join = Callable[[TaskCall, TaskCall, TaskCall], bool]


@dataclass(frozen=True)
class Pair:
    """A product and the reduction of its results. `ways`: those that the analytical model expects to be the fastest;
    `pays`: whether it expects the first to be faster than the two apart."""

    task: Task
    product: str  # key of its task
    ways: tuple[Way, ...]
    pays: bool


def parted(config: Config) -> Config:
    """That a pair is faster apart than joined in this way: to be remembered like a way."""
    return Config(_PARTED, config.values)


def best_joined(config: Config) -> Config:
    """The way that a config stands for, or that lost where it says that the pair is apart."""
    return Config(NAME, config.values) if config.template == _PARTED else config


def joined(partition: Partition, ways: Mapping[str, Way]) -> Partition:
    """The partition with those pairs joined whose task has a way."""
    return _walked(partition, lambda before, call, whole: _is_joined(ways.get(whole.task.key)))


def joined_tasks(partitions: Sequence[Partition], keys: Collection[str]) -> dict[str, Task]:
    """The tasks of pairs whose key is one of these."""
    found: dict[str, Task] = {}

    def join(before: TaskCall, call: TaskCall, whole: TaskCall) -> bool:
        if whole.task.key in keys:
            found[whole.task.key] = whole.task
        return False

    for partition in partitions:
        _walked(partition, join)
    return found


def pairs_of(
    partitions: Sequence[Partition], ways: Mapping[str, Way], machine: GpuMachine, numerics: str
) -> dict[str, Pair]:
    """By key of the task that they would be: where a kernel of ours computes the product."""
    found: dict[str, Pair] = {}

    def join(before: TaskCall, call: TaskCall, whole: TaskCall) -> bool:
        key = whole.task.key
        if key not in found and key not in ways:
            pair = _pair(before, call, whole, ways, machine, numerics)
            if pair is not None:
                found[key] = pair
        return False

    for partition in partitions:
        _walked(partition, join)
    return found


def _walked(partition: Partition, join: Join) -> Partition:
    # A call may read one buffer twice, as what it combines and beside that.
    readers = Counter(partition.buffer_of(node) for call in partition.calls for node in call.inputs)
    calls: list[TaskCall] = []
    writer: dict[Node, TaskCall] = {}
    for call in partition.calls:
        made, reduced = call, _reduced(call)
        if reduced is not None:
            buffer = partition.buffer_of(reduced)
            before = writer.get(buffer)
            alone = readers[buffer] == 1 and buffer not in partition.graph.outputs
            if before is not None and alone and not _reduces(before):
                whole = with_producer(call, reduced, before)
                if join(before, call, whole):
                    calls.remove(before)
                    made = whole
        calls.append(made)
        writer[made.output] = made
    result = Partition(partition.graph, tuple(calls), partition.views)
    result.check()
    return result


def _is_joined(way: Way | None) -> bool:
    return way is not None and way.config.template == NAME


def _reduced(call: TaskCall) -> Node | None:
    """What a call reads to combine its rows or columns, and for nothing else."""
    graph = call.task.graph
    found = [node for node in graph.nodes() if node.op in KINDS]
    if len(found) != 1 or not found[0].inputs[0].is_input or combined_of(found[0]) is None:
        return None
    source = found[0].inputs[0]
    return call.inputs[source.attrs["index"]] if len(graph.users()[source]) == 1 else None


def _reduces(call: TaskCall) -> bool:
    return any(node.op in KINDS for node in call.task.graph.nodes())


def _pair(
    before: TaskCall,
    call: TaskCall,
    whole: TaskCall,
    ways: Mapping[str, Way],
    machine: GpuMachine,
    numerics: str,
) -> Pair | None:
    product, behind = ways.get(before.task.key), ways.get(call.task.key)
    if product is None or behind is None or not product.is_ours or len(product.pieces) != 1:
        return None
    template = next((t for t in (*TEMPLATES, *SKETCHES) if t.name == product.config.template), None)
    applied = None if template is None else template.apply(GpuWork(before.task, machine, numerics))
    if applied is None:
        return None
    found = []
    for number, (count, pieces) in enumerate(cuts_of(whole.task)):
        rest = sum(_alone(piece.task, machine) for piece in pieces[1:])
        work = GpuWork(pieces[0].task, machine, numerics)
        found += [
            (ranked.seconds + rest, number, way_summed(count, pieces, ranked.config))
            for ranked in rank(work, most=_MOST, templates=[TensorSums()])
        ]
    if not found:
        return None
    found.sort(key=lambda each: each[:2])
    apart = seconds(applied.terms(product.config), machine) + _alone(call.task, machine)
    apart += (len(behind.pieces) - 1) * _START
    return Pair(whole.task, before.task.key, tuple(way for _, _, way in found[:_MOST]), found[0][0] < apart)


def _alone(task: Task, machine: GpuMachine) -> float:
    return _START + task.bytes / machine.memory_bytes_per_second
