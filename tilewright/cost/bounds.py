"""Lower bounds on time from arithmetic and memory traffic, for operators that no template computes.

This is a roofline at the machine's nominal rates. It ignores how an operator is implemented, so it serves to compare
parts of one model, not to predict times.
"""

from __future__ import annotations

from tilewright.cost.cpu import LAUNCH_SECONDS, nominal_rates
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.hw.gpu import GpuMachine


def least_seconds(flops: float, bytes: float, machine: CpuMachine | GpuMachine) -> float:
    """The minimum seconds of one float32 kernel with these operations and bytes, on the whole machine."""
    if isinstance(machine, GpuMachine):
        arithmetic = flops / machine.fma_flops
        return max(arithmetic, bytes / machine.memory_bytes_per_second) + machine.launch_seconds
    rates = nominal_rates(machine).all
    per_cycle = machine.throughput.fmas * machine.lanes(DType.F32) * (2 if machine.has_fma else 1)
    cycles = machine.cores * rates.hertz  # cycles per second of all cores
    caches = machine.caches
    if bytes <= caches.l2_per_core * machine.cores:
        level = rates.l2
    else:
        level = rates.l3 if bytes <= caches.l3 else rates.memory
    return max(flops / (per_cycle * cycles), bytes / (level * cycles)) + LAUNCH_SECONDS
