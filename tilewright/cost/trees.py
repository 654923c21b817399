"""Gradient-boosted trees, set for tens of samples: small, many, slow learners, and several ensembles of them.

LightGBM is imported when the first trees are grown, and not before: its wheel wants a system's OpenMP library, which is
not everywhere.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from tilewright.errors import TilewrightWarning

MEMBERS = 6
_GRADES = 16  # of relevance, for ranking
_COMMON = {
    "num_leaves": 6,
    "max_depth": 3,
    "min_data_in_leaf": 2,
    "min_sum_hessian_in_leaf": 1e-6,
    "min_data_in_bin": 1,
    "max_bin": 63,
    "learning_rate": 0.08,
    "lambda_l2": 1.0,
    "feature_fraction": 0.6,
    "feature_pre_filter": False,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "verbosity": -1,
}
_ROUNDS = 60


@lru_cache(maxsize=1)
def lightgbm() -> ModuleType | None:
    """None, and a warning, where it cannot be loaded."""
    try:
        import lightgbm as found
    except (ImportError, OSError) as error:
        warnings.warn(
            f"lightgbm cannot be loaded ({error}), so that tuning learns with a plainer model and may need more"
            " trials; install the OpenMP library that it wants (libgomp1 on Debian, libgomp on Fedora)",
            TilewrightWarning,
        )
        return None
    return found


class Trees:
    """Ensembles grown on different draws of the samples. `left_out`: for each sample, the mean of the ensembles that
    did not see it; NaN where all did."""

    def __init__(
        self,
        library: ModuleType,
        rows: np.ndarray,
        targets: np.ndarray,
        weights: np.ndarray,
        *,
        rank: bool,
        start: np.ndarray,
        seed: int,
    ) -> None:
        """`targets` around zero; for `rank`, what is to be ordered, the least first. `start`: where the ranking
        begins from."""
        rng = np.random.default_rng(seed)
        count = len(rows)
        self._members: list[Any] = []
        outside = np.full((MEMBERS, count), np.nan)
        for member in range(MEMBERS):
            drawn = rng.permutation(count)[: max(2, round(0.8 * count))]
            drawn.sort()
            grown = _grown(
                library, rows[drawn], targets[drawn], weights[drawn], rank, start[drawn], seed + member
            )
            self._members.append(grown)
            others = np.setdiff1d(np.arange(count), drawn)
            if len(others):
                outside[member, others] = grown.predict(rows[others])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a sample that all have seen
            self.left_out = np.nanmean(outside, axis=0)

    def predict(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(mean, standard deviation) over the ensembles."""
        each = np.array([member.predict(rows) for member in self._members])
        return each.mean(axis=0), each.std(axis=0)


def _grown(
    library: ModuleType,
    rows: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    rank: bool,
    start: np.ndarray,
    seed: int,
) -> Any:
    settings = {**_COMMON, "seed": seed}
    if not rank:
        data = library.Dataset(rows, targets, weight=weights)
        return library.train({**settings, "objective": "regression"}, data, _ROUNDS)
    places = np.argsort(np.argsort(targets))
    grades = (_GRADES - 1) - places * _GRADES // max(1, len(targets))
    data = library.Dataset(rows, np.clip(grades, 0, _GRADES - 1), group=[len(rows)], init_score=start)
    ranking = {
        "objective": "lambdarank",
        "label_gain": [float(2**grade - 1) for grade in range(_GRADES)],
        "lambdarank_truncation_level": len(rows),
    }
    return library.train({**settings, **ranking}, data, _ROUNDS)
