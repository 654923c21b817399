"""Which nodes share a kernel, what becomes a view, and that every output has its own buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.rewrites.helpers import (
    array,
    assert_close,
    conv,
    graph_of,
    inputs_for,
    scalar,
    weight,
    x_input,
)
from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, constant
from tilewright.graph.lower import lower_graph
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Partition, Task
from tilewright.loops.formula import formula_of
from tilewright.measure.passes import run_calls
from tilewright.rewrites.expansion import MAX_PARTS
from tilewright.rewrites.fuse import EXPENSIVE_OPERATORS, MAX_NODES, OVERLAPPING
from tilewright.rewrites.partition import partition

X = x_input(4, 8)
Y = x_input(4, 8, index=1)
IMAGE = x_input(1, 8, 8, 4)


def cut(*nodes: Node, graph: Graph | None = None) -> Partition:
    graph = graph or graph_of(*nodes)
    result = partition(graph)
    inputs = inputs_for(graph)
    assert_close(run_calls(result, inputs), evaluate(graph, inputs), 1e-12)
    for task, _ in result.tasks().values():
        lower_graph(task.graph)
    return result


def labels(*nodes: Node) -> list[str]:
    return [call.task.label for call in cut(*nodes).calls]


def reshape(x: Node, *shape: int) -> Node:
    return apply("reshape", x, shape=shape)


def permute(x: Node, *axes: int) -> Node:
    return apply("permute", x, axes=axes)


def matmul(x: Node = X, width: int = 8, seed: int = 0) -> Node:
    return apply("matmul", x, weight(x.shape[-1], width, seed=seed))


def softmax(x: Node) -> Node:
    return apply("softmax", x, axis=x.type.rank - 1)


def pad(x: Node) -> Node:
    ones = (1,) * x.type.rank
    return apply("pad", x, low=ones, high=ones, interior=(0,) * x.type.rank, value=0.0)


# -- contractions -------------------------------------------------------------------------------------------------


def test_a_contraction_takes_what_follows() -> None:
    node = apply("relu", apply("add", apply("add", matmul(), weight(8)), Y))
    assert labels(node) == ["matmul+add+add+relu"]
    image = conv(IMAGE, weight(1, 1, 4, 6), layout="channels_last")
    assert labels(apply("clamp", image, min=0, max=6)) == ["conv+clamp"]


def test_a_dag_behind_a_contraction() -> None:
    y = matmul()
    assert labels(apply("mul", y, apply("sigmoid", y))) == ["matmul+sigmoid+mul"]


def test_it_stops_at_what_others_read() -> None:
    y = matmul()
    z = apply("relu", y)
    assert labels(apply("exp", z), z) == ["matmul+relu", "exp"]
    assert labels(apply("exp", z), softmax(z)) == ["matmul+relu", "exp", "softmax"]
    assert labels(z, softmax(y)) == ["matmul", "relu", "softmax"]
    # The sigmoid could be taken, but then the matmul itself would still be read outside.
    assert labels(apply("mul", apply("sigmoid", y), softmax(y)))[0] == "matmul"


def test_it_stops_at_another_shape() -> None:
    assert labels(apply("add", matmul(x_input(1, 8)), Y)) == ["matmul", "add"]
    assert labels(apply("relu", reshape(matmul(), 32))) == ["matmul", "relu"]


@pytest.mark.parametrize(
    ("dtype", "border", "expected"),
    [
        (DType.F32, 0.0, ["pad+conv"]),
        (DType.F32, 1.0, ["pad", "conv"]),
        (DType.U8, 0, ["pad+conv"]),
        (DType.U8, 7, ["pad+conv"]),
    ],
)
def test_a_convolution_takes_its_border(dtype: DType, border: float, expected: list[str]) -> None:
    around = (0, 1, 1, 0)
    image = apply(
        "pad", x_input(1, 6, 6, 4, dtype=dtype), low=around, high=around, interior=(0,) * 4, value=border
    )
    kernel = weight(3, 3, 4, 6, dtype=DType.I8 if dtype is DType.U8 else dtype)
    assert labels(conv(image, kernel, layout="channels_last")) == expected


@pytest.mark.parametrize(
    ("kernel", "groups", "expected"),
    [
        (weight(8, 4, 3, 3), 1, ["pad+conv"]),
        (weight(4, 1, 3, 3), 4, ["pad+conv"]),
        (weight(8, 1, 3, 3), 4, ["pad", "conv"]),  # two channels of a group: no kernel copies what it reads
        (x_input(8, 4, 3, 3, index=1), 1, ["pad", "conv"]),
    ],
)
def test_with_channels_first_some_take_it(kernel: Node, groups: int, expected: list[str]) -> None:
    around = (0, 0, 1, 1)
    image = apply("pad", x_input(1, 4, 6, 6), low=around, high=around, interior=(0,) * 4, value=0.0)
    assert labels(conv(image, kernel, groups=groups, layout="channels_first")) == expected


def test_it_takes_no_producers() -> None:
    assert labels(matmul(apply("relu", X))) == ["relu", "matmul"]
    assert labels(apply("add", matmul(), apply("relu", Y))) == ["relu", "matmul+add"]


def test_of_two_contractions_one_takes_the_sum() -> None:
    assert sorted(labels(apply("relu", apply("add", matmul(), matmul(Y, seed=1))))) == [
        "matmul",
        "matmul+add+relu",
    ]


def test_an_operand_that_depends_on_the_group_is_no_cycle() -> None:
    y = matmul()
    gate = apply("sum", y, axes=(1,), keepdims=True)
    assert labels(apply("mul", y, gate)) == ["matmul", "sum", "mul"]


def test_long_epilogues_are_cut() -> None:
    node = matmul()
    for _ in range(MAX_NODES + 10):
        node = apply("tanh", node)
    result = cut(node)
    assert len(result.calls) == 2
    assert max(len(call.task.graph.nodes()) for call in result.calls) <= MAX_NODES + 2


def written_out(task: Task) -> int:
    """The size of the largest expression of a task's formula."""
    output, inputs = lower_graph(task.graph)
    formula = formula_of(output, inputs)
    return max(sum(1 for _ in te.walk(expr)) for expr in formula.expressions())


