"""The oracle: execute a graph in NumPy, node by node, by the definitions in the op table.

Floats are computed in f64 whatever their type. With `precise` they stay in f64 throughout, and kernel errors are
measured against that result. Otherwise each node's result is rounded to its type, as in a framework that runs one
operator at a time. Integers and bools are exact in their own type.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from tilewright.errors import InternalError
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import flops_of, op_of

_COPIES = 3  # approximate float64 copies of operands and result that an oracle holds


def evaluate(
    graph: Graph, inputs: Sequence[np.ndarray], *, precise: bool = True, rounded: Collection[Node] = ()
) -> list[np.ndarray]:
    """The outputs of `graph` for arrays that fit its inputs. Floats are returned as f64 if `precise`. `rounded`:
    nodes whose results are rounded to their type even then."""
    if len(inputs) != len(graph.inputs):
        raise InternalError(f"the graph has {len(graph.inputs)} inputs, {len(inputs)} were given")
    values: dict[Node, np.ndarray] = {}
    for node, array in zip(graph.inputs, inputs, strict=True):
        _check_shape(node, array)
        values[node] = _held(array, node, precise)

    nodes = graph.nodes()
    waiting = Counter(operand for node in nodes for operand in set(node.inputs))
    waiting.update(graph.outputs)  # never reach 0, so they are kept
    for node in nodes:
        if node.is_input or node.is_constant:
            continue  # a constant is widened at each use, and not kept
        operands = [_held(_data(o), o, precise) if o.is_constant else values[o] for o in node.inputs]
        values[node] = evaluate_node(node, operands, precise and node not in rounded)
        for operand in set(node.inputs):
            waiting[operand] -= 1
            if not waiting[operand]:
                values.pop(operand, None)
    return [_held(_data(o), o, precise) if o.is_constant else values[o] for o in graph.outputs]


def evaluate_node(node: Node, arrays: Sequence[np.ndarray], precise: bool = True) -> np.ndarray:
    """The value of one node, given those of its operands."""
    wide = [
        array.astype(np.float64, copy=False) if operand.dtype.is_float else array
        for operand, array in zip(node.inputs, arrays, strict=True)
    ]
    with np.errstate(all="ignore"):
        result = np.asarray(op_of(node.op).oracle(node.attrs, *wide))
    _check_shape(node, result)
    return _held(result, node, precise)


def evaluation_cost(node: Node) -> tuple[int, int]:
    """The cost of `evaluate_node`: (operations on elements, bytes besides its operands)."""
    sizes = [operand.type.size for operand in node.inputs]
    padding = node.attrs.get("padding", ())
    if node.inputs and padding:  # a convolution or a pooling computes on a padded copy
        widths = [sum(pair) if isinstance(pair, tuple) else 2 * pair for pair in padding]
        last = node.attrs.get("layout") == "channels_last"
        axes = range(1 if last else 2, node.inputs[0].type.rank)
        extents = list(node.inputs[0].shape)
        for axis, width in zip(axes, widths, strict=False):
            extents[axis] += width
        sizes[0] = math.prod(extents)
    elements = sum(sizes) + node.type.size
    return flops_of(node) + elements, _COPIES * 8 * elements


def _held(array: np.ndarray, node: Node, precise: bool) -> np.ndarray:
    """`array` in the type in which the value of `node` is kept."""
    dtype = np.dtype(np.float64) if precise and node.dtype.is_float else node.dtype.numpy
    with np.errstate(all="ignore"):
        return array.astype(dtype, copy=False)


def _data(node: Node) -> np.ndarray:
    assert node.data is not None
    return node.data


def _check_shape(node: Node, array: np.ndarray) -> None:
    if array.shape != node.shape:
        raise InternalError(f"{node!r}: the oracle has a value of shape {list(array.shape)}")
