"""Reads at indices that are data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.frontend.checking import check, floats, functions, integers, ops_of

INDEXING: dict[str, Any] = {
    "one": lambda x, i: x[i],
    "middle": lambda x, i: x[:, i],
    "matrix_index": lambda x, i: x[:, i.view(2, 2)],
    "neighbours": lambda x, i: x[:, i, i.flip(0)],
    "apart": lambda x, i: x[i, :, i],
    "broadcast": lambda x, i: x[:, i[:, None], i[None, :2]],
    "front_and_back": lambda x, i: x[i, ..., i],
    "with_slices": lambda x, i: x[1:, i, ::2],
    "negative": lambda x, i: x[-i - 1, i],
    "list": lambda x, i: x[:, [2, 0]],
    "index_select": lambda x, i: [x.index_select(1, i), x.index_select(-1, i[:2])],
    "gather": lambda x, i: x.gather(1, i.view(1, 4, 1).expand(2, 4, 3)),
    "take": lambda x, i: x.take(i.view(2, 2)),
    "take_along": lambda x, i: [
        x.take_along_dim(i.view(1, 4, 1), 1),
        torch.take_along_dim(x, i),
    ],
    "embedding": lambda x, i: F.embedding(i, x[0], padding_idx=0),
}


def test_indexing() -> None:
    check(functions(INDEXING), floats(4, 5, 4), torch.tensor([1, 0, 3, 2]))


def test_index_types() -> None:
    x = floats(6, 5)
    check(lambda x, i: [x[i], F.embedding(i, x), x.index_select(0, i)], x, integers(4, low=0, high=6).int())
    check(lambda x, i: x[i], x, integers(4, low=-6, high=6))


def test_an_embedding_is_one_take() -> None:
    result = check(torch.nn.Embedding(7, 3).eval(), integers(2, 4, low=0, high=7))
    assert ops_of(result) == ["input", "constant", "take"]


def test_masked_writes_of_one_value() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[y > 1] = -3.0
        y[x[:, 0] > 0] = 5.0
        return y

    check(model, floats(6, 5))
