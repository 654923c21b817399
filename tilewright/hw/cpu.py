"""CPUs: the data that schedules and the code generator need, and the detection of this CPU."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar

from tilewright import knobs
from tilewright.dtypes import DType
from tilewright.hw.caches import Caches, detect_caches
from tilewright.hw.cores import USUAL, Core, Prefetcher, core_of
from tilewright.hw.memory import STACK_BYTES, Memory, Scope
from tilewright.runtime import host as runtime_host


@dataclass(frozen=True)
class Throughput:
    """Nominal rates of a core while all are busy: cycles per second; whole vectors per cycle that it multiplies and
    adds (FMA), adds in parallel, loads and stores; bytes per cycle from its L2 and L3."""

    hertz: float = USUAL.hertz
    fmas: float = USUAL.fma_ports
    independent_adds: float = 0.0
    loads: float = USUAL.load_ports
    stores: float = USUAL.store_ports
    l2: float = USUAL.l2
    l3: float = USUAL.l3


@dataclass(frozen=True)
class CpuMachine:
    kind: ClassVar[str] = "cpu"

    triple: str  # LLVM's target triple
    cpu: str  # LLVM's name of the processor
    features: tuple[str, ...]  # features that generated code may use, sorted: ("avx", "avx2", ...)
    absent: tuple[str, ...]  # features that LLVM knows and generated code must not use
    vector_bytes: int
    vector_registers: int
    has_fma: bool
    cores: int
    caches: Caches = field(default_factory=Caches)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """From the nearest to the farthest; rates are nominal until `measure/calibrate.py` has measured them."""
        caches, core, line = self.caches, self.throughput, self.line_bytes
        levels = [
            Memory("registers", Scope.REGISTER, "thread", self.vector_registers * self.vector_bytes),
            Memory("L1", None, "core", caches.l1, core.loads * self.vector_bytes, line=line),
            Memory("stack", Scope.SCRATCH, "thread", STACK_BYTES, line=line),
            Memory("L2", None, "core", caches.l2_per_core, core.l2, line=line),
        ]
        if caches.l3:
            levels.append(Memory("L3", None, "machine", caches.l3, core.l3, line=line))
        return (*levels, Memory("DRAM", Scope.GLOBAL, "machine", line=line))

    def lanes(self, dtype: DType) -> int:
        """Elements of a type in a vector register; types below 32 bits are computed in 32."""
        return self.vector_bytes // max(4, dtype.compute.bytes)

    def channel_multiple(self, dtype: DType) -> int:
        """Numbers of channels that are multiples of this fill whole vectors."""
        return self.lanes(dtype) if dtype.is_float else 1

    def channel_block(self, channels: int, dtype: DType) -> int:
        """The best number of channels per block: the lanes of a vector, or half of them; 0: none."""
        lanes = self.lanes(dtype) if dtype.is_float else 1
        return next((size for size in (lanes, lanes // 2) if size > 1 and channels % size == 0), 0)

    @cached_property
    def core(self) -> Core:
        """The entry of its cores in the table of known cores."""
        return core_of(self.cpu)

    @cached_property
    def line_bytes(self) -> int:
        """Bytes of a cache line."""
        return self.core.line_bytes

    @cached_property
    def page_bytes(self) -> int:
        """The usual page size in bytes."""
        return self.core.page_bytes

    @property
    def prefetcher(self) -> Prefetcher:
        """The kind of pattern that the hardware prefetcher tracks: see `hw/cores.py`."""
        return self.core.prefetcher

    @property
    def fma_latency(self) -> float:
        """Cycles between dependent FMAs."""
        return self.core.fma_latency

    @cached_property
    def throughput(self) -> Throughput:
        core = self.core

        def of_vectors(ports: float, width: int | None) -> float:
            return ports if width is None else min(ports, width / self.vector_bytes)

        return Throughput(
            core.hertz,
            of_vectors(core.fma_ports, core.multiplied),
            core.added / self.vector_bytes,
            of_vectors(core.load_ports, core.loaded),
            of_vectors(core.store_ports, core.stored),
            core.l2,
            core.l3,
        )

    @cached_property
    def chains(self) -> float:
        """Independent sums, in whole vectors, that are needed to hide the FMA latency."""
        return self.fma_latency * self.throughput.fmas

    @property
    def independent_adds(self) -> bool:
        """Whether a core adds a vector and a broadcast memory operand in parallel with each FMA without
        slowing down."""
        return self.throughput.independent_adds >= self.throughput.fmas and "avx512f" in self.features

    @property
    def prefetches_by_page(self) -> bool:
        """Whether interleaved streams in separate pages are all prefetched."""
        return self.prefetcher == "page"

    @property
    def vscale(self) -> int:
        """The length of SVE vectors in units of 128 bits; 0 without SVE."""
        return self.vector_bytes // 16 if "sve" in self.features else 0

    @property
    def dot4_bytes(self) -> int:
        """The widest vector, in bytes, for which one instruction multiplies unsigned by signed bytes and sums groups
        of four products exactly; 0 if there is none."""
        if {"avx512vnni", "avx512vl"} <= set(self.features):
            return self.vector_bytes
        if "avxvnni" in self.features:
            return min(self.vector_bytes, 32)
        return 16 if "i8mm" in self.features else 0

    def feature_string(self) -> str:
        """In LLVM's format. Absent features are listed too, because the processor's name would imply them."""
        return ",".join([f"+{name}" for name in self.features] + [f"-{name}" for name in self.absent])

    def describe(self) -> str:
        return f"{self.cpu}, {self.vector_bytes * 8}-bit vectors, {self.cores} core(s)"


def _shape_of(arch: str, features: frozenset[str]) -> tuple[int, int, bool]:
    """(vector bytes, vector registers, fused FMA) of an instruction set."""
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
    """This machine, restricted to what generated code may use (`TILEWRIGHT_CPU_FEATURES` removes features)."""
    return _machine(runtime_host.features())
