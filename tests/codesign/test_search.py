"""The search, its descent and its baselines, on small networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest

from tilewright.codesign.baselines import (
    descended,
    dosa,
    hardware_candidates,
    machine_of,
    random_mappings,
    two_loops,
)
from tilewright.codesign.bound import least_cycles
from tilewright.codesign.correction import shipped
from tilewright.codesign.descent import Descent
from tilewright.codesign.exact import LATENCY, best_mapping
from tilewright.codesign.library import library_mapping, library_tile
from tilewright.codesign.mapping import Hardware, Mappings, check, needs
from tilewright.codesign.network import Evaluator, Limits, Network, machine_for
from tilewright.codesign.problem import Layer, Nests
from tilewright.codesign.search import Budget, Exploration, ExplorationProgress, explore
from tilewright.errors import HardwareRangeError, MappingError
from tilewright.hw.gemmini import KIB, GemminiMachine

NETWORK = Network.of(
    [
        Layer.matmul(64, 96, 128, count=4, name="linear"),
        Layer.convolution((16, 16), 24, 32, (3, 3), name="conv"),
        Layer.convolution((16, 16), 32, 40, (1, 1), stride=(2, 2), name="pointwise"),
    ]
)
DEFAULT = GemminiMachine()


def evaluator() -> Evaluator:
    return Evaluator(NETWORK, DEFAULT)


# -- designs ----------------------------------------------------------------------------------------------------------


def test_equal_layers_are_one_and_the_product_of_sums_is_the_cost() -> None:
    twice = Network.of([*NETWORK.layers, *NETWORK.layers])
    assert len(twice) == 3 and list(twice.counts) == [8, 2, 2]
    design = evaluator().mapped(DEFAULT)
    assert design.edp == pytest.approx(
        sum(n * c for n, c in zip(NETWORK.counts, design.layer_cycles, strict=True))
        * sum(n * e for n, e in zip(NETWORK.counts, design.layer_microjoules, strict=True))
    )
    assert design.importance.sum() == pytest.approx(2.0)
    assert ((design.utilisation > 0) & (design.utilisation <= 1)).all()
    assert design.watts(2e9) == pytest.approx(2 * design.watts(1e9))


def test_the_least_hardware_runs_the_mappings_and_nothing_smaller_does() -> None:
    design = evaluator().mapped(GemminiMachine(dim=20, scratchpad=64 * KIB, accumulator=32 * KIB))
    need = needs(NETWORK.nests, design.mappings)
    machine = machine_for(need, DEFAULT)
    rows = np.zeros(3, int)
    check(NETWORK.nests, design.mappings, Hardware.of([machine]).take(rows))
    for name, less in (("dim", 1), ("scratchpad", KIB), ("accumulator", KIB)):
        size = getattr(machine, name) - less
        if size >= KIB or name == "dim":
            smaller = replace(machine, **{name: size})
            with pytest.raises(MappingError):
                check(NETWORK.nests, design.mappings, Hardware.of([smaller]).take(rows))


def test_mapping_all_layers_together_is_no_worse_than_each_alone() -> None:
    together = evaluator().mapped(DEFAULT)
    alone = evaluator().design(
        DEFAULT, Mappings.joined([best_mapping(layer, DEFAULT).mapping for layer in NETWORK.layers])
    )
    assert together.edp <= alone.edp * (1 + 1e-9)


def test_a_model_without_matmuls_is_refused() -> None:
    with pytest.raises(MappingError, match="nothing to do"):
        Network.of([])


@pytest.mark.parametrize(
    ("limits", "message"),
    [({"area": 0.001}, "too small"), ({"watts": 0.0}, "above 0"), ({"dim": 500}, "between 1 and 128")],
)
def test_limits_that_no_hardware_meets_are_refused(limits: dict[str, float], message: str) -> None:
    with pytest.raises(HardwareRangeError, match=message):
        Limits(**limits)  # type: ignore[arg-type]


# -- descent ----------------------------------------------------------------------------------------------------------


def test_the_descent_descends_and_stays_within_its_layers() -> None:
    descent = Descent(evaluator(), Limits(), 6, np.random.default_rng(1))
    first = descent.step()
    for _ in range(60):
        last = descent.step()
    assert (last < first).all() and np.mean(first - last) > 0.5
    mappings = descent.mappings(np.ones((6, 3), bool))
    padded = mappings.padded().reshape(6, 3, 7)
    assert padded == pytest.approx(np.broadcast_to(NETWORK.nests.extents, padded.shape))
    assert (mappings.factors >= 1 - 1e-12).all()


def test_an_area_limit_pulls_the_hardware_below_it() -> None:
    free, bound = (
        Descent(evaluator(), limits, 4, np.random.default_rng(1)) for limits in (Limits(), Limits(area=0.25))
    )
    for _ in range(80):
        free.step()
        bound.step()

    def area(descent: Descent) -> np.ndarray:
        dim, scratchpad, accumulator = descent.hardware().T
        points = zip(dim, scratchpad, 4 * accumulator, strict=True)
        return np.array([sum(DEFAULT.area_model.parts(*point)) for point in points])

    assert area(bound).mean() < area(free).mean()
    assert area(bound).min() < 0.3


def test_importance_saves_evaluations() -> None:
    some, all_ = (
        Descent(evaluator(), Limits(), 4, np.random.default_rng(1), importance)
        for importance in (True, False)
    )
    for _ in range(40):
        losses = some.step(), all_.step()
    assert some.evaluator.mappings < all_.evaluator.mappings
    assert losses[0].min() < losses[1].min() + 0.3


def test_importance_moves_the_layers_that_decide_the_hardware() -> None:
    """Otherwise a memory shrinks for all other layers' energy, and nothing weighs what its own layer loses."""
    descent = Descent(evaluator(), Limits(), 4, np.random.default_rng(1))
    kept = 0
    for _ in range(60):
        widest, before, moves = descent.widest(), descent.point.copy(), descent.moves.copy()
        descent.step()
        moved = descent.moves > moves
        assert np.take_along_axis(moved, widest, axis=1).all()
        assert descent.point[~moved] == pytest.approx(before[~moved], abs=1e-12)
        kept += int((~moved).sum())
    assert kept > 0


