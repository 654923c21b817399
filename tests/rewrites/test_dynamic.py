"""The partition by dynamic programming: right for any times, never predicted to be slower than greedy fusion."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rewrites.helpers import array, graph_of, inputs_for, x_input
from tests.rewrites.oracles import RandomPrices
from tests.rewrites.random_graphs import EVERYTHING, graphs
from tests.rewrites.test_properties import check
from tilewright.graph.ir import Graph, Node, constant
from tilewright.graph.op import apply
from tilewright.graph.task import Partition, Task
from tilewright.measure.passes import run_calls
from tilewright.rewrites import units
from tilewright.rewrites.decompose import Decompose
from tilewright.rewrites.dynamic import MARGIN, cut_dynamically
from tilewright.rewrites.fuse import fuse
from tilewright.rewrites.oracle import Price
from tilewright.rewrites.partition import make_task, partition


def labels(found: Partition) -> list[str]:
    return [call.task.label for call in found.calls]


def linear(x: Node, width: int, seed: int = 0) -> Node:
    return apply("matmul", x, constant(array(x.shape[-1], width, seed=seed)))


@dataclass
class ByLabel:
    """Times by label, one for all others; groups with a listed label are legal."""

    prices: dict[str, float]
    usual: float = 1e-3
    measured: bool = False
    asked: list[str] = field(default_factory=list)

    def can_compute(self, task: Task) -> bool:
        return task.label in self.prices

    def prepare(self, tasks: Collection[Task]) -> None:
        pass

    def decided(self) -> Mapping[Task, bool]:
        return {}

    def price(self, task: Task) -> Price | None:
        self.asked.append(task.label)
        return Price(self.prices.get(task.label, self.usual), self.measured)

    def traffic_seconds(self, bytes: float) -> float:
        return 1e-3


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    graphs(kinds=(*EVERYTHING, "matmul", "softmax", "layer_norm"), most=14),
    st.integers(0, 1000),
    st.sampled_from((1.0, 0.3)),
    st.booleans(),
)
def test_any_times_give_a_partition_of_the_same_function(
    graph: Graph, seed: int, favours: float, defers: bool
) -> None:
    costs = RandomPrices(seed, favours)
    found = partition(Decompose().run(graph), defers=defers, slices=not defers, prologues=defers, costs=costs)
    check(graph, run_calls(found, inputs_for(graph)), 1e-9)
    assert found.fusion is not None and found.fusion.partition == "dynamic"
    assert found.fusion.seconds <= found.fusion.greedy_seconds * (1 + 1e-9)


def test_two_contractions_are_one_group_where_that_is_faster() -> None:
    x = x_input(32, 64)
    block = linear(apply("relu", linear(x, 128)), 64, seed=1)
    whole, parts = "matmul+relu+matmul", ["matmul+relu", "matmul"]
    assert labels(partition(graph_of(block), costs=ByLabel({whole: 1.5e-3}))) == [whole]
    assert labels(partition(graph_of(block), costs=ByLabel({whole: 2.5e-3}))) == parts
    assert labels(partition(graph_of(block), costs=ByLabel({}))) == parts


def test_a_predicted_gain_must_exceed_the_margin() -> None:
    block = linear(linear(x_input(32, 64), 128), 64, seed=1)
    close = 2e-3 * (1 - MARGIN / 2)
    assert len(partition(graph_of(block), costs=ByLabel({"matmul+matmul": close})).calls) == 2
    measured = ByLabel({"matmul+matmul": close}, measured=True)
    assert len(partition(graph_of(block), costs=measured).calls) == 1


def test_a_chain_of_three_although_no_two_have_a_kernel() -> None:
    x = x_input(16, 16)
    block = linear(linear(linear(x, 16), 16, 1), 16, 2)
    costs = ByLabel({"matmul+matmul+matmul": 1e-3})
    assert labels(partition(graph_of(block), costs=costs)) == ["matmul+matmul+matmul"]


def test_an_intermediate_that_is_read_elsewhere_stays_in_memory() -> None:
    first = linear(x_input(32, 64), 128)
    second = linear(first, 64, seed=1)
    costs = ByLabel({"matmul+matmul": 1e-9})
    assert len(partition(graph_of(second, first), costs=costs).calls) == 2
    assert len(partition(graph_of(second, apply("exp", first)), costs=costs).calls) == 3


def test_a_view_between_two_pieces_becomes_part_of_their_group() -> None:
    flat = apply("reshape", linear(x_input(4, 8, 64), 128), shape=(32, 128))
    found = partition(graph_of(linear(flat, 64, seed=1)), costs=ByLabel({"matmul+reshape+matmul": 1e-4}))
    assert labels(found) == ["matmul+reshape+matmul"]
    assert not found.views


def test_an_epilogue_is_cut_off_only_where_its_reader_could_take_it() -> None:
    graph = graph_of(apply("softmax", apply("relu", linear(x_input(32, 64), 128)), axis=1))
    costs = ByLabel({"matmul+relu": 5e-3, "matmul": 1e-3, "relu": 1e-3, "relu+softmax": 1e-3})
    assert labels(partition(graph, costs=costs)) == ["matmul+relu", "softmax"]
    assert labels(partition(graph, defers=True, costs=costs)) == ["matmul", "relu+softmax"]
    alone = graph_of(graph.outputs[0].inputs[0])  # nothing could take the end of its epilogue
    assert labels(partition(alone, defers=True, costs=costs)) == ["matmul+relu"]


def test_repeated_blocks_are_priced_once() -> None:
    x = x_input(32, 64)
    for number in range(12):
        x = linear(apply("relu", linear(x, 128, seed=number)), 64, seed=100 + number)
    costs = ByLabel({"matmul+relu+matmul": 1.5e-3})
    found = partition(graph_of(x), costs=costs)
    assert labels(found) == ["matmul+relu+matmul"] * 12
    assert len(costs.asked) == len(set(costs.asked)) == 3
    assert found.fusion is not None and found.fusion.considered[0].calls == 12


def test_beyond_the_limits_greedy_fusion_is_used_and_says_so() -> None:
    block = linear(apply("relu", linear(x_input(32, 64), 128)), 64, seed=1)
    graph = graph_of(block)
    fused = fuse(graph)
    costs = ByLabel({"matmul+relu+matmul": 1e-9})
    found, report, _ = cut_dynamically(graph, fused, fused, costs, make_task, max_states=1)
    assert found is fused
    assert report.partition == "greedy"
    assert "greedy fusion instead of dynamic programming: more than 1 states" in str(report)


def test_groups_beyond_the_limit_are_dropped_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    x = x_input(32, 64)
    for number in range(3):
        x = linear(x, 64, number)
    costs = ByLabel({"matmul+matmul": 1e-4, "matmul+matmul+matmul": 1e-9})
    assert labels(partition(graph_of(x), costs=costs)) == ["matmul+matmul+matmul"]
    monkeypatch.setattr(units, "MAX_GROUPS", 1)
    found = partition(graph_of(x), costs=costs)
    assert sorted(labels(found)) == ["matmul", "matmul+matmul"]
    assert found.fusion is not None
    assert found.fusion.note == "more than 1 groups with one output; the larger ones are not considered"


def test_every_limit_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "MAX_GROUPS", 1)
    monkeypatch.setattr("tilewright.rewrites.dynamic.MAX_LARGER", 1)
    x = x_input(32, 64)
    for number in range(3):
        x = linear(x, 64, number)
    found = partition(graph_of(x), costs=ByLabel({"matmul+matmul": 1e-4}))
    assert found.fusion is not None
    assert "more than 1 groups with one output" in found.fusion.note
    assert "more than 1 larger groups" in found.fusion.note


def test_a_graph_with_too_many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.rewrites.dynamic.MAX_UNITS", 1)
    block = linear(linear(x_input(32, 64), 128), 64, seed=1)
    found = partition(graph_of(block), costs=ByLabel({"matmul+matmul": 1e-9}))
    assert found.fusion is not None and "2 units, more than 1" in found.fusion.note


def test_without_prices_greedy_groups_stay() -> None:
    class Silent(ByLabel):
        def price(self, task: Task) -> Price | None:
            return None

    block = linear(linear(x_input(32, 64), 128), 64, seed=1)
    assert len(partition(graph_of(block), costs=Silent({"matmul+matmul": 1e-9})).calls) == 2


class Forgetful(ByLabel):
    """Knows the times of some tasks only."""

    def __init__(self, known: Collection[str] = ()) -> None:
        super().__init__({})
        self.known = known

    def price(self, task: Task) -> Price | None:
        return Price(1e-3) if task.label in self.known else None


def separable() -> Graph:
    """A chain that greedy fusion makes: expand, filter, project."""
    attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "layout": "channels_last"}
    x = x_input(1, 14, 14, 8)
    y = apply("relu", apply("conv", x, constant(array(1, 1, 8, 48)), groups=1, **attrs))
    y = apply("conv", y, constant(array(3, 3, 1, 48)), groups=48, **attrs)
    return graph_of(apply("conv", y, constant(array(1, 1, 48, 8)), groups=1, **attrs))


@pytest.mark.parametrize("known", [(), ("conv",), ("conv+relu",), ("conv+relu", "conv")])
def test_a_greedy_group_without_a_time_stays(known: tuple[str, ...]) -> None:
    graph = separable()
    greedy = labels(partition(graph))
    assert greedy == ["conv+relu+conv+conv"]
    found = partition(graph, costs=Forgetful(known))
    assert labels(found) == greedy
    assert found.fusion is not None and "stay as greedy fusion makes them" in str(found.fusion)


def test_the_report_says_what_each_alternative_would_have_cost() -> None:
    block = linear(apply("relu", linear(x_input(32, 64), 128)), 64, seed=1)
    found = partition(graph_of(block), costs=ByLabel({"matmul+relu+matmul": 2.5e-3}))
    assert found.fusion is not None
    (row,) = found.fusion.considered
    assert (row.label, row.used, row.is_greedy) == ("matmul+relu+matmul", False, False)
    assert (row.seconds, row.separate_seconds) == (2.5e-3, 2e-3)
    assert [(part.label, part.seconds) for part in row.parts] == [("matmul+relu", 1e-3), ("matmul", 1e-3)]
    assert not row.rest and row.gain == pytest.approx(-0.25)
    assert str(row) == (
        "matmul+relu+matmul, f32[32,64]: 2500.0 us as one kernel (predicted); 2000.0 us in use (predicted):"
        " matmul+relu 1000.0, matmul 1000.0"
    )


def test_a_group_is_compared_with_the_kernels_in_use_and_what_else_they_compute() -> None:
    x = x_input(16, 16)
    for number in range(3):
        x = linear(x, 16, number)
    costs = ByLabel({"matmul+matmul": 1.4e-3, "matmul+matmul+matmul": 2.2e-3})
    found = partition(graph_of(x), costs=costs)
    assert labels(found) == ["matmul+matmul+matmul"] and found.fusion is not None
    rows = {(row.label, row.used): row for row in found.fusion.considered}
    whole = rows.pop(("matmul+matmul+matmul", True))
    assert [part.label for part in whole.parts] == ["matmul"] * 3 and whole.gain == pytest.approx(0.8 / 3)
    (pair,) = rows.values()
    assert [part.label for part in pair.parts] == ["matmul+matmul+matmul"]
    assert [part.label for part in pair.rest] == ["matmul"]
    assert pair.total_seconds == pytest.approx(2.4e-3) and pair.calls == 2


def test_a_gain_within_the_margin_is_said() -> None:
    block = linear(linear(x_input(32, 64), 128), 64, seed=1)
    found = partition(graph_of(block), costs=ByLabel({"matmul+matmul": 2e-3 * (1 - MARGIN / 2)}))
    assert found.fusion is not None
    (row,) = found.fusion.considered
    assert not row.used and str(row).endswith("; a predicted gain below 5% does not count")


# -- near-ties, which tuning measures both ways -----------------------------------------------------------------------


def block_of_two() -> Graph:
    return graph_of(linear(apply("relu", linear(x_input(32, 64), 128)), 64, seed=1))


def keys_of(found: Partition) -> list[str]:
    return [call.task.key for call in found.calls]


@pytest.mark.parametrize("share", [1 - MARGIN / 2, 1 + MARGIN / 2])
def test_a_near_tie_has_a_rival_that_is_cut_the_other_way(share: float) -> None:
    found = partition(block_of_two(), costs=ByLabel({"matmul+relu+matmul": 2e-3 * share}))
    assert labels(found) == ["matmul+relu", "matmul"]
    rival = found.rival()
    assert rival is not None and labels(rival.partition) == ["matmul+relu+matmul"]
    one, (both,) = keys_of(found), keys_of(rival.partition)
    apart = dict.fromkeys(one, 4e-3)
    for seconds, wanted in ((7e-3, ["matmul+relu+matmul"]), (9e-3, ["matmul+relu", "matmul"])):
        settled = rival.settle({**apart, both: seconds})
        assert labels(settled) == wanted and settled.fusion is not None
        (row,) = settled.fusion.considered
        assert row.measured and (row.used, row.seconds) == (seconds < 8e-3, seconds)


def test_a_fused_near_tie_has_the_separate_kernels_as_its_rival() -> None:
    found = partition(separable(), costs=ByLabel({"conv+relu+conv+conv": 2.95e-3}))
    assert labels(found) == ["conv+relu+conv+conv"]
    rival = found.rival()
    assert rival is not None and labels(rival.partition) == ["conv+relu", "conv", "conv"]


@pytest.mark.parametrize(
    "costs",
    [
        ByLabel({"matmul+relu+matmul": 2e-3 * (1 - 2 * MARGIN)}),
        ByLabel({"matmul+relu+matmul": 2e-3 * (1 + 2 * MARGIN)}),
        ByLabel({"matmul+relu+matmul": 2e-3 * (1 - MARGIN / 2)}, measured=True),
        ByLabel({}),
        None,
    ],
    ids=["faster", "slower", "measured", "no kernel", "greedy"],
)
def test_what_is_clear_or_measured_has_no_rival(costs: ByLabel | None) -> None:
    assert partition(block_of_two(), costs=costs).rival() is None


def test_groups_that_were_not_measured_are_no_part_of_the_settled_cut() -> None:
    """They are predicted, and predictions win where they are too low."""
    x = x_input(16, 16)
    for number in range(3):
        x = linear(x, 16 * (number + 1), number)
    three = "matmul+matmul+matmul"
    costs = ByLabel({"matmul+matmul": 3e-3, three: 3e-3 * (1 + MARGIN / 2)})
    found = partition(graph_of(x), costs=costs)
    rival = found.rival()
    assert rival is not None and labels(rival.partition) == [three]
    costs.prices["matmul+matmul"] = 1e-9
    times = {**dict.fromkeys(keys_of(found), 1e-3), **dict.fromkeys(keys_of(rival.partition), 4e-3)}
    assert labels(rival.settle(times)) == ["matmul"] * 3


# -- what tuning has decided ------------------------------------------------------------------------------------------


@dataclass
class Tuned(ByLabel):
    """Also knows which tasks were tuned, by label, and whether these were measured."""

    tuned: dict[str, bool] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)

    def prepare(self, tasks: Collection[Task]) -> None:
        self.tasks = list(tasks)

    def decided(self) -> Mapping[Task, bool]:
        return {task: self.tuned[task.label] for task in self.tasks if task.label in self.tuned}

    def price(self, task: Task) -> Price | None:
        price = super().price(task)
        return price and Price(price.seconds, self.tuned.get(task.label, False))


def test_what_tuning_decided_on_has_no_rival() -> None:
    fused = "conv+relu+conv+conv"
    found = partition(separable(), costs=Tuned({fused: 2.95e-3}, tuned={fused: False}))
    assert labels(found) == [fused]
    assert found.rival() is None


def test_a_prediction_replaces_nothing_that_was_tuned() -> None:
    prices = {"matmul+relu+matmul": 1e-6}
    apart = {"matmul+relu": True, "matmul": True}
    for tuned, wanted in (
        (apart, ["matmul+relu", "matmul"]),
        ({"matmul": True}, ["matmul+relu+matmul"]),  # another model's: this one was not tuned
        ({**apart, "matmul+relu+matmul": True}, ["matmul+relu+matmul"]),
        (
            {**apart, "matmul+relu+matmul": False},
            ["matmul+relu", "matmul"],
        ),  # there was no time to measure it
        ({"matmul+relu": False, "matmul": True}, ["matmul+relu", "matmul"]),
        ({"matmul+relu+matmul": False}, ["matmul+relu+matmul"]),
    ):
        assert labels(partition(block_of_two(), costs=Tuned(prices, tuned=tuned))) == wanted, tuned


def test_what_was_tuned_must_cover_the_graph_without_overlaps() -> None:
    x = x_input(16, 16)
    for number in range(3):
        x = linear(x, 16, number)
    pairs = Tuned({"matmul+matmul": 1e-6}, tuned={"matmul+matmul": True})
    assert sorted(labels(partition(graph_of(x), costs=pairs))) == ["matmul", "matmul+matmul"]
    three = Tuned({"matmul+matmul": 1e-6, "matmul+matmul+matmul": 9.0}, tuned={"matmul+matmul+matmul": True})
    assert labels(partition(graph_of(x), costs=three)) == ["matmul+matmul+matmul"]


def test_a_group_without_a_time_that_tuning_kept_stays() -> None:
    class Silent(Tuned):
        def price(self, task: Task) -> Price | None:
            return None

    apart = {"matmul+relu": True, "matmul": True}
    assert len(partition(block_of_two(), costs=Silent({"matmul+relu+matmul": 1.0}, tuned=apart)).calls) == 2


# -- each rule on groups ----------------------------------------------------------------------------------------------


def chain_of(graph: Graph) -> list[units.Unit]:
    fused = fuse(graph)
    return units.Units(graph, fused, fused, (), cuts=False).all


def broken(graph: Graph) -> str | None:
    return units.refused(chain_of(graph))


def test_rule_contractions() -> None:
    x = x_input(4, 4)
    for number in range(4):
        x = linear(x, 4, number)
    assert broken(graph_of(x)) == "at most 3 contractions"
    assert broken(graph_of(x.inputs[0])) is None


def test_rule_reductions() -> None:
    x = x_input(4, 4)
    for _ in range(3):
        x = apply("softmax", x, axis=1)
    assert broken(graph_of(x)) == "at most 2 reductions"


def test_rule_units() -> None:
    x = x_input(4, 4)
    for _ in range(9):
        x = apply("permute", apply("softmax", x, axis=1), axes=(1, 0))
    assert broken(graph_of(x)) == "at most 8 units"


def test_rule_concatenations_stay_alone() -> None:
    x = x_input(4, 4)
    both = apply("concat", x, linear(x, 4), axis=0)
    assert broken(graph_of(linear(both, 4))) == "no concatenation, tile kernel or operator without a formula"


def test_rule_permutes_stay_apart_from_contractions() -> None:
    turned = apply("permute", x_input(4, 6), axes=(1, 0))
    assert broken(graph_of(linear(turned, 4))) == "no permute or gather with a contraction"


def test_rule_a_returned_result_may_be_permuted() -> None:
    """Its kernel stores in another order; a permute in between is a movement as any other."""
    x = linear(x_input(4, 6), 4)
    returned = apply("permute", x, axes=(1, 0))
    assert broken(graph_of(returned)) is None
    between = apply("softmax", returned, axis=1)
    assert broken(graph_of(between)) == "no permute or gather with a contraction"


def test_rule_nodes() -> None:
    x = x_input(4, 4)
    for number in range(2):
        x = linear(x, 4, number)
        for _ in range(16):
            x = apply("relu", apply("neg", x))
    assert broken(graph_of(x)) == "at most 64 nodes"  # 66
    assert broken(graph_of(x.inputs[0].inputs[0])) is None  # 64


def test_rule_sums_are_not_padded() -> None:
    """A reduction or contraction in the kernel of the padding would read its operands out of bounds."""
    around = {"low": (1, 1), "high": (1, 1), "interior": (0, 0), "value": 0.0}
    summed = apply("softmax", x_input(4, 4), axis=1)
    padded = apply("pad", apply("permute", summed, axes=(1, 0)), **around)
    assert broken(graph_of(padded)) == "no padding of a contraction's or reduction's result"
    assert broken(graph_of(apply("softmax", apply("pad", x_input(4, 4), **around), axis=1))) is None


def test_rule_formula() -> None:
    x = apply("softmax", x_input(4, 4), axis=1)
    for _ in range(9):
        x = apply("mul", x, apply("sigmoid", x))
        x = apply("permute", x, axes=(1, 0))
    graph = graph_of(x)
    everything = chain_of(graph)
    writable = [units.refused(everything[-count:]) for count in range(1, len(everything) + 1)]
    assert writable[0] is None
    assert any(name is not None for name in writable)
