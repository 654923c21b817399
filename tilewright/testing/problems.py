"""Small tasks for tests, and a builder for your own."""

from __future__ import annotations

from functools import cache

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task


class Inputs:
    """Makes the inputs of a task, and remembers which are constant.

    x = Inputs()
    task = x.task(apply("matmul", x(8, 16), x(16, 4, constant=True)))
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: set[int] = set()

    def __call__(self, *shape: int, constant: bool = False, dtype: DType = DType.F32) -> Node:
        if constant:
            self.constants.add(len(self.nodes))
        node = input_node(len(self.nodes), TensorType(shape, dtype), f"x{len(self.nodes)}")
        self.nodes.append(node)
        return node

    def task(self, output: Node) -> Task:
        return Task(Graph(tuple(self.nodes), (output,)), frozenset(self.constants))


@cache
def gemm(m: int = 33, n: int = 48, k: int = 40, dtype: DType = DType.F32) -> Task:
    """relu(a @ b + bias), b and the bias constant."""
    x = Inputs()
    product = apply("matmul", x(m, k, dtype=dtype), x(k, n, constant=True, dtype=dtype))
    return x.task(apply("relu", apply("add", product, x(n, constant=True, dtype=dtype))))


@cache
def softmax_rows(rows: int = 17, columns: int = 45, dtype: DType = DType.F32) -> Task:
    x = Inputs()
    return x.task(apply("softmax", x(rows, columns, dtype=dtype), axis=1))


@cache
def elementwise(rows: int = 19, columns: int = 30, dtype: DType = DType.F32) -> Task:
    x = Inputs()
    return x.task(apply("tanh", apply("mul", x(rows, columns, dtype=dtype), x(columns, dtype=dtype))))
