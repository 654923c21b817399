"""A matrix product of few results and a long sum, where no clusters add up: the sum is cut into parts.

    a[m, k] @ b[k, n]  ->  partial[p, m, n] = a[m, p, k'] @ b[p, k', n]     (a batch of products, in float32)
                           sum over p of partial, and all that is behind    (a second kernel)

The parts are added in their order: the result has the same bits every time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.space.space import Config
from tilewright.space.templates.cuda.matmul import NAME as PRODUCTS
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor.pieces import Way, cut

NAME = "parts"
PARTS = (2, 4, 8)
_SHORT = (DType.F16, DType.BF16)
_TILE = 128 * 128  # results of a block; with as many blocks as multiprocessors there is nothing to gain
_SHORTEST = 256  # of a part


def may_be_cut(task: Task, machine: GpuMachine) -> bool:
    """Whether the task is such a product, on a card that cannot add up otherwise."""
    anchor = _anchor(task.graph)
    if anchor is None or machine.clusters:
        return False
    return anchor.type.size <= _TILE * machine.sms and anchor.inputs[0].shape[-1] >= 2 * _SHORTEST


def parts_of(task: Task) -> list[int]:
    anchor = _anchor(task.graph)
    assert anchor is not None
    k = anchor.inputs[0].shape[-1]
    return [parts for parts in PARTS if k % (8 * parts) == 0 and k >= parts * _SHORTEST]


def way_in_parts(task: Task, parts: int, inner: Config | None) -> Way:
    """`inner`: the template's config for the batch of products, which is the first piece."""
    anchor = _anchor(task.graph)
    assert anchor is not None
    partial, total = _cut(anchor, parts)
    made: dict[Node, Node] = {anchor: total}
    for node in task.graph.nodes():
        if node not in made:
            made[node] = replace(node, inputs=tuple(made[x] for x in node.inputs)) if node.inputs else node
    graph = Graph(task.graph.inputs, (made[task.output],))
    constants: Collection[Node] = [graph.inputs[number] for number in task.constants]
    computed = [node for node in graph.nodes() if not (node.is_input or node.is_constant)]
    before = set(Graph(graph.inputs, (partial,)).nodes())
    rest = [node for node in computed if node not in before]
    products, ending = cut(
        graph, constants, [([n for n in computed if n in before], partial), (rest, graph.outputs[0])]
    )
    values = {"count": parts, **(dict(inner.values) if inner is not None else {})}
    return Way(Config.of(NAME, values), graph.inputs, (replace(products, config=inner), ending))


def way_of_config(task: Task, machine: GpuMachine, numerics: str, config: Config) -> Way | None:
    """The way that `way_in_parts` gave this config; None where there is no such way."""
    values = dict(config.values)
    parts = values.pop("count", 0)
    if not may_be_cut(task, machine) or parts not in parts_of(task):
        return None
    inner = Config.of(PRODUCTS, values)
    found = way_in_parts(task, int(parts), inner)
    applied = TensorCores().apply(GpuWork(found.pieces[0].task, machine, numerics))
    return found if applied is not None and inner in applied.space else None


def _anchor(graph: Graph) -> Node | None:
    """The one contraction, where it is a product of two matrices that the task is given."""
    found = [n for n in graph.nodes() if n.op in ("matmul", "linear", "conv", "attention")]
    if len(found) != 1 or found[0].op not in ("matmul", "linear") or len(found[0].inputs) != 2:
        return None
    (anchor,) = found
    data, weight = anchor.inputs
    plain = data.is_input and weight.is_input and weight.type.rank == 2 and anchor.dtype in _SHORT
    return anchor if plain and data.dtype is weight.dtype is anchor.dtype else None


def _cut(anchor: Node, parts: int) -> tuple[Node, Node]:
    """(the partial products, their sum as the anchor's result)."""
    data, weight = (apply("cast", x, dtype=DType.F32) for x in anchor.inputs)
    k = data.shape[-1]
    rows = data.type.size // k
    left = apply("permute", apply("reshape", data, shape=(rows, parts, k // parts)), axes=(1, 0, 2))
    if anchor.op == "linear":
        n = weight.shape[0]
        right = apply("permute", apply("reshape", weight, shape=(n, parts, k // parts)), axes=(1, 2, 0))
    else:
        right = apply("reshape", weight, shape=(parts, k // parts, weight.shape[1]))
    partial = apply("matmul", left, right)
    total = apply("cast", apply("sum", partial, axes=(0,), keepdims=False), dtype=anchor.dtype)
    return partial, apply("reshape", total, shape=anchor.shape)
