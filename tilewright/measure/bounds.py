"""Rounding-error bounds for each element of a contraction, from the task and the numerics alone.

u = 2^-24. A sum of K products of float32, in any order, has |error| <= K u sum_k |a_k b_k|. Kernels stay far below
that, and validation demands it: (16 + 8 sqrt(K)) u sum |a_k b_k|, if that is less. Certified paired products satisfy
it too, although they only guarantee 32 K u sum |a_k b_k| (`runtime/paired.py`).

A convolution that may use Winograd's algorithm additionally has |error| <= c u sum_c max_tile |d_c| sum |g_c|, with
the c of the largest tile (`runtime/winograd.py`); a tile may be anywhere around a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import flops_of, op_of
from tilewright.graph.ops.layouts import block_of
from tilewright.numerics import is_strict, may_round_to_tf32
from tilewright.runtime import winograd

UNIT = 2.0**-24
CONTRACTIONS = ("matmul", "linear", "conv", "conv_transpose")
_SUMS = ("sum", "mean")
SUMMING = (*CONTRACTIONS, *_SUMS)
_TF32 = 2.0**-9  # for a product of two operands that are each rounded or truncated to 10 fraction bits
_FEW, _PER_ROOT = 16.0, 8.0  # roundings that add up, and roundings per sqrt(K) that partly cancel


def summed_count(node: Node) -> int:
    """K: the number of terms in one element of the result."""
    if node.op in _SUMS:
        return max(1, math.prod(node.inputs[0].shape) // max(1, node.type.size))
    return max(1, flops_of(node) // max(1, 2 * node.type.size))


def rounding_errors(node: Node, operands: Sequence[np.ndarray], numerics: str) -> np.ndarray | None:
    """The maximum error of each element of a float32 sum; None for other operators."""
    if node.op not in SUMMING:
        return None
    with np.errstate(all="ignore"):
        sizes = op_of(node.op).oracle(node.attrs, *(np.abs(operand) for operand in operands))
        count = summed_count(node)
        errors = UNIT * min(count, _FEW + _PER_ROOT * math.sqrt(count)) * sizes
        if may_be_transformed(node, numerics):
            errors = errors + UNIT * max(winograd.ERROR_FACTORS.values()) * _of_tiles(node, *operands[:2])
        if may_be_rounded(node, numerics):
            errors = errors + _TF32 * sizes
        if node.op in CONTRACTIONS and node.dtype.is_half and any(map(_is_computed, node.inputs[:2])):
            # A computed operand is rounded to the type of the other one before tensor cores multiply.
            errors = errors + float(ml_dtypes.finfo(node.dtype.numpy).eps) * sizes
    return np.asarray(errors)


def _is_computed(operand: Node) -> bool:
    while operand.op in ("reshape", "permute", "pad", "slice"):
        operand = operand.inputs[0]
    return not (operand.is_input or operand.is_constant)


def may_be_rounded(node: Node, numerics: str) -> bool:
    """Whether its operands may be rounded to 10 fraction bits before they are multiplied."""
    return node.op in CONTRACTIONS and node.dtype is DType.F32 and may_round_to_tf32(numerics)


def may_be_transformed(node: Node, numerics: str) -> bool:
    """Whether it is a convolution that Winograd's algorithm may compute."""
    if (
        node.op != "conv"
        or is_strict(numerics)
        or node.dtype is not DType.F32
        or block_of(node.attrs["layout"])
    ):
        return False
    weight = node.inputs[1].shape
    kernel = weight[:-2] if node.attrs["layout"] == "channels_last" else weight[2:]
    steps = (node.attrs["stride"], node.attrs["dilation"])
    return kernel == (winograd.TAPS,) * 2 and node.attrs["groups"] == 1 and steps == ((1, 1), (1, 1))


def _of_tiles(node: Node, data: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Sum over channels: the largest element of any tile around a result, times the sum of its weights."""
    last = node.attrs["layout"] == "channels_last"
    image, window = (np.abs(data), np.abs(weight)) if last else (np.moveaxis(data, 1, -1), None)
    if window is None:
        image, window = np.abs(image), np.abs(weight).transpose(2, 3, 1, 0)
    reach = max(winograd.ERROR_FACTORS)
    edges = [(low + reach - 1, high + reach - 1) for low, high in node.attrs["padding"]]
    image = np.pad(image, [(0, 0), *edges, (0, 0)])
    for axis in (1, 2):
        image = _largest_in_windows(image, axis, 2 * reach + 1)
    result = np.nan_to_num(image, nan=0.0, posinf=0.0) @ window.sum(axis=(0, 1))
    return result if last else np.moveaxis(result, -1, 1)


def _largest_in_windows(values: np.ndarray, axis: int, width: int) -> np.ndarray:
    """The maximum over every window of `width` elements."""
    moved, covered = np.moveaxis(values, axis, 0), 1
    while covered < width:
        step = min(covered, width - covered)
        moved = np.maximum(moved[:-step], moved[step:])
        covered += step
    return np.moveaxis(moved, 0, axis)


def channel_axes(node: Node) -> tuple[int, int]:
    """The reduction axes of a contraction's data and weight."""
    data, weight = (operand.type.rank for operand in node.inputs[:2])
    if node.op == "conv":
        return (1, 1) if node.attrs["layout"] == "channels_first" else (data - 1, weight - 2)
    if node.op == "conv_transpose":
        return 1, 0
    return data - 1, 1 if node.op == "linear" else weight - 2
