"""Lower bounds on time from arithmetic and memory traffic, for operators that no template computes.

A roofline at the machine's nominal rates. It knows nothing of how an operator is implemented, so it serves to compare
parts of one model with each other, not to predict a time.
"""

from __future__ import annotations

from tilewright.cost.cpu import LAUNCH_SECONDS, nominal_rates
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.hw.gpu import GpuMachine

_GPU_LAUNCH = 2e-6
_GPU_F32 = 0.125  # of the rate of tensor cores with 16-bit operands, what float32 is computed with


def least_seconds(flops: float, bytes: float, machine: CpuMachine | GpuMachine) -> float:
    """Of one kernel in float32 that does so many operations and moves so many bytes, on the whole machine."""
    if isinstance(machine, GpuMachine):
        clock = machine.clock_mhz * 1e6
        peak = machine.sms * machine.tensor_flops_clock * clock * _GPU_F32
        bandwidth = machine.memory_bytes_per_second
        return max(flops / peak, bytes / bandwidth) + _GPU_LAUNCH
    rates = nominal_rates(machine).all
    per_cycle = machine.throughput.fmas * machine.lanes(DType.F32) * (2 if machine.has_fma else 1)
    cycles = machine.cores * rates.hertz  # of all cores in a second
    caches = machine.caches
    if bytes <= caches.l2_per_core * machine.cores:
        level = rates.l2
    else:
        level = rates.l3 if bytes <= caches.l3 else rates.memory
    return max(flops / (per_cycle * cycles), bytes / (level * cycles)) + LAUNCH_SECONDS
