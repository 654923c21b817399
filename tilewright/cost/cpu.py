"""Terms -> seconds on a processor: bounds of the ports, and the share of each level's traffic that cannot hide.

A core runs vector instructions on its ports while lines come from the caches below. Of a level's traffic the part that
out-of-order execution and the hardware's own prefetchers hide is larger the nearer the level; what the program
prefetches itself hides entirely behind the arithmetic, up to the bandwidth.
"""

from __future__ import annotations

from tilewright.hw import CpuMachine
from tilewright.space.template import Terms

GIGAHERTZ = 2.5  # nominal: only ratios matter for a choice
LAUNCH_SECONDS = 1.5e-6  # to start and to join the threads

_PORTS = 2.0  # multiply-adds, loads per cycle
_L2_BYTES = 48.0  # per cycle and core
_L3_BYTES = 10.0
_MEMORY_BYTES = 4.5
_SHOWN_L2, _SHOWN_L3, _SHOWN_MEMORY = 0.25, 0.5, 0.6  # of the time of the traffic, what cannot be hidden
_BRANCH = 0.7  # cycles
_TIE = 0.05  # where memory is the bound, less arithmetic still is better
_LOAD = 0.16  # cycles: what a load costs even where the ports have room


def seconds(terms: Terms, machine: CpuMachine, threads: int | None = None) -> float:
    """Predicted time of a kernel that does what `terms` counts."""
    threads = threads or machine.cores
    busy = min(threads, terms.iterations)
    share = -(-terms.iterations // busy) / terms.iterations  # of the work, what the slowest thread does
    core = max(terms.arithmetic / _PORTS, terms.loads / _PORTS, terms.stores)
    core += terms.branches * _BRANCH + terms.loads * _LOAD + terms.scalar
    fetched = terms.from_memory - terms.prefetched
    l2, l3, memory = terms.from_l2 / _L2_BYTES, terms.from_l3 / _L3_BYTES, fetched / _MEMORY_BYTES
    shown = _SHOWN_L2 * l2 + _SHOWN_L3 * l3 + _SHOWN_MEMORY * memory
    least = l2 + l3 + terms.from_memory / _MEMORY_BYTES
    cycles = max(core + shown, least) + _TIE * core
    return cycles * share / (GIGAHERTZ * 1e9) + (LAUNCH_SECONDS if busy > 1 else 0.0)