def gated(x: Node) -> Node:
    return apply("mul", x, apply("sigmoid", x))


def shuffled(x: Node) -> Node:
    return apply("abs", reshape(permute(reshape(x, 2, 4, 4), 2, 1, 0), 4, 8))


@pytest.mark.parametrize(
    "step",
    [
        gated,
        shuffled,
        lambda x: apply("add", x, permute(reshape(x, 8, 4), 1, 0)),
        lambda x: apply("select", apply("gt", x, scalar(0)), apply("neg", x), apply("mul", x, scalar(0.5))),
    ],
)
@pytest.mark.parametrize("start", [X, matmul(), softmax(X)])
def test_formulas_stay_small_however_often_a_value_is_read(start: Node, step: Callable[[Node], Node]) -> None:
    node = start
    for _ in range(30):
        node = step(node)
    result = cut(node)
    assert 2 <= len(result.calls) <= 60
    assert max(written_out(task) for task, _ in result.tasks().values()) <= 2 * MAX_PARTS


def test_a_few_activations_in_a_row_are_one_kernel() -> None:
    assert len(cut(gated(gated(gated(X)))).calls) == 1
    assert len(cut(gated(gated(matmul()))).calls) == 1
    assert len(cut(shuffled(shuffled(X))).calls) == 1


# -- reductions ---------------------------------------------------------------------------------------------------


def test_a_reduction_takes_cheap_producers_and_what_follows() -> None:
    x = apply("add", apply("mul", X, Y), scalar(1))
    assert labels(apply("mul", softmax(x), scalar(2))) == ["mul+add+softmax+mul"]
    assert labels(apply("layer_norm", apply("add", X, Y), weight(8), weight(8), dims=1, eps=1e-5)) == [
        "add+layer_norm"
    ]


def test_it_takes_movement_but_no_concat() -> None:
    assert labels(softmax(permute(x_input(8, 4), 1, 0))) == ["permute+softmax"]
    ids = x_input(4, index=1, dtype=DType.I64)
    assert labels(apply("layer_norm", apply("take", x_input(9, 8), ids, axis=0), dims=1, eps=1e-5)) == [
        "take+layer_norm"
    ]
    assert labels(softmax(apply("concat", X, Y, axis=0))) == ["concat", "softmax"]


@pytest.mark.parametrize("op", ["exp", "tanh", "sqrt", "reciprocal"])
def test_it_takes_no_expensive_producers(op: str) -> None:
    assert op in EXPENSIVE_OPERATORS
    assert labels(apply("sum", apply(op, X), axes=(1,), keepdims=True)) == [op, "sum"]


