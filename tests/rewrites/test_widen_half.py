from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.rewrites.helpers import (
    array,
    assert_close,
    assert_same_function,
    conv,
    graph_of,
    inputs_for,
    ops_of,
    weight,
    x_input,
)
from tests.rewrites.random_graphs import graphs
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.verify import verify
from tilewright.measure.passes import run_calls
from tilewright.rewrites.fold_constants import FoldConstants
from tilewright.rewrites.partition import partition
from tilewright.rewrites.pipeline import Abilities, rewrite, run_pipeline
from tilewright.rewrites.widen_half import FEW_ROWS, WidenHalf

HALF = pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.short)
MANY = FEW_ROWS + 1


def widened(*outputs: Node, rounds: bool = False) -> Graph:
    before = graph_of(*outputs)
    after = WidenHalf(rounds).run(before)
    verify(after, "imported")
    assert_same_function(before, after)
    return after


def computed_types(graph: Graph) -> set[tuple[str, DType]]:
    return {(node.op, node.dtype) for node in graph.nodes() if node.inputs and node.op != "cast"}


def dense(x: Node, outputs: int, seed: int = 0) -> Node:
    return apply("linear", x, weight(outputs, x.shape[-1], seed=seed, dtype=x.dtype))


# -- what is computed in f32


@HALF
def test_only_the_boundary_stays_in_16_bits(dtype: DType) -> None:
    after = widened(apply("relu", dense(apply("relu", dense(x_input(MANY, 6, dtype=dtype), 8)), 3)))
    assert computed_types(after) == {("linear", DType.F32), ("relu", DType.F32)}
    assert ops_of(FoldConstants().run(after)) == ["cast", "linear", "relu", "linear", "relu", "cast"]
    assert after.outputs[0].dtype is dtype


@HALF
def test_weights_become_f32_constants(dtype: DType) -> None:
    after = rewrite(graph_of(conv(x_input(1, 3, 9, 9, dtype=dtype), weight(8, 3, 3, 3, dtype=dtype))))
    assert {node.dtype for node in after.nodes() if node.is_constant} == {DType.F32}


def test_a_graph_without_16_bit_types_is_the_same_graph() -> None:
    graph = graph_of(dense(x_input(MANY, 6), 8))
    assert WidenHalf().run(graph) is graph


def test_machines_that_compute_in_16_bits_keep_them() -> None:
    graph = graph_of(dense(x_input(MANY, 6, dtype=DType.F16), 8))
    after = rewrite(graph, abilities=Abilities(half=True))
    assert {node.dtype for node in after.nodes()} == {DType.F16}


def test_conversions_to_16_bits_and_back_are_left_out_unless_strict() -> None:
    x = x_input(2, 3)
    there_and_back = apply("cast", apply("cast", x, dtype=DType.BF16), dtype=DType.F32)
    assert widened(there_and_back).outputs[0] is x
    strict = WidenHalf(rounds=True).run(graph_of(there_and_back))
    assert ops_of(strict) == ["cast", "cast"]


@HALF
def test_results_of_other_types_are_kept(dtype: DType) -> None:
    x = x_input(3, 5, dtype=dtype)
    positions = apply("argmax", x, axis=1, keepdims=False)
    wide = apply("cast", apply("exp", x), dtype=DType.F64)
    after = widened(positions, wide, apply("cast", positions, dtype=dtype))
    assert [node.dtype for node in after.outputs] == [DType.I64, DType.F64, dtype]


# -- what stays in 16 bits


@HALF
def test_a_table_is_not_doubled(dtype: DType) -> None:
    table, positions = weight(100, 8, dtype=dtype), x_input(4, dtype=DType.I64)
    after = rewrite(graph_of(apply("exp", apply("take", table, positions, axis=0))))
    assert ops_of(after) == ["take", "cast", "exp", "cast"]
    assert table in after.nodes()


@HALF
def test_movement_of_inputs_converts_nothing(dtype: DType) -> None:
    x, y = x_input(2, 3, dtype=dtype), x_input(2, 3, index=1, dtype=dtype)
    after = widened(apply("permute", apply("concat", x, y, axis=0), axes=(1, 0)))
    assert ops_of(after) == ["concat", "permute"]


@pytest.mark.parametrize("rows,stays", [(1, True), (FEW_ROWS, True), (MANY, False)])
def test_a_matmul_of_few_rows_reads_a_16_bit_weight(rows: int, stays: bool) -> None:
    after = widened(dense(apply("exp", x_input(rows, 6, dtype=DType.F16)), 8))
    assert ("linear", DType.F16 if stays else DType.F32) in computed_types(after)


def test_each_matrix_of_a_stack_has_rows_of_its_own() -> None:
    x, y = x_input(4, 1, 6, dtype=DType.BF16), x_input(4, 6, 8, index=1, dtype=DType.BF16)
    assert computed_types(widened(apply("matmul", x, y))) == {("matmul", DType.BF16)}


