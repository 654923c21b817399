"""Lock files for GPUs: the way of every task of a build, and of every two that it joins, in the file that `lock.py`
describes.

`kernel` is a fingerprint of all that runs for the task, calls of libraries included, of the card's capability and of
the versions of NVRTC and PyTorch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.pieces import code_of
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.runtime.plan import Origin
from tilewright.runtime.ports import torch_module
from tilewright.space.vendor.candidates import way_of
from tilewright.space.vendor.pieces import Way
from tilewright.support.fingerprint import fingerprint
from tilewright.tune.lock import FORMAT, Lock, LockedTask, Misfit, fitted


def lock_of(ways: Mapping[str, Way], tasks: Mapping[str, Task], machine: GpuMachine, numerics: str) -> Lock:
    locked = {}
    for key, way in ways.items():
        config = way.config
        kernel = _kernel(way, machine, numerics)
        locked[key] = LockedTask(tasks[key].label, kernel, config.template, dict(config.values))
    return Lock(FORMAT, numerics, locked)


def locked_ways(
    lock: Lock,
    tasks: Mapping[str, Task],
    machine: GpuMachine,
    numerics: str,
    libraries: Collection[str],
    path: Path,
) -> dict[str, Way]:
    """What the lock says for every one of `tasks`; LockError where it cannot be had."""

    def one(key: str, locked: LockedTask) -> Way:
        way = way_of(tasks[key], machine, numerics, libraries, locked.config)
        if way is None:
            raise Misfit(
                f"its config is none of this version's, or of a library that is not here: {locked.config}"
            )
        if _kernel(way, machine, numerics) != locked.kernel:
            raise Misfit(
                "its config gives another kernel here: the card, NVRTC, PyTorch or this program differ"
            )
        return replace(way, origin=Origin("lock"))

    labels = {key: task.label for key, task in tasks.items()}
    return fitted(lock, labels, numerics, path, one)


def _kernel(way: Way, machine: GpuMachine, numerics: str) -> str:
    calls = any(piece.call is not None for piece in way.pieces)
    version = getattr(torch_module(), "__version__", "") if calls else ""
    return fingerprint(code_of(way, machine, numerics), machine.capability, toolchain.version(), str(version))
