from __future__ import annotations

import pytest

from tests.rewrites.helpers import graph_of, scalar, x_input
from tilewright.dtypes import DType
from tilewright.errors import InternalError
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import apply
from tilewright.graph.task import Partition, Task, TaskCall


def body(name: str = "") -> Graph:
    a, b = x_input(4, 8), x_input(8, 3, index=1)
    product = apply("matmul", a, b, name=name)
    return graph_of(apply("relu", apply("mul", product, scalar(2))))


def test_counts() -> None:
    task = Task(body())
    assert task.label == "matmul+mul+relu"
    assert task.flops == 2 * 4 * 8 * 3 + 2 * 12
    assert task.bytes == 4 * (32 + 24 + 12)
    assert "matmul+mul+relu" in repr(task)


def test_the_key_is_of_the_computation_alone() -> None:
    assert Task(body("one")).key == Task(body("two")).key
    assert Task(body("one")) == Task(body("two"))
    assert len({Task(body("one")), Task(body("two"))}) == 1
    # A change here orphans every stored record: it must be deliberate.
    assert Task(body()).key == "be54b0004562d11335478c2f748dd435"


def test_the_key_tells_shapes_types_attributes_and_numbers_apart() -> None:
    x = x_input(4, 8)
    nodes = [
        apply("relu", x),
        apply("relu", x_input(8, 4)),
        apply("sum", x, axes=(0,), keepdims=False),
        apply("sum", x, axes=(1,), keepdims=False),
        apply("mul", x, scalar(2)),
        apply("mul", x, scalar(3)),
        apply("mul", scalar(2), x),
        apply("add", x, x),
        apply("add", x, x_input(4, 8, index=1)),
    ]
    assert len({Task(graph_of(node)).key for node in nodes}) == len(nodes)


def test_long_labels_are_shortened() -> None:
    node: Node = x_input(2)
    for _ in range(9):
        node = apply("neg", apply("abs", node))
    assert Task(graph_of(node)).label == "abs+neg+abs+neg+abs+neg+12 more"


def test_looked_up_inputs_count_what_is_read() -> None:
    table, ids = x_input(1000, 16), x_input(4, index=1, dtype=DType.I64)
    assert Task(graph_of(apply("take", table, ids, axis=0))).bytes == 2 * 4 * 16 * 4 + 4 * 8
    part = apply("slice", table, starts=(0, 0), stops=(1, 16), steps=(1, 1))
    assert Task(graph_of(part)).bytes == 2 * 64
    both = apply("add", table, part)
    assert Task(graph_of(both)).bytes == 2 * 64000


def test_one_output() -> None:
    x = x_input(2)
    with pytest.raises(InternalError, match="one output"):
        Task(Graph((x,), (apply("relu", x), apply("neg", x))))


# -- partitions ---------------------------------------------------------------------------------------------------


def unary(op: str, *shape: int) -> Task:
    return Task(graph_of(apply(op, x_input(*shape))))


X = x_input(2, 3)
R = apply("relu", X)
V = apply("reshape", R, shape=(6,))
N = apply("neg", V)
CALLS = (TaskCall(unary("relu", 2, 3), (X,), R, "r"), TaskCall(unary("neg", 6), (V,), N, "n"))


def test_a_sound_partition() -> None:
    partition = Partition(graph_of(N), CALLS, {V: R})
    partition.check()
    assert partition.buffer_of(V) is R and partition.buffer_of(R) is R
    assert partition.flops == 12
    assert repr(CALLS[0]) == "<call r: relu>"


def test_tasks_are_counted() -> None:
    second = apply("relu", R)
    calls = (CALLS[0], TaskCall(unary("relu", 2, 3), (R,), second, "s"))
    partition = Partition(graph_of(second), calls)
    partition.check()
    ((task, count),) = partition.tasks().values()
    assert count == 2 and task is calls[0].task


@pytest.mark.parametrize(
    "graph,calls,views,message",
    [
        (graph_of(N), CALLS[::-1], {V: R}, "before it is computed"),
        (graph_of(N), CALLS, {}, "before it is computed"),
        (graph_of(N), CALLS[:1], {V: R}, "not written by a call"),
        (graph_of(V), CALLS[:1], {V: R}, "not written by a call"),
        (graph_of(N), (CALLS[0], CALLS[0]), {V: R}, "another writer"),
        (graph_of(N), (TaskCall(unary("relu", 6), (X,), R, "r"),), {}, "for a task that takes"),
        (graph_of(N), (TaskCall(unary("relu", 2, 3), (X,), x_input(2), "r"),), {}, "writes f32"),
        (graph_of(N), CALLS, {V: X, X: R}, "cannot be a view"),
        (graph_of(N), CALLS, {V: x_input(5)}, "cannot be a view"),
        (graph_of(R, R), CALLS[:1], {}, "one node"),
    ],
)
def test_mistakes(graph: Graph, calls: tuple[TaskCall, ...], views: dict[Node, Node], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        Partition(graph, calls, views).check()
