"""Machines as frozen data, and the detection of this one."""

from tilewright.hw.caches import Caches
from tilewright.hw.cpu import CpuMachine, Throughput, host
from tilewright.hw.machine import Machine
from tilewright.hw.memory import Memory, Scope

__all__ = ["Caches", "CpuMachine", "Machine", "Memory", "Scope", "Throughput", "host"]
