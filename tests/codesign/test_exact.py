"""The exact mapper: against all mappings of small layers, against random ones of large layers, and its bound."""

from __future__ import annotations

from itertools import permutations
from itertools import product as tuples

import numpy as np
import pytest

from tilewright.codesign.exact import EDP, ENERGY, LATENCY, Objective, best_mapping, coverings, near_optimal
from tilewright.codesign.mapping import Hardware, Mappings, check, fits, orders
from tilewright.codesign.model import Model
from tilewright.codesign.problem import C, K, Layer, Nests, R, S
from tilewright.hw.gemmini import GemminiMachine

# Steps so large, or memories so small, that not all tiles fit.
SMALL = [
    (Layer.matmul(2, 2, 2), GemminiMachine(dim=2, scratchpad=256, accumulator=256)),
    (Layer.matmul(3, 2, 2), GemminiMachine(dim=64, scratchpad=256, accumulator=256)),
    (Layer((2, 1, 3, 1, 1, 2, 1), stride=(100, 1)), GemminiMachine(dim=32, scratchpad=256, accumulator=256)),
    (Layer((2, 1, 2, 1, 2, 1, 1), dilation=(120, 1)), GemminiMachine(dim=1, scratchpad=256, accumulator=256)),
    (Layer((1, 1, 2, 2, 1, 2, 1), stride=(9, 14)), GemminiMachine(dim=64, scratchpad=256, accumulator=512)),
]


def every_mapping(layer: Layer) -> Mappings:
    """All factors up to the extents that cover the layer, in all orders of DRAM's and the scratchpad's loops."""
    moving = [loop for loop in range(7) if layer.extents[loop] > 1]
    choices = []
    for loop in moving:
        levels = 4 + (loop in (C, K)) - (loop in (R, S, C, K))  # no loop of these four in L0
        sizes = range(1, layer.extents[loop] + 1)
        choices.append(
            [each for each in tuples(sizes, repeat=levels) if np.prod(each) >= layer.extents[loop]]
        )
    combinations = list(tuples(*choices))
    factors, spatial = np.ones((len(combinations), 4, 7)), np.ones((len(combinations), 2))
    for index, loop in enumerate(moving):
        column = np.array([combination[index] for combination in combinations], float)
        if loop in (C, K):
            spatial[:, loop - C] = column[:, -1]
        held = loop in (R, S, C, K)  # in a register
        factors[:, held:, loop] = column[:, : 4 - held]
    batches = []
    for outer, inner in tuples(permutations(moving), repeat=2):
        order = orders(range(7), len(factors))
        for level, loops in ((3, outer), (2, inner)):
            order[:, level] = [*(loop for loop in range(7) if loop not in moving), *loops]
        batches.append(Mappings(factors, spatial[:, 0], spatial[:, 1], order))
    return Mappings(
        *(
            np.concatenate([getattr(batch, name) for batch in batches])
            for name in ("factors", "rows", "columns", "order")
        )
    )


@pytest.mark.parametrize(
    ("layer", "machine"), SMALL, ids=lambda value: getattr(value, "extents", None) and str(value)
)
def test_no_mapping_of_a_small_layer_is_better(layer: Layer, machine: GemminiMachine) -> None:
    mappings = every_mapping(layer)
    rows = np.zeros(len(mappings), int)
    nests, hardware = Nests.of([layer]).take(rows), Hardware.of([machine]).take(rows)
    legal = fits(nests, mappings, hardware)
    found = Model.of(machine).estimate(nests.take(legal), mappings.take(legal), hardware.take(legal))
    for objective in (EDP, LATENCY, ENERGY, Objective.weighted(1.0, 3000.0)):
        best = best_mapping(layer, machine, objective)
        least = objective.of(found.cycles.value, found.microjoules.value).min()
        assert best.proven and best.value == pytest.approx(least, rel=1e-9), (objective, best.mapping.text(0))


