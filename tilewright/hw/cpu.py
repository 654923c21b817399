"""CPUs: what the schedules and the code generator need to know of one, and the detection of this one."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar

from tilewright import knobs
from tilewright.dtypes import DType
from tilewright.hw.caches import Caches, detect_caches
from tilewright.runtime import host as runtime_host

_LATENCY = 4.0  # cycles from a multiply-add to one that needs its result


@dataclass(frozen=True)
class Throughput:
    """Of a core that nobody has measured, while all are busy: cycles a second; whole vectors that it multiplies and
    adds to others, adds beside those (not instead of them), loads and stores in a cycle; bytes that its second cache
    and the third give it in a cycle."""

    hertz: float = 2.5e9
    multiply_adds: float = 2.0
    adds_beside: float = 0.0
    loads: float = 2.0
    stores: float = 1.0
    l2: float = 48.0
    l3: float = 12.0


@dataclass(frozen=True)
class _Core:
    """What differs from the usual, in bytes a cycle: where units are narrower than vectors, a vector takes one of them
    for more than a cycle, or two of them together."""

    multiplied: int
    loaded: int
    stored: int
    added: int = 0
    hertz: float = Throughput.hertz
    l2: float = Throughput.l2
    l3: float = Throughput.l3


_CORES = {  # by LLVM's names
    "znver1": _Core(32, 32, 16),
    "znver4": _Core(64, 64, 32, added=64, hertz=3.6e9, l2=32.0, l3=24.0),
    **dict.fromkeys(("cannonlake", "icelake-client", "rocketlake", "tigerlake"), _Core(64, 128, 64)),
}


@dataclass(frozen=True)
class CpuMachine:
    kind: ClassVar[str] = "cpu"

    triple: str  # LLVM's name of the platform
    cpu: str  # LLVM's name of the processor
    features: tuple[str, ...]  # what generated code may use, sorted: ("avx", "avx2", ...)
    absent: tuple[str, ...]  # what LLVM knows of and generated code may not use
    vector_bytes: int
    vector_registers: int
    has_fma: bool
    cores: int
    caches: Caches = field(default_factory=Caches)

    def lanes(self, dtype: DType) -> int:
        """Elements of a type in a vector register; nothing is computed in less than 32 bits."""
        return self.vector_bytes // max(4, dtype.compute.bytes)

    def channel_block(self, channels: int, dtype: DType) -> int:
        """Of so many channels, how many are best stored together: the lanes of a vector, or half of them; 0: none."""
        lanes = self.lanes(dtype) if dtype.is_float else 1
        return next((size for size in (lanes, lanes // 2) if size > 1 and channels % size == 0), 0)

    @cached_property
    def throughput(self) -> Throughput:
        usual, core = Throughput(), _CORES.get(self.cpu)
        if core is None:
            return usual
        return Throughput(
            core.hertz,
            min(usual.multiply_adds, core.multiplied / self.vector_bytes),
            core.added / self.vector_bytes,
            min(usual.loads, core.loaded / self.vector_bytes),
            min(usual.stores, core.stored / self.vector_bytes),
            core.l2,
            core.l3,
        )

    @property
    def chains(self) -> float:
        """Sums at a time, in whole vectors, below which multiply-adds wait for those before them."""
        return _LATENCY * self.throughput.multiply_adds

    @property
    def adds_beside(self) -> bool:
        """Whether a core adds a vector to an element in memory, which it broadcasts, for each that it multiplies, and
        is no slower for it."""
        return self.throughput.adds_beside >= self.throughput.multiply_adds and "avx512f" in self.features

    @property
    def follows_pages(self) -> bool:
        """Whether the look-ahead follows pages: several places read in turn, each in a page of its own, are then more
        that is on its way. That of AMD's Zen follows the loads of a program, and loses one that jumps between
        places."""
        return not self.cpu.startswith("znver")

    @property
    def dot4_bytes(self) -> int:
        """The widest vector, in bytes, of which one instruction multiplies unsigned bytes by signed ones and sums the
        products exactly, four to a lane; 0 where there is none."""
        if {"avx512vnni", "avx512vl"} <= set(self.features):
            return self.vector_bytes
        if "avxvnni" in self.features:
            return min(self.vector_bytes, 32)
        return 16 if "i8mm" in self.features else 0

    def feature_string(self) -> str:
        """As LLVM wants it. What is absent is said too: the processor's name would imply it."""
        return ",".join([f"+{name}" for name in self.features] + [f"-{name}" for name in self.absent])

    def describe(self) -> str:
        return f"{self.cpu}, {self.vector_bytes * 8}-bit vectors, {self.cores} core(s)"


def _shape_of(arch: str, features: frozenset[str]) -> tuple[int, int, bool]:
    """(vector bytes, vector registers, fused multiply-add) of an instruction set."""
    if arch in ("x86_64", "AMD64", "i686"):
        if {"avx512f", "avx512vl", "avx512dq", "avx512bw"} <= features:
            return 64, 32, True
        if "avx" in features:
            return 32, 16, "fma" in features
        return 16, 16, False
    if arch in ("aarch64", "arm64"):
        return 16, 32, True
    return 16, 16, False


@lru_cache(maxsize=8)
def _machine(features: frozenset[str]) -> CpuMachine:
    import llvmlite.binding as llvm

    vector_bytes, registers, has_fma = _shape_of(platform.machine(), features)
    return CpuMachine(
        triple=runtime_host.triple(),
        cpu=runtime_host.cpu_name(),
        features=tuple(sorted(features)),
        absent=tuple(sorted(set(llvm.get_host_cpu_features()) - features)),
        vector_bytes=vector_bytes,
        vector_registers=registers,
        has_fma=has_fma,
        cores=knobs.usable_cores(),
        caches=detect_caches(),
    )


def host() -> CpuMachine:
    """This machine, as far as generated code may use it (`TILEWRIGHT_CPU_FEATURES` takes features away)."""
    return _machine(runtime_host.features())
