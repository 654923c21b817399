"""split-reduction: split a long K of a matmul with few results, or a long reduction to few results, into parallel
parts.

    y = x @ w                    x as [parts, m, k / parts], w as [parts, k / parts, n]
                        ->       y = sum(x @ w, over the parts)

    y = mean(x, over k)          x as [..., parts, k / parts, ...]
                        ->       y = mean(mean(x, over k / parts), over the parts)

A kernel distributes its results over the cores, and few results leave most cores idle, or give each short runs of
every row. All cores compute the parts. The number of parts depends on the machine, not on a call's number of threads,
so results stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, input_node, rebuild
from tilewright.graph.op import apply
from tilewright.graph.provenance import UNKNOWN, Provenance
from tilewright.graph.task import Task
from tilewright.rewrites.base import Pass
from tilewright.rewrites.oracle import CostOracle

_MAX_RESULTS = 1 << 14  # with more there is enough work for all cores
_MIN_TERMS = 512  # minimum of a part: shorter parts end before all cores have started
_PARTS = (2, 4, 8, 16, 32, 64)
_GAIN = 0.85  # maximum time of the parts and their sum, relative to the whole product
_MIN_REDUCED = 1 << 18  # minimum elements: with fewer, another kernel is not worth its overhead
_REDUCTIONS = frozenset(
    ["sum", "mean", "amax", "amin"]
)  # reductions whose partial results are reduced by the same operator


@dataclass(frozen=True)
class SplitReduction(Pass):
    oracle: CostOracle
    name = "split-reduction"

    def run(self, graph: Graph) -> Graph:
        chosen = {node: parts for node in graph.nodes() if (parts := self._parts(node)) > 1}
        if not chosen:
            return graph

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            return _split(node, operands, chosen[node]) if node in chosen else None

        return rebuild(graph, rule)

    def _parts(self, node: Node) -> int:
        """The number of parts; 1 if it should stay whole."""
        terms = _terms(node)
        possible = [parts for parts in _PARTS if terms % parts == 0 and terms // parts >= _MIN_TERMS]
        if not possible:
            return 1
        # Shorter sums are more accurate, so parts of a reduction need not be much faster.
        limit = (_GAIN if node.op == "matmul" else 1.0) * self.oracle.seconds(_alone(node))
        seconds, parts = min(
            (sum(map(self.oracle.seconds, _tasks(node, parts))), parts) for parts in possible
        )
        return parts if seconds < limit else 1


def _terms(node: Node) -> int:
    """The number of terms of each result; 0 if it is not a sum that can be split, or there are many results."""
    if node.type.size > _MAX_RESULTS:
        return 0
    if node.dtype not in (
        DType.F32,
        DType.F64,
    ):  # partial sums would be rounded to 16 bits, or be integers
        return 0
    if node.op == "matmul":
        left, right = node.inputs
        return left.shape[1] if left.type.rank == right.type.rank == 2 else 0
    if node.op in _REDUCTIONS and node.inputs[0].type.size >= _MIN_REDUCED:
        axes = sorted(node.attrs["axes"])
        neighbours = axes and axes == list(range(axes[0], axes[-1] + 1))
        return _around(node)[1] if neighbours else 0
    return 0


def _alone(node: Node) -> Task:
    operands = tuple(input_node(number, operand.type) for number, operand in enumerate(node.inputs))
    return Task(Graph(operands, (apply(node.op, *operands, **node.attrs),)), _constants(node))


def _constants(node: Node) -> frozenset[int]:
    return frozenset(number for number, operand in enumerate(node.inputs) if operand.is_constant)


def _tasks(node: Node, parts: int) -> Iterator[Task]:
    """The tasks of the split node: the transposed data of a product, the parts, and their sum."""
    if node.op != "matmul":
        data = input_node(0, _parts_of_terms(node, input_node(0, node.inputs[0].type), parts).type)
        reduced = _reduced(node, data, axis=2)
        yield Task(Graph((data,), (reduced,)))
        partial = input_node(0, reduced.type)
        yield Task(Graph((partial,), (_reduced(node, partial, axis=1),)))
        return
    left, right = (input_node(number, operand.type) for number, operand in enumerate(node.inputs))
    transposed = _parts_of_data(left, parts)
    if not node.inputs[0].is_constant and left.shape[0] > 1:
        yield Task(Graph((left,), (transposed,)))
    data, weight = input_node(0, transposed.type), input_node(1, _parts_of_weight(right, parts).type)
    product = apply("matmul", data, weight, source=node.source)
    yield Task(Graph((data, weight), (product,)), _constants(node))
    partial = input_node(0, product.type)
    yield Task(Graph((partial,), (_sum(partial),)))


def _split(node: Node, operands: tuple[Node, ...], parts: int) -> Node:
    if node.op != "matmul":
        partial = _reduced(node, _parts_of_terms(node, operands[0], parts), axis=2)
        whole = _reduced(node, partial, axis=1)
        if whole.shape == node.shape:
            return whole
        return apply("reshape", whole, shape=node.shape, name=node.name, source=node.source)
    left, right = operands
    product = apply(
        "matmul",
        _parts_of_data(left, parts),
        _parts_of_weight(right, parts),
        name=node.name,
        source=node.source,
    )
    return _sum(product, name=node.name, source=node.source)


# -- reductions -------------------------------------------------------------------------------------------------------


def _around(node: Node) -> tuple[int, int, int]:
    """Elements of the axes before the reduced ones, of the reduced ones, and of those after them."""
    shape, axes = node.inputs[0].shape, node.attrs["axes"]
    first, last = min(axes), max(axes) + 1
    return math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:])


def _parts_of_terms(node: Node, operand: Node, parts: int) -> Node:
    before, terms, after = _around(node)
    return apply("reshape", operand, shape=(before, parts, terms // parts, after))


def _reduced(node: Node, operand: Node, axis: int) -> Node:
    return apply(node.op, operand, axes=(axis,), keepdims=False, name=node.name, source=node.source)


# -- products ---------------------------------------------------------------------------------------------------------


def _parts_of_data(left: Node, parts: int) -> Node:
    rows, terms = left.shape
    if rows == 1:
        return apply("reshape", left, shape=(parts, 1, terms // parts))
    split = apply("reshape", left, shape=(rows, parts, terms // parts))
    return apply("permute", split, axes=(1, 0, 2))


def _parts_of_weight(right: Node, parts: int) -> Node:
    terms, columns = right.shape
    return apply("reshape", right, shape=(parts, terms // parts, columns))


def _sum(product: Node, name: str = "", source: Provenance = UNKNOWN) -> Node:
    return apply("sum", product, axes=(0,), keepdims=False, name=name, source=source)
