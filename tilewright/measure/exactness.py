"""Error bounds for each element of a reference result.

The bound depends on the task: a sum that cancels loses digits whatever the rounding. So the oracle runs twice, the
second time with each computed value perturbed by a known small amount, in single precision. If that changes an
element, a kernel's own rounding may change it in proportion; if it changes the element qualitatively (a number that
rounds the other way, an intermediate overflow), the element is not compared.

With strict numerics, values between operators are rounded to 16 bits, by the oracle too. That is part of the
reference, not an error: the second run adds the same amounts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, toposort
from tilewright.graph.op import op_of
from tilewright.graph.oracle import evaluate_node
from tilewright.measure.bounds import SUMMING

_CHANGE = 2.0**-12  # relative perturbation: far above rounding, and still the same function
_SIGNS = 8191  # a prime: the pattern of signs differs for every row
# Factor of an element's own size and of the typical size: a larger change means a discontinuity. Weights change in
# proportion to the scores, and values relative to a mean in proportion to its distance from zero.
_JUMP, _JUMP_OF_WEIGHTS, _JUMP_OF_DISTANCES = 16.0, 1024.0, 32768.0
_NEAR = (
    32  # neighbours on each side whose maximum sensitivity counts, because one may be insensitive by accident
)


def rounded_nodes(graph: Graph, numerics: str) -> frozenset[Node]:
    """The nodes between operators whose results every kernel rounds to 16 bits."""
    if numerics != "strict":
        return frozenset()
    given = {*graph.outputs, *graph.inputs}
    return frozenset(
        node for node in graph.nodes() if node.dtype.is_half and not node.is_constant and node not in given
    )


Errors = Callable[[Node, Sequence[np.ndarray]], "np.ndarray | None"]


def changed_answer(
    graph: Graph,
    inputs: Sequence[np.ndarray],
    rounded: Collection[Node] = (),
    errors: Errors | None = None,
) -> np.ndarray:
    """The result with every float, inputs and intermediate values alike, perturbed and held in single precision, like
    a kernel's. `errors`: for some nodes, given their operands, the error in units of the perturbation, in addition to
    the propagated errors of earlier sums; None for others."""
    rng = np.random.default_rng(len(inputs))
    factors = 1.0 + _CHANGE * (2.0 * rng.integers(0, 2, _SIGNS) - 1.0)

    def changed(array: np.ndarray, node: Node) -> np.ndarray:
        if not node.dtype.is_float:
            return array
        factors[:] = np.roll(factors, 257)
        with np.errstate(all="ignore"):
            moved = array.astype(np.float64) * np.resize(factors, array.size).reshape(array.shape)
            return moved if node.dtype is DType.F64 else moved.astype(np.float32)

    values: dict[Node, np.ndarray] = {
        node: changed(array, node) for node, array in zip(graph.inputs, inputs, strict=True)
    }
    unchanged = _unchanged(graph, inputs, rounded, errors is not None)
    feeding = {node for total in graph.nodes() if total.op in SUMMING for node in toposort(total.inputs)}
    drifted: dict[Node, np.ndarray] = {}  # operands of later sums: with the errors of earlier ones only
    for node in graph.nodes():
        if node.is_input:
            continue
        if node.is_constant:
            assert node.data is not None
            values[node] = node.data
        else:
            operands = [values[operand] for operand in node.inputs]
            result = evaluate_node(node, operands, precise=True)
            with np.errstate(all="ignore"):
                if node.op in _UNSTEADY:
                    value = unchanged[node].exact
                    precise = [unchanged[operand].held for operand in node.inputs]
                    least = _CHANGE * _UNSTEADY[node.op](node, precise, operands, value)
                    result = np.where(np.abs(result - value) < least, value + least, result)
                if errors is not None:
                    exact = [unchanged[operand].held for operand in node.inputs]
                    off = [drifted.get(operand, unchanged[operand].held) for operand in node.inputs]
                    is_off = any(operand in drifted for operand in node.inputs)
                    if (moved := errors(node, exact)) is not None:
                        result = unchanged[node].exact + _CHANGE * moved
                        if is_off:
                            result = result + np.copysign(_carried(node, exact, off), moved)
                        drifted[node] = result
                    elif is_off and node in feeding:
                        drifted[node] = evaluate_node(node, off, precise=True)
                if node in rounded:
                    result = result + unchanged[node].added
            values[node] = changed(result, node)
    return values[graph.outputs[0]]


def _carried(node: Node, exact: Sequence[np.ndarray], off: Sequence[np.ndarray]) -> np.ndarray:
    """The maximum error of a sum from the errors of its operands, without cancellation."""
    oracle = op_of(node.op).oracle
    sizes = [np.abs(operand) for operand in exact]
    larger = [size + np.abs(moved - operand) for size, moved, operand in zip(sizes, off, exact, strict=True)]
    carried = oracle(node.attrs, *larger) - oracle(node.attrs, *sizes)
    return np.maximum(np.nan_to_num(carried, nan=0.0, posinf=0.0), 0.0)


class _Value(NamedTuple):
    """The oracle's value of a node, and what its readers receive."""

    exact: np.ndarray
    held: np.ndarray

    @property
    def added(self) -> np.ndarray:
        return np.where(np.isfinite(self.exact), self.held.astype(np.float64) - self.exact, 0.0)


