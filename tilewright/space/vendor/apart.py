"""What stands before a product, as a kernel of its own: in one with the product it is computed again for each column of
its tiles.

    product(f(x), w)  ->  y = f(x)             (a kernel)
                          product(y, w)        (a template's, with all that is behind)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tilewright.graph.ir import Graph, Node
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.space.space import Config
from tilewright.space.templates.cuda.matmul import NAME as PRODUCTS
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor.pieces import Way, cut

NAME = "apart"


def is_before(task: Task) -> bool:
    """Whether something stands there."""
    return bool(_before(task.graph))


def way_apart(task: Task, inner: Config | None) -> Way:
    """`inner`: the template's config for the product, which is the second piece."""
    graph, before = task.graph, _before(task.graph)
    constants: Collection[Node] = [graph.inputs[number] for number in task.constants]
    computed = [node for node in graph.nodes() if not (node.is_input or node.is_constant)]
    rest = [node for node in computed if node not in before]
    first, product = cut(graph, constants, [(before, before[-1]), (rest, graph.outputs[0])])
    values = dict(inner.values) if inner is not None else {}
    return Way(Config.of(NAME, values), graph.inputs, (first, replace(product, config=inner)))


def way_of_config(task: Task, machine: GpuMachine, numerics: str, config: Config) -> Way | None:
    """The way that `way_apart` gave this config; None where there is no such way."""
    if not is_before(task):
        return None
    inner = Config.of(PRODUCTS, dict(config.values))
    found = way_apart(task, inner)
    applied = TensorCores().apply(GpuWork(found.pieces[1].task, machine, numerics))
    return found if applied is not None and inner in applied.space else None


def _before(graph: Graph) -> list[Node]:
    """What computes the first operand of the one contraction; a border belongs to the contraction."""
    anchors = [node for node in graph.nodes() if node.op in ("matmul", "linear", "conv", "attention")]
    if len(anchors) != 1 or anchors[0].op == "attention":
        return []
    data = anchors[0].inputs[0]
    if data.op == "pad":
        data = data.inputs[0]
    return [node for node in Graph(graph.inputs, (data,)).nodes() if not (node.is_input or node.is_constant)]