def test_windows_and_parameters_take_none() -> None:
    window = {
        "kernel": (2, 2),
        "stride": (1, 1),
        "padding": (0, 0),
        "ceil_mode": False,
        "layout": "channels_last",
    }
    assert labels(apply("max_pool", apply("relu", IMAGE), **window, dilation=(1, 1))) == ["relu", "max_pool"]
    assert labels(apply("cumsum", apply("relu", X), axis=1)) == ["relu", "cumsum"]
    assert "avg_pool" in OVERLAPPING
    scale = apply("relu", x_input(8, index=1))
    assert labels(apply("layer_norm", X, scale, dims=1, eps=1e-5)) == ["relu", "layer_norm"]


def test_a_group_norm_reads_its_groups_in_one_piece() -> None:
    norm = {"groups": 2, "eps": 1e-5}
    assert labels(apply("group_norm", permute(IMAGE, 0, 3, 1, 2), **norm)) == ["permute", "group_norm"]
    assert labels(apply("group_norm", permute(IMAGE, 0, 2, 1, 3), **norm)) == ["permute+group_norm"]


def test_it_takes_nothing_that_is_also_read_behind_it() -> None:
    x = apply("relu", X)
    assert labels(apply("add", softmax(x), x)) == ["relu", "softmax+add"]
    assert labels(apply("add", softmax(X), apply("relu", Y))) == ["relu", "softmax+add"]


def test_one_anchor_per_task() -> None:
    assert labels(softmax(softmax(X))) == ["softmax", "softmax"]
    assert labels(softmax(matmul())) == ["matmul", "softmax"]
    assert labels(matmul(softmax(X))) == ["softmax", "matmul"]


def test_consumers_of_the_reduced_shape() -> None:
    mean = apply("mean", X, axes=(1,), keepdims=True)
    assert labels(apply("sqrt", apply("add", mean, scalar(1)))) == ["mean+add+sqrt"]
    assert labels(apply("sub", X, mean)) == ["mean", "sub"]


# -- elementwise work and movement --------------------------------------------------------------------------------


def test_chains_are_one_kernel() -> None:
    node = apply("exp", apply("mul", apply("tanh", X), apply("sin", Y)))
    assert labels(node) == ["tanh+sin+mul+exp"]
    assert labels(permute(apply("exp", X), 1, 0)) == ["exp+permute"]
    assert labels(apply("exp", permute(X, 1, 0))) == ["permute+exp"]
    assert labels(pad(permute(apply("exp", X), 1, 0))) == ["exp+permute+pad"]


def test_what_two_kernels_read_is_computed_once() -> None:
    shared = apply("exp", X)
    assert sorted(labels(softmax(shared), apply("neg", shared))) == ["exp", "neg", "softmax"]
    assert labels(apply("mul", shared, apply("neg", shared))) == ["exp+neg+mul"]


def test_broadcasts_compute_cheap_things_again_and_expensive_ones_not() -> None:
    row = x_input(8, index=2)
    assert labels(apply("add", X, apply("add", row, weight(8)))) == ["add+add"]
    assert labels(apply("add", X, apply("exp", row))) == ["exp", "add"]
    assert labels(apply("broadcast_to", apply("exp", x_input(1, 8)), shape=(6, 8))) == ["exp", "broadcast_to"]
    assert labels(apply("broadcast_to", apply("neg", x_input(1, 8)), shape=(6, 8))) == ["neg+broadcast_to"]
    # Also where the larger consumer is further down.
    assert labels(apply("add", X, apply("neg", apply("exp", row)))) == ["exp", "neg+add"]


def test_slices_of_something_expensive_compute_less() -> None:
    assert labels(apply("slice", apply("exp", X), starts=(0, 0), stops=(1, 8), steps=(1, 1))) == ["exp+slice"]


def test_a_concat_stands_alone() -> None:
    assert labels(apply("exp", apply("concat", apply("neg", X), Y, axis=0))) == ["neg", "concat", "exp"]


def test_interpolation_reads_memory() -> None:
    image = x_input(1, 4, 4, 4)

    def resize(x: Node, mode: str) -> Node:
        return apply("resize", x, sizes=(8, 8), mode=mode, coordinates="half_pixel")

    assert labels(resize(apply("relu", image), "linear")) == ["relu", "resize"]
    assert labels(resize(apply("relu", image), "nearest")) == ["relu+resize"]
    assert labels(resize(apply("exp", image), "nearest")) == ["exp", "resize"]
    assert labels(apply("relu", resize(image, "linear"))) == ["resize+relu"]


# -- views --------------------------------------------------------------------------------------------------------


def test_a_reshape_between_kernels_is_a_view() -> None:
    y = matmul()
    flat = reshape(y, 2, 16)
    result = cut(softmax(flat))
    assert [call.task.label for call in result.calls] == ["matmul", "softmax"]
    assert result.views == {flat: y}
    assert result.calls[1].inputs == (flat,)


