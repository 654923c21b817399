"""Lower a task to tensor expressions, using each node's lowering in the op table."""

from __future__ import annotations

from tilewright import te
from tilewright.errors import InternalError
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import application, op_of


def lower_graph(graph: Graph) -> tuple[te.Tensor, list[te.Tensor]]:
    """(the output's expression, the input tensors in order) for a graph with one output."""
    tensors: dict[Node, te.Tensor] = {}
    output = lower_nodes(graph, tensors)
    return output, [tensors[node] for node in graph.inputs]


def lower_nodes(graph: Graph, tensors: dict[Node, te.Tensor]) -> te.Tensor:
    """The output's expression of a graph with one output. `tensors`: what some nodes are already; gets the others."""
    for node in graph.nodes():
        if node not in tensors:
            tensors[node] = _lower_node(node, [tensors[operand] for operand in node.inputs])
    (output,) = graph.outputs
    return tensors[output]


def _lower_node(node: Node, operands: list[te.Tensor]) -> te.Tensor:
    if node.is_input:
        return te.Tensor(f"input{node.attrs['index']}", node.shape, node.dtype)
    if node.is_constant:
        return _lower_constant(node)
    lower = op_of(node.op).lower
    if lower is None:
        raise InternalError(
            f"{node.op} has no lowering: a rewrite should have replaced it ({node.source or node.name})"
        )
    return lower(application(node), operands)


def _lower_constant(node: Node) -> te.Tensor:
    """A single number becomes part of the program; larger constants are inputs of their task."""
    assert node.data is not None
    if node.data.size != 1:
        raise InternalError(
            f"constant {node.name} of shape {node.shape} inside a task: it should be an input"
        )
    value = te.const(node.data.reshape(())[()].item(), node.dtype)
    return te.compute(node.name or "constant", node.shape, node.dtype, lambda *axes: value)
