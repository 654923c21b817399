"""The certificate of paired products: what it says of rows and columns holds, and real data passes it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.runtime.paired import (
    BOUND_FACTOR,
    certified_ratios,
    error_constant,
    largest_kappa,
    prepare_weights,
    row_ratios,
)

KINDS = ("normal", "sparse", "decades", "outliers", "relu", "one")


def line(kind: str, k_size: int, rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(k_size)
    if kind == "sparse":
        values *= rng.random(k_size) < 0.1
    elif kind == "decades":
        values *= 10.0 ** rng.uniform(-6, 6, k_size)
    elif kind == "outliers":
        values[rng.integers(0, k_size, 3)] *= 10.0 ** rng.uniform(0, 4)
    elif kind == "relu":
        values = np.maximum(values, 0)
    elif kind == "one":
        values[1:] = 0
    return values.astype(np.float32)


@given(
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    k_size=st.sampled_from((32, 64, 100, 768, 4608)),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=200, deadline=None)
def test_a_certified_row_and_column_have_a_small_kappa(
    kinds: tuple[str, str], k_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = np.stack([line(kinds[0], k_size, rng) for _ in range(6)])
    columns = np.stack([line(kinds[1], k_size, rng) for _ in range(6)], axis=1)
    columns = columns[rng.permutation(k_size)]
    certified = row_ratios(rows)[:, None] >= certified_ratios(columns)
    wide, tall = np.abs(rows).astype(np.float64), np.abs(columns).astype(np.float64)
    norms = np.outer(np.linalg.norm(wide, axis=1), np.linalg.norm(tall, axis=0))
    assert (norms[certified] <= largest_kappa(k_size) * (wide @ tall)[certified]).all()


def test_adversarial_supports_are_refused() -> None:
    """Disjoint supports of +-1: by maxima and norms they look harmless, and every product is zero."""
    rows = np.zeros((1, 256), np.float32)
    columns = np.zeros((256, 1), np.float32)
    rows[0, ::2], columns[1::2, 0] = 1.0, 1.0
    assert row_ratios(rows)[0] < certified_ratios(columns)[0]


@pytest.mark.parametrize(("kind", "share"), [("normal", 1.0), ("relu", 1.0), ("decades", 0.0)])
def test_which_data_is_certified(kind: str, share: float) -> None:
    rng = np.random.default_rng(1)
    rows = np.stack([line(kind, 768, rng) for _ in range(50)])
    columns = rng.standard_normal((768, 80)).astype(np.float32)
    assert np.mean(row_ratios(rows)[:, None] >= certified_ratios(columns)) == share


@pytest.mark.parametrize("k_size", [32, 64, 128, 256, 768, 4608, 25088])
def test_the_promised_bound_follows_from_the_largest_kappa(k_size: int) -> None:
    assert 1.25 * error_constant(k_size) * largest_kappa(k_size) <= BOUND_FACTOR * k_size * (1 + 1e-12)
    assert largest_kappa(k_size) > 10


def test_columns_that_cannot_be_certified_are_stored_as_they_are() -> None:
    weights = np.random.default_rng(0).standard_normal((64, 5)).astype(np.float32)
    weights[3, 0], weights[3, 1], weights[:, 2] = np.inf, np.nan, 0.0
    weights[:, 3] *= np.float32(1e-30)
    columns, _, sizes, ratios = prepare_weights(weights)
    np.testing.assert_array_equal(np.abs(columns[:, [0, 1, 3]]), np.abs(weights[:, [0, 1, 3]]))
    np.testing.assert_array_equal(sizes[[0, 1, 2, 3]], [1, 1, 0, 1])
    assert np.isinf(ratios[[0, 1, 3]]).all() and ratios[2] == 0 and ratios[4] < 0.5


def test_ratios_of_rows_that_are_never_or_always_certified() -> None:
    rows = np.ones((4, 16), np.float32)
    rows[0, 3], rows[1, 3], rows[2], rows[3] = np.inf, np.nan, 0.0, 1e-30
    np.testing.assert_array_equal(row_ratios(rows), [-1, -1, 2, -1])