@HALF
def test_a_cache_is_extended_and_read_in_16_bits(dtype: DType) -> None:
    query = apply("exp", x_input(1, 2, 1, 4, dtype=dtype))
    caches = [x_input(1, 2, 5, 4, index=n, dtype=dtype) for n in (1, 2)]
    keys, values = (apply("concat", cache, query, axis=2) for cache in caches)
    result = apply("attention", query, keys, values, causal=False, scale=0.5)
    after = widened(result, keys)
    assert {("concat", dtype), ("attention", dtype), ("exp", DType.F32)} == computed_types(after)


@pytest.mark.parametrize("queries,whole", [(FEW_ROWS, False), (MANY, True)])
def test_attention_of_a_few_queries_to_a_cache_is_in_parts(queries: int, whole: bool) -> None:
    """The keys are read as they are stored."""
    q, k, v = (x_input(1, 2, n, 4, index=i, dtype=DType.F16) for i, n in enumerate((queries, 64, 64)))
    after = rewrite(graph_of(apply("attention", q, k, v, causal=False, scale=0.5)))
    assert ("attention" in ops_of(after), "matmul" in ops_of(after)) == (whole, not whole)
    assert "permute" not in ops_of(after)


def test_a_border_is_beside_its_convolution() -> None:
    x = x_input(1, 8, 6, 6, dtype=DType.F16)
    padded = apply("pad", x, low=(0, 0, 1, 1), high=(0, 0, 1, 1), interior=(0,) * 4, value=0.0)
    after = FoldConstants().run(widened(conv(padded, weight(8, 8, 3, 3, dtype=DType.F16))))
    assert ops_of(after) == ["cast", "pad", "conv", "cast"]


# -- rounding


@HALF
def test_strict_numerics_round_every_result(dtype: DType) -> None:
    x = x_input(7, 6, dtype=dtype)
    y = apply("mul", apply("exp", dense(x, 5)), constant(array(5, dtype=dtype)))
    before = graph_of(apply("add", y, apply("tanh", y)))
    after = WidenHalf(rounds=True).run(before)
    inputs = inputs_for(before)
    (got,), (want,) = (evaluate(graph, inputs, precise=False) for graph in (after, before))
    np.testing.assert_array_equal(got, want)
    fast = WidenHalf().run(before)
    assert (evaluate(fast, inputs, precise=False)[0] != want).any()


def in_half(graph: Graph, dtype: DType) -> Graph:
    """The graph with `dtype` in the place of f32."""
    new: dict[Node, Node] = {}
    for node in graph.nodes():
        attrs = {name: dtype if value is DType.F32 else value for name, value in node.attrs.items()}
        half = dtype if node.dtype is DType.F32 else node.dtype
        if node.is_input:
            new[node] = input_node(node.attrs["index"], TensorType(node.shape, half), node.name)
        elif node.data is not None:
            new[node] = constant(node.data.astype(half.numpy), node.name)
        else:
            new[node] = apply(node.op, *(new[operand] for operand in node.inputs), **attrs)
    return Graph(tuple(new[x] for x in graph.inputs), tuple(new[y] for y in graph.outputs))


@pytest.mark.parametrize("rounds", [False, True])
@HALF
def test_the_function_stays(dtype: DType, rounds: bool) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(graphs())
    def run(graph: Graph) -> None:
        before = in_half(graph, dtype)
        after = WidenHalf(rounds).run(before)
        verify(after, "imported")
        inputs = inputs_for(before)
        assert_close(evaluate(after, inputs), evaluate(before, inputs))

    run()


@HALF
def test_the_pipeline_keeps_the_function(dtype: DType) -> None:
    x = x_input(2, 8, 6, 6, dtype=dtype)
    image = apply("relu", conv(x, weight(16, 8, 3, 3, dtype=dtype), padding=((1, 1), (1, 1))))
    pooled = apply("amax", image, axes=(2, 3), keepdims=False)
    before = graph_of(dense(pooled, 4), apply("softmax", pooled, axis=1))
    inputs = inputs_for(before)
    for numerics in ("fast", "strict"):
        after = run_calls(run_pipeline(before, numerics=numerics), inputs)
        assert_close(after, evaluate(before, inputs), 1e-5)


@pytest.mark.parametrize("readers", [1, 2])
def test_pooling_converts_what_it_reads(readers: int) -> None:
    """Two readers share a conversion that is written to memory."""
    x = x_input(1, 4, 6, 6, dtype=DType.F16)
    attrs = {"stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "ceil_mode": False}
    pools = [
        apply("max_pool", x, kernel=(size, size), layout="channels_first", **attrs)
        for size in range(2, 2 + readers)
    ]
    calls = partition(widened(*pools)).calls
    labels = ["cast+max_pool+cast"] if readers == 1 else ["cast", "max_pool+cast", "max_pool+cast"]
    assert [call.task.label for call in calls] == labels
