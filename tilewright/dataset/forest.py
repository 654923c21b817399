"""Grow the trees of `cost/forest.py` on tables, with LightGBM: a regression of the residual, up to a constant for each
task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.cost.forest import FEATURES, Forest, flat_rows
from tilewright.cost.trees import lightgbm
from tilewright.dataset.tables import Table
from tilewright.errors import MissingDependencyError

TREES, LEAVES, DEPTH = 200, 31, 7
_SETTINGS: dict[str, Any] = {
    "objective": "huber",
    "alpha": 0.25,
    "learning_rate": 0.06,
    "num_leaves": LEAVES,
    "max_depth": DEPTH,
    "min_data_in_leaf": 20,
    "feature_fraction": 0.7,
    "max_bin": 63,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
    "verbose": -1,
}


def grow(tables: Sequence[Table], seed: int = 0, trees: int = TREES) -> Forest:
    return of_lightgbm(grown_by_lightgbm(tables, seed, trees))


def grown_by_lightgbm(tables: Sequence[Table], seed: int, trees: int) -> Any:
    library = lightgbm()
    if library is None:
        raise MissingDependencyError(
            "training a cost model needs LightGBM, which is in the extra tune",
            remedy="pip install 'tilewright[tune]'",
        )
    rows = np.concatenate([flat_rows(table.tokens)[table.known] for table in tables])
    targets = np.concatenate([_targets(table) for table in tables])
    return library.train({**_SETTINGS, "seed": seed}, library.Dataset(rows, targets), trees)


def _targets(table: Table) -> np.ndarray:
    known = table.residuals[table.known]
    return np.asarray(known - known.mean())


def of_lightgbm(grown: Any) -> Forest:
    """The trees of a booster of LightGBM."""
    structures = [tree["tree_structure"] for tree in grown.dump_model()["tree_info"]]
    inner = max(1, *(_count(each, "split_index") for each in structures))
    leaves = max(_count(each, "leaf_value") for each in structures)
    shape = len(structures), inner
    feature, left, right = (np.zeros(shape, np.float32) for _ in range(3))
    threshold, leaf = np.zeros(shape, np.float32), np.zeros((len(structures), leaves), np.float32)

    def fill(tree: int, node: dict[str, Any]) -> int:
        """Fill in a node and those below; its number in the arrays."""
        if "split_index" not in node:
            at = int(node.get("leaf_index", 0))
            leaf[tree, at] = node["leaf_value"]
            return ~at
        at = int(node["split_index"])
        feature[tree, at] = node["split_feature"]
        # The next number below that a float32 has, so that the rows, which are float32 too, go the same way.
        limit = np.float32(node["threshold"])
        threshold[tree, at] = np.nextafter(limit, np.float32(-np.inf)) if limit > node["threshold"] else limit
        left[tree, at] = fill(tree, node["left_child"])
        right[tree, at] = fill(tree, node["right_child"])
        return at

    for tree, structure in enumerate(structures):
        if fill(tree, structure) < 0:  # a single leaf
            left[tree, 0] = right[tree, 0] = -1
    found = Forest.of(
        {
            "forest.feature": feature, "forest.threshold": threshold, "forest.left": left, "forest.right": right,
            "forest.leaf": leaf,
        }
    )  # fmt: skip
    assert found is not None and found.feature.max() < FEATURES
    return found


def _count(node: dict[str, Any], key: str) -> int:
    """The nodes of a tree that have this key."""
    below = sum(_count(node[side], key) for side in ("left_child", "right_child") if side in node)
    return below + (key in node)
