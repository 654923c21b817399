"""The prologue of a GEMM or convolution as a separate kernel. Fused, it is recomputed for each column of tiles.

product(f(x), w)  ->  y = f(x)             (a kernel)
                      product(y, w)        (the tensor-core template, with the epilogue)
"""

from __future__ import annotations

from tilewright.graph.ir import Graph, Node
from tilewright.space.decompositions.decomposed import CutVariant, Decomposed
from tilewright.space.implementation import cut
from tilewright.space.template import Applied, GpuWork
from tilewright.space.templates.cuda.matmul import TensorCores

NAME = "separate-prologue"


class SeparatePrologue:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        task = work.task
        before = prologue(task.graph)
        if not before:
            return None
        graph = task.graph
        constants = [graph.inputs[number] for number in task.constants]
        computed = [node for node in graph.nodes() if not (node.is_input or node.is_constant)]
        rest = [node for node in computed if node not in before]
        first, product = cut(graph, constants, [(before, before[-1]), (rest, graph.outputs[0])])
        if GpuWork(first.task, work.machine, work.numerics).formula is None:
            return None
        inner = TensorCores().apply(GpuWork(product.task, work.machine, work.numerics))
        return None if inner is None else Decomposed(NAME, work, {0: CutVariant((first, product), 1, inner)})


def prologue(graph: Graph) -> list[Node]:
    """The nodes that compute the first operand of the only contraction; zero padding belongs to the contraction."""
    anchors = [node for node in graph.nodes() if node.op in ("matmul", "linear", "conv", "attention")]
    if len(anchors) != 1 or anchors[0].op == "attention":
        return []
    data = anchors[0].inputs[0]
    if data.op == "pad":
        data = data.inputs[0]
    return [node for node in Graph(graph.inputs, (data,)).nodes() if not (node.is_input or node.is_constant)]
