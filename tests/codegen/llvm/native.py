"""Runs a loop program as machine code, through the same loader as a plan."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np

from tilewright.hw import CpuMachine, host
from tilewright.loops.ir import Program
from tilewright.measure.single import Built
from tilewright.runtime.loader import load_objects, object_digest

CANARY = 64


def run_program(
    program: Program,
    inputs: Sequence[np.ndarray],
    *,
    machine: CpuMachine | None = None,
    numerics: str = "fast",
    pieces: int = 1,
    built: Built | None = None,
) -> np.ndarray:
    """The flat output. Its buffer is poisoned, stands between canaries that must survive, and its parallel loop is run
    in `pieces`, the last first, as threads might. `built`: the program's machine code, where there is one already."""
    (kernel,) = (built or Built.of(program, machine or host(), numerics)).parts
    digest = object_digest(kernel.code)
    library = load_objects({digest: kernel.code}, {kernel.symbol: digest})
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(library[kernel.symbol])
    output = program.params[-1]
    memory = np.full(output.size * output.dtype.bytes + 2 * CANARY, 0xA5, np.uint8)
    buffers = [np.ascontiguousarray(array) for array in inputs]
    addresses = [buffer.ctypes.data for buffer in buffers] + [memory.ctypes.data + CANARY]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    cuts = np.linspace(0, kernel.extent, pieces + 1).astype(int)
    for begin, end in reversed(list(itertools.pairwise(cuts))):
        entry(ctypes.addressof(pointers), int(begin), int(end))
    assert (memory[:CANARY] == 0xA5).all() and (memory[-CANARY:] == 0xA5).all(), "wrote outside of its output"
    return memory[CANARY:-CANARY].view(output.dtype.numpy)
