"""Every pass, and the whole pipeline, keeps the function that a random graph computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.rewrites.helpers import inputs_for
from tests.rewrites.random_graphs import EVERYTHING, graphs
from tilewright.graph.ir import Graph
from tilewright.graph.oracle import evaluate
from tilewright.graph.text import structurally_equal
from tilewright.graph.verify import verify
from tilewright.measure.passes import run_calls
from tilewright.rewrites.base import Pass
from tilewright.rewrites.common_subexpressions import CommonSubexpressions
from tilewright.rewrites.decompose import Decompose
from tilewright.rewrites.fold_batch_norm import FoldBatchNorm
from tilewright.rewrites.fold_constants import FoldConstants
from tilewright.rewrites.layout import Layout, permuted_bytes
from tilewright.rewrites.partition import partition
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.rewrites.simplify import Simplify

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def check(before: Graph, outputs: list[np.ndarray], tolerance: float) -> None:
    """The error against the largest value anywhere in the graph: differences of large numbers are not our error."""
    inputs = inputs_for(before)
    everything = evaluate(Graph(before.inputs, tuple(before.nodes())), inputs)
    floats = [a[np.isfinite(a)] for a in everything if a.dtype.kind == "f"]
    scale = max([1.0, *(float(np.abs(a).max()) for a in floats if a.size)])
    for actual, expected in zip(outputs, evaluate(before, inputs), strict=True):
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    "each,tolerance",
    [(Simplify(fast=False), 1e-9), (Layout(), 1e-9), (CommonSubexpressions(), 1e-9), (Decompose(), 1e-9)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_exact_passes(each: Pass, tolerance: float) -> None:
    @QUICK
    @given(graphs())
    def run(graph: Graph) -> None:
        after = each.run(graph)
        verify(after, each.reaches if each.name == "decompose" else "imported")
        check(graph, evaluate(after, inputs_for(graph)), tolerance)

    run()


@pytest.mark.parametrize(
    "each", [Simplify(), FoldConstants(), FoldBatchNorm(), Decompose()], ids=lambda value: value.name
)
def test_rounding_passes(each: Pass) -> None:
    @QUICK
    @given(graphs(kinds=(*EVERYTHING, *["batch_norm"] * 6), images=True))
    def run(graph: Graph) -> None:
        check(graph, evaluate(each.run(graph), inputs_for(graph)), 1e-5)

    run()


@QUICK
@given(graphs())
def test_partition(graph: Graph) -> None:
    decomposed = Decompose().run(graph)
    check(graph, run_calls(partition(decomposed), inputs_for(graph)), 1e-9)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(kinds=(*EVERYTHING, "batch_norm", "conv", "conv", "max_pool"), images=True, most=14))
def test_pipeline_of_image_networks(graph: Graph) -> None:
    check(graph, run_calls(run_pipeline(graph), inputs_for(graph)), 1e-5)


@QUICK
@given(graphs(most=14))
def test_pipeline(graph: Graph) -> None:
    check(graph, run_calls(run_pipeline(graph, numerics="strict"), inputs_for(graph)), 1e-5)


@QUICK
@given(graphs(kinds=("conv", "max_pool", "unary", "permute", "reshape", "concat", "pad", "sum"), images=True))
def test_layout_is_idempotent_in_cost(graph: Graph) -> None:
    once = Layout().run(Decompose().run(graph))
    assert permuted_bytes(Layout().run(once)) <= permuted_bytes(once)


@QUICK
@given(graphs())
def test_simplify_is_idempotent(graph: Graph) -> None:
    once = Simplify().run(graph)
    assert structurally_equal(Simplify().run(once), once)
