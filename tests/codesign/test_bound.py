"""Bounds on cycles, energy and EDP: below every mapping and every design, and reached where nothing is in the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tilewright.codesign.baselines import randomly_mapped
from tilewright.codesign.bound import edp_floor, least_cycles, least_edp, least_microjoules
from tilewright.codesign.exact import ENERGY, LATENCY, best_mapping
from tilewright.codesign.network import Evaluator, Limits, Network
from tilewright.codesign.problem import Layer
from tilewright.codesign.search import Budget, explore
from tilewright.errors import HardwareRangeError
from tilewright.hw.gemmini import KIB, GemminiMachine

DEFAULT = GemminiMachine()
NETWORK = Network.of(
    [
        Layer.matmul(24, 40, 64, count=3),
        Layer.convolution((10, 9), 12, 20, (3, 2), stride=(2, 1)),
        Layer.convolution((12, 12), 6, 8, (1, 1), stride=(3, 2)),  # windows with words between them
        Layer.matmul(1, 30, 17),
    ]
)


def random_machine(rng: np.random.Generator) -> GemminiMachine:
    """One with a row for each memory; small memories are as likely as large ones."""
    while True:
        try:
            return GemminiMachine(
                dim=int(np.exp(rng.uniform(0.0, np.log(128.5)))),
                scratchpad=int(256 * 2 ** rng.uniform(0, 12)),
                accumulator=int(256 * 2 ** rng.uniform(0, 12)),
                dram_bytes_per_cycle=float(rng.choice([1.0, 8.0, 40.0])),
            )
        except HardwareRangeError:
            continue


@pytest.mark.parametrize("seed", range(6))
def test_no_mapping_is_below_the_floor_of_its_hardware(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(3):
        machine = random_machine(rng)
        for layer in NETWORK.layers:
            fastest, thriftiest = (best_mapping(layer, machine, objective) for objective in (LATENCY, ENERGY))
            assert fastest.proven and thriftiest.proven
            assert least_cycles(layer, machine) <= fastest.cycles
            assert least_microjoules(layer, machine) <= thriftiest.microjoules * (1 + 1e-12)
        assert edp_floor(NETWORK, machine) <= Evaluator(NETWORK, machine).mapped(machine).edp


def test_the_floor_is_reached_where_everything_fits() -> None:
    machine = GemminiMachine(dim=16, scratchpad=64 * KIB, accumulator=64 * KIB)
    for layer in (Layer.matmul(64, 64, 64), Layer((1, 1, 16, 16, 32, 16, 1))):
        assert best_mapping(layer, machine, LATENCY).cycles == least_cycles(layer, machine)
        assert best_mapping(layer, machine, ENERGY).microjoules == pytest.approx(
            least_microjoules(layer, machine), rel=1e-9
        )
        assert edp_floor(Network((replace(layer, count=3),)), machine) == pytest.approx(
            9 * best_mapping(layer, machine).edp, rel=1e-9
        )


@pytest.mark.parametrize("dim", [12, 128])
def test_no_design_is_below_the_bound_over_all_hardware(dim: int) -> None:
    bound = least_edp(NETWORK, DEFAULT, dim=dim, cells=12)
    rng = np.random.default_rng(dim)
    evaluator = Evaluator(NETWORK, DEFAULT)
    designs = explore(NETWORK, Budget(evaluations=90), limits=Limits(dim=dim), steps=20, starts=3).designs
    for count in range(48):
        machine = random_machine(rng)
        machine = replace(machine, dim=min(dim, machine.dim), dram_bytes_per_cycle=8.0)
        found = randomly_mapped(evaluator, machine, rng, 20)
        designs += [] if found is None else [found]
        if count % 8 == 0:
            designs.append(evaluator.mapped(machine))
    assert len(designs) > 40
    for design in designs:
        assert bound.cycles <= design.cycles
        assert bound.microjoules <= design.microjoules
    # It says something: the best design is not far above it.
    assert bound.edp <= min(design.edp for design in designs) < 1.5 * bound.edp


def test_more_cells_raise_the_bound_over_all_hardware() -> None:
    bounds = [least_edp(NETWORK, DEFAULT, cells=cells) for cells in (0, 1, 4, 16)]
    energies = [bound.microjoules for bound in bounds]
    assert energies == sorted(energies) and energies[0] < energies[-1]
    assert len({bound.cycles for bound in bounds}) == 1
