"""Terms to seconds on a CPU: port bounds, and the share of each cache level's traffic that cannot be hidden.

A core runs vector instructions on its ports while lines come from the caches below. Of a level's traffic the part that
out-of-order execution and the hardware's own prefetchers hide is larger the nearer the level; what the program
prefetches itself hides entirely behind the arithmetic, up to the bandwidth.

How fast the ports and each level are is nominal, or what a calibration of the machine has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.measure.calibration import Speeds, stored
from tilewright.space.template import Terms

LAUNCH_SECONDS = 1.5e-6  # to start and to join the threads

_MEMORY = 4.5  # bytes per cycle from there, nominally
_LOADS = 1.25  # per cycle: elements that are spread and lines that arrive alternate with them
_LOADED = 0.9  # of the whole vectors that could be loaded at most, where that is less
_SHOWN_L2, _SHOWN_L3, _SHOWN_MEMORY = 0.2, 0.5, 0.6  # of the time of the traffic, what cannot be hidden
_SHARP = 4.0  # near where two bounds meet, neither is reached
_BRANCH = 0.7  # cycles
_TIE = 0.05  # where memory is the bound, less arithmetic still is better
_UNEVEN = 0.04  # of the time, what threads wait for the slowest core where its share of iterations is all one
_ENOUGH = 8  # iterations for each thread: others take what it has left, and hardly wait
_LOAD = 0.16  # cycles: what a load costs even where the ports have room
_BELIEVED = (
    2.0  # the factor by which a measured rate may differ from a nominal one: beyond, others were there
)


@dataclass(frozen=True)
class Rates:
    """Of one core while all that are busy work: cycles a second, and bytes a cycle from each level."""

    hertz: float
    l2: float
    l3: float
    memory: float


@dataclass(frozen=True)
class MachineRates:
    """On one thread, and on all of them."""

    one: Rates
    all: Rates


def nominal_rates(machine: CpuMachine) -> MachineRates:
    core = machine.throughput
    rates = Rates(core.hertz, core.l2, core.l3, _MEMORY)
    return MachineRates(rates, rates)


def rates_of(machine: CpuMachine) -> MachineRates:
    """As a calibration of the machine says, if there is one; nominal otherwise. Measures nothing."""
    calibration = stored(machine)
    if calibration is None:
        return nominal_rates(machine)
    return MachineRates(_rates(calibration.one, machine), _rates(calibration.all, machine))


def _rates(speeds: Speeds, machine: CpuMachine) -> Rates:
    """Rates of one thread, as far as they are believed."""
    nominal = nominal_rates(machine).one
    operations = machine.throughput.fmas * machine.lanes(DType.F32) * (2 if machine.has_fma else 1)
    hertz = _near(speeds.flops / speeds.threads / operations, nominal.hertz)
    each = hertz * speeds.threads
    return Rates(
        hertz,
        _near(speeds.l2 / each, nominal.l2),
        _near(speeds.l3 / each, nominal.l3),
        _near(speeds.memory / each, nominal.memory),
    )


def _near(measured: float, nominal: float) -> float:
    return min(max(measured, nominal / _BELIEVED), nominal * _BELIEVED)


def seconds(
    terms: Terms, machine: CpuMachine, threads: int | None = None, rates: MachineRates | None = None
) -> float:
    """Predicted time of a kernel that does what `terms` counts; nominal rates where none are given."""
    threads = threads or machine.cores
    busy = min(threads, terms.iterations)
    known = rates or nominal_rates(machine)
    at = known.one if busy == 1 else known.all
    share = -(-terms.iterations // busy) / terms.iterations  # of the work, what the slowest thread does
    if busy > 1:
        share *= 1 + _UNEVEN * max(0.0, 1 - terms.iterations / (busy * _ENOUGH))
    most = machine.throughput
    loads = min(_LOADS, _LOADED * most.loads)
    core = max(terms.arithmetic / most.fmas, terms.loads / loads, terms.stores / most.stores)
    core += terms.branches * _BRANCH + terms.loads * _LOAD + terms.scalar
    fetched = terms.from_memory - terms.prefetched
    l2, l3, memory = terms.from_l2 / at.l2, terms.from_l3 / at.l3, fetched / at.memory
    shown = _SHOWN_L2 * l2 + _SHOWN_L3 * l3 + _SHOWN_MEMORY * memory
    least = l2 + l3 + terms.from_memory / at.memory
    cycles = ((core + shown) ** _SHARP + least**_SHARP) ** (1 / _SHARP) + _TIE * core
    return cycles * share / at.hertz + (LAUNCH_SECONDS if busy > 1 else 0.0)
