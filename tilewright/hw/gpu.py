"""NVIDIA GPUs as data for schedules, templates and code generation.

The numbers of a compute capability are the vendor's published limits. Values that differ between GPUs of one
capability (multiprocessors, cache, clock, memory) come from the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from tilewright.dtypes import DType
from tilewright.errors import TargetError
from tilewright.hw.memory import Memory, Scope
from tilewright.runtime.cuda import device
from tilewright.support.batch import Number, least, most

WARP = 32
MAX_THREADS = 1024  # of a block


@dataclass(frozen=True)
class GpuRates:
    """Rates and latencies of GPUs of one capability that the driver does not report.

    `fitted`: whether the unpublished constants were fitted on such a GPU; otherwise they are the H200's.
    """

    launch_seconds: float = 1.6e-6  # of a kernel in a CUDA graph, until a block's first instruction
    library_launch_seconds: float = 3e-6  # of a small call of cuBLASLt or cuDNN
    shared_bytes_clock: float = 128.0  # of shared memory per multiprocessor
    l2_latency: float = 200.0  # clocks for a load
    memory_latency: float = 557.0
    fma_flops_clock: float = 256.0  # per multiprocessor, float32, without tensor cores
    peak_tensor_flops_clock: float = (
        1024.0  # the same of the fastest tensor instruction: dense, 16-bit operands
    )
    fitted: bool = False


# By capability, without its suffix. Latencies and launches were fitted to the times of 9,200 kernels on one H200
# (`cost/gpu.py`); the launch time of a library call is an estimate. Operations per clock follow from the data sheets'
# dense TFLOP/s, float32 and 16-bit: A100 19.5 and 312, A10 31.2 and 125, L4 30.3 and 121, H200 67 and 989 (the last at
# 1.83 GHz). Shared memory has 32 banks of 4 bytes on all of them (CUDA programming guide).
_RATES = {
    80: GpuRates(fma_flops_clock=128.0, peak_tensor_flops_clock=2048.0),
    86: GpuRates(),
    89: GpuRates(),
    90: GpuRates(peak_tensor_flops_clock=4096.0, fitted=True),
}


@lru_cache(maxsize=16)
def _rates_of(capability: str) -> GpuRates:
    """Called for each of thousands of predicted kernels."""
    own = int("".join(filter(str.isdigit, capability)))
    return _RATES[max((arch for arch in _RATES if arch <= own), default=min(_RATES))]


@dataclass(frozen=True)
class GpuMachine:
    """A GPU; sizes are in bytes. `shared_block` is the maximum per block, `shared_sm` the total of a
    multiprocessor."""

    kind: ClassVar[str] = "cuda"

    name: str
    capability: str  # in the compiler's format: "sm_90a"
    sms: int
    clock_mhz: int
    l2: int
    memory: int
    memory_bytes_per_second: float  # from the data sheet; a calibration is more accurate
    shared_block: int
    shared_sm: int
    tensor_flops_clock: float  # per multiprocessor, sustained by `mma.sync`, 16-bit operands and 32-bit sums
    l2_bytes_clock: float  # of the whole GPU
    registers_sm: int = 65_536
    threads_sm: int = 2_048
    blocks_sm: int = 32
    async_copy: bool = True  # cp.async, from sm_80 on
    bulk_copy: bool = False  # the tensor copy engine and its barriers, from sm_90 on
    warpgroup_mma: bool = False  # wgmma, only on sm_90a
    dependent_launch: bool = False  # programmatic dependent launch, from sm_90 on
    clusters: bool = False  # blocks that access each other's shared memory, from sm_90 on
    libraries: tuple[str, ...] = ()  # that may compute parts of a model: "cublaslt", "torch"

    @property
    def arch(self) -> int:
        """80, 86, 89, 90."""
        return int("".join(filter(str.isdigit, self.capability)))

    def channel_multiple(self, dtype: DType) -> int:
        """Rows of this many channels are read in whole vectors of 16 bytes, as tensor cores need them."""
        return max(1, 16 // dtype.bytes) if dtype.is_float else 1

    def channel_block(self, channels: int, dtype: DType) -> int:
        """No kernel reads channels in blocks: channels are last."""
        return 0

    @property
    def rates(self) -> GpuRates:
        """The rates of its capability, or of the newest described one before it."""
        return _rates_of(self.capability)

    @property
    def launch_seconds(self) -> float:
        return self.rates.launch_seconds

    @property
    def fma_flops(self) -> float:
        """The float32 operations per second of the whole GPU without tensor cores, at most."""
        return self.rates.fma_flops_clock * self.sms * self.clock_mhz * 1e6

    @property
    def peak_tensor_flops(self) -> float:
        """The operations per second of all tensor cores with 16-bit operands, at most: those of libraries and `wgmma`.
        On an H200, `mma.sync` reaches less than half (`tensor_flops_clock`)."""
        return self.rates.peak_tensor_flops_clock * self.sms * self.clock_mhz * 1e6

    @property
    def memories(self) -> tuple[Memory, ...]:
        """From the nearest to the farthest, as seen by a multiprocessor."""
        rates, hertz = self.rates, self.clock_mhz * 1e6
        return (
            Memory("registers", Scope.REGISTER, "thread", self.registers_sm * 4),
            Memory("shared", Scope.SCRATCH, "block", self.shared_block, rates.shared_bytes_clock),
            Memory("L2", None, "machine", self.l2, self.l2_bytes_clock / self.sms, rates.l2_latency, _LINE),
            Memory(
                "global",
                Scope.GLOBAL,
                "machine",
                self.memory,
                self.memory_bytes_per_second / hertz / self.sms,
                rates.memory_latency,
                _LINE,
            ),
        )

    @property
    def features(self) -> tuple[str, ...]:
        """Features that intrinsics may need: every capability up to its own ("sm_80"), and others it has."""
        capabilities = sorted({machine.arch for machine in DESCRIBED.values() if machine.arch <= self.arch})
        flags = ("async_copy", "bulk_copy", "warpgroup_mma", "dependent_launch", "clusters")
        return (*(f"sm_{arch}" for arch in capabilities), *(flag for flag in flags if getattr(self, flag)))

    def resident_blocks(self, threads: Number, registers: Number, shared: Number) -> Number:
        """How many blocks with this many threads, registers per thread and bytes of shared memory fit on a
        multiprocessor; of many configs, an array."""
        warps = -(-threads // WARP)
        by_registers = self.registers_sm // most(1, warps * _rounded(registers * WARP, 256))
        by_shared = self.shared_sm // _rounded(shared + _RESERVED_SHARED, 128)
        by_threads = least(self.blocks_sm, self.threads_sm // (warps * WARP))
        return most(0, least(by_threads, least(by_registers, by_shared)))

    def describe(self) -> str:
        return f"{self.name} ({self.capability}), {self.sms} multiprocessors, {self.memory >> 30} GiB"


_LINE = 128  # bytes of a cache line, in sectors of 32
_OLDEST = 8  # oldest supported generation: the first with asynchronous copies
_RESERVED_SHARED = 1_024  # per block, by the driver


def _rounded(value: Number, unit: int) -> Number:
    return -(-value // unit) * unit


_KIB = 1 << 10
_MIB = 1 << 20
_GIB = 1 << 30

# One GPU of each capability that the templates know, for compilation without a GPU.
A100 = GpuMachine(
    "NVIDIA A100 80GB",
    "sm_80",
    sms=108,
    clock_mhz=1_410,
    l2=40 * _MIB,
    memory=80 * _GIB,
    memory_bytes_per_second=2.04e12,
    shared_block=163 * _KIB,
    shared_sm=164 * _KIB,
    tensor_flops_clock=1_700,
    l2_bytes_clock=3_000,
)
A10 = GpuMachine(
    "NVIDIA A10",
    "sm_86",
    sms=72,
    clock_mhz=1_695,
    l2=6 * _MIB,
    memory=24 * _GIB,
    memory_bytes_per_second=0.6e12,
    shared_block=99 * _KIB,
    shared_sm=100 * _KIB,
    tensor_flops_clock=850,
    l2_bytes_clock=1_000,
    threads_sm=1_536,
    blocks_sm=16,
)
L4 = replace(
    A10,
    name="NVIDIA L4",
    capability="sm_89",
    sms=58,
    clock_mhz=2_040,
    l2=48 * _MIB,
    memory_bytes_per_second=0.3e12,
    blocks_sm=24,
)
H200 = GpuMachine(
    "NVIDIA H200",
    "sm_90a",
    sms=132,
    clock_mhz=1_980,
    l2=50 * _MIB,
    memory=141 * _GIB,
    memory_bytes_per_second=4.8e12,
    shared_block=227 * _KIB,
    shared_sm=228 * _KIB,
    tensor_flops_clock=1_800,
    l2_bytes_clock=5_400,
    bulk_copy=True,
    warpgroup_mma=True,
    dependent_launch=True,
    clusters=True,
)

# The common features of all GPUs from sm_80 on. Its kernels are PTX, which the driver compiles.
PORTABLE = replace(A10, name="any NVIDIA GPU from sm_80 on", capability="compute_80")

DESCRIBED = {machine.capability: machine for machine in (A100, A10, L4, H200)}


def of_capability(name: str, major: int, minor: int) -> GpuMachine:
    """The description of a capability; for one newer than all described, the features of the newest described."""
    if major < _OLDEST:
        raise TargetError(
            f"{name} has the compute capability {major}.{minor}, and kernels are made for {_OLDEST}.0 and later",
            remedy='use a GPU of the Ampere generation or later, or target="cpu"',
        )
    known = DESCRIBED.get(f"sm_{major}{minor}") or DESCRIBED.get(f"sm_{major}{minor}a")
    if known is not None:
        return known
    elder = max((m for m in DESCRIBED.values() if m.arch <= major * 10 + minor), key=lambda m: m.arch)
    return replace(elder, capability=f"sm_{major}{minor}", warpgroup_mma=False)


@lru_cache(maxsize=8)
def detect(ordinal: int = 0) -> GpuMachine:
    """Describe the GPU with this number. Raises TargetError if kernels cannot be compiled for it."""
    card = device.Device(ordinal)
    major, minor = (card.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    known = of_capability(card.name, major, minor)
    width, clock = card.attribute("GLOBAL_MEMORY_BUS_WIDTH"), card.attribute("MEMORY_CLOCK_RATE")
    return replace(
        known,
        name=card.name,
        sms=card.attribute("MULTIPROCESSOR_COUNT"),
        clock_mhz=card.attribute("CLOCK_RATE") // 1_000,
        l2=card.attribute("L2_CACHE_SIZE"),
        memory=card.memory,
        memory_bytes_per_second=2.0 * clock * 1e3 * width / 8,
        shared_block=card.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_sm=card.attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        threads_sm=card.attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        registers_sm=card.attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
    )
