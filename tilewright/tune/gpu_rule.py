"""How each task is computed on a GPU where nothing is measured."""

from __future__ import annotations

import math
from collections.abc import Collection

from tilewright.cost import gpu as cost
from tilewright.errors import SpaceError
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.gpu.rows import is_rowwise
from tilewright.measure.gpu_calibration import rated
from tilewright.space.sketches.cuda.shared_sums import SharedSums
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor import apart, split, tall
from tilewright.space.vendor.candidates import candidate_ways, is_contraction, is_depthwise
from tilewright.space.vendor.pieces import Way, ours

_FEW_TERMS = 32
_QUERIES, _IDLE = 64, 4  # of a block of attention; blocks for each multiprocessor that are few
_START = 3e-6  # seconds until a kernel begins, roughly
_WORTH_TWO = 0.6  # of what one kernel is expected to take, that two may: it often takes less
_REACHED = 0.7  # of the memory's bandwidth, by a kernel that reads columns


def choose(task: Task, machine: GpuMachine, numerics: str, libraries: Collection[str]) -> Way:
    """Without measurement: a library for what has a large matrix product or a convolution in it; a template where it
    was found ahead of them, or nothing else is there; the default program for all else."""
    found = candidate_ways(task, machine, numerics, libraries, algorithms=1)
    own = [way for way in found if way.is_ours]
    rates = rated(machine)
    if own and (is_depthwise(task) or not is_contraction(task)):
        return _shared(task, rates, numerics) or own[0]
    if own == found or _suits_template(task, machine):
        best = cost.best_of(GpuWork(task, rates, numerics))
        cut = min(cut_ways(task, rates, numerics), key=lambda each: each[0], default=None)
        if best is not None and (cut is None or best.seconds <= cut[0]):
            return ours(task, best.config)
        if cut is not None:
            return cut[1]
    if not found:
        raise SpaceError(f"no kernel and no library computes {task.label} on a GPU")
    return found[0]


def _shared(task: Task, machine: GpuMachine, numerics: str) -> Way | None:
    """A kernel whose threads share long sums of few results, where these do not run along memory: the default program
    leaves most of the card idle."""
    work = GpuWork(task, machine, numerics)
    if is_depthwise(task) or work.formula is None or is_rowwise(work.formula):
        return None
    best = next(iter(cost.rank(work, most=1, templates=[SharedSums()])), None)
    parts = _tall(task, machine, numerics)
    if parts is not None and (best is None or parts[0] < _WORTH_TWO * best.seconds):
        return parts[1]
    return None if best is None else ours(task, best.config)


def _tall(task: Task, machine: GpuMachine, numerics: str) -> tuple[float, Way] | None:
    """A reduction over rows in parts, and the seconds that it is expected to take."""
    count = tall.parts_of(task, machine)
    if count is None:
        return None
    first, rest = tall.way_tall(task, count).pieces
    ending = GpuWork(rest.task, machine, numerics)
    best = next(iter(cost.rank(ending, most=1, templates=[SharedSums()])), None)
    way = tall.way_tall(task, count, None if best is None else best.config)
    moved = first.task.bytes / (_REACHED * machine.memory_bytes_per_second)
    return moved + 2 * _START, way


def cut_ways(task: Task, machine: GpuMachine, numerics: str) -> list[tuple[float, Way]]:
    """Ways of two kernels of ours, and the seconds that they are expected to take."""
    found = (
        _in_parts(task, machine, numerics),
        _apart(task, machine, numerics),
        _tall(task, machine, numerics),
    )
    return [way for way in found if way is not None]


def _apart(task: Task, machine: GpuMachine, numerics: str) -> tuple[float, Way] | None:
    """The best way to compute what stands before a product by itself."""
    if not apart.is_before(task):
        return None
    before, product = apart.way_apart(task, None).pieces
    for best in cost.rank(GpuWork(product.task, machine, numerics), most=1, templates=[TensorCores()]):
        seconds = best.seconds + _START + before.task.bytes / machine.memory_bytes_per_second
        return seconds, apart.way_apart(task, best.config)
    return None


def _in_parts(task: Task, machine: GpuMachine, numerics: str) -> tuple[float, Way] | None:
    """The best way to sum in parts, and the seconds that it is expected to take."""
    if not split.may_be_cut(task, machine):
        return None
    found = []
    for parts in split.parts_of(task):
        products, ending = split.way_in_parts(task, parts, None).pieces
        for best in cost.rank(GpuWork(products.task, machine, numerics), most=1, templates=[TensorCores()]):
            seconds = best.seconds + _START + ending.task.bytes / machine.memory_bytes_per_second
            found.append((seconds, parts, best.config))
    if not found:
        return None
    seconds, parts, config = min(found, key=lambda each: each[:2])
    return seconds, split.way_in_parts(task, parts, config)


def has_kernel(task: Task, machine: GpuMachine, numerics: str) -> bool:
    """Whether a kernel of ours computes the task."""
    work = GpuWork(task, machine, numerics)
    return work.formula is not None or cost.best_of(work) is not None


def _suits_template(task: Task, machine: GpuMachine) -> bool:
    """Sums of few terms, which are bound by memory; attention that leaves most of the card idle."""
    for node in task.graph.nodes():
        if node.op == "attention":
            heads, queries = math.prod(node.shape[:-2]), node.shape[-2]
            return heads * -(-queries // _QUERIES) < _IDLE * machine.sms
        if node.op == "conv" and node.attrs["layout"] == "channels_last":
            return math.prod(node.inputs[1].shape[:-1]) <= _FEW_TERMS
        if node.op == "matmul":
            return node.inputs[0].shape[-1] <= _FEW_TERMS and node.type.rank == 2
    return False
