"""Gradient-boosted trees, configured for tens of samples: shallow, slow learners, in several ensembles.

LightGBM is imported when the first trees are trained: it is an extra (`tilewright[tune]`), and its wheel needs the
system's OpenMP library, which is not always installed.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from tilewright.errors import TilewrightWarning

MEMBERS = 4
_DRAWN = 0.75  # share of the samples for each ensemble
_ROUNDS = 50
_GRADES = 16  # relevance levels for ranking
_SETTINGS = {
    "num_leaves": 6,
    "max_depth": 3,
    "min_data_in_leaf": 2,
    "min_sum_hessian_in_leaf": 1e-6,
    "min_data_in_bin": 1,
    "max_bin": 31,
    "learning_rate": 0.1,
    "lambda_l2": 1.0,
    "feature_fraction": 0.6,
    "feature_pre_filter": False,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "verbosity": -1,
}


@lru_cache(maxsize=1)
def lightgbm() -> ModuleType | None:
    """The module, or None with a warning if it cannot be loaded."""
    try:
        import lightgbm as found
    except (ImportError, OSError) as error:
        warnings.warn(
            f"lightgbm cannot be loaded ({error}): tuning searches with the analytical model and a regression on"
            " similar configs, and may need more trials. Try: pip install 'tilewright[tune]', and the OpenMP library"
            " that lightgbm wants (libgomp1 on Debian, libgomp on Fedora)",
            TilewrightWarning,
        )
        return None
    return found


class Trees:
    """Ensembles trained on different subsets of the samples. `left_out`: for each sample, the mean prediction of the
    ensembles that did not see it; NaN if all did.

    They predict the targets or, for `rank`, a correction to `start` such that the least target has the highest score.
    """

    def __init__(
        self,
        library: ModuleType,
        rows: np.ndarray,
        targets: np.ndarray,
        weights: np.ndarray,
        seed: int,
        *,
        rank: bool = False,
        start: np.ndarray | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        count = len(rows)
        start = np.zeros(count) if start is None else start
        grow = _ranking if rank else _regression
        self._members: list[Any] = []
        outside = np.full((MEMBERS, count), np.nan)
        for member in range(MEMBERS):
            order = rng.permutation(count)
            seen, unseen = np.split(order, [max(2, round(_DRAWN * count))])
            grown = grow(library, rows[seen], targets[seen], weights[seen], start[seen], seed + member)
            self._members.append(grown)
            if len(unseen):
                outside[member, unseen] = grown.predict(rows[unseen])
        counted = np.sum(~np.isnan(outside), axis=0)
        self.left_out = np.where(counted > 0, np.nansum(outside, axis=0) / np.maximum(counted, 1), np.nan)

    def predict(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(mean, standard deviation) over the ensembles."""
        each = np.array([member.predict(rows) for member in self._members])
        return each.mean(axis=0), each.std(axis=0)


def _regression(
    library: ModuleType,
    rows: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    start: np.ndarray,
    seed: int,
) -> Any:
    data = library.Dataset(rows, targets, weight=weights)
    return library.train({**_SETTINGS, "seed": seed, "objective": "regression"}, data, _ROUNDS)


def _ranking(
    library: ModuleType,
    rows: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    start: np.ndarray,
    seed: int,
) -> Any:
    positions = np.argsort(np.argsort(targets))
    grades = (_GRADES - 1) - positions * _GRADES // len(targets)
    data = library.Dataset(rows, grades, weight=weights, group=[len(rows)], init_score=start)
    settings = {
        **_SETTINGS,
        "seed": seed,
        "objective": "lambdarank",
        "label_gain": list(range(_GRADES)),
        "lambdarank_truncation_level": len(rows),
    }
    return library.train(settings, data, _ROUNDS)
