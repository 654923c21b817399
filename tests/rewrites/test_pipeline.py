from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, replace

import pytest

import tilewright.rewrites
from tests.machines import ICE_LAKE
from tests.rewrites.helpers import batch_norm, conv, graph_of, scalar, weight, x_input
from tilewright.errors import InternalError, OptionError, TilewrightWarning, VerificationError
from tilewright.graph.ir import Graph
from tilewright.graph.op import apply
from tilewright.rewrites.base import Pass, run_passes
from tilewright.rewrites.pipeline import passes, rewrite, run_pipeline
from tilewright.rewrites.simplify import rule_names
from tilewright.support.trace import Trace
from tilewright.tune.oracle import PredictedCosts

IMAGE = x_input(1, 4, 8, 8)


def network() -> Graph:
    x = apply("relu", batch_norm(conv(IMAGE, weight(8, 4, 3, 3), padding=((1, 1), (1, 1)))))
    x = apply("mean", x, axes=(2, 3), keepdims=False)
    return graph_of(apply("linear", x, weight(10, 8), weight(10)))


def test_every_pass_is_in_the_pipeline() -> None:
    for module in pkgutil.iter_modules(tilewright.rewrites.__path__):
        importlib.import_module(f"tilewright.rewrites.{module.name}")
    defined = {cls for cls in Pass.__subclasses__() if cls.__module__.startswith("tilewright.rewrites")}
    assert {type(each) for each in (*passes(), *passes(oracle=PredictedCosts(ICE_LAKE)))} == defined


def test_names_are_unique_and_spelt_alike() -> None:
    names = {type(each): each.name for each in passes(oracle=PredictedCosts(ICE_LAKE))}
    assert len(set(names.values())) == len(names)
    for cls, name in names.items():
        assert cls.__module__.rsplit(".", 1)[1] == name.replace("-", "_")


def test_the_result() -> None:
    partition = run_pipeline(network())
    assert [call.task.label for call in partition.calls] == [
        "permute",
        "pad+conv+add+relu",
        "mean",
        "matmul+add",
    ]


def test_the_trace_has_every_pass_with_node_counts() -> None:
    trace = Trace()
    run_pipeline(network(), trace)
    events = {event["name"]: event for event in trace.data()}
    assert events["rewrites"]["notes"]["calls"] == 4
    for each in passes():
        notes = events[f"rewrites.{each.name}"]["notes"]
        assert notes["before"] > 0 and notes["after"] > 0
        assert isinstance(notes["changed"], bool)
    assert events["rewrites.fold-batch-norm"]["notes"]["changed"]
    assert events["rewrites.decompose"]["notes"]["rules"] == {"conv": 1, "linear": 1}
    assert events["rewrites.layout"]["notes"]["orders"]["conv, channels_last"] == 1
    groups = {
        "movement": 1,
        "border + contraction + consumers": 1,
        "reduction": 1,
        "contraction + consumers": 1,
    }
    assert events["rewrites.partition"]["notes"]["groups"] == groups


def test_the_trace_counts_the_rules_that_were_taken() -> None:
    trace = Trace()
    run_pipeline(graph_of(apply("relu", apply("relu", apply("add", IMAGE, scalar(0))))), trace)
    first = next(event for event in trace.data() if event["name"] == "rewrites.simplify")
    assert first["notes"]["rules"] == {"add_zero": 1, "twice_is_once": 1}
    assert set(first["notes"]["rules"]) <= set(rule_names())


def test_an_observer_sees_the_graph_after_every_pass() -> None:
    seen: list[tuple[str, Graph]] = []
    after = rewrite(network(), observe=lambda name, graph: seen.append((name, graph)))
    assert [name for name, _ in seen] == [each.name for each in passes()]
    assert seen[-1][1] is after


def test_numerics_choose_the_rules() -> None:
    graph = graph_of(apply("div", x_input(4), weight(4)))
    assert [n.op for n in rewrite(graph, numerics="fast").nodes() if n.inputs] == ["mul"]
    assert [n.op for n in rewrite(graph, numerics="strict").nodes() if n.inputs] == ["div"]


# -- the runner ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken(Pass):
    name = "broken"

    def run(self, graph: Graph) -> Graph:
        (out,) = graph.outputs
        return Graph(graph.inputs, (replace(out, op="no_such_op"),))


@dataclass(frozen=True)
class Backwards(Pass):
    name = "backwards"

    def run(self, graph: Graph) -> Graph:
        (out,) = graph.outputs
        return Graph(graph.inputs, (apply("linear", out, weight(3, 10)),))


@dataclass(frozen=True)
class Unwritten(Pass):
    name = "unwritten"


@dataclass(frozen=True)
class Failing(Pass):
    name = "failing"

    def run(self, graph: Graph) -> Graph:
        return min([], key=len)


@dataclass(frozen=True)
class Needed(Failing):
    name = "needed"
    reaches = "decomposed"


@dataclass(frozen=True)
class Refusing(Pass):
    name = "refusing"

    def run(self, graph: Graph) -> Graph:
        raise OptionError("something that the user decides")


# Not passes of the pipeline: the test above would miss them otherwise.
for _cls in (Broken, Backwards, Unwritten, Failing, Needed, Refusing):
    assert not _cls.__module__.startswith("tilewright.rewrites")


def test_a_broken_pass_is_named() -> None:
    with pytest.raises(VerificationError, match="after broken"):
        run_passes(network(), [Broken()], Trace.off())


def test_a_pass_may_not_change_the_types_of_outputs() -> None:
    with pytest.raises(InternalError, match="changed the types of the outputs"):
        run_passes(network(), [Backwards()], Trace.off())


def test_a_later_pass_may_not_undo_a_stage() -> None:
    with pytest.raises(VerificationError, match="after backwards"):
        run_passes(network(), [*passes(), Backwards()], Trace.off())


def test_an_illegal_model_is_the_imports_fault() -> None:
    with pytest.raises(VerificationError, match="after import"):
        run_passes(Broken().run(network()), [], Trace.off())


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_STRICT_PASSES", "off")


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("broken", [Failing(), Broken(), Backwards(), Unwritten()])
def test_an_optional_pass_that_fails_is_skipped_with_one_warning(broken: Pass) -> None:
    graph, trace = network(), Trace()
    with pytest.warns(TilewrightWarning, match=f"pass '{broken.name}' failed") as caught:
        after = run_passes(graph, [broken, *passes(), broken], trace)
    assert len(caught) == 1
    assert [n.op for n in after.nodes()] == [n.op for n in rewrite(graph).nodes()]
    skipped = [event for event in trace.events if event.name == f"rewrites.{broken.name}.skipped"]
    assert len(skipped) == 2 and skipped[0].notes["error"]


@pytest.mark.usefixtures("lenient")
def test_a_required_pass_and_a_users_error_still_fail_the_compilation() -> None:
    with pytest.raises(ValueError, match="empty"):
        run_passes(network(), [Needed()], Trace.off())
    with pytest.raises(OptionError, match="the user decides"):
        run_passes(network(), [Refusing()], Trace.off())


def test_tests_are_strict() -> None:
    with pytest.raises(ValueError, match="empty"):
        run_passes(network(), [Failing()], Trace.off())


def test_the_base_does_nothing_by_itself() -> None:
    with pytest.raises(NotImplementedError):
        Unwritten().run(network())
