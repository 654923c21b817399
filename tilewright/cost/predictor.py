"""Convert counted terms to seconds, by kind of machine: the entry point of the analytical model.

`cpu.py` and `gpu.py` have the formulas for each kind, at nominal or calibrated rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright.cost import cpu, gpu
from tilewright.cost.program import terms_of
from tilewright.cost.tiles import count_tiles, tile_terms
from tilewright.errors import InternalError, SpaceError
from tilewright.hw import CpuMachine, Machine
from tilewright.hw.gemmini_system import GemminiSystem
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.ir import Program
from tilewright.measure.gpu_calibration import rated
from tilewright.space.implementation import Implementation
from tilewright.space.space import Config
from tilewright.space.template import Applied, Batched
from tilewright.space.terms import Counted, Cycles, Terms
from tilewright.space.tile_operator import TileCall
from tilewright.support.batch import Number

CALL_SECONDS = 1.5e-6  # overhead of a timed kernel call on a CPU

ACCELERATOR_HERTZ = 1e9  # that cycles of the simulated accelerator are shown as seconds at

Predictor = Callable[[Counted], Number]


def nominal(machine: Machine) -> Predictor:
    """A predictor at nominal rates on all cores, for compilations that measure nothing."""
    return _NOMINAL[machine.kind](machine)


def calibrated(machine: Machine, threads: int) -> Predictor:
    """A predictor at measured rates with this many threads, for a call as the timer measures it."""
    return _CALIBRATED[machine.kind](machine, threads)


def _cpu_nominal(machine: CpuMachine) -> Predictor:
    rates = cpu.nominal_rates(machine)
    return lambda terms: cpu.seconds(_of_cpu(terms), machine, machine.cores, rates)


def _cpu_calibrated(machine: CpuMachine, threads: int) -> Predictor:
    rates = cpu.rates_of(machine)
    return lambda terms: CALL_SECONDS + cpu.seconds(_of_cpu(terms), machine, threads, rates)


def _gpu(machine: GpuMachine, threads: int = 0) -> Predictor:
    known = rated(machine)
    return lambda terms: gpu.seconds(terms, known)


def _of_cpu(terms: Counted) -> Terms:
    if not isinstance(terms, Terms):
        raise InternalError(f"expected CPU terms, got {type(terms).__name__}")
    return terms


def _gemmini(machine: GemminiSystem, threads: int = 0) -> Predictor:
    on_host = _cpu_nominal(machine.host)
    return lambda terms: terms.count / ACCELERATOR_HERTZ if isinstance(terms, Cycles) else on_host(terms)


def kernel_seconds(machine: Machine) -> float:
    """The time that each further kernel adds to a model's call, besides its own: threads are synchronised, and caches
    and branch predictors hold the previous kernel's data."""
    return _BETWEEN[machine.kind]


# On a CPU from two partitions of MobileNetV2 on two cores of a Zen 4: 25 kernels that take 3,702 us one by one take
# 3,955 us in a call, 45 kernels of 3,523 us take 3,874 us (benchmarks/fusion.py). On a GPU the launch is in the time of
# each kernel.
_BETWEEN = {"cpu": 5e-6, "cuda": 0.0, "gemmini": 5e-6}


def traffic_seconds(machine: Machine, bytes: float) -> float:
    """An upper estimate of the time that a kernel saves by not moving this many bytes, and of one launch."""
    return kernel_seconds(machine) + _TRAFFIC[machine.kind](machine, bytes)


def _cpu_traffic(machine: CpuMachine, bytes: float) -> float:
    rates = cpu.nominal_rates(machine).all
    rate = rates.memory if bytes > 2 * machine.caches.l3 else rates.l3
    return cpu.LAUNCH_SECONDS + bytes / (rate * rates.hertz * machine.cores)


def _gpu_traffic(machine: GpuMachine, bytes: float) -> float:
    return machine.launch_seconds + bytes / (0.5 * machine.memory_bytes_per_second)


_TRAFFIC: dict[str, Callable[[Any, float], float]] = {
    "cpu": _cpu_traffic,
    "cuda": _gpu_traffic,
    "gemmini": lambda machine, bytes: _cpu_traffic(machine.host, bytes),
}

_NOMINAL: dict[str, Callable[[Any], Predictor]] = {"cpu": _cpu_nominal, "cuda": _gpu, "gemmini": _gemmini}
_CALIBRATED: dict[str, Callable[[Any, int], Predictor]] = {
    "cpu": _cpu_calibrated,
    "cuda": _gpu,
    "gemmini": _gemmini,
}


def all_seconds(applied: Applied, configs: Sequence[Config], predictor: Predictor) -> np.ndarray | None:
    """The predicted seconds of many configs at once; None if their terms are counted one by one."""
    if not configs or not isinstance(applied, Batched) or not applied.space.batched:
        return None
    rows = [dict(config.values) for config in configs]
    if any(row.keys() != rows[0].keys() for row in rows):
        return None  # a config of an earlier version
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return np.broadcast_to(predictor(applied.terms_of(columns)), (len(configs),))


def counted(
    applied: Applied, config: Config, machine: Machine, constants: frozenset[int] = frozenset()
) -> tuple[Counted, bool]:
    """The terms of a config, and whether they were counted in its program because the template has no closed form.
    `constants`: numbers of inputs that are the same in every call, where that matters."""
    terms = applied.terms(config)
    if terms is not None:
        return terms, False
    program = applied.program(config)
    if isinstance(machine, GemminiSystem):
        machine = machine.host
    if isinstance(program, TileCall):
        counts = count_tiles(program.program, program.scalars, program.grid, program.tensor_bytes)
        return tile_terms(counts, machine, dict(program.options)), False
    if isinstance(program, Implementation):
        program = program.program
    if not isinstance(program, Program) or not isinstance(machine, CpuMachine):
        raise SpaceError(
            f"{applied.space.template!r} counts no terms, and only programs for processors are counted"
        )
    return terms_of(program, machine, constants), True
