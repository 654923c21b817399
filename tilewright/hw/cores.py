"""Known processor cores by name: the constants that the operating system does not report.

Each row names the source of its numbers. A core that is not in the table is `USUAL`; code without a machine takes its
cache line and page size from there too. None of this is a field of `CpuMachine`, so that a machine's fingerprint, and
every database record, stays valid when a row is added or corrected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What the hardware prefetcher tracks: accesses within each page (Intel's streamer, and most others), so that several
# interleaved pages are all prefetched; or the addresses of one load instruction (AMD Zen), so that a load that jumps
# between pages is not.
Prefetcher = Literal["page", "stride"]


@dataclass(frozen=True)
class Core:
    """A core while all cores are busy. Widths are bytes per cycle of all units together, None if they never limit
    whole vectors; `*_ports` are instructions per cycle. `added` are additions in parallel with the FMAs."""

    multiplied: int | None = None
    loaded: int | None = None
    stored: int | None = None
    added: int = 0
    fma_ports: float = 2.0
    load_ports: float = 2.0
    store_ports: float = 1.0
    hertz: float = 2.5e9
    l2: float = 48.0  # bytes per cycle from the L2 cache
    l3: float = 12.0
    fma_latency: float = 4.0  # cycles between dependent FMAs
    line_bytes: int = 64
    page_bytes: int = 4096
    prefetcher: Prefetcher = "page"


# Two 256-bit or 512-bit FMA ports, two loads and a store a cycle: Skylake-SP and Ice Lake-SP, by Intel's optimization
# manual. The clock and the caches' rates are those of a mid-range server with all cores busy.
USUAL = Core()

# Ice Lake and Tiger Lake client parts fuse ports 0 and 1 into their only 512-bit FMA unit (Intel's optimization manual,
# section on the Ice Lake client core).
_ICE_LAKE_CLIENT = Core(multiplied=64, loaded=128, stored=64)

# Zen: the prefetcher's behaviour was measured on Zen 4 (pooling and column sums with rows in one page or in eight:
# `loops/row_plan.py`), and AMD's optimization guides describe the same "L1 stride prefetcher" from Zen 2 on.
_ZEN = Core(prefetcher="stride")

CORES: dict[str, Core] = {  # by LLVM's names
    # 128-bit units (AMD's optimization guide for family 17h, models 00h to 2Fh).
    "znver1": Core(multiplied=32, loaded=32, stored=16, prefetcher="stride"),
    "znver2": _ZEN,
    "znver3": _ZEN,
    # 256-bit units: a 512-bit instruction takes two of them. The additions, the clock and the rates of the caches were
    # measured on an EPYC of that generation (`tilewright doctor`).
    "znver4": Core(
        multiplied=64, loaded=64, stored=32, added=64, hertz=3.6e9, l2=32.0, l3=24.0, prefetcher="stride"
    ),
    # 512-bit units. No additions in parallel: with them BERT-base took 1.19 times as long in paired products as in
    # plain ones (an EPYC of that generation), since each addition reads memory too, and there are two loads a cycle.
    "znver5": Core(loaded=128, stored=64, hertz=4.2e9, l2=45.0, l3=28.0, prefetcher="stride"),
    **dict.fromkeys(("cannonlake", "icelake-client", "rocketlake", "tigerlake"), _ICE_LAKE_CLIENT),
    # ARM: ports and latencies are those of Arm's software optimization guides for each core (FP/ASIMD and load/store
    # pipelines; latency of FMLA without late forwarding), clocks those of the products named. Nothing was measured.
    "cortex-a76": Core(multiplied=32, loaded=32, stored=32, hertz=2.4e9, l2=32.0),
    "neoverse-n1": Core(multiplied=32, loaded=32, stored=32, hertz=2.5e9, l2=32.0),  # AWS Graviton2
    # Four 128-bit pipelines for NEON, two of 256 bits for SVE.
    "neoverse-v1": Core(
        multiplied=64,
        loaded=64,
        stored=32,
        fma_ports=4.0,
        load_ports=3.0,
        store_ports=2.0,
        hertz=2.6e9,
        l2=64.0,
    ),  # AWS Graviton3
    "neoverse-v2": Core(
        multiplied=64,
        loaded=48,
        stored=32,
        fma_ports=4.0,
        load_ports=3.0,
        store_ports=2.0,
        hertz=2.8e9,
        l2=64.0,
    ),  # AWS Graviton4, NVIDIA Grace
    # Apple publishes lines and pages (`sysctl hw.cachelinesize hw.pagesize`); ports and the latency are those of
    # Dougall Johnson's measurements of the Firestorm core.
    "apple-m1": Core(
        multiplied=64,
        loaded=48,
        stored=32,
        fma_ports=4.0,
        load_ports=3.0,
        store_ports=2.0,
        hertz=3.0e9,
        l2=64.0,
        line_bytes=128,
        page_bytes=16384,
    ),
}

_FAMILIES = {"znver": _ZEN}  # by prefix of LLVM's name: cores that are newer than the table


def core_of(cpu: str) -> Core:
    """The table's entry for a core, by LLVM's name."""
    if cpu in CORES:
        return CORES[cpu]
    return next((core for family, core in _FAMILIES.items() if cpu.startswith(family)), USUAL)
