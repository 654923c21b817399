"""The conformance suite of targets: models run on it, and match the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.driver import compile_imported
from tilewright.frontend import ImportedModel
from tilewright.graph.ir import Graph
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.measure.validation import make_validation
from tilewright.support.trace import Trace
from tilewright.targets.target import Target, computed
from tilewright.testing.problems import elementwise, gemm, softmax_rows


class TargetSuite:
    """Inherit it, and implement `make`. `tolerance`: of the relative L2 error."""

    numerics = "fast"
    tolerance = 1e-5

    def make(self) -> Target:
        raise NotImplementedError

    def tasks(self) -> Sequence[Task]:
        return (gemm(), softmax_rows(), elementwise())

    def test_a_partition_has_a_task_for_every_value(self) -> None:
        for task in self.tasks():
            partition = self.make().partition(as_model(task.graph), self.numerics, Trace.off())
            partition.check()
            assert computed(partition)

    def test_models_run_and_give_what_the_oracle_gives(self) -> None:
        for task in self.tasks():
            model = compile_imported(as_model(task.graph), self.make(), numerics=self.numerics)
            model.plan.validate()
            case = make_validation(task, self.numerics, seed=7).ordinary
            (result,) = model(*case.inputs)
            (expected,) = evaluate(task.graph, list(case.inputs), precise=True)
            error = np.linalg.norm(np.asarray(result, np.float64) - expected) / np.linalg.norm(expected)
            assert error <= self.tolerance, (task.label, error)

    def test_two_compilations_are_the_same_plan(self) -> None:
        first, second = (
            compile_imported(as_model(self.tasks()[0].graph), self.make(), numerics=self.numerics)
            for _ in range(2)
        )
        assert first.plan.steps == second.plan.steps


def as_model(graph: Graph) -> ImportedModel:
    """A graph as a frontend imports it: its inputs by position, a tuple of its outputs."""

    def leaves(count: int) -> dict[str, Any]:
        return {"kind": "tuple", "items": [{"kind": "leaf", "index": number} for number in range(count)]}

    names = tuple(f"x{number}" for number in range(len(graph.inputs)))
    arguments = {"kind": "tuple", "items": [leaves(len(names)), {"kind": "dict", "keys": [], "items": []}]}
    return ImportedModel(graph, names, arguments, leaves(len(graph.outputs)), names)
