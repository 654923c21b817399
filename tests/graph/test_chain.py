"""Which tasks are chains of contractions, and how they are split into stages."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from tests.rewrites.helpers import array
from tests.space.chains import POINTWISE, After, Case, NormCase, random_case, random_norms
from tests.space.checked import Inputs
from tilewright.graph.chain import Chain, Refused, chain_of
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph, print_graph
from tilewright.space.chain import subtasks_of


def stages(task: Task) -> list[list[str]]:
    found = chain_of(task)
    assert isinstance(found, Chain), found
    return [[node.op for node in stage.members] for stage in found.stages]


def test_a_stage_has_the_contraction_and_what_is_around_it() -> None:
    after = (After(), After(activation="gelu", residual=True))
    assert stages(Case(8, (16, 32, 8), after).task()) == [
        ["linear", "add", "relu"],
        ["linear", "add", "add", "gelu"],
    ]
    conv = Case(0, (4, 8, 6), (After(bias=False),) * 2, image=(5, 5))
    assert stages(conv.task()) == [["pad", "conv", "relu"], ["conv", "relu"]]


def test_movement_between_two_stages_belongs_to_the_second() -> None:
    x = Inputs()
    first = apply("relu", apply("matmul", x(2, 3, 8), x(8, 4)))
    second = apply("matmul", apply("reshape", first, shape=(6, 4)), x(4, 5))
    assert stages(x.task(second)) == [["matmul", "relu"], ["reshape", "matmul"]]


def test_what_is_computed_from_inputs_alone_belongs_to_its_reader() -> None:
    x = Inputs()
    first = apply("matmul", apply("tanh", x(6, 8)), x(8, 4))
    second = apply("add", apply("matmul", first, x(4, 5)), apply("exp", x(6, 5)))
    assert stages(x.task(second)) == [["tanh", "matmul"], ["matmul", "exp", "add"]]


def test_a_norm_is_a_stage() -> None:
    both = NormCase(6, 8, 4, "layer_norm", "softmax", After(residual=True), more=True)
    assert stages(both.task()) == [["add", "layer_norm"], ["linear", "add", "relu", "add"], ["softmax"]]


@pytest.mark.parametrize("seed", range(30))
def test_the_stages_one_after_the_other_compute_the_task(seed: int) -> None:
    """On random chains; the text form of the task gives the same chain and the same key."""
    make = random_norms if seed % 3 == 0 else random_case
    task = make(Random(seed), widest=24).task()
    chain = chain_of(task)
    assert isinstance(chain, Chain)
    again = Task(parse_graph(print_graph(task.graph)), task.constants)
    assert again.key == task.key and stages(again) == stages(task)
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    known: dict[Node, np.ndarray] = dict(zip(task.graph.inputs, arrays, strict=True))
    for sub in subtasks_of(chain):
        (known[sub.result],) = evaluate(sub.task.graph, [known[node] for node in sub.operands], precise=True)
    (reference,) = evaluate(task.graph, arrays, precise=True)
    np.testing.assert_array_equal(known[task.output], reference)


def of_one_contraction() -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(4, 4), x(4, 4)))


def of_two_that_are_added() -> Task:
    x = Inputs()
    y = x(4, 4)
    return x.task(apply("add", apply("matmul", y, x(4, 4)), apply("matmul", y, x(4, 4))))


def with_a_computed_weight() -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(4, 4), apply("matmul", x(4, 4), x(4, 4))))


def with_a_skip_connection() -> Task:
    x = Inputs()
    first = apply("relu", apply("matmul", x(4, 4), x(4, 4)))
    return x.task(apply("add", first, apply("matmul", first, x(4, 4))))


def with_a_skip_past_the_activation() -> Task:
    x = Inputs()
    first = apply("matmul", x(4, 4), x(4, 4))
    return x.task(apply("add", first, apply("matmul", apply("relu", first), x(4, 4))))


def with_a_sum() -> Task:
    x = Inputs()
    first = apply("sum", apply("matmul", x(4, 4), x(4, 4)), axes=(1,), keepdims=True)
    return x.task(apply("matmul", first, x(1, 4)))


def of_norms_alone() -> Task:
    x = Inputs()
    return x.task(apply("softmax", apply("softmax", x(4, 4), axis=1), axis=1))


def with_a_skip_around_a_norm() -> Task:
    x = Inputs()
    first = apply("softmax", x(4, 4), axis=1)
    return x.task(apply("add", first, apply("matmul", first, x(4, 4))))


def of_two_that_read_no_norm() -> Task:
    x = Inputs()
    first = apply("softmax", x(4, 4), axis=1)
    return x.task(apply("add", apply("matmul", x(4, 4), x(4, 4)), first))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of_one_contraction, "fewer than two contractions, and none with a norm"),
        (of_norms_alone, "fewer than two contractions, and none with a norm"),
        (with_a_skip_around_a_norm, "the result of softmax 1 is read twice"),
        (of_two_that_read_no_norm, "does not read the"),
        (of_two_that_are_added, "matmul 2 does not read the contraction before it"),
        (with_a_computed_weight, "the weight of matmul 2 is computed in the chain"),
        (with_a_skip_connection, "the result of matmul 1 is read twice"),
        (with_a_skip_past_the_activation, "the result of matmul 1 is read twice"),
        (with_a_sum, "sum is not a GEMM, a convolution, a norm of rows or elementwise"),
    ],
)
def test_other_tasks_are_refused_with_the_reason(make: Callable[[], Task], reason: str) -> None:
    found = chain_of(make())
    assert isinstance(found, Refused) and reason in found.reason


def test_a_window_after_the_first_is_still_a_chain_of_the_graph() -> None:
    """Whether a kernel can compute it is up to templates: the padding belongs to the second stage."""
    x = Inputs()
    first = apply("conv", x(1, 5, 5, 4), x(1, 1, 4, 4), **POINTWISE)
    edge = (0, 1, 1, 0)
    padded = apply("pad", first, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    assert stages(x.task(apply("conv", padded, x(3, 3, 4, 4), **POINTWISE))) == [["conv"], ["pad", "conv"]]