def test_a_reshape_of_an_input_is_a_view_of_it() -> None:
    flat = reshape(X, 32)
    assert cut(apply("exp", flat)).views == {flat: X}
    twice = reshape(reshape(X, 32), 2, 16)
    assert set(cut(apply("exp", twice)).views.values()) == {X}


def test_work_is_fused_through_a_reshape() -> None:
    result = cut(permute(reshape(apply("exp", X), 2, 2, 8), 1, 0, 2))
    assert [call.task.label for call in result.calls] == ["exp+reshape+permute"]
    assert not result.views
    heads = apply("slice", X, starts=(0, 0), stops=(4, 4), steps=(1, 1))
    assert labels(permute(reshape(heads, 4, 2, 2), 1, 0, 2)) == ["slice+reshape+permute"]


# -- outputs ------------------------------------------------------------------------------------------------------


def test_an_output_that_is_a_view_takes_the_buffer() -> None:
    y = matmul()
    out = reshape(y, 32)
    result = cut(out)
    (call,) = result.calls
    assert call.output is out and call.task.output.shape == (4, 8)
    assert result.views == {y: out}
    # ... also where others read the value, through views or not.
    other = reshape(y, 2, 16)
    result = cut(out, softmax(y), apply("exp", other))
    assert result.views == {y: out, other: out}
    assert len(result.calls) == 3


def test_two_outputs_of_one_buffer() -> None:
    y = matmul()
    result = cut(reshape(y, 32), reshape(y, 2, 16))
    assert [call.task.label for call in result.calls] == ["matmul", "reshape"]
    result = cut(y, reshape(y, 32))
    assert [call.task.label for call in result.calls] == ["matmul", "reshape"]
    assert result.graph.outputs[0] is y
    result = cut(reshape(y, 32), y)
    assert result.graph.outputs[1] is y


def test_outputs_that_nothing_computes_are_copied() -> None:
    w = constant(array(3, 5))
    result = cut(graph=Graph((X,), (X, w, reshape(X, 32), apply("relu", X))))
    assert [call.task.label for call in result.calls] == ["reshape", "reshape", "reshape", "relu"]
    assert len(set(result.graph.outputs)) == 4


def test_repeated_outputs_are_copied() -> None:
    y = apply("relu", X)
    out = reshape(y, 32)
    assert len(cut(y, y, y).calls) == 3
    assert len(cut(out, out).calls) == 2


def test_no_outputs() -> None:
    assert cut(graph=Graph((X,), ())).calls == ()


# -- tasks --------------------------------------------------------------------------------------------------------


def test_single_numbers_are_part_of_the_program_and_larger_constants_are_inputs() -> None:
    node = apply("mul", apply("add", X, weight(8)), constant(np.full((1, 1), 2, np.float32)))
    (call,) = cut(node).calls
    assert [operand.is_constant for operand in call.inputs] == [False, True]
    (embedded,) = (n for n in call.task.graph.nodes() if n.is_constant)
    assert embedded.shape == (1, 1)


def test_an_operand_read_twice_is_one_input() -> None:
    (call,) = cut(apply("mul", X, apply("exp", X))).calls
    assert call.inputs == (X,)


def test_equal_layers_are_one_task() -> None:
    node: Node = X
    for seed in range(4):
        node = apply("relu", apply("add", matmul(node, seed=seed), weight(8, seed=seed), name=f"layer{seed}"))
    result = cut(node)
    ((task, times),) = result.tasks().values()
    assert (task.label, times) == ("matmul+add+relu", 4)
    assert len({call.task for call in result.calls}) == 1
    assert all(call.task is result.calls[0].task for call in result.calls)


def test_calls_have_unique_names() -> None:
    y = apply("relu", X, name="same")
    result = cut(apply("exp", reshape(y, 32), name="same"), softmax(y))
    names = [call.name for call in result.calls]
    assert len(set(names)) == len(names) and "same" in names and "same_1" in names


def test_the_order_is_that_of_the_graph_and_the_same_each_time() -> None:
    def build() -> Partition:
        x, y = x_input(4, 8), x_input(4, 8, index=1)
        a, b = matmul(x), matmul(y, seed=1)
        return partition(graph_of(softmax(apply("add", a, b)), apply("exp", b), permute(a, 1, 0)))

    first, second = build(), build()
    assert [call.task.key for call in first.calls] == [call.task.key for call in second.calls]
    assert [call.name for call in first.calls] == [call.name for call in second.calls]
