"""Code generation by kind of machine: the one interface that the packages above use.

    Kernel description (space/implementation.py) --> machine code with what a plan needs to know of it

One slice for each kind: `llvm/` for processors, `cuda/` for NVIDIA GPUs, `gemmini/` for the accelerator. A slice sees
one kernel, and no task.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


class Generator(Protocol):
    """What a slice offers: functions of a module."""

    AT_ONCE: int  # kernels that are worth building at once in one process
    KEEPS_TRIALS: bool  # whether the machine code of trials is worth keeping in the cache

    def build(
        self, kernel: Kernel, machine: Any, numerics: str, cache: ObjectCache | None
    ) -> tuple[Linkable, bool]:
        """Machine code, from the cache or made now, and whether it was in the cache. CodegenError where the machine
        lacks what the kernel needs."""

    def source(self, kernel: Kernel, machine: Any, numerics: str) -> str:
        """The text that the machine code is made of, under a fixed name: what a measured time holds for."""

    def key(self, kernel: Kernel, machine: Any, numerics: str) -> str:
        """A fingerprint of everything that decides the machine code: what a lock file holds."""

    def toolchain(self, machine: Any) -> str:
        """The versions of what makes and runs machine code, the libraries that may take part included."""

    def plan_target(self, machine: Any) -> dict[str, Any]:
        """What a plan says of the machine that its code needs."""


@lru_cache(maxsize=8)
def generator(kind: str) -> Generator:
    if kind not in _SLICES:
        raise CodegenError(f"there is no code generation for machines of the kind {kind!r}")
    return cast(Generator, importlib.import_module(_SLICES[kind]))


def build_part(
    part: Part, machine: Machine, numerics: str, cache: ObjectCache | None
) -> tuple[Linkable, bool]:
    inputs = len(part.operands)
    if isinstance(part.body, VendorCall):
        packings = (*part.packings, *[None] * (inputs - len(part.packings)))
        return Linkable("", b"", 1, f"{part.body.function} of a library", packings, vendor=part.body), True
    made, cached = generator(machine.kind).build(part.body, machine, numerics, cache)
    return replace(made, packings=(*made.packings, *[None] * (inputs - len(made.packings)))), cached


@contextmanager
def building(
    parts: Sequence[Part], machine: Machine, numerics: str, cache: ObjectCache | None
) -> Iterator[Iterator[tuple[Linkable, bool]]]:
    """Each part in turn; meanwhile threads build those behind it, as far as that pays."""
    threads = min(len(parts), generator(machine.kind).AT_ONCE, knobs.usable_cores())
    if threads < 2:
        yield (build_part(part, machine, numerics, cache) for part in parts)
        return
    pool = ThreadPoolExecutor(threads, "tilewright-build")
    before = threading.stack_size(_STACK_BYTES)
    try:
        waiting = [pool.submit(build_part, part, machine, numerics, cache) for part in parts]
    finally:
        threading.stack_size(before)
    try:
        yield (each.result() for each in waiting)
    finally:
        pool.shutdown(cancel_futures=True)


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
