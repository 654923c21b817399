"""The operation counts of a candidate, which an analytical model (`cost/`) converts to time.

Each kind of machine counts what its time depends on. A candidate with several kernels has a tuple of terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tilewright.support.arith import ceil_div
from tilewright.support.batch import Number, least
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
class InnerLoop:
    """The register pipeline within a step: each part is loaded from shared memory into registers, then used."""

    parts: int  # of a step
    stages: int  # parts in registers at once
    loaded: float  # bytes that a warp loads for a part
    fused: bool  # whether the first part of a step is loaded in the step before


@dataclass(frozen=True)
class TileGrid:
    """The tiles that concurrent blocks share: blocks form groups of `together` rows."""

    rows: int
    columns: int
    together: int
    row_bytes: float  # that a step loads for a row of tiles
    column_bytes: float

    def loaded(self, blocks: Number) -> Number:
        """Distinct bytes that a step of so many neighbouring blocks loads."""
        whole, rest = divmod(blocks, self.rows * self.columns)
        group = self.together * self.columns
        rows = least(least(self.rows, ceil_div(rest, group) * self.together), rest)
        columns = least(self.columns, ceil_div(rest, self.together))
        found = whole * (self.rows * self.row_bytes + self.columns * self.column_bytes)
        return found + (rows * self.row_bytes + columns * self.column_bytes)


@dataclass(frozen=True)
class GpuTerms:
    """Operation counts of a kernel on a GPU; of many configs, arrays. Those of the main loop are per block and step."""

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
    inner: InnerLoop | None = None  # of a step; None: its loads are hidden
    grid: TileGrid | None = (
        None  # None: each block loads all of its tiles for the first time as often as others
    )
    write_flops: float = 0.0  # on tensor cores after the main loop: further products of a chain
    write_scalar: float = 0.0  # instructions for them, over all warps
    waits_before: float = 0.0  # times that a block waits for memory before its main loop
    warpgroups: int = 0  # of a block that multiply by instructions of warpgroups; 0: by those of warps
    roles: bool = False  # whether warps of their own do nothing but start copies


@dataclass(frozen=True)
class StreamTerms:
    """Operation counts of a GPU kernel without tensor cores, whose blocks load, compute and store in steps; per block,
    over all its steps."""

    blocks: int
    threads: int  # of a block
    registers: float  # of a thread, estimated; more than there are means spills
    steps: float
    loaded: float  # bytes, those that were loaded before included
    written: float
    memory: float  # bytes of the kernel's tensors, each once
    scalar: float  # instructions, over all warps


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
    """The cycles that an accelerator takes."""

    count: float


Counted: TypeAlias = Terms | GpuTerms | StreamTerms | Roofline | Cycles | tuple["Counted", ...]