# -- search -----------------------------------------------------------------------------------------------------------


BUDGET, LIMITS = Budget(evaluations=1500), Limits(area=DEFAULT.area)


@pytest.fixture(scope="module")
def found() -> Exploration:
    return explore(NETWORK, BUDGET, limits=LIMITS, steps=40)


def test_the_search_beats_every_baseline_and_the_library(found: Exploration) -> None:
    best = found.best
    check(NETWORK.nests, best.mappings, Hardware.of([best.machine]).take(np.zeros(3, int)))
    assert best.area <= DEFAULT.area
    library = evaluator().design(
        DEFAULT, Mappings.joined([library_mapping(layer, DEFAULT) for layer in NETWORK.layers])
    )
    assert best.edp < library.edp
    baselines = [two_loops(evaluator(), LIMITS, BUDGET, name) for name in ("random", "annealing", "bayesian")]
    for other in (*baselines, dosa(evaluator(), LIMITS, BUDGET, between=20)):
        assert other is not None and other.within(LIMITS)
        assert best.edp < other.edp


def test_the_front_has_no_design_that_another_one_dominates(found: Exploration) -> None:
    front = found.front
    assert len(front) > 1
    areas, edps = [one.area for one in front], [one.edp for one in front]
    assert areas == sorted(areas) and edps == sorted(edps, reverse=True) and len(set(edps)) == len(edps)


def test_a_search_that_is_interrupted_keeps_its_best() -> None:
    def stop(step: ExplorationProgress) -> None:
        if step.stage == "exact mapping":
            raise KeyboardInterrupt

    found = explore(NETWORK, Budget(), steps=5, progress=stop)
    assert found.interrupted and found.best.edp > 0


def test_with_the_correction_mappings_and_hardware_are_judged_by_its_cycles() -> None:
    budget, learned = Budget(evaluations=40), shipped()
    with_it = explore(NETWORK, budget, correction=learned, steps=2, starts=2)
    without = explore(NETWORK, budget, limits=Limits(dim=16, least_dim=16), steps=2, starts=2)
    assert {design.machine.dim for design in with_it.designs} == {16}
    best, judge = with_it.best, Evaluator(NETWORK, DEFAULT, learned)
    again = judge.design(best.machine, best.mappings)
    assert again.layer_cycles == pytest.approx(best.layer_cycles)
    for machine in (DEFAULT, best.machine):
        chosen = judge.mapped(machine)
        blind = judge.design(machine, evaluator().mapped(machine).mappings)
        assert chosen.edp <= blind.edp * (1 + 1e-9)
        for layer, cycles in zip(NETWORK.layers, judge.mapped(machine).layer_cycles, strict=True):
            tiling = Evaluator(Network((layer,)), machine, learned).design(
                machine, library_mapping(layer, machine)
            )
            fastest = judge.best_mapping(layer, machine, LATENCY)
            assert fastest[1] <= tiling.layer_cycles[0] and fastest[1] <= cycles
    blind = judge.design(without.best.machine, without.best.mappings)
    assert with_it.best.edp < blind.edp


def test_with_the_correction_the_librarys_tilings_are_predicted_as_what_the_library_runs() -> None:
    learned, rows = shipped(), np.zeros(3, int)
    tilings = Mappings.joined([library_mapping(layer, DEFAULT) for layer in NETWORK.layers])
    given = NETWORK.nests, tilings, Hardware.of([DEFAULT]).take(rows)
    design = Evaluator(NETWORK, DEFAULT, learned).design(DEFAULT, tilings)
    automatic, found = learned.cycles(*given, "automatic"), learned.cycles(*given)
    least = [least_cycles(layer, DEFAULT) for layer in NETWORK.layers]
    assert design.layer_cycles == pytest.approx(np.maximum(automatic, least))
    assert (np.abs(found / automatic - 1) > 0.01).any()
    # Another mapping is predicted as one that a search found.
    others = evaluator().mapped(DEFAULT).mappings
    again = Evaluator(NETWORK, DEFAULT, learned).design(DEFAULT, others)
    expected = learned.cycles(given[0], others, given[2])
    assert again.layer_cycles == pytest.approx(expected)


