"""The share of register tiles of a paired GEMM that took the paired path, on the inputs its kernel was given.

A kernel decides tile by tile (`runtime/paired.py`) and keeps no count. Its decision follows from the norms of rows and
the ratios that are stored behind the packed weight, so it is made again here.
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
    """Of a task's tiles the share in pairs; None where it is no paired product. `arrays`: its inputs as the graph has
    them; `stored`: as the kernel has."""
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
    """Of each row of the result, pixel by pixel for a convolution."""
    (data,) = evaluate(Graph(graph.inputs, (node.inputs[0],)), arrays, precise=True)
    weight = node.inputs[1].shape
    ones = np.ones((*weight[:-1], 1))  # one column that adds up a row
    oracle = op_of(node.op).oracle
    with np.errstate(all="ignore"):
        means = [
            oracle(node.attrs, part, ones) / summed_count(node) for part in (np.abs(data), np.square(data))
        ]
    return ratios_of(*means).reshape(-1)


def _demanded(packing: Packing, transform: PairedWeights, packed: np.ndarray) -> np.ndarray:
    """Of each panel the largest ratio that one of its columns wants."""
    ratios = transform.ratios(packed[packing.begin_of(transform) :], packing.shape)
    (columns,) = (axis for axis in range(len(packing.shape)) if axis not in transform.axes)
    lanes = packing.blocks[columns]
    return np.maximum.reduceat(ratios, np.arange(0, ratios.size, lanes))
