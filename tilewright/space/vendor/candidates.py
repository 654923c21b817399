"""The ways to compute a task on a GPU that are worth a measurement: those of libraries, and the default program."""

from __future__ import annotations

from collections.abc import Collection

from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.space.sketches.cuda import SKETCHES
from tilewright.space.space import Config
from tilewright.space.templates.cuda import TEMPLATES
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor import apart, split, summed, tall
from tilewright.space.vendor.pieces import Way, ours
from tilewright.space.vendor.ways import ATTENTION, CUBLASLT, CUDNN, vendor_ways

# What must be there for a way of this name: a library that we call, or the framework.
LIBRARIES = {CUBLASLT: "cublaslt", CUDNN: "torch", ATTENTION: "torch"}
_ALGORITHMS = 5  # of a library
_MOST_FLOPS = 2e8  # of a contraction that is left to the default program, where something else is there


def candidate_ways(
    task: Task,
    machine: GpuMachine,
    numerics: str,
    libraries: Collection[str],
    algorithms: int = _ALGORITHMS,
) -> list[Way]:
    """Those of libraries first, best expected ones before others; then the default program. Those of templates are
    left to who can rank them."""
    ways = vendor_ways(task, numerics, algorithms)
    found = [way for way in ways if LIBRARIES[way.config.template] in libraries]
    if GpuWork(task, machine, numerics).formula is not None and not (found and _is_heavy(task)):
        found.append(ours(task))
    return found


def way_of(
    task: Task, machine: GpuMachine, numerics: str, libraries: Collection[str], config: Config
) -> Way | None:
    """The way that a config stands for, which may come from another version's records; None where there is none."""
    if config.template == split.NAME:
        return split.way_of_config(task, machine, numerics, config)
    if config.template == apart.NAME:
        return apart.way_of_config(task, machine, numerics, config)
    if config.template == tall.NAME:
        return tall.way_of_config(task, machine, numerics, config)
    if config.template == summed.NAME:
        return summed.way_of_config(task, machine, numerics, config)
    for template in (*TEMPLATES, *SKETCHES):
        if template.name == config.template:
            applied = template.apply(GpuWork(task, machine, numerics))
            return ours(task, config) if applied is not None and config in applied.space else None
    found = candidate_ways(task, machine, numerics, libraries)
    return next((way for way in found if way.config == config), None)


def is_depthwise(task: Task) -> bool:
    return any(
        node.op == "conv" and node.attrs["groups"] > 1 and node.attrs["groups"] == node.shape[-1]
        for node in task.graph.nodes()
    )


def is_contraction(task: Task) -> bool:
    return any(node.op in ("conv", "matmul", "linear", "attention") for node in task.graph.nodes())


def _is_heavy(task: Task) -> bool:
    return is_contraction(task) and task.flops > _MOST_FLOPS and not is_depthwise(task)
