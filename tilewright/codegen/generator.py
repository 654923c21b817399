"""Code generation by kind of machine: the one interface that the packages above use.

    Kernel description (space/implementation.py) --> machine code with what a plan needs to know of it

One slice for each kind: `llvm/` for processors, `cuda/` for NVIDIA GPUs, `gemmini/` for the accelerator. A slice sees
one kernel, and no task.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, cast

from tilewright import knobs
from tilewright.codegen.cache import ObjectCache
from tilewright.errors import CodegenError
from tilewright.hw import Machine
from tilewright.link import Linkable
from tilewright.runtime.plan import VendorCall
from tilewright.space.implementation import Implementation, Kernel, Part
from tilewright.support.fingerprint import fingerprint

_SLICES = {
    "cpu": "tilewright.codegen.llvm.generator",
    "cuda": "tilewright.codegen.cuda.generator",
    "gemmini": "tilewright.codegen.gemmini.generator",
}

_STACK_BYTES = (
    8 << 20
)  # of a thread that builds: some systems give new ones far less than a process begins with


class Workers(Protocol):
    """Processes that a slice has for itself. They start when they are needed."""

    @property
    def processes(self) -> int: ...

    def close(self) -> None: ...


class Generator(Protocol):
    """The interface of a code generator: functions of a module."""

    AT_ONCE: int  # kernels that are worth building at once in one process
    KEEPS_TRIALS: bool  # whether the machine code of trials is worth keeping in the cache

    def workers(self, kernels: int) -> Workers | None:
        """Processes that help to build so many kernels; None where they do not pay."""

    def build(
        self,
        kernel: Kernel,
        machine: Any,
        numerics: str,
        cache: ObjectCache | None,
        workers: Any = None,
    ) -> tuple[Linkable, bool]:
        """Machine code, from the cache or made now, and whether it was in the cache. Raises CodegenError if the machine
        lacks what the kernel needs. `workers`: processes that may do a part of it."""

    def check_trial(self, kernel: Kernel, machine: Any, numerics: str, cache: ObjectCache | None) -> None:
        """Raise PipelineError if the machine code shows that the kernel's pipeline is not worth measuring."""

    def source(self, kernel: Kernel, machine: Any, numerics: str) -> str:
        """The text that the machine code is made of, under a fixed name: what a measured time holds for."""

    def key(self, kernel: Kernel, machine: Any, numerics: str) -> str:
        """A fingerprint of everything that decides the machine code: what a lock file holds."""

    def toolchain(self, machine: Any) -> str:
        """The versions of what makes and runs machine code, the libraries that may take part included."""

    def plan_target(self, machine: Any) -> dict[str, Any]:
        """A plan's description of the machine that its code requires."""


@lru_cache(maxsize=8)
def generator(kind: str) -> Generator:
    if kind not in _SLICES:
        raise CodegenError(f"the kind of a machine must be one of {', '.join(_SLICES)}, got {kind!r}")
    return cast(Generator, importlib.import_module(_SLICES[kind]))


def build_part(
    part: Part, machine: Machine, numerics: str, cache: ObjectCache | None
) -> tuple[Linkable, bool]:
    if isinstance(part.body, VendorCall):
        packings = (*part.packings, *[None] * (len(part.operands) - len(part.packings)))
        return Linkable("", b"", 1, f"{part.body.function} of a library", packings, vendor=part.body), True
    made, cached = generator(machine.kind).build(part.body, machine, numerics, cache)
    return _packed(made, part), cached


def _packed(made: Linkable, part: Part) -> Linkable:
    """The part with as many packings as it has inputs."""
    return replace(made, packings=(*made.packings, *[None] * (len(part.operands) - len(made.packings))))


class Builds:
    """The kernels of one compilation, built by threads and worker processes while it goes on.

    `kernels`: how many there will be, about. Use it as a context: threads and processes end with it."""

    def __init__(self, machine: Machine, numerics: str, cache: ObjectCache | None, kernels: int) -> None:
        self._machine, self._numerics, self._cache = machine, numerics, cache
        slice = generator(machine.kind)
        self.workers = slice.workers(kernels)
        at_once = slice.AT_ONCE + (self.workers.processes if self.workers else 0)
        cores = knobs.usable_cores()
        # One more than cores where processes help: while they run LLVM, the next IR is made here.
        threads = min(kernels, at_once, cores + 1 if self.workers else cores)
        self._pool = ThreadPoolExecutor(threads, "tilewright-build") if threads > 1 else None
        self._begun: dict[int, tuple[Kernel, Future[tuple[Linkable, bool]]]] = {}  # by the kernel's id

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
        finally:
            if self.workers is not None:
                self.workers.close()

    def begin(self, part: Part) -> None:
        """Build it meanwhile. What that raises, `result` raises."""
        body = part.body
        if self._pool is None or isinstance(body, VendorCall) or id(body) in self._begun:
            return
        before = threading.stack_size(_STACK_BYTES)
        try:
            begun = self._pool.submit(self._build, body)
        finally:
            threading.stack_size(before)
        self._begun[id(body)] = body, begun

    def result(self, part: Part) -> tuple[Linkable, bool]:
        """The part as machine code, and whether it was in the cache: what was begun, or made now."""
        if isinstance(part.body, VendorCall):
            return build_part(part, self._machine, self._numerics, self._cache)
        begun = self._begun.get(id(part.body))
        made, cached = self._build(part.body) if begun is None else begun[1].result()
        return _packed(made, part), cached

    def _build(self, kernel: Kernel) -> tuple[Linkable, bool]:
        slice = generator(self._machine.kind)
        return slice.build(kernel, self._machine, self._numerics, self._cache, self.workers)


def code_of(implementation: Implementation, machine: Machine, numerics: str) -> str:
    """The fingerprint of all that runs: what a measured time holds for."""
    slice = generator(machine.kind)
    texts = [
        repr(part.body) if isinstance(part.body, VendorCall) else slice.source(part.body, machine, numerics)
        for part in implementation.parts
    ]
    whole = texts[0] if len(texts) == 1 else repr(texts)
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


def locked_code_of(implementation: Implementation, machine: Machine, numerics: str) -> str:
    """The same with everything else that decides the machine code: what a lock file promises."""
    slice = generator(machine.kind)
    parts = [
        repr(part.body) if isinstance(part.body, VendorCall) else slice.key(part.body, machine, numerics)
        for part in implementation.parts
    ]
    if len(parts) == 1 and not implementation.uses_library:
        return parts[0]
    return fingerprint(parts, slice.toolchain(machine))