def test_the_correction_refuses_arrays_that_it_does_not_know() -> None:
    with pytest.raises(HardwareRangeError, match="dim must be at least 16, got 8"):
        explore(NETWORK, Budget(evaluations=10), limits=Limits(dim=8), correction=shipped())
    with pytest.raises(HardwareRangeError, match="an array of 16x16 with 1 KiB memories has"):
        explore(NETWORK, Budget(evaluations=10), limits=Limits(area=0.05), correction=shipped())
    with pytest.raises(HardwareRangeError, match="is asked about one of 8"):
        Evaluator(NETWORK, DEFAULT, shipped()).mapped(GemminiMachine(dim=8))


def test_a_budget_of_seconds_is_that_of_its_clock() -> None:
    """A clock that ticks when it is read: searches end after so many readings, at whatever load."""
    for run in (
        lambda budget: explore(NETWORK, budget, steps=1000).evaluations,
        lambda budget: counted(dosa, budget),
        lambda budget: counted(partial(two_loops, search="random"), budget),
    ):
        assert run(Budget(seconds=20.0, clock=count().__next__)) < run(Budget(90.0, clock=count().__next__))


def counted(search: Callable[..., object], budget: Budget) -> int:
    judge = evaluator()
    search(judge, Limits(), budget)
    return judge.evaluations


def test_descent_and_rounding_alone_give_legal_designs_within_their_budget() -> None:
    random = two_loops(evaluator(), LIMITS, Budget(evaluations=1000), "random")
    for importance in (True, False):
        judge = evaluator()
        found = descended(judge, LIMITS, Budget(evaluations=1000), between=20, importance=importance)
        assert found is not None and found.within(LIMITS) and random is not None
        check(NETWORK.nests, found.mappings, Hardware.of([found.machine]).take(np.zeros(3, int)))
        assert 1000 <= judge.evaluations < 1100 and found.edp < random.edp


def test_a_budget_of_evaluations_gives_the_same_design_again() -> None:
    runs = [explore(NETWORK, Budget(evaluations=120), steps=10, starts=3, seed=4) for _ in range(2)]
    assert runs[0].best.machine == runs[1].best.machine and runs[0].best.edp == runs[1].best.edp
    assert runs[0].evaluations == runs[1].evaluations
    assert [design.edp for design in runs[0].designs] == [design.edp for design in runs[1].designs]


def test_a_power_limit_is_kept_or_nothing_is_found() -> None:
    small = Network.of([Layer.matmul(32, 48, 64)])
    free = explore(small, Budget(evaluations=200), steps=10).best
    bound = explore(small, Budget(evaluations=400), limits=Limits(watts=free.watts() / 1.5), steps=10)
    assert bound.best.watts() <= free.watts() / 1.5
    with pytest.raises(HardwareRangeError, match="within the limits"):
        _ = explore(small, Budget(evaluations=100), limits=Limits(watts=1e-9), steps=5).best


# -- baselines --------------------------------------------------------------------------------------------------------


def test_hardware_is_a_space_of_the_projects_searches() -> None:
    limits = Limits(area=1.0)
    candidates = hardware_candidates(DEFAULT, limits)
    configs = list(candidates.configs())
    assert 100 < len(configs) < candidates.size
    assert all(limits.admit(machine_of(DEFAULT, config)) for config in configs[::37])


def test_random_mappings_cover_their_layer() -> None:
    layer = NETWORK.layers[1]
    mappings = random_mappings(layer, 500, 16, np.random.default_rng(0))
    assert (mappings.padded() >= Nests.of([layer]).extents).all()


@pytest.mark.parametrize(
    ("layer", "tile"),
    [
        # What the library chose on a default Gemmini (DOSA repository, BSD 2-Clause, copyright 2022 Charles Hong).
        (Layer.matmul(128, 768, 768), (1, 1, 80, 1, 768, 80, 1)),
        (Layer.matmul(128, 64, 128), (1, 1, 80, 1, 64, 96, 1)),
        (Layer.matmul(128, 128, 64), (1, 1, 128, 1, 128, 64, 1)),
    ],
)
def test_the_librarys_tiles(layer: Layer, tile: tuple[int, ...]) -> None:
    assert library_tile(layer, DEFAULT) == tile


def test_the_librarys_mappings_fit() -> None:
    for layer in (*NETWORK.layers, Layer.convolution((230, 230), 3, 64, (7, 7), stride=(2, 2))):
        for machine in (DEFAULT, GemminiMachine(dim=8, scratchpad=8 * KIB, accumulator=4 * KIB)):
            check(Nests.of([layer]), library_mapping(layer, machine), Hardware.of([machine]))
