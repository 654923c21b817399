"""Bounds the effect of rounding a contraction's operands on a task's results, if the task computes these operands.

A kernel may round them to 16 bits, as between two kernels, or keep them in float32. `exactness.py` assumes small
errors; a rounded operand may change a result so much that the activation after it is not linear over that range.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tilewright.graph.ir import Graph, Node, toposort
from tilewright.graph.oracle import evaluate_node
from tilewright.measure.bounds import CONTRACTIONS, rounding_errors
from tilewright.numerics import is_strict


def overflown_results(graph: Graph, rounded: Collection[Node], inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Which results depend on a node of `rounded` that overflows its type. An overflow counts as NaN, since an
    activation may hide an infinity."""
    values: dict[Node, np.ndarray] = dict(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes():
        if node.is_constant:
            assert node.data is not None
            values[node] = node.data
        elif not node.is_input:
            found = evaluate_node(node, [values[operand] for operand in node.inputs])
            if node in rounded:
                with np.errstate(all="ignore"):
                    beyond = np.isfinite(found) & np.isinf(found.astype(node.dtype.numpy))
                found = np.where(beyond, np.nan, found)
            values[node] = found
    return np.isnan(values[graph.outputs[0]]).reshape(-1)


def chain_errors(graph: Graph, inputs: Sequence[np.ndarray], numerics: str) -> np.ndarray | float:
    """The error of each result from rounding the results of a contraction that another contraction of 16-bit floats
    reads; 0 if there is none."""
    sums = [node for node in graph.nodes() if node.op in CONTRACTIONS]
    if is_strict(numerics) or not any(_reads_another(node, sums) for node in sums):
        return 0.0
    values: dict[Node, np.ndarray] = dict(zip(graph.inputs, inputs, strict=True))
    errors: dict[Node, np.ndarray] = {}
    for node in graph.nodes():
        if node.is_constant:
            assert node.data is not None
            values[node] = node.data
        if node.is_input or node.is_constant:
            continue
        operands = [values[operand] for operand in node.inputs]
        values[node] = evaluate_node(node, operands)
        off = [errors.get(operand) for operand in node.inputs]
        if node in sums:
            errors[node] = _of_sum(node, operands, off, numerics)
        elif any(each is not None for each in off):
            errors[node] = _of_change(node, operands, off, values[node])
    found = errors[graph.outputs[0]].reshape(-1)
    return np.nan_to_num(found, nan=0.0, posinf=np.inf).astype(np.float32)


def _reads_another(node: Node, sums: Collection[Node]) -> bool:
    return node.dtype.is_half and any(each in sums for each in toposort(node.inputs[:2]))


def _of_sum(
    node: Node, operands: Sequence[np.ndarray], off: Sequence[np.ndarray | None], numerics: str
) -> np.ndarray:
    """The sum's own error bound, plus the errors of its left operand without cancellation."""
    own = rounding_errors(node, operands, numerics)
    assert own is not None
    if off[0] is None:
        return own
    rest = [np.zeros_like(operand) for operand in operands[2:]]
    return np.asarray(own + evaluate_node(node, [off[0], np.abs(operands[1]), *rest]))


def _of_change(
    node: Node, operands: Sequence[np.ndarray], off: Sequence[np.ndarray | None], exact: np.ndarray
) -> np.ndarray:
    """The larger change of its result when all operands are as far off as they may be, to either side."""
    found = []
    with np.errstate(all="ignore"):
        for sign in (1.0, -1.0):
            moved = [x if e is None else x + sign * e for x, e in zip(operands, off, strict=True)]
            found.append(np.abs(evaluate_node(node, moved) - exact))
        return np.maximum(*found)
