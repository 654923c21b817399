"""Convert counted terms to seconds, by kind of machine: the entry point of the analytical model.

`cpu.py` and `gpu.py` have the formulas for each kind, at nominal or calibrated rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from tilewright.space.template import Applied
from tilewright.space.terms import Counted, Cycles, Terms
from tilewright.space.tile_operator import TileCall

CALL_SECONDS = 1.5e-6  # overhead of a timed kernel call on a CPU

ACCELERATOR_HERTZ = 1e9  # that cycles of the simulated accelerator are shown as seconds at

Predictor = Callable[[Counted], float]


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
        raise InternalError("terms of another kind of machine")
    return terms


def _gemmini(machine: GemminiSystem, threads: int = 0) -> Predictor:
    on_host = _cpu_nominal(machine.host)
    return lambda terms: terms.count / ACCELERATOR_HERTZ if isinstance(terms, Cycles) else on_host(terms)


_NOMINAL: dict[str, Callable[[Any], Predictor]] = {"cpu": _cpu_nominal, "cuda": _gpu, "gemmini": _gemmini}
_CALIBRATED: dict[str, Callable[[Any, int], Predictor]] = {
    "cpu": _cpu_calibrated,
    "cuda": _gpu,
    "gemmini": _gemmini,
}


def counted(
    applied: Applied, config: Config, machine: Machine, constants: frozenset[int] = frozenset()
) -> tuple[Counted, bool]:
    """The terms of a config, and whether they were counted in its program because the template has no closed form.
    `constants`: numbers of inputs that are the same in every call, where that matters."""
    terms = applied.terms(config)
    if terms is not None:
        return terms, False
    program = applied.program(config)
    if isinstance(program, TileCall):
        counts = count_tiles(program.program, program.scalars, program.grid, program.tensor_bytes)
        return tile_terms(counts, machine, {}), False
    if isinstance(program, Implementation):
        program = program.program
    if isinstance(machine, GemminiSystem):
        machine = machine.host
    if not isinstance(program, Program) or not isinstance(machine, CpuMachine):
        raise SpaceError(
            f"{applied.space.template!r} counts no terms, and only programs for processors are counted"
        )
    return terms_of(program, machine, constants), True
