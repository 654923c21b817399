"""Draw the inputs of validation: ordinary numbers, edge values, NaN and infinities."""

from __future__ import annotations

import math

import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, toposort

_LARGE, _TINY = 1e3, 2.0**-120
_TINY_HALF = 2.0**-14  # smallest normal float16


def random_values(
    node: Node, rng: np.random.Generator, constant: bool, extent: int | None, positive: bool
) -> np.ndarray:
    """Ordinary numbers for an input: `constant` ones are scaled like a weight, indices stay below `extent`."""
    dtype, shape = node.dtype, node.shape
    if dtype.is_float:
        values = rng.standard_normal(shape, dtype=np.float32)
        if constant and len(shape) > 1:
            values /= np.float32(math.sqrt(math.prod(shape[1:])))  # keeps sums of products near one
        return np.asarray(np.abs(values) if positive else values, dtype.numpy)
    if dtype in (DType.I8, DType.U8):
        limits = np.iinfo(dtype.numpy)
        return rng.integers(limits.min, limits.max, shape, dtype=dtype.numpy, endpoint=True)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(dtype.numpy)
    if extent is not None:  # from the end, too
        return rng.integers(-extent, extent, shape).astype(dtype.numpy)
    return rng.integers(0, 4, shape).astype(dtype.numpy)


def with_edges(array: np.ndarray, dtype: DType, rng: np.random.Generator, positive: bool) -> np.ndarray:
    """The array with zeros, ones, equal and tiny numbers, large ones next to each other, and several magnitudes."""
    if not array.size:
        return array
    flat = array.reshape(-1).copy()
    if dtype in (DType.I8, DType.U8):
        limits = np.iinfo(dtype.numpy)
        for limit in (limits.min, limits.max, 0):
            flat[rng.random(flat.size) < 0.15] = limit
        return flat.reshape(array.shape)
    if not dtype.is_float:
        return array
    if not positive:
        flat = -flat  # values that a relu removed show now
    for magnitude in (2.0**-12, 2.0**-6, 8.0):
        flat[_stretch(rng, flat.size)] *= np.asarray(magnitude, flat.dtype)
    flat[_stretch(rng, flat.size)] = 1.0
    tiny = _TINY_HALF if dtype is DType.F16 else _TINY
    for value, share in ((0.0, 0.1), (1.0, 0.05), (tiny, 0.05)):
        flat[rng.random(flat.size) < share] = value
    # Adjacent, so that they do not dominate sums elsewhere.
    large = flat[_stretch(rng, flat.size)]
    large[rng.random(large.size) < 0.2] = _LARGE
    if not positive:
        large[rng.random(large.size) < 0.2] = -_LARGE
    return flat.reshape(array.shape)


def with_specials(array: np.ndarray, dtype: DType, rng: np.random.Generator, positive: bool) -> np.ndarray:
    """The array with a few NaN and infinities."""
    if not dtype.is_float or not array.size:
        return array
    flat = array.reshape(-1).copy()
    count = max(1, min(8, flat.size // 64))
    for value in (np.nan, np.inf) if positive else (np.nan, np.inf, -np.inf):
        flat[rng.integers(0, flat.size, count)] = value
    return flat.reshape(array.shape)


def index_extents(graph: Graph) -> dict[Node, int]:
    """The table size for each integer input that is used as an index."""
    found: dict[Node, int] = {}
    for node in graph.nodes():
        if node.op not in ("take", "take_along"):
            continue
        extent = node.inputs[0].shape[node.attrs["axis"]]
        for source in toposort([node.inputs[1]]):
            if source.is_input and source.dtype.is_integer:
                found[source] = min(extent, found.get(source, extent))
    return found


def _stretch(rng: np.random.Generator, size: int) -> slice:
    """An eighth of this many elements, contiguous."""
    length = max(1, size // 8)
    begin = int(rng.integers(0, size - length + 1))
    return slice(begin, begin + length)
