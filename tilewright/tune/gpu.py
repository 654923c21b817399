"""How each task is computed on a GPU without any measurement."""

from __future__ import annotations

from collections.abc import Collection

from tilewright.errors import SpaceError
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor.pieces import Way, ours
from tilewright.space.vendor.ways import vendor_ways

# What must be there for a way of this name: a library that we call, or the framework.
LIBRARIES = {"cublaslt": "cublaslt", "cudnn": "torch", "cudnn apart": "torch", "sdpa": "torch"}


def ways_of(task: Task, machine: GpuMachine, numerics: str, libraries: Collection[str]) -> list[Way]:
    """All ways to compute a task with these libraries. SpaceError where there is none."""
    found = [way for way in vendor_ways(task, numerics) if LIBRARIES[way.name] in libraries]
    if GpuWork(task, machine, numerics).formula is not None:
        found.append(ours(task))
    if not found:
        raise SpaceError(f"no kernel and no library computes {task.label} on a GPU")
    return found


def choose(task: Task, machine: GpuMachine, numerics: str, libraries: Collection[str]) -> Way:
    """A library for what has a matrix product or a convolution in it, and a kernel of ours for all else."""
    found = ways_of(task, machine, numerics, libraries)
    own = [way for way in found if way.is_ours]
    return own[0] if own and _is_depthwise(task) else found[0]


def _is_depthwise(task: Task) -> bool:
    return any(
        node.op == "conv" and node.attrs["groups"] > 1 and node.attrs["groups"] == node.shape[-1]
        for node in task.graph.nodes()
    )
