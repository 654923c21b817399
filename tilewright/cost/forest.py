"""Regression trees as arrays, evaluated in NumPy: the network of the attention model is averaged with them.

Inner nodes are numbered from 0, and leaf n is the child ~n. A row goes left if its feature is at most the threshold.
`dataset/forest.py` grows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tilewright.cost.tokens import WIDTHS, Tokens
from tilewright.cost.vocabulary import BUCKETS
from tilewright.errors import WeightsError

PREFIX = "forest."
_SINGLE = ("task", "machine", "terms", "instruction")
FEATURES = sum(WIDTHS[level] for level in _SINGLE) + 2 * BUCKETS


def flat_rows(tokens: Tokens) -> np.ndarray:
    """Each candidate's tokens as one row: the single ones, then two numbers for each template and knob, 0 for those
    that it lacks."""
    slots = np.zeros((len(tokens), BUCKETS, 2), np.float32)
    at, number = np.nonzero(tokens.knob_mask)
    knobs = tokens.knobs[at, number]
    slots[at, tokens.buckets[at, number]] = np.stack([knobs[:, 0] + 0.5, knobs[:, 2]], axis=1)
    return np.concatenate(
        [*(getattr(tokens, level) for level in _SINGLE), slots.reshape(len(tokens), -1)], axis=1
    )


@dataclass(frozen=True)
class Forest:
    """The sum of regression trees. All arrays are (trees, nodes); unused nodes are 0."""

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    leaf: np.ndarray  # (trees, leaves)
    depth: int

    @classmethod
    def of(cls, tensors: Mapping[str, np.ndarray]) -> Forest | None:
        """The trees of a file of weights; None if it has none. Raises WeightsError."""
        found = {name: tensors[PREFIX + name] for name in _ARRAYS if PREFIX + name in tensors}
        if not found:
            return None
        shapes = {array.shape for name, array in found.items() if name != "leaf"}
        if len(found) < len(_ARRAYS) or len(shapes) != 1 or any(array.ndim != 2 for array in found.values()):
            raise WeightsError("the weights have trees that are not complete")
        whole = {name: found[name].astype(np.int64) for name in ("feature", "left", "right")}
        depth = _depth(whole["left"], whole["right"], found["leaf"].shape)
        if depth is None or not ((whole["feature"] >= 0) & (whole["feature"] < FEATURES)).all():
            raise WeightsError("the weights have trees that do not fit the features")
        return cls(threshold=found["threshold"], leaf=found["leaf"], depth=depth, **whole)

    def tensors(self) -> dict[str, np.ndarray]:
        return {PREFIX + name: np.asarray(getattr(self, name), np.float32) for name in _ARRAYS}

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The prediction for each row of `flat_rows`."""
        trees, nodes = self.feature.shape
        leaves = self.leaf.shape[1]
        first, at = np.arange(trees) * nodes, np.zeros((len(rows), trees), np.int64)
        flat, start = np.ascontiguousarray(rows).reshape(-1), np.arange(len(rows))[:, None] * rows.shape[1]
        feature, threshold = self.feature.reshape(-1), self.threshold.reshape(-1)
        left, right = self.left.reshape(-1), self.right.reshape(-1)
        for _ in range(self.depth):
            inner = at >= 0
            node = np.where(inner, at, 0) + first
            goes_left = flat[start + feature[node]] <= threshold[node]
            at = np.where(inner, np.where(goes_left, left[node], right[node]), at)
        return np.asarray(self.leaf.reshape(-1)[~at + np.arange(trees) * leaves].sum(axis=1))


_ARRAYS = ("feature", "threshold", "left", "right", "leaf")


def _depth(left: np.ndarray, right: np.ndarray, leaf: tuple[int, ...]) -> int | None:
    """The most steps from a root to a leaf; None if there is a way that does not end at one."""
    trees, nodes = left.shape
    if leaf[0] != trees or not left.size:
        return None
    both = np.stack([left, right], axis=2)
    if (both >= nodes).any() or (~both >= leaf[1]).any():
        return None
    reached = np.zeros((trees, nodes), bool)
    reached[:, 0] = True
    for depth in range(1, nodes + 1):
        tree, node = np.nonzero(reached)
        children = both[tree, node]
        inner = children >= 0
        if not inner.any():
            return depth
        reached = np.zeros((trees, nodes), bool)
        reached[np.repeat(tree, 2)[inner.ravel()], children.ravel()[inner.ravel()]] = True
    return None
