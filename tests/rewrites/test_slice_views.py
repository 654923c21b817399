"""A slice whose elements lie side by side is read in place, so that equal steps are one task."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rewrites.helpers import assert_close, graph_of, inputs_for, weight, x_input
from tilewright.errors import InternalError
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Partition
from tilewright.measure.passes import run_calls
from tilewright.rewrites.fuse import MANY_SLICES, part_of
from tilewright.rewrites.partition import partition

STEPS = MANY_SLICES + 4
X = x_input(STEPS, 3, 5)


def cut(*nodes: Node, slices: bool = True) -> Partition:
    graph = graph_of(*nodes)
    result = partition(graph, slices=slices)
    inputs = inputs_for(graph)
    assert_close(run_calls(result, inputs), evaluate(graph, inputs), 1e-12)
    return result


def sliced(x: Node, *bounds: tuple[int, int] | tuple[int, int, int]) -> Node:
    whole = [*bounds, *((0, extent) for extent in x.shape[len(bounds) :])]
    starts, stops = (tuple(bound[end] for bound in whole) for end in (0, 1))
    steps = tuple(bound[2] if len(bound) == 3 else 1 for bound in whole)
    return apply("slice", x, starts=starts, stops=stops, steps=steps)


def reshape(x: Node, *shape: int) -> Node:
    return apply("reshape", x, shape=shape)


def recurrence(x: Node, steps: int = STEPS) -> Node:
    """h = tanh(x[t] + h w), step by step."""
    w, state = weight(5, 5), reshape(sliced(x, (0, 1)), 3, 5)
    for step in range(1, steps):
        row = reshape(sliced(x, (step, step + 1)), 3, 5)
        state = apply("tanh", apply("add", apply("matmul", state, w), row))
    return state


@pytest.mark.parametrize(
    ("bounds", "offset"),
    [
        (((2, 4),), 2 * 15),
        (((2, 3), (1, 3)), 2 * 15 + 5),
        (((2, 3), (1, 2), (3, 5)), 2 * 15 + 5 + 3),
        (((2, 3, 1), (1, 2), (3, 4, 2)), 2 * 15 + 5 + 3),
        (((0, STEPS),), 0),
        (((2, 4), (1, 3)), None),
        (((2, 4), (1, 2)), None),
        (((0, 4, 2),), None),
        (((2, 3), (0, 3, 2)), None),
        (((2, 2),), None),
    ],
)
def test_which_slices_lie_side_by_side(bounds: tuple[tuple[int, int], ...], offset: int | None) -> None:
    node = sliced(X, *bounds)
    assert part_of(node) == offset
    if offset is not None:
        values = np.arange(X.type.size).reshape(X.shape)
        index = tuple(slice(*bound) for bound in bounds)
        np.testing.assert_array_equal(values[index].reshape(-1), np.arange(node.type.size) + offset)


def test_the_steps_of_a_recurrence_are_one_task() -> None:
    split, together = cut(recurrence(X), slices=False), cut(recurrence(X))
    assert len(split.tasks()) > STEPS - 2
    assert len(together.tasks()) == 1
    assert len(together.calls) == STEPS - 1
    offsets = [together.offsets[call.inputs[-1]] for call in together.calls]
    assert offsets == [step * 15 * 4 for step in range(1, STEPS)]


def test_of_what_is_computed_and_through_reshapes() -> None:
    fed = reshape(apply("matmul", reshape(X, 3 * STEPS, 5), weight(5, 5)), STEPS, 3, 5)
    assert len(cut(recurrence(fed)).tasks()) == 2


def test_a_slice_that_would_be_copied_is_read_where_it_lies() -> None:
    token = reshape(sliced(X, (2, 3)), 3, 5)
    assert [call.task.label for call in cut(apply("matmul", token, weight(5, 4))).calls] == ["matmul"]
    beside = sliced(X, (0, STEPS), (0, 2))  # every row of it lies apart
    labels = [call.task.label for call in cut(apply("matmul", beside, weight(5, 4))).calls]
    assert labels == ["slice", "matmul"]


def test_a_value_that_nothing_else_needs_is_fused_through_its_slice() -> None:
    half = sliced(apply("exp", X), (0, 2))
    assert [call.task.label for call in cut(apply("relu", half)).calls] == ["exp+slice+relu"]


def test_outputs_are_written() -> None:
    """An output is no view, nor is a slice that an output is a reshape of."""
    parts = [sliced(X, (step, step + 1)) for step in range(STEPS)]
    result = cut(*parts[:3], reshape(parts[3], 15), *(apply("exp", part) for part in parts[4:]))
    assert {call.output for call in result.calls} == set(result.graph.outputs)
    assert len(result.offsets) == STEPS - 4


def test_an_output_of_which_parts_are_read() -> None:
    y = apply("matmul", X, weight(5, 5))
    cut(reshape(y, STEPS * 15), *(apply("exp", sliced(y, (step, step + 1))) for step in range(STEPS)))


def test_a_part_of_constants_is_copied() -> None:
    w = weight(STEPS, 5)
    rows = [apply("mul", X, sliced(w, (step, step + 1))) for step in range(STEPS)]
    assert not cut(*rows).offsets


def test_a_part_without_an_offset_is_an_internal_error() -> None:
    result = cut(recurrence(X))
    with pytest.raises(InternalError, match="cannot be a view"):
        Partition(result.graph, result.calls, result.views).check()