def _unchanged(
    graph: Graph, inputs: Sequence[np.ndarray], rounded: Collection[Node], wanted: bool
) -> dict[Node, _Value]:
    """The value of every node; of none if `wanted` is empty."""
    if not wanted and not rounded and not any(node.op in _UNSTEADY for node in graph.nodes()):
        return {}
    found = {
        node: _Value(wide, wide)
        for node, array in zip(graph.inputs, inputs, strict=True)
        for wide in [array.astype(np.float64) if node.dtype.is_float else array]
    }
    for node in graph.nodes():
        if node.is_constant:
            assert node.data is not None
            found[node] = _Value(node.data, node.data)
        elif not node.is_input:
            exact = evaluate_node(node, [found[operand].held for operand in node.inputs], precise=True)
            with np.errstate(all="ignore"):
                held = exact.astype(node.dtype.numpy).astype(np.float64) if node in rounded else exact
            found[node] = _Value(exact, held)
    return found


# The effect of perturbed scores on a weighting operator, in units of the perturbation. Equal changes of two scores
# leave the weights unchanged, an accident that rounding does not have, so the effects are added instead of tried.


def _of_weights(
    node: Node, exact: Sequence[np.ndarray], changed: Sequence[np.ndarray], result: np.ndarray
) -> np.ndarray:
    with np.errstate(all="ignore"):
        scores = exact[0]
        moved = np.maximum(np.abs(scores), np.abs(changed[0] - scores) / _CHANGE)
        moved = np.nan_to_num(moved, nan=0.0, posinf=0.0)
        weights = np.nan_to_num(result if node.op == "softmax" else np.exp(result))
        others = np.sum(weights * moved, axis=node.attrs["axis"], keepdims=True) - weights * moved
        logarithm = (1.0 - weights) * moved + others
        return weights * logarithm if node.op == "softmax" else logarithm


def _of_attention(
    node: Node, exact: Sequence[np.ndarray], changed: Sequence[np.ndarray], result: np.ndarray
) -> np.ndarray:
    """The magnitude of a score's terms, times the spread of the weighted values. Both are means with the same
    weights."""
    query, key, value, *mask = exact
    oracle = op_of(node.op).oracle
    with np.errstate(all="ignore"):
        keys = oracle(node.attrs, query, key, np.abs(key), *mask)
        sizes = abs(node.attrs["scale"]) * np.sum(np.abs(query) * keys, axis=-1, keepdims=True)
        squares = oracle(node.attrs, query, key, value * value, *mask)
        deviation = np.sqrt(np.maximum(squares - result * result, 0.0))
        return np.nan_to_num(sizes * deviation, nan=0.0, posinf=0.0)


_UNSTEADY: dict[str, Callable[..., np.ndarray]] = {
    "softmax": _of_weights,
    "log_softmax": _of_weights,
    "attention": _of_attention,
}
RELATIVE = {"layer_norm", "group_norm"}  # relative to a mean


def typical_size(answer: np.ndarray, axis: int | None) -> np.ndarray:
    """The typical magnitude for each element: over all elements, or over those at the same index of an axis."""
    if not answer.size or answer.dtype.kind != "f":
        return np.zeros(answer.shape)
    with np.errstate(all="ignore"):
        squares = np.where(np.isfinite(answer), answer, 0.0).astype(np.float64) ** 2
    others = tuple(number for number in range(answer.ndim) if number != axis)
    return np.broadcast_to(np.sqrt(np.mean(squares, axis=others, keepdims=True)), answer.shape)


def allowed_errors(
    graph: Graph,
    answer: np.ndarray,
    changed: np.ndarray,
    dtype: DType,
    typical: np.ndarray,
    bound: float,
    least_share: float,
    *,
    alone: bool = False,
) -> np.ndarray:
    """The allowed error of each element, as float32; 0 for a NaN or infinity, which must match. `alone`: each
    element's change belongs to its own bound and says nothing about its neighbours."""
    if not dtype.is_float:
        moved = np.abs(answer.astype(np.float64) - changed)
        steps = 1 if dtype.is_integer else 0  # steps by which a rounding may differ
        return np.where(moved > steps, np.inf, moved).astype(np.float32)
    operators = {node.op for node in graph.nodes()}
    jump = (
        _JUMP_OF_DISTANCES
        if operators & RELATIVE
        else _JUMP_OF_WEIGHTS
        if operators & set(_UNSTEADY)
        else _JUMP
    )
    with np.errstate(all="ignore"):
        finite, stays = np.isfinite(answer), np.isfinite(changed)
        comparable = finite & stays
        size = np.where(finite, np.abs(answer), 0.0)
        shift = np.where(comparable, np.abs(changed.astype(np.float64) - answer) / _CHANGE, 0.0)
        jumps = shift > jump * (size + typical)
        shift[jumps] = 0.0
        limits = ml_dtypes.finfo(dtype.numpy)
        scale = size + (shift if alone else _largest_nearby(shift)) + least_share * typical
        allowed = bound * scale + float(limits.tiny)
        allowed[jumps | (size > 0.5 * float(limits.max))] = np.inf
        same = (answer == changed) | (np.isnan(answer) & np.isnan(changed))
        allowed = np.where(comparable, allowed, np.where(same, 0.0, np.inf))
        result: np.ndarray = allowed.astype(np.float32)
    return result


def _largest_nearby(values: np.ndarray) -> np.ndarray:
    result = values.copy()
    distance = 1
    while distance < min(_NEAR, result.size):  # the distance doubles with each step
        before = result.copy()
        np.maximum(result[distance:], before[:-distance], out=result[distance:])
        np.maximum(result[:-distance], before[distance:], out=result[:-distance])
        distance *= 2
    return result
