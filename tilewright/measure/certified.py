"""The share of register tiles of a paired GEMM that took the paired path, on the inputs its kernel was given.

A kernel decides for each tile (`runtime/paired.py`) and does not count. The decision follows from the norms of rows
and the ratios stored after the packed weight, so it is recomputed here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import op_of
from tilewright.graph.oracle import evaluate
from tilewright.measure.bounds import CONTRACTIONS, summed_count
from tilewright.runtime.packing import Packing
from tilewright.runtime.paired import PairedWeights, ratios_of
from tilewright.runtime.plan import TaskInfo

_ROWS = re.compile(r"^paired: rows=(\d+)\b")


def certified_share(
    info: TaskInfo, graph: Graph, arrays: Sequence[np.ndarray], stored: Sequence[np.ndarray]
) -> float | None:
    """The share of a task's tiles on the paired path; None if it is not a paired product. `arrays`: its inputs in the
    graph's layout; `stored`: in the kernel's."""
    rows = _ROWS.match(info.program)
    sums = [node for node in graph.nodes() if node.op in CONTRACTIONS]
    weights = [
        (packing, transform, stored[n])
        for n, packing in enumerate(info.packings)
        if packing is not None
        for transform in packing.transforms
        if isinstance(transform, PairedWeights)
    ]
    if rows is None or len(sums) != 1 or len(weights) != 1:
        return None
    of_rows = _row_ratios(sums[0], graph, arrays)
    demanded = _demanded(*weights[0])
    tiles = np.minimum.reduceat(of_rows, np.arange(0, of_rows.size, int(rows.group(1))))
    return float(np.mean(tiles[:, None] >= demanded))


def _row_ratios(node: Node, graph: Graph, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The ratio of each row of the result; for a convolution, of each pixel."""
    (data,) = evaluate(Graph(graph.inputs, (node.inputs[0],)), arrays, precise=True)
    weight = node.inputs[1].shape
    ones = np.ones((*weight[:-1], 1))  # one column that sums a row
    oracle = op_of(node.op).oracle
    with np.errstate(all="ignore"):
        means = [
            oracle(node.attrs, part, ones) / summed_count(node) for part in (np.abs(data), np.square(data))
        ]
    return ratios_of(*means).reshape(-1)


def _demanded(packing: Packing, transform: PairedWeights, packed: np.ndarray) -> np.ndarray:
    """The largest ratio that a column of each panel requires."""
    ratios = transform.ratios(packed[packing.begin_of(transform) :], packing.shape)
    (columns,) = (axis for axis in range(len(packing.shape)) if axis not in transform.axes)
    lanes = packing.blocks[columns]
    return np.maximum.reduceat(ratios, np.arange(0, ratios.size, lanes))
