"""A kernel's error: its result against the float64 oracle of its task."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tilewright.graph.ir import Graph
from tilewright.graph.oracle import evaluate
from tilewright.graph.text import parse_graph
from tilewright.measure.certified import certified_share
from tilewright.runtime.explain import Checked
from tilewright.runtime.plan import TaskInfo


def relative_error(result: np.ndarray, reference: np.ndarray) -> float:
    """The relative L2 error. NaN and infinity must match, otherwise the error is infinite; they are excluded from the
    norm. For integers and bools, the share of elements that differ."""
    result, reference = np.asarray(result), np.asarray(reference)
    if result.size == 0:
        return 0.0
    if result.dtype.kind in "iub":
        return float(np.mean(result != reference.astype(result.dtype)))
    result, reference = result.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(reference)
    if not finite.all():
        odd = ~finite
        same = (result[odd] == reference[odd]) | (np.isnan(result[odd]) & np.isnan(reference[odd]))
        if not same.all():
            return float("inf")
        result, reference = result[finite], reference[finite]
    if not np.isfinite(result).all():
        return float("inf")
    difference, size = np.linalg.norm(result - reference), np.linalg.norm(reference)
    return float(difference / size) if size else float(difference)


@lru_cache(maxsize=256)
def _parsed(text: str) -> Graph:
    return parse_graph(text, {})


def kernel_error(info: TaskInfo, inputs: Sequence[np.ndarray], output: np.ndarray) -> float:
    """The relative error of a task's result for the inputs that it received, including packed ones."""
    return checked_kernel(info, inputs, output).error


def checked_kernel(info: TaskInfo, inputs: Sequence[np.ndarray], output: np.ndarray) -> Checked:
    """The check that `explain` shows: a kernel's error and, for a paired product, its certified share."""
    graph = _parsed(info.text)
    packings = (*info.packings, *[None] * (len(inputs) - len(info.packings)))
    arrays = [
        array if packing is None else packing.unpack(array).reshape(node.shape)
        for node, array, packing in zip(graph.inputs, inputs, packings, strict=True)
    ]
    (reference,) = evaluate(graph, arrays, precise=True)
    return Checked(relative_error(output, reference), certified_share(info, graph, arrays, inputs))
