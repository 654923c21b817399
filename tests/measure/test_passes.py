"""The graph after every pass against the graph as imported: right ones pass, and the first wrong pass is named."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.rewrites.helpers import batch_norm, conv, graph_of, inputs_for, scalar, weight, x_input
from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.op import apply
from tilewright.measure.passes import PassChecks, PassReport, run_calls
from tilewright.rewrites import pipeline
from tilewright.rewrites.base import Pass
from tilewright.rewrites.pipeline import passes, run_pipeline


@dataclass(frozen=True)
class Broken(Pass):
    """Pools, or convolves, what lies in memory alongside what it should."""

    name = "broken"

    def run(self, graph: Graph) -> Graph:
        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            if node.op != "conv":
                return None
            flipped = apply("flip", operands[0], axes=(1,))
            return apply("conv", flipped, *operands[1:], **node.attrs)

        return rebuild(graph, rule)


def network() -> Graph:
    x = apply("relu", batch_norm(conv(x_input(2, 4, 6, 8), weight(8, 4, 3, 3), padding=((1, 1), (1, 1)))))
    x = apply("concat", x, apply("mul", x, scalar(0.5)), axis=1)
    return graph_of(x, apply("mean", x, axes=(2, 3), keepdims=False))


def checked(graph: Graph) -> PassReport:
    checks = PassChecks(graph, inputs_for(graph))
    checks.cut(run_pipeline(graph, observe=checks))
    return checks.report


def test_every_pass_is_right() -> None:
    report = checked(network())
    assert report.ok and report.first is None
    assert [each.name for each in report.passes] == [*(each.name for each in passes()), "partition"]
    folding = next(each for each in report.passes if each.name == "fold-batch-norm")
    assert folding.changed and 0 < folding.error < 1e-6  # weights are rounded once
    assert str(report).startswith(f"OK after each of {len(report.passes)} passes, the largest error is ")


def test_a_pass_that_changes_nothing_has_the_error_of_the_one_before() -> None:
    report = checked(graph_of(apply("relu", x_input(2, 3))))
    assert not any(each.changed for each in report.passes[:-1])
    assert str(report) == f"OK after each of {len(report.passes)} passes, to the last bit of float64"


@pytest.mark.parametrize("place", [0, 4, -1])
def test_the_first_wrong_pass_is_named(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = list(passes())
    number = len(listed) if place == -1 else place
    listed.insert(number, Broken())
    monkeypatch.setattr(pipeline, "passes", lambda *options: listed)
    report = checked(network())
    assert not report.ok and report.first is not None
    assert (report.first.number, report.first.name) == (number + 1, "broken")
    assert report.first.error > 0.1 > report.first.bound
    assert str(report).startswith(f"WRONG after pass {number + 1} of {len(listed) + 1}, broken: an error of ")


def test_infinities_and_integers_must_stay_where_they_are() -> None:
    x = x_input(3, 4)
    graph = graph_of(apply("log", apply("relu", x)), apply("argmax", x, axis=1, keepdims=False))
    inputs = inputs_for(graph)

    def after(*outputs: Node) -> bool:
        checks = PassChecks(graph, inputs)
        checks("changed", Graph(graph.inputs, outputs))
        return checks.report.ok

    logs, best = graph.outputs
    assert after(apply("log", apply("relu", x)), apply("argmax", x, axis=1, keepdims=False))
    assert not after(apply("log", apply("abs", x)), best)
    assert not after(logs, apply("argmin", x, axis=1, keepdims=False))


def test_calls_run_on_buffers() -> None:
    graph = network()
    inputs = inputs_for(graph)
    first, second = run_calls(run_pipeline(graph), inputs)
    np.testing.assert_allclose(second, first.mean((2, 3)))