def random_mappings(layer: Layer, machine: GemminiMachine, rng: np.random.Generator, count: int) -> Mappings:
    factors, spatial = np.ones((count, 4, 7)), np.ones((count, 2))
    for loop, extent in enumerate(layer.extents):
        left = np.full(count, float(extent))
        if loop in (C, K):
            spatial[:, loop - C] = rng.integers(1, min(extent, machine.dim) + 1, count)
            left = np.ceil(left / spatial[:, loop - C])
        for level in rng.permutation([1, 2] if loop in (R, S, C, K) else [0, 1, 2]):
            factors[:, level, loop] = np.floor(left ** rng.uniform(0.0, 1.0, count))
            left = np.ceil(left / factors[:, level, loop])
        factors[:, 3, loop] = left
    order = rng.permuted(np.broadcast_to(np.arange(7, dtype=np.int8), (count, 4, 7)), axis=2)
    return Mappings(factors, spatial[:, 0], spatial[:, 1], order)


def test_no_random_mapping_of_a_large_layer_is_better() -> None:
    rng = np.random.default_rng(5)
    layers = [
        Layer.matmul(128, 768, 3072),
        Layer.convolution((28, 30), 100, 60, (3, 3)),
        Layer.convolution((57, 57), 3, 24, (7, 5), stride=(2, 3), dilation=(2, 1), batch=2),
    ]
    for layer in layers:
        for machine in (GemminiMachine(), GemminiMachine(dim=12, scratchpad=3000, accumulator=2048)):
            mappings = random_mappings(layer, machine, rng, 12_000)
            rows = np.zeros(len(mappings), int)
            nests, hardware = Nests.of([layer]).take(rows), Hardware.of([machine]).take(rows)
            legal = fits(nests, mappings, hardware)
            assert legal.sum() > 100
            found = Model.of(machine).estimate(nests.take(legal), mappings.take(legal), hardware.take(legal))
            best = best_mapping(layer, machine)
            assert best.proven and best.value <= found.edp.value.min()


def test_what_it_finds_is_legal_and_costs_what_the_model_says() -> None:
    layer, machine = Layer.convolution((14, 14), 256, 720, (3, 3)), GemminiMachine(dim=24, scratchpad=20_000)
    for objective in (EDP, LATENCY, ENERGY):
        best = best_mapping(layer, machine, objective)
        nests, hardware = Nests.of([layer]), Hardware.of([machine])
        check(nests, best.mapping, hardware)
        found = Model.of(machine).estimate(nests, best.mapping, hardware)
        assert found.cycles.value[0] == best.cycles
        assert found.microjoules.value[0] == pytest.approx(best.microjoules, rel=1e-12)
    assert best_mapping(layer, machine, LATENCY).cycles <= best.cycles
    assert best_mapping(layer, machine, ENERGY).microjoules <= best_mapping(layer, machine).microjoules


def test_mappings_near_the_optimum_are_legal_many_and_include_it() -> None:
    layer, machine = Layer.convolution((14, 14), 64, 96, (3, 3)), GemminiMachine(dim=16, scratchpad=20_000)
    for objective in (EDP, LATENCY):
        best = best_mapping(layer, machine, objective)
        near, visited = near_optimal(layer, machine, objective, within=0.2)
        rows = np.zeros(len(near), int)
        nests, hardware = Nests.of([layer]).take(rows), Hardware.of([machine]).take(rows)
        check(nests, near, hardware)
        found = Model.of(machine).estimate(nests, near, hardware)
        values = objective.of(found.cycles.value, found.microjoules.value)
        assert values[0] == best.value == pytest.approx(values.min(), rel=1e-9)
        assert values.max() <= 1.2 * best.value
        assert len({near.text(row) for row in range(len(near))}) > 20 and visited > len(near)


def test_a_search_that_is_cut_short_says_so() -> None:
    layer, machine = Layer.convolution((56, 56), 64, 128, (3, 3)), GemminiMachine(dim=32, scratchpad=4096)
    whole, short = best_mapping(layer, machine), best_mapping(layer, machine, most=1)
    assert whole.proven and not short.proven
    assert short.bound <= whole.value <= short.value


@pytest.mark.parametrize("extent", [1, 2, 7, 12, 30])
def test_coverings_are_all_minimal_ones(extent: int) -> None:
    found = {tuple(map(int, row)) for row in coverings(extent, 3)}
    expected = {
        each
        for each in tuples(range(1, extent + 1), repeat=3)
        if np.prod(each) >= extent
        and all(np.prod(each) // each[i] * (each[i] - 1) < extent for i in range(3))
    }
    assert found == expected
    assert {row for row in found if row[0] <= 4} == {tuple(map(int, row)) for row in coverings(extent, 3, 4)}
