"""Terms to seconds on a CPU: port bounds, and the share of each cache level's traffic that cannot be hidden.

A core runs vector instructions on its ports while lines arrive from lower cache levels. Out-of-order execution and
the hardware prefetchers hide more of a level's traffic the nearer the level is; software prefetches hide entirely
behind the arithmetic, up to the bandwidth.

The rates of the ports and of each level are nominal, or measured by a calibration of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.measure.calibration import Speeds, stored
from tilewright.space.template import Terms
from tilewright.support.arith import ceil_div
from tilewright.support.batch import Number, least, most, select

LAUNCH_SECONDS = 1.5e-6  # to start and join the threads

_MEMORY = 4.5  # nominal bytes per cycle from memory
_LOADS = 1.25  # per cycle: broadcasts and arriving lines compete with loads
_LOADED = 0.9  # share of the maximum vector loads, if that is less
_SHOWN_L2, _SHOWN_L3, _SHOWN_MEMORY = (
    0.2,
    0.5,
    0.6,
)  # share of each level's traffic time that cannot be hidden
_SHARP = 4.0  # near the intersection of two bounds, neither is reached
_BRANCH = 0.7  # cycles
_TIE = 0.05  # for memory-bound kernels, less arithmetic is still better
_UNEVEN = 0.04  # share of the time that threads wait for the slowest core if each has one chunk of iterations
_ENOUGH = 8  # iterations per thread with which dynamic scheduling leaves hardly any waiting
_LOAD = 0.16  # cycles that a load costs even if the ports have room
_BELIEVED = (
    2.0  # maximum factor between a measured rate and its nominal value; beyond it, the machine was busy
)


@dataclass(frozen=True)
class Rates:
    """The rates of one core while all active cores work: cycles per second, and bytes per cycle from each level."""

    hertz: float
    l2: float
    l3: float
    memory: float


@dataclass(frozen=True)
class MachineRates:
    """Rates with one thread, and with all of them."""

    one: Rates
    all: Rates


def nominal_rates(machine: CpuMachine) -> MachineRates:
    core = machine.throughput
    rates = Rates(core.hertz, core.l2, core.l3, _MEMORY)
    return MachineRates(rates, rates)


def rates_of(machine: CpuMachine) -> MachineRates:
    """The calibrated rates of the machine if there are any, otherwise nominal ones. Measures nothing."""
    calibration = stored(machine)
    if calibration is None:
        return nominal_rates(machine)
    return MachineRates(_rates(calibration.one, machine), _rates(calibration.all, machine))


def _rates(speeds: Speeds, machine: CpuMachine) -> Rates:
    """The rates of one thread, as far as they are plausible."""
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
) -> Number:
    """The predicted time of a kernel with these counts; at nominal rates if none are given. Of many configs, whose
    counts are arrays, it is an array."""
    busy = least(threads or machine.cores, terms.iterations)
    known = rates or nominal_rates(machine)
    if not isinstance(busy, np.ndarray):
        return _seconds(terms, machine, busy, known.one if busy == 1 else known.all)
    together = _seconds(terms, machine, busy, known.all)
    return (
        together
        if known.one == known.all
        else np.where(busy == 1, _seconds(terms, machine, busy, known.one), together)
    )


def _seconds(terms: Terms, machine: CpuMachine, busy: Number, at: Rates) -> Number:
    share = ceil_div(terms.iterations, busy) / terms.iterations  # share of the work of the slowest thread
    uneven = 1 + _UNEVEN * most(0.0, 1 - terms.iterations / (busy * _ENOUGH))
    share = share * select(busy > 1, uneven, 1.0)
    ports = machine.throughput
    loads = min(_LOADS, _LOADED * ports.loads)
    core = most(most(terms.arithmetic / ports.fmas, terms.loads / loads), terms.stores / ports.stores)
    core = core + terms.branches * _BRANCH + terms.loads * _LOAD + terms.scalar
    fetched = terms.from_memory - terms.prefetched
    l2, l3, memory = terms.from_l2 / at.l2, terms.from_l3 / at.l3, fetched / at.memory
    shown = _SHOWN_L2 * l2 + _SHOWN_L3 * l3 + _SHOWN_MEMORY * memory
    least = l2 + l3 + terms.from_memory / at.memory
    cycles = ((core + shown) ** _SHARP + least**_SHARP) ** (1 / _SHARP) + _TIE * core
    return cycles * share / at.hertz + select(busy > 1, LAUNCH_SECONDS, 0.0)
