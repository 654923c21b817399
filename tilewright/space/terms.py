"""The operation counts of a candidate, which an analytical model (`cost/`) converts to time.

Each kind of machine counts what its time depends on. A candidate of several kernels is a tuple of their terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Terms:
    """What a program does on a processor, counted over all threads.

    Instructions are whole vectors. Traffic is bytes that come from each level of memory into the one before it; stores
    count as twice their bytes where they miss (the line is read first).
    """

    arithmetic: float  # instructions of the FMA ports
    loads: float = 0.0  # loads and broadcasts issued
    stores: float = 0.0
    branches: float = (
        0.0  # iterations of innermost loops: each costs about a mispredicted or taken branch's share
    )
    from_l2: float = 0.0
    from_l3: float = 0.0
    from_memory: float = 0.0
    prefetched: float = 0.0  # of `from_memory`, bytes that the program itself prefetches early enough
    iterations: int = 1  # of the parallel loop
    scalar: float = 0.0  # cycles that none of the above covers, over all threads


@dataclass(frozen=True)
class GpuTerms:
    """What a kernel does on a GPU. Those of the main loop are of one block and one of its `steps`."""

    blocks: int
    threads: int  # of a block
    registers: int  # of a thread, estimated
    shared_bytes: int  # that a block asks for
    steps: int
    stages: int  # steps that are under way at once
    flops: float  # on tensor cores
    scalar: float  # instructions, over all warps
    copies: float  # instructions of a warp that copy to shared memory
    shared_traffic: float  # bytes into and out of shared memory
    loaded: float  # bytes that come from L2 or beyond
    memory: float  # bytes of the whole kernel that come from memory at least once
    write_loaded: float  # bytes that a block reads for its results, behind the main loop
    written: float  # bytes of them
    write_shared: float  # bytes into and out of shared memory for them
    cluster: int = 1  # blocks that must run at once
    ordinary: float = 0.0  # instructions that wait for nothing but each other, over all warps
    persistent: bool = (
        False  # a block begins the next tile while it writes the results of one; `blocks` are tiles
    )


@dataclass(frozen=True)
class Roofline:
    """Work of which only the totals are known: a library call, or a kernel without a main loop worth modelling."""

    flops: float
    bytes: float
    unit: str = "scalar"  # what multiplies: "scalar", "tensor16", "tf32"
    busy: float = 1.0  # share of the machine that has work
    chain: float = 0.0  # FMAs of one thread that wait for each other's operands
    is_call: bool = False  # of a library, which takes longer to start
    launches: int = 1  # kernels that follow each other


Counted: TypeAlias = Terms | GpuTerms | Roofline | tuple["Counted", ...]
