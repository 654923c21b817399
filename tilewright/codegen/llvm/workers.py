"""Worker processes that run LLVM alongside the compiler.

llvmlite has one lock for all threads of a process, so a second kernel goes through LLVM only in a second process:

    this process   IR of a kernel --> the first that is free:   this process's own LLVM  --> object code
                                                                a worker process's LLVM  --> object code

A worker gets the text of the IR and answers with the bytes that LLVM makes of it, the same bytes as here. It starts
with the first kernel that finds this process's LLVM busy, so a compilation that finds its kernels in the cache starts
none. Whatever goes wrong with a worker, this process compiles the kernel itself: nothing is lost but time, and an error
of LLVM is raised here. Workers end with the compilation, and with this process.
"""

from __future__ import annotations

import gc
import os
import queue

import msgspec

from tilewright import knobs
from tilewright.codegen.llvm import toolchain
from tilewright.codegen.llvm.toolchain import Processor
from tilewright.errors import CodegenError, MeasurementError
from tilewright.support.process import Channel, Child, Dead

_SERVE = "tilewright.codegen.llvm.workers:serve"
_KERNELS_EACH = 6  # for which starting a worker, a fifth of a second, pays
_MEMORY = 4 << 30  # bytes of its own that a worker may take; 30 MB are usual, and 100 MB with libraries
_SECONDS = 600.0  # that LLVM may take for a kernel in a worker


class Named(msgspec.Struct, frozen=True):
    """A processor in LLVM's words."""

    triple: str
    cpu: str
    features: str

    def feature_string(self) -> str:
        return self.features


class Job(msgspec.Struct, frozen=True):
    ir_text: str
    machine: Named


class Workers:
    """LLVM of this process and of worker processes. Any thread may ask; `close` comes after the last answer."""

    def __init__(self, processes: int) -> None:
        self._children = [Child(_SERVE, _MEMORY) for _ in range(processes)]
        # This process's own LLVM is None and goes first: a worker is started only when it is needed.
        self._free: queue.LifoQueue[Child | None] = queue.LifoQueue()
        for child in (*self._children, None):
            self._free.put(child)

    @property
    def processes(self) -> int:
        return len(self._children)

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return [child.pid for child in self._children if child.pid is not None]

    def object_code(self, ir_text: str, machine: Processor) -> bytes:
        """Compile as `toolchain.object_code` does, in the first process that is free."""
        child = self._free.get()
        if child is None:
            try:
                return toolchain.object_code(ir_text, machine)
            finally:
                self._free.put(None)
        code = _answer(child, Job(ir_text, Named(machine.triple, machine.cpu, machine.feature_string())))
        if code is None:  # the worker is not asked again
            return toolchain.object_code(ir_text, machine)
        self._free.put(child)
        return code

    def close(self) -> None:
        for child in self._children:
            child.close()


def worker_processes(kernels: int) -> int:
    """The number of workers that pays off for this many kernels."""
    if os.name != "posix":  # `support/process.py` needs its sockets
        return 0
    return min(knobs.get("build_processes"), kernels // _KERNELS_EACH)


def _answer(child: Child, job: Job) -> bytes | None:
    """The object code; None where the worker did not start, died, or LLVM refused the text."""
    try:
        child.send(msgspec.msgpack.encode(job))
        return child.receive(_SECONDS) or None
    except (Dead, MeasurementError, OSError):
        child.close()
        return None


# -- in the worker ----------------------------------------------------------------------------------------------------


def serve(channel: Channel) -> None:
    decoder = msgspec.msgpack.Decoder(Job)
    gc.disable()
    while True:
        job = decoder.decode(channel.receive()[0])
        try:
            code = toolchain.object_code(job.ir_text, job.machine)
        except CodegenError:
            code = b""
        channel.send(code)
