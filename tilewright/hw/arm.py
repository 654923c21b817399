"""64-bit ARM processors, described for cross compilation: NEON, or SVE at a fixed vector length.

A program's vectors have a fixed number of lanes, so an SVE kernel is compiled for one vector length, which LLVM is
given (`vscale_range`). It must not run on a processor with another length.
"""

from __future__ import annotations

from tilewright.errors import TargetError
from tilewright.hw.caches import Caches
from tilewright.hw.cpu import CpuMachine

LINUX = "aarch64-unknown-linux-gnu"
SVE_GRANULE = 128  # bits: vector lengths are multiples of this

_V8_2 = ("crc", "dotprod", "fp-armv8", "fullfp16", "lse", "neon", "rcpc", "rdm")
# What each core has beyond `_V8_2`, by LLVM's names, and its SVE vector length in bits (0: NEON alone). From Arm's
# technical reference manuals; Apple's from LLVM's own table of processors.
_CORES: dict[str, tuple[tuple[str, ...], int]] = {
    "cortex-a76": ((), 0),
    "neoverse-n1": ((), 0),
    "neoverse-v1": (("bf16", "i8mm", "sve"), 256),
    "neoverse-v2": (("bf16", "i8mm", "sve", "sve2"), 128),
    "apple-m1": ((), 0),
}
_SVE = ("sve", "sve2")


def aarch64(
    cpu: str, *, sve_bits: int = 0, cores: int = 1, caches: Caches | None = None, triple: str = LINUX
) -> CpuMachine:
    """A machine with this core (LLVM's name), for cross compilation.

    `sve_bits`: the vector length of SVE code, which must be the core's own; 0: NEON, which every core has.
    """
    if cpu not in _CORES:
        raise TargetError(
            f"the core must be one of {', '.join(_CORES)}, got {cpu!r}",
            remedy="describe it with a CpuMachine of its own",
        )
    extra, own_bits = _CORES[cpu]
    if sve_bits not in (0, own_bits) or (sve_bits and sve_bits % SVE_GRANULE):
        has = f"{own_bits}-bit SVE vectors" if own_bits else "no SVE"
        raise TargetError(f"{cpu} has {has}, got sve_bits={sve_bits}", remedy="use sve_bits=0 for NEON")
    absent = () if sve_bits else tuple(name for name in extra if name in _SVE)
    return CpuMachine(
        triple=triple,
        cpu=cpu,
        features=tuple(sorted({*_V8_2, *extra} - set(absent))),
        absent=absent,
        vector_bytes=max(16, sve_bits // 8),
        vector_registers=32,
        has_fma=True,
        cores=cores,
        caches=caches or Caches(l1=64 << 10, l2=1 << 20, l3=32 << 20),
    )
