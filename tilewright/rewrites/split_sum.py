"""split-sum: a matrix product of few results and long sums, as several products of shorter ones.

    y = x @ w                    x as [parts, m, k / parts], w as [parts, k / parts, n]
                        ->       y = sum(x @ w, over the parts)

A kernel shares its results among the cores, and few results leave most of them idle. The parts are computed by all of
them. In how many is a matter of the machine, not of how many threads a call happens to have: results stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, input_node, rebuild
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.rewrites.base import Pass
from tilewright.rewrites.oracle import CostOracle

_MOST_RESULTS = 1 << 14  # with more there is enough for all cores
_LEAST_TERMS = 512  # of a part: below, a product is over before all cores have begun
_PARTS = (2, 4, 8, 16, 32, 64)
_GAIN = 0.85  # of the whole product's time, that the parts and their sum may take together


@dataclass(frozen=True)
class SplitSum(Pass):
    oracle: CostOracle
    name = "split-sum"

    def run(self, graph: Graph) -> Graph:
        chosen = {node: parts for node in graph.nodes() if (parts := self._parts(node)) > 1}
        if not chosen:
            return graph

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            return _split(node, operands, chosen[node]) if node in chosen else None

        return rebuild(graph, rule)

    def _parts(self, node: Node) -> int:
        """1 where it is best left whole."""
        if node.op != "matmul" or node.type.size > _MOST_RESULTS:
            return 1
        if node.dtype not in (
            DType.F32,
            DType.F64,
        ):  # partial sums would be rounded to 16 bits, or be whole numbers
            return 1
        left, right = node.inputs
        if left.type.rank != 2 or right.type.rank != 2:
            return 1
        possible = [
            parts for parts in _PARTS if left.shape[1] % parts == 0 and left.shape[1] // parts >= _LEAST_TERMS
        ]
        if not possible:
            return 1
        limit = _GAIN * self.oracle.seconds(_alone(node))
        seconds, parts = min(
            (sum(map(self.oracle.seconds, _tasks(node, parts))), parts) for parts in possible
        )
        return parts if seconds < limit else 1


def _alone(node: Node) -> Task:
    operands = tuple(input_node(number, operand.type) for number, operand in enumerate(node.inputs))
    return Task(Graph(operands, (apply("matmul", *operands),)), _constants(node))


def _constants(node: Node) -> frozenset[int]:
    return frozenset(number for number, operand in enumerate(node.inputs) if operand.is_constant)


def _tasks(node: Node, parts: int) -> Iterator[Task]:
    """What the split product comes to: the data turned, the parts, their sum."""
    left, right = (input_node(number, operand.type) for number, operand in enumerate(node.inputs))
    turned = _parts_of_data(left, parts)
    if not node.inputs[0].is_constant and left.shape[0] > 1:
        yield Task(Graph((left,), (turned,)))
    data, weight = input_node(0, turned.type), input_node(1, _parts_of_weight(right, parts).type)
    product = apply("matmul", data, weight)
    yield Task(Graph((data, weight), (product,)), _constants(node))
    partial = input_node(0, product.type)
    yield Task(Graph((partial,), (_sum(partial),)))


def _split(node: Node, operands: tuple[Node, ...], parts: int) -> Node:
    left, right = operands
    product = apply("matmul", _parts_of_data(left, parts), _parts_of_weight(right, parts), name=node.name)
    return _sum(product, name=node.name, source=node.source)


def _parts_of_data(left: Node, parts: int) -> Node:
    rows, terms = left.shape
    if rows == 1:
        return apply("reshape", left, shape=(parts, 1, terms // parts))
    apart = apply("reshape", left, shape=(rows, parts, terms // parts))
    return apply("permute", apart, axes=(1, 0, 2))


def _parts_of_weight(right: Node, parts: int) -> Node:
    terms, columns = right.shape
    return apply("reshape", right, shape=(parts, terms // parts, columns))


def _sum(product: Node, name: str = "", source: str = "") -> Node:
    return apply("sum", product, axes=(0,), keepdims=False, name=name, source=source)
