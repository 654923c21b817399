"""Large tasks on few rows: the whole answer is that of the few, repeated element by element, or there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.rewrites.helpers import array, weight
from tests.rewrites.random_graphs import graphs
from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.errors import TypeRuleError
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.measure import rows
from tilewright.measure.rows import FewRows, few_rows
from tilewright.measure.validation import Repeats, WrongResult, make_validation

BATCH = 5


@pytest.fixture(autouse=True, scope="module")
def small_tasks_are_large() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_MAX_FLOPS", 1.0)
        patch.setattr(rows, "_MAX_ELEMENTS", 1.0)
        yield


def check(task: Task, found: FewRows, seed: int = 0) -> None:
    """On repeated inputs the whole task gives the repeated answer of the few rows."""
    rng = np.random.default_rng(seed)
    order = found.repeats(rng)
    assert set(order) == set(range(found.count)) and len(order) == math.prod(found.batch)
    shapes = tuple(
        node.shape if repeated else None
        for node, repeated in zip(task.graph.inputs, found.repeated, strict=True)
    )
    repeats = Repeats(order, shapes)
    few = [
        array(*node.shape, seed=seed + n, dtype=node.dtype) for n, node in enumerate(found.task.graph.inputs)
    ]
    whole = [repeats.input(number, values) for number, values in enumerate(few)]
    for node, values in zip(task.graph.inputs, whole, strict=True):
        assert values.shape == node.shape
    with np.errstate(all="ignore"):
        (answer,) = evaluate(found.task.graph, few, precise=True)
        (expected,) = evaluate(task.graph, whole, precise=True)
    flat = repeats.output(np.asarray(answer).reshape(-1))
    np.testing.assert_allclose(flat, np.asarray(expected).reshape(-1), rtol=1e-9, atol=1e-9)


# -- what is taken ----------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "stride": (1, 1),
    "padding": ((1, 1), (1, 1)),
    "dilation": (1, 1),
    "groups": 1,
    "layout": "channels_last",
}


def linear() -> Task:
    x = Inputs()
    total = apply("linear", x(BATCH, 3, 8), x(6, 8, constant=True))
    return x.task(apply("gelu", apply("add", total, x(6, constant=True)), approximate="none"))


def residual() -> Task:
    x = Inputs()
    total = apply("matmul", x(BATCH, 3, 8), x(8, 6, constant=True))
    return x.task(apply("add", total, x(BATCH, 3, 6)))


def batched_matmul() -> Task:
    x = Inputs()
    return x.task(apply("relu", apply("matmul", x(BATCH, 2, 4, 3), x(BATCH, 2, 3, 4))))


def convolution() -> Task:
    x = Inputs()
    image = x(BATCH, 6, 5, 4)
    total = apply("conv", image, x(3, 3, 4, 8, constant=True), **PLAIN)
    return x.task(apply("relu", apply("add", apply("add", total, x(8, constant=True)), x(BATCH, 6, 5, 8))))


def attention() -> Task:
    """Heads split from what a projection leaves, a mask for all rows, heads merged again."""
    x = Inputs()

    def heads(node: Node) -> Node:
        return apply("permute", apply("reshape", node, shape=(BATCH, 6, 2, 4)), axes=(0, 2, 1, 3))

    operands = [heads(x(BATCH, 6, 8)) for _ in range(3)]
    out = apply("attention", *operands, x(1, 1, 6, 6), scale=0.5, causal=False)
    return x.task(apply("reshape", apply("permute", out, axes=(0, 2, 1, 3)), shape=(BATCH, 6, 8)))


def masked_rows() -> Task:
    """A mask of each row of the batch."""
    x = Inputs()
    operands = [x(BATCH, 2, 6, 4) for _ in range(3)]
    return x.task(apply("attention", *operands, x(BATCH, 1, 6, 6), scale=0.5, causal=False))


def normalised() -> Task:
    x = Inputs()
    norm = apply("layer_norm", apply("softmax", x(BATCH, 3, 8), axis=2), dims=1, eps=1e-5)
    return x.task(apply("mul", norm, x(8, constant=True)))


def pooled() -> Task:
    x = Inputs()
    edge = (0, 1, 1, 0)
    image = apply("pad", x(BATCH, 4, 4, 3), low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    cut = apply("slice", image, starts=(0, 1, 0, 0), stops=(BATCH, 5, 6, 3), steps=(1, 2, 1, 1))
    return x.task(apply("mean", apply("tanh", cut), axes=(1, 2), keepdims=True))


TAKEN: dict[str, Callable[[], Task]] = {
    each.__name__: each
    for each in (
        linear,
        residual,
        batched_matmul,
        convolution,
        attention,
        masked_rows,
        normalised,
        pooled,
    )
}


@pytest.mark.parametrize("name", TAKEN)
def test_batches_of_independent_rows_are_taken(name: str) -> None:
    task = TAKEN[name]()
    found = few_rows(task)
    assert found is not None and found.count < math.prod(found.batch)
    assert found.task.constants == task.constants and found.task.label == task.label
    for seed in range(3):
        check(task, found, seed)


def test_weights_and_constants_are_not_repeated() -> None:
    x = Inputs()
    data, weights = x(BATCH, BATCH), x(BATCH, BATCH)  # of one shape: what it is used for decides
    task = x.task(apply("linear", data, weights))
    found = few_rows(task)
    assert found is not None and found.repeated == (True, False)
    check(task, found)


def test_small_tasks_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_MAX_FLOPS", 1e9)
    monkeypatch.setattr(rows, "_MAX_ELEMENTS", 1e9)
    assert few_rows(linear()) is None


def test_there_are_as_many_rows_as_the_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Inputs()
    task = x.task(apply("linear", x(1000, 16), x(8, 16, constant=True)))
    for share in (2, 10, 100):
        monkeypatch.setattr(rows, "_MAX_FLOPS", task.flops / share)
        monkeypatch.setattr(rows, "_MAX_ELEMENTS", 1e9)
        found = few_rows(task)
        assert found is not None and found.count == 1000 // share


# -- random graphs ----------------------------------------------------------------------------------------------------


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(graphs(), st.integers(0, 100))
def test_of_any_graph_the_answer_is_right_or_there_is_none(graph: Graph, seed: int) -> None:
    _check_if_taken(graph, graph.outputs[0], seed)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(graphs(images=True), st.integers(0, 100))
def test_of_any_graph_of_images_too(graph: Graph, seed: int) -> None:
    _check_if_taken(graph, graph.outputs[0], seed)


@st.composite
def batches(draw: Any) -> Graph:
    """A chain of operators, most of which leave the rows of a batch alone: far more of these are taken."""
    x = Inputs()
    node = x(BATCH, draw(st.sampled_from([4, 6])), draw(st.sampled_from([4, 8])))
    for step in range(draw(st.integers(1, 5))):
        node = _STEPS[draw(st.sampled_from(sorted(_STEPS)))](draw, x, node, step)
    return x.task(node).graph


def _linear(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    return apply("linear", node, x(draw(st.sampled_from([4, 8])), node.shape[-1]))


def _matmul(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    if node.type.rank == 3 and draw(st.booleans()):
        return apply("matmul", node, x(BATCH, node.shape[-1], 4))
    return apply("matmul", node, x(node.shape[-1], 4))


def _bias(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    """Of the last axes, of all, or of each row; sometimes as many as there are rows, of something else."""
    shapes = [
        node.shape[-1:],
        node.shape,
        (1, *node.shape[1:]),
        (node.shape[0], *(1,) * (node.type.rank - 1)),
    ]
    other = x(*draw(st.sampled_from(shapes))) if draw(st.booleans()) else weight(*node.shape[1:], seed=step)
    return apply(draw(st.sampled_from(["add", "mul", "maximum"])), node, other)


def _heads(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    width = node.shape[-1]
    split = apply("reshape", node, shape=(*node.shape[:-1], 2, width // 2))
    rank = split.type.rank
    axes = (*range(rank - 3), rank - 2, rank - 3, rank - 1)
    moved = apply("permute", split, axes=axes)
    mask = [x(1, *moved.shape[-2:-1], moved.shape[-2])] if draw(st.booleans()) else []
    out = apply("attention", moved, moved, apply("tanh", moved), *mask, scale=0.5, causal=draw(st.booleans()))
    return apply("reshape", apply("permute", out, axes=axes), shape=node.shape)


def _softmax(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    return apply("softmax", node, axis=draw(st.integers(0, node.type.rank - 1)))


def _norm(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    return apply("layer_norm", node, dims=draw(st.integers(1, node.type.rank)), eps=0.1)


def _reduction(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    axis = draw(st.integers(0, node.type.rank - 1))
    return apply(draw(st.sampled_from(["sum", "mean", "amax"])), node, axes=(axis,), keepdims=True)


def _pad(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    axis = draw(st.integers(0, node.type.rank - 1))
    low = tuple(int(number == axis) for number in range(node.type.rank))
    zeros = (0,) * node.type.rank
    return apply("pad", node, low=low, high=zeros, interior=zeros, value=0.0)


def _slice(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    axis = draw(st.integers(0, node.type.rank - 1))
    stops = tuple(max(1, e - int(n == axis)) for n, e in enumerate(node.shape))
    return apply("slice", node, starts=(0,) * len(stops), stops=stops, steps=(1,) * len(stops))


def _permute(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    axes = list(range(node.type.rank))
    rest = draw(st.permutations(axes[1:]))
    return apply("permute", node, axes=(0, *rest) if draw(st.booleans()) else (*rest, 0))


def _reshape(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    merged = (math.prod(node.shape[:2]), *node.shape[2:])
    ones = (node.shape[0], 1, *node.shape[1:])
    return apply("reshape", node, shape=draw(st.sampled_from([merged, ones, (*node.shape, 1)])))


def _broadcast(draw: Any, x: Inputs, node: Node, step: int) -> Node:
    wide = tuple(3 if extent == 1 else extent for extent in node.shape)
    return apply("broadcast_to", node, shape=(BATCH, *wide) if draw(st.booleans()) else wide)


_STEPS: dict[str, Callable[[Any, Inputs, Node, int], Node]] = {
    each.__name__: each
    for each in (
        _linear,
        _matmul,
        _bias,
        _heads,
        _softmax,
        _norm,
        _reduction,
        _pad,
        _slice,
        _permute,
        _reshape,
        _broadcast,
    )
}


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.data(), st.integers(0, 100))
def test_of_any_batch_the_answer_is_right_or_there_is_none(data: st.DataObject, seed: int) -> None:
    try:
        graph = data.draw(batches())
    except TypeRuleError:  # these operators do not fit together
        assume(False)
    _check_if_taken(graph, graph.outputs[0], seed)


def _check_if_taken(graph: Graph, output: Node, seed: int) -> None:
    if not output.type.size or output.type.size > 20_000:
        return
    task = Task(Graph(graph.inputs, (output,)))
    found = few_rows(task)
    if found is not None:
        check(task, found, seed)


# -- what is declined -------------------------------------------------------------------------------------------------


def over_rows(op: str, **attrs: Any) -> Callable[[], Task]:
    def make() -> Task:
        x = Inputs()
        return x.task(apply(op, x(BATCH, 3, 8), **attrs))

    return make


def batch_on_the_right() -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(4, 3), x(BATCH, 3, 6)))


def rows_of_each_other() -> Task:
    """Each row is multiplied with all of them."""
    x = Inputs()
    data = x(BATCH, 8)
    return x.task(apply("matmul", data, apply("permute", data, axes=(1, 0))))


def batch_statistics() -> Task:
    x = Inputs()
    data = x(BATCH, 3, 8)
    return x.task(apply("sub", data, apply("mean", data, axes=(0,), keepdims=True)))


def shifted() -> Task:
    """The row before each row."""
    x = Inputs()
    zeros = (0, 0, 0)
    moved = apply("pad", x(BATCH, 3, 8), low=(1, 0, 0), high=zeros, interior=zeros, value=0.0)
    return x.task(apply("slice", moved, starts=zeros, stops=(BATCH, 3, 8), steps=(1, 1, 1)))


def new_leading_axis() -> Task:
    """As many copies as there are rows: the leading axis is no longer that of the rows."""
    x = Inputs()
    return x.task(apply("broadcast_to", x(BATCH, 4), shape=(BATCH, BATCH, 4)))


def aligned_from_the_right() -> Task:
    """The rows of the second operand are the heads of the first."""
    x = Inputs()
    return x.task(apply("matmul", x(BATCH, BATCH, 3, 4), x(BATCH, 4, 3)))


DECLINED: dict[str, Callable[[], Task]] = {
    "a new leading axis": new_leading_axis,
    "aligned from the right": aligned_from_the_right,
    "softmax over the batch": over_rows("softmax", axis=0),
    "cumulative sum over the batch": over_rows("cumsum", axis=0),
    "statistics of the batch": batch_statistics,
    "batch on the right": batch_on_the_right,
    "rows of each other": rows_of_each_other,
    "flipped": over_rows("flip", axes=(0,)),
    "shifted": shifted,
}


@pytest.mark.parametrize("name", DECLINED)
def test_rows_that_depend_on_each_other_are_declined(name: str) -> None:
    assert few_rows(DECLINED[name]()) is None


# -- what is caught ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "convolution", "attention"])
def test_a_kernel_that_mixes_two_rows_is_caught(name: str) -> None:
    task = TAKEN[name]()
    validation = make_validation(task, "fast", seed=3)
    case = validation.ordinary
    assert case.repeats is not None
    (right,) = evaluate(task.graph, list(case.inputs), precise=True)
    flat = np.asarray(right, task.output.dtype.numpy)
    assert case.error(flat.reshape(-1)) < 1e-5
    leading = math.prod(task.output.shape) // (len(case.repeats.rows))
    by_row = flat.reshape(-1, leading)
    one, other = (int(np.argmax(case.repeats.rows == number)) for number in range(2))
    mixed = by_row.copy()
    mixed[[one, other]] = by_row[[other, one]]
    with pytest.raises(WrongResult, match="element"):
        case.error(mixed.reshape(-1))
    last = by_row.copy()
    last[-1, -1] += 1.0
    with pytest.raises(WrongResult, match="1 of"):
        case.error(last.reshape(-1))


def test_inputs_of_the_whole_are_the_few_rows_again() -> None:
    task = residual()
    case = make_validation(task, "fast", seed=1).ordinary
    assert case.repeats is not None
    for number, node in enumerate(task.graph.inputs):
        whole = case.input(number)
        assert whole.shape == node.shape
        if number in task.constants:
            assert whole is case.stored[number]
            continue
        few = case.stored[number]
        count = len(case.repeats.rows)
        np.testing.assert_array_equal(whole.reshape(count, -1), few.reshape(len(few), -1)[case.repeats.rows])


def test_half_floats_are_repeated_as_they_are() -> None:
    x = Inputs()
    task = x.task(apply("linear", x(BATCH, 3, 8, dtype=DType.F16), x(6, 8, dtype=DType.F16, constant=True)))
    found = few_rows(task)
    assert found is not None and found.task.output.dtype is DType.F16
    check(task, found)
