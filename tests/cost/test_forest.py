"""Trees as arrays: as LightGBM computes them, in weights and refused there if they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.cost.test_attention import some_tensors
from tests.dataset.test_dataset import records
from tilewright.cost import weights
from tilewright.cost.analytical import Analytical
from tilewright.cost.forest import FEATURES, Forest, flat_rows
from tilewright.cost.network import FOREST_SHARE, AttentionNetwork
from tilewright.cost.tokens import Tokeniser, joined
from tilewright.dataset.forest import grow, grown_by_lightgbm, of_lightgbm
from tilewright.dataset.tables import Table, tables_of
from tilewright.dataset.tasks import F32, gemm
from tilewright.errors import WeightsError
from tilewright.hw import host
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work

pytest.importorskip("lightgbm")


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    return tables_of([r for m in (32, 64, 128) for r in records(m, 96, 64, 60, "rows")])[0]


@pytest.fixture(scope="module")
def forest(tables: list[Table]) -> Forest:
    return grow(tables, trees=20)


def test_arrays_predict_what_lightgbm_does(tables: list[Table]) -> None:
    grown = grown_by_lightgbm(tables, seed=3, trees=30)
    rows = np.concatenate([flat_rows(table.tokens) for table in tables])
    rows = np.concatenate([rows, np.random.default_rng(0).normal(0, 3, rows.shape).astype(np.float32)])
    assert grown.predict(rows).std() > 0.01
    np.testing.assert_allclose(of_lightgbm(grown)(rows), grown.predict(rows), rtol=1e-4, atol=1e-5)


def test_one_row_is_predicted_as_in_company(tables: list[Table], forest: Forest) -> None:
    rows = flat_rows(tables[0].tokens)
    together = forest(rows)
    np.testing.assert_allclose([forest(rows[at : at + 1])[0] for at in range(8)], together[:8], rtol=1e-6)


def test_trees_learn_what_the_analytical_model_gets_wrong(forest: Forest) -> None:
    (test,) = tables_of(records(256, 128, 96, 60, "rows"))[0]
    left = test.residuals - forest(flat_rows(test.tokens))
    assert np.std(left) < 0.8 * np.std(test.residuals)


def test_nothing_to_learn_is_a_forest_of_leaves(tables: list[Table]) -> None:
    (table,) = tables_of(records(64, 96, 64, 40))[0]  # exactly as predicted
    found = grow([table], trees=3)
    np.testing.assert_allclose(found(flat_rows(table.tokens)), 0.0, atol=1e-6)


def test_rows_do_not_depend_on_padding() -> None:
    candidates = Candidates.of(Work(gemm(64, 64, 64, "none", F32), host()))
    tokeniser = Tokeniser(Analytical(candidates, 1))
    configs = candidates.sample(Random(0), 40)
    together = flat_rows(tokeniser.tokens(configs))
    assert together.shape == (len(configs), FEATURES)
    for at, config in enumerate(configs):
        np.testing.assert_array_equal(flat_rows(tokeniser.tokens([config]))[0], together[at])


def test_the_network_is_averaged_with_the_trees(tmp_path: Path, tables: list[Table], forest: Forest) -> None:
    tensors = some_tensors()
    plain, both = AttentionNetwork(tensors), AttentionNetwork(tensors | forest.tensors())
    tokens = joined([table.tokens for table in tables])
    said, grown = plain(tokens), forest(flat_rows(tokens))
    wanted = (1 - FOREST_SHARE) * said.members + FOREST_SHARE * grown
    np.testing.assert_allclose(both(tokens).members, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(both(tokens).valid, said.valid)
    path = tmp_path / "weights.safetensors"
    weights.save(path, tensors | forest.tensors(), {})
    again = Forest.of(weights.load(path).tensors)
    assert again is not None
    np.testing.assert_array_equal(again(flat_rows(tokens)), grown)


def without_leaves(tensors: dict[str, np.ndarray]) -> None:
    del tensors["forest.leaf"]


def without_trees(tensors: dict[str, np.ndarray]) -> None:
    for name in tensors:
        tensors[name] = tensors[name][:0]


def without_nodes(tensors: dict[str, np.ndarray]) -> None:
    for name in tensors:
        if name != "forest.leaf":
            tensors[name] = tensors[name][:, :0]


def of_another_feature(tensors: dict[str, np.ndarray]) -> None:
    tensors["forest.feature"][0, 0] = FEATURES


def in_a_circle(tensors: dict[str, np.ndarray]) -> None:
    tensors["forest.left"][0, 0] = 0


def beyond_its_nodes(tensors: dict[str, np.ndarray]) -> None:
    tensors["forest.right"][0, 0] = 10_000


def beyond_its_leaves(tensors: dict[str, np.ndarray]) -> None:
    tensors["forest.right"][0, 0] = -10_000


@pytest.mark.parametrize(
    "spoil",
    [
        without_leaves, without_trees, without_nodes, of_another_feature, in_a_circle, beyond_its_nodes,
        beyond_its_leaves,
    ],
)  # fmt: skip
def test_trees_that_do_not_fit_are_refused(
    forest: Forest, spoil: Callable[[dict[str, np.ndarray]], None]
) -> None:
    tensors = forest.tensors()
    spoil(tensors)
    with pytest.raises(WeightsError, match="trees"):
        AttentionNetwork(some_tensors() | tensors)
