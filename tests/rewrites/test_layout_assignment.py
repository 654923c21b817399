"""The assignment of layouts is the best one there is, by brute force over all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rewrites.helpers import assert_same_function, conv, graph_of, ops_of, scalar, weight, x_input
from tests.rewrites.oracles import Dice, Priced, Whims
from tests.rewrites.random_graphs import graphs
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.rewrites import layout_assignment
from tilewright.rewrites.decompose import Decompose
from tilewright.rewrites.layout import Layout
from tilewright.rewrites.layout_assignment import Costs, assign, solve
from tilewright.rewrites.layout_choices import WITH_LAYOUT, LayoutChoice, folds
from tilewright.rewrites.oracle import FewestBytes
from tilewright.rewrites.partition import partition
from tilewright.tune.oracle import PredictedCosts

LAYOUTS = ("channels_first", "channels_last")
BLOCKED, TRANSPOSING = "channels_by_2", "turning"
WIDTHS = (3, 4, 5, 6)
# What stands between convolutions, and works on their results in blocks.
IN_BLOCKS = (
    *(
        "conv",
        "conv",
        "conv",
        "max_pool",
        "avg_pool",
        "adaptive_avg_pool",
        "concat",
        "concat",
        "slice",
        "pad",
    ),
    *("resize", "flip", "unary", "binary", "constant", "permute", "reshape", "mean", "amax", "group_norm"),
    *("softmax", "broadcast_to", "cumsum"),
)
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


def pool(x: Node) -> Node:
    attrs: dict[str, Any] = {"kernel": (2, 2), "stride": (1, 1), "padding": (1, 1), "ceil_mode": False}
    return apply("max_pool", x, **attrs, dilation=(1, 1), layout="channels_first")


def block(draw: Any, x: Node, width: int) -> Node:
    kind = draw(st.sampled_from(["conv", "conv", "pool", "relu"]))
    if kind == "conv":
        return conv(x, weight(width, x.shape[1], 1, 1))
    return pool(x) if kind == "pool" and max(x.shape[2:]) < 8 else apply("relu", x)


@st.composite
def networks(draw: Any, most: int = 9) -> Graph:
    """Chains, trees of several images, and diamonds, with at most so many operators, and sometimes a second output."""
    images = draw(st.integers(1, 3))
    ends = [x_input(1, 3, 4, 5, index=n) for n in range(images)]
    made = list(ends)
    while len(made) < images + most:
        action = draw(st.sampled_from(["grow", "grow", "fork", "join"]))
        at = draw(st.integers(0, len(ends) - 1))
        if action == "grow":
            ends[at] = block(draw, ends[at], draw(st.sampled_from(WIDTHS)))
            made.append(ends[at])
        elif action == "fork" and len(ends) < 3:
            ends.append(ends[at])
        elif action == "join" and len(ends) > 1:
            other = ends.pop(0 if at else 1)
            at = min(at, len(ends) - 1)
            if other.shape == ends[at].shape:
                ends[at] = apply("add", ends[at], other)
                made.append(ends[at])
            else:
                ends.append(other)
        elif draw(st.booleans()):
            break
    outputs = [end for end in dict.fromkeys(ends) if not end.is_input]
    return graph_of(*(outputs or [apply("relu", ends[0])]))


@st.composite
def prices(draw: Any, layouts: Sequence[str] = LAYOUTS) -> Priced:
    table = {
        (op, channels, layout): draw(st.integers(0, 1000)) / 10
        for op in ("conv", "max_pool")
        for channels in WIDTHS
        for layout in layouts
    }
    size = 2 if BLOCKED in layouts else 0
    return Priced(table, draw(st.sampled_from([0.0, 0.01, 0.05, 0.2, 1.0])), size)


def brute_force(graph: Graph, oracle: Priced) -> float:
    """Every operator in each layout that it can have; each value is permuted once for all readers that have it the
    same other way."""
    nodes = [node for node in graph.nodes() if not node.is_constant]
    free = [node for node in nodes if not node.is_input]
    users = graph.users()
    best = float("inf")

    def whole(node: Node) -> bool:
        return oracle.size > 0 and node.shape[1] % oracle.size == 0

    def choices(node: Node) -> tuple[str, ...]:
        transposing = (TRANSPOSING,) if node.op == "conv" and not whole(node.inputs[0]) else ()
        return (*LAYOUTS, BLOCKED, *transposing) if whole(node) else LAYOUTS

    def needed(node: Node, layout: str) -> str:
        """A convolution reads what has no whole blocks with channels first."""
        return LAYOUTS[0] if layout == TRANSPOSING or (layout == BLOCKED and not whole(node)) else layout

    for chosen in itertools.product(*map(choices, free)):
        layout = dict(zip(free, chosen, strict=True))
        total = 0.0
        for node in nodes:
            have = layout.get(node, "channels_first")
            if node.op in WITH_LAYOUT:
                total += oracle.prices[node.op, node.shape[1], have]
            have = LAYOUTS[1] if have == TRANSPOSING else have
            needs = {needed(node, layout[user]) for user in users[node]}
            needs |= {"channels_first"} if node in graph.outputs else set()
            total += oracle.per_byte * node.type.bytes * len(needs - {have})
        best = min(best, total)
    return best


def cost_of(graph: Graph, oracle: Priced) -> float:
    """What a graph costs as it is written."""
    permutes = [node for node in graph.nodes() if node.op == "permute" and not folds(node)]
    return sum(map(oracle.price, graph.nodes())) + sum(oracle.permute_seconds(p.type, ()) for p in permutes)


@QUICK
@given(networks(), prices())
def test_it_is_the_best_of_all(graph: Graph, oracle: Priced) -> None:
    best, _ = assign(graph, oracle)
    assert best.exact
    assert best.total == pytest.approx(brute_force(graph, oracle))


@QUICK
@given(networks(), prices())
def test_what_is_written_costs_what_was_counted(graph: Graph, oracle: Priced) -> None:
    after = Layout(oracle).run(graph)
    assert cost_of(after, oracle) == pytest.approx(assign(graph, oracle)[0].total)
    assert_same_function(graph, after)


@settings(QUICK, max_examples=25)
@given(networks(most=6), prices((*LAYOUTS, BLOCKED, TRANSPOSING)))
def test_blocks_of_channels_where_they_are_best(graph: Graph, oracle: Priced) -> None:
    best, _ = assign(graph, oracle)
    assert best.total == pytest.approx(brute_force(graph, oracle))
    after = Layout(oracle).run(graph)
    assert cost_of(after, oracle) == pytest.approx(best.total)
    assert_same_function(graph, after)


class Hesitant(Priced):
    """Quick answers are too high for some."""

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        exact = int(task.key[0], 16) % 2 == 0
        return self.seconds(task) * (1.0 if exact else 1.0 + int(task.key[1], 16) / 8), exact


@QUICK
@given(networks(), prices())
def test_quick_answers_do_not_change_the_choice(graph: Graph, oracle: Priced) -> None:
    after = Layout(Hesitant(oracle.prices, oracle.per_byte)).run(graph)
    assert cost_of(after, oracle) == pytest.approx(brute_force(graph, oracle))


@QUICK
@given(networks(), prices(), st.sampled_from([1, 2, 3]))
def test_a_narrow_beam_is_not_worse_than_one_layout_everywhere(
    graph: Graph, oracle: Priced, beam: int
) -> None:
    costs = Costs(graph, oracle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_assignment, "BEAM", beam)
        found, _ = assign(graph, oracle)
        everywhere = [solve(graph, costs, _only(layout)).total for layout in LAYOUTS]
        assert_same_function(graph, Layout(oracle).run(graph))
    assert brute_force(graph, oracle) <= found.total + 1e-9
    assert found.total <= min(everywhere) + 1e-9


@dataclass(frozen=True)
class Kernelless(Whims):
    """Knows no kernel for most ways, and for some operators none at all."""

    def seconds(self, task: Task) -> float:
        return math.inf if int(task.key[self.seed + 4], 16) < 12 else super().seconds(task)


@settings(QUICK, max_examples=30)
@given(graphs(images=True, most=14), st.integers(0, 5), st.sampled_from([1, 2, 256]))
def test_there_is_an_assignment_whatever_kernels_are_missing(graph: Graph, seed: int, beam: int) -> None:
    graph = Decompose().run(graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_assignment, "BEAM", beam)
        for oracle in (Kernelless(seed), FewestBytes()):
            found, costs = assign(graph, oracle)
            assert set(found.choices) == {n for n in graph.nodes() if not n.is_input and not folds(n)}
            assert math.isfinite(found.total)
            nothing = solve(
                graph, costs, lambda node, choice: False
            )  # nothing allowed: a preference, not a law
            assert set(nothing.choices) == set(found.choices)
            assert_same_function(graph, Layout(oracle).run(graph), tolerance=1e-6)


def test_a_way_without_a_kernel_is_taken_only_where_there_is_no_other() -> None:
    x = x_input(1, 4, 8, 8)
    prices = {
        ("conv", 8, LAYOUTS[0]): math.inf,
        ("conv", 8, LAYOUTS[1]): 5.0,
        ("conv", 4, LAYOUTS[0]): math.inf,
    }
    oracle = Priced({**prices, ("conv", 4, LAYOUTS[1]): math.inf}, per_byte=1.0)
    first = conv(x, weight(8, 4, 1, 1))
    best, _ = assign(graph_of(conv(first, weight(4, 8, 1, 1))), oracle)
    assert best.unknown == 1
    assert best.choices[first].layout == LAYOUTS[1]


def _only(layout: str) -> Callable[[Node, LayoutChoice], bool]:
    return lambda node, choice: choice.layout == layout


@QUICK
@given(graphs(images=True, most=14), st.integers(0, 5))
def test_any_assignment_is_the_same_function(graph: Graph, seed: int) -> None:
    graph = Decompose().run(graph)
    assert_same_function(graph, Layout(Whims(seed)).run(graph), tolerance=1e-6)


@QUICK
@given(graphs(kinds=IN_BLOCKS, images=True), st.integers(0, 99))
def test_any_assignment_in_blocks_is_the_same_function(graph: Graph, seed: int) -> None:
    graph = Decompose().run(graph)
    assert_same_function(graph, Layout(Dice(seed)).run(graph), tolerance=1e-6)


def test_blocks_that_do_not_divide_each_other() -> None:
    """Two images of 24 channels in one block each, and a pool that wants their 48 channels in blocks of 16."""
    x = conv(x_input(1, 3, 5, 15), weight(24, 3, 3, 3), padding=((1, 1), (1, 1)))
    joined = apply("concat", x, apply("mul", x, scalar(0.5)), axis=1)
    resized = apply("resize", joined, sizes=(10, 30), mode="nearest", coordinates="asymmetric")
    prices = {("conv", 24, layout): 1.0 for layout in (*LAYOUTS, "channels_by_8")}
    prices |= {("max_pool", 48, layout): 1.0 for layout in LAYOUTS}
    prices |= {("conv", 24, TRANSPOSING): 0.0, ("max_pool", 48, "channels_by_16"): 0.0}

    class Mixed(Priced):
        def block(self, channels: int, dtype: DType) -> int:
            return {24: 8, 48: 16}.get(channels, 0)

    for value in (joined, resized):
        before = Decompose().run(graph_of(pool(value)))
        after = Layout(Mixed(prices, per_byte=1e-6)).run(before)
        assert {node.attrs["layout"] for node in after.nodes() if "layout" in node.attrs} == {
            "channels_by_24",
            "channels_by_16",
        }
        assert_same_function(before, after)


def test_single_channels_are_no_blocks() -> None:
    """An operand of one channel broadcasts to a block, but is no block that could be concatenated."""
    parts = [apply(op, x_input(1, 1, 4, 5, index=n)) for n, op in enumerate(("sin", "cos", "tanh", "exp"))]
    joined = apply("concat", *parts, axis=1)
    prices = {("max_pool", 4, layout): 1.0 for layout in LAYOUTS} | {("max_pool", 4, BLOCKED): 0.0}
    before = Decompose().run(graph_of(pool(joined)))
    after = Layout(Priced(prices, per_byte=1e-6, size=2)).run(before)
    assert {node.attrs["layout"] for node in after.nodes() if node.op == "max_pool"} == {BLOCKED}
    assert_same_function(before, after)


def test_readers_share_a_conversion_that_none_would_pay_alone() -> None:
    x = x_input(1, 4, 8, 8)
    means = [apply("mean", conv(x, weight(width, 4, 1, 1)), axes=(2, 3), keepdims=False) for width in WIDTHS]
    prices = {("conv", width, layout): float(layout == LAYOUTS[0]) for width in WIDTHS for layout in LAYOUTS}
    oracle = Priced(prices, per_byte=3.0 / x.type.bytes)
    assert "permute" not in ops_of(Layout(oracle).run(graph_of(means[0])))
    together = Layout(oracle).run(graph_of(*means))
    assert len([node for node in together.nodes() if node.op == "permute" and not folds(node)]) == 1


def test_channels_last_of_the_model_can_become_channels_first() -> None:
    x = conv(x_input(2, 5, 6, 3), weight(2, 2, 3, 4), layout="channels_last")
    attrs: dict[str, Any] = {"kernel": (2, 2), "stride": (1, 1), "padding": (0, 0), "ceil_mode": False}
    x = apply("max_pool", x, **attrs, dilation=(1, 1), layout="channels_last")
    before = graph_of(x)
    prices = {(op, 4, layout): float(layout == LAYOUTS[1]) for op in WITH_LAYOUT for layout in LAYOUTS}
    after = Layout(Priced(prices, per_byte=1e-5)).run(before)
    assert {node.attrs["layout"] for node in after.nodes() if "layout" in node.attrs} == {LAYOUTS[0]}
    assert_same_function(before, after)


def test_a_border_is_in_the_order_of_the_convolution_that_reads_it() -> None:
    """In blocks of one channel it would lie in memory as it does channels first, but in a kernel of its own."""
    ends = {"low": (0, 0, 3, 3), "high": (0, 0, 3, 3), "interior": (0, 0, 0, 0)}
    padded = apply("pad", x_input(1, 3, 64, 64), value=0.0, **ends)
    graph = graph_of(conv(padded, weight(64, 3, 7, 7), stride=(2, 2)))
    after = Layout(PredictedCosts(host(), "fast")).run(graph)
    assert len(partition(after).calls) == 1


def test_a_pad_that_adds_channels_is_no_border() -> None:
    """16 channels and 4 of zeros, in blocks of 4 or of 5: no kernel adds them to the blocks that it reads."""
    ends = {"low": (0, 4, 0, 2), "high": (0, 0, 0, 1), "interior": (0, 0, 0, 0)}
    padded = apply("pad", x_input(1, 16, 1, 9), value=0.0, **ends)
    graph = graph_of(conv(padded, weight(12, 20, 1, 1)))
    for oracle in (Dice(seed) for seed in range(20)):
        assert_same_function(graph, Layout(oracle).run(graph))


def test_a_permute_beside_elementwise_work_costs_what_it_adds() -> None:
    """The image is permuted in the kernel of the sine; the sum of the channels is so in either order."""

    class Riding(Priced):
        def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
            return 1.0 if alone else 0.1

    prices = {("conv", 5, "channels_first"): 0.5, ("conv", 5, "channels_last"): 0.0}
    oracle = Riding(prices, 0.0)

    def permutes(x: Node) -> int:
        x = apply("mean", conv(x, weight(5, 4, 1, 1)), axes=(2, 3), keepdims=False)
        after = Layout(oracle).run(graph_of(x))
        return len([node for node in after.nodes() if node.op == "permute" and not folds(node)])

    assert permutes(x_input(1, 4, 8, 8)) == 0
    assert permutes(apply("sin", x_input(1, 4, 8, 8))) == 1


def test_the_mask_of_a_select_in_front_of_a_mean_is_not_what_is_averaged() -> None:
    """The pass once priced a mean of the mask, which has no type rule."""
    image = x_input(1, 3, 12, 6)
    pool = {
        "kernel": (3, 3),
        "stride": (2, 2),
        "padding": (1, 1),
        "ceil_mode": False,
        "count_include_pad": True,
    }
    pooled = apply("avg_pool", image, layout="channels_first", divisor=None, **pool)
    slope = apply("select", apply("gt", pooled, scalar(0.0)), pooled, apply("mul", pooled, scalar(0.25)))
    graph = graph_of(apply("mean", slope, axes=(2, 3), keepdims=False))
    assert_same_function(graph, Layout(PredictedCosts(host(), "fast")).run(graph))
