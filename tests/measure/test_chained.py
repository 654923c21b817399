"""Validation of tasks in which a contraction reads another: what rounding the result between them may do."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.programs import validation
from tests.space.chains import After, Case, random_case
from tilewright.dtypes import DType
from tilewright.graph.chain import Chain, chain_of
from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.measure.chained import chain_errors, overflown_results
from tilewright.measure.validation import WrongResult


def between(task: Task) -> tuple[Node, ...]:
    chain = chain_of(task)
    assert isinstance(chain, Chain)
    return chain.between


@pytest.mark.parametrize("seed", range(12))
def test_rounding_the_results_between_contractions_is_allowed(seed: int) -> None:
    """On random chains of either type, on every kind of inputs."""
    task = random_case(Random(seed), widest=40).task()
    for case in validation(task, "fast"):
        (got,) = evaluate(task.graph, case.inputs, precise=True, rounded=between(task))
        with np.errstate(all="ignore"):
            case.error(got.reshape(-1).astype(task.output.dtype.numpy))


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.short)
def test_a_result_without_its_activation_is_not(dtype: DType) -> None:
    task = Case(40, (24, 32, 16), (After(), After(activation="none")), dtype=dtype).task()

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        return apply("abs", *operands) if node.op == "relu" else None

    wrong = rebuild(task.graph, rule)
    (case,) = [case for case in validation(task, "fast") if case.name == "ordinary"]
    (got,) = evaluate(wrong, case.inputs, precise=True)
    with pytest.raises(WrongResult):
        case.error(got.reshape(-1).astype(dtype.numpy))


def test_other_tasks_have_no_such_errors() -> None:
    task = Case(8, (16, 8)).task()
    inputs = [np.ones(node.shape, node.dtype.numpy) for node in task.graph.inputs]
    assert chain_errors(task.graph, inputs, "fast") == 0.0
    chained = Case(8, (16, 8, 4)).task()
    inputs = [np.ones(node.shape, node.dtype.numpy) for node in chained.graph.inputs]
    assert np.all(np.asarray(chain_errors(chained.graph, inputs, "fast")) > 0)
    assert chain_errors(chained.graph, inputs, "strict") == 0.0, "strict numerics round as the operators say"


def test_an_overflow_behind_an_activation_is_seen() -> None:
    """relu(-inf) is 0: the result is finite, and depends on a number that float16 cannot hold."""
    task = Case(2, (1, 2, 1), (After(bias=False, activation="none"), After(bias=False))).task()
    x, first, second = (np.ones(node.shape, np.float16) for node in task.graph.inputs)
    x[0], x[1] = 60000, 1
    first[:], second[:] = [[2], [1]], [[-1, 1]]
    (node,) = between(task)
    found = overflown_results(task.graph, {node}, [x, first, second])
    assert found.tolist() == [True, False]
    (exact,) = evaluate(Graph(task.graph.inputs, (node,)), [x, first, second])
    assert np.isfinite(exact).all()
