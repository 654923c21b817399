"""Machines that tests speak of by name, wherever they run."""

from __future__ import annotations

from dataclasses import replace

from tilewright.hw import Caches, CpuMachine, host

ICE_LAKE = replace(
    host(),
    cpu="icelake-server",
    vector_bytes=64,
    vector_registers=32,
    has_fma=True,
    cores=2,
    caches=Caches(48 << 10, 1280 << 10, 48 << 20, l2_cores=1, l3_cores=2),
)
ZEN_4 = replace(ICE_LAKE, cpu="znver4", features=("avx", "avx2", "avx512f", "fma"))


def here_as(cpu: str) -> CpuMachine | None:
    """This processor, described as if its cores were those of another; None if it does not run that one's code."""
    return replace(host(), cpu=cpu) if "avx512f" in host().features or cpu == host().cpu else None
