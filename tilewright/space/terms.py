"""The operation counts of a candidate, which an analytical model (`cost/`) converts to time.

Each kind of machine counts what its time depends on. A candidate with several kernels has a tuple of terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tilewright.support.frozen import quickly_made


@quickly_made
@dataclass(frozen=True)
class Terms:
    """Operation counts of a program on a CPU, over all threads.

    Instructions are whole vectors. Traffic is the bytes loaded from each level of memory into the one above it.
    Stores that miss count twice, because the line is read first.
    """

    arithmetic: float  # instructions on the FMA ports
    loads: float = 0.0  # loads and broadcasts issued
    stores: float = 0.0
    branches: float = (
        0.0  # iterations of innermost loops: each costs a share of a taken or mispredicted branch
    )
    from_l2: float = 0.0
    from_l3: float = 0.0
    from_memory: float = 0.0
    prefetched: float = 0.0  # bytes of `from_memory` that the program prefetches early enough
    iterations: int = 1  # of the parallel loop
    scalar: float = 0.0  # cycles not covered by the other terms, over all threads


@dataclass(frozen=True)
class GpuTerms:
    """Operation counts of a kernel on a GPU. Those of the main loop are per block and per step."""

    blocks: int
    threads: int  # of a block
    registers: int  # of a thread, estimated
    shared_bytes: int  # per block
    steps: int
    stages: int  # steps in flight at once
    flops: float  # on tensor cores
    scalar: float  # instructions, over all warps
    copies: float  # warp instructions that copy to shared memory
    shared_traffic: float  # bytes to and from shared memory
    loaded: float  # bytes from L2 or beyond
    memory: float  # bytes that the whole kernel loads from memory at least once
    write_loaded: float  # bytes that a block reads for its epilogue, after the main loop
    written: float  # bytes of results
    write_shared: float  # bytes to and from shared memory for them
    cluster: int = 1  # blocks that must run at once
    ordinary: float = 0.0  # instructions that only wait for each other, over all warps
    persistent: bool = False  # a block starts the next tile while it writes one; `blocks` are then tiles


@dataclass(frozen=True)
class Roofline:
    """Work known only by its totals: a library call, or a kernel whose main loop is not worth modelling."""

    flops: float
    bytes: float
    unit: str = "scalar"  # the unit that multiplies: "scalar", "tensor16", "tf32"
    busy: float = 1.0  # share of the machine that has work
    chain: float = 0.0  # length of the longest dependency chain of FMAs in a thread
    is_call: bool = False  # whether it is a library call, which takes longer to start
    launches: int = 1  # consecutive kernels


@dataclass(frozen=True)
class Cycles:
    """Of an accelerator."""

    count: float


Counted: TypeAlias = Terms | GpuTerms | Roofline | Cycles | tuple["Counted", ...]
