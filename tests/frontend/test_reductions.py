"""Reductions, moments, norms and running sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.checking import check, floats, functions, integers

REDUCTIONS: dict[str, Any] = {
    "sum": lambda x: [x.sum(), x.sum(1), x.sum((0, -1), keepdim=True), x.sum(dim=[])],
    "sum_dtype": lambda x: x.sum(0, dtype=torch.float64),
    "nansum": lambda x: torch.nansum(x, 1),
    "mean": lambda x: [x.mean(), x.mean(-1, keepdim=True), x.mean((0, 2))],
    "prod": lambda x: [x.prod(), x.prod(1)],
    "amax": lambda x: [x.amax(), x.amax(1), x.amin((0, 2), keepdim=True), x.amin(-1)],
    "max": lambda x: [x.max(), x.min()],
    "max_dim": lambda x: [*x.max(1), *x.min(-1, keepdim=True)],
    "max_values_only": lambda x: x.max(dim=2).values,
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "argmax": lambda x: [
        x.argmax(),
        x.argmax(1),
        x.argmin(-1, keepdim=True),
        x.argmax(dim=None, keepdim=True),
    ],
    "any_all": lambda x: [
        (x > 0).any(),
        (x > 0).any(1),
        (x > 0).all(-1),
        x.any(),
        x.bool().all(0, keepdim=True),
    ],
    "count": lambda x: [x.relu().count_nonzero(), x.relu().count_nonzero(1)],
    "var": lambda x: [
        x.var(),
        x.var(1),
        x.var(-1, unbiased=False, keepdim=True),
        x.var((0, 2), correction=2),
    ],
    "std": lambda x: [x.std(), x.std(0), x.std(-1, correction=0)],
    "var_mean": lambda x: [*torch.var_mean(x, 1), *torch.std_mean(x, (0, 1), keepdim=True)],
    "norm": lambda x: [x.norm(), x.norm(dim=1), x.norm(1, dim=-1, keepdim=True), x.norm(math.inf, dim=0)],
    "vector_norm": lambda x: [
        torch.linalg.vector_norm(x, p, dim=1) for p in (0, 1, 2, 3, math.inf, -math.inf)
    ],
    "frobenius": lambda x: torch.linalg.norm(x, dim=(1, 2)),
    "normalize": lambda x: F.normalize(x, dim=1),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(1), dim=2),
    "cosine, broadcast": lambda x: F.cosine_similarity(x, x[:, :, :1], dim=-1),
    "distance": lambda x: [torch.dist(x, x.flip(0)), torch.cdist(x, x[:1] + 1), torch.cdist(x, x + 1, p=1.0)],
    "logsumexp": lambda x: [x.logsumexp(1), x.logsumexp((0, 2), keepdim=True)],
    "cumsum": lambda x: [x.cumsum(1), x.cumsum(-1, dtype=torch.float64)],
    "diff": lambda x: [x.diff(), x.diff(n=2, dim=0), x.diff(dim=1, prepend=x[:, :1]), x.diff(n=0, prepend=x)],
    "trace": lambda x: x[0].trace(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reductions(dtype: torch.dtype) -> None:
    check(functions(REDUCTIONS), floats(3, 4, 5, dtype=dtype))


def test_half_precision() -> None:
    named = ("sum", "mean", "amax", "max_dim", "argmax", "norm", "std", "logsumexp")
    check(functions({name: REDUCTIONS[name] for name in named}), floats(3, 4, 5, dtype=torch.float16))


def test_integers_count_in_64_bits() -> None:
    named = ("sum", "prod", "amax", "max_dim", "argmax", "any_all", "count", "cumsum", "diff")
    table = {name: REDUCTIONS[name] for name in named}
    check(functions(table), integers(3, 4, 5, low=-2, high=3, dtype=torch.int32))


def test_bools() -> None:
    table = {
        "sum": lambda x: [x.sum(), x.sum(1)],
        "mean": lambda x: x.float().mean(),
        "max": lambda x: [x.amax(0), x.amin(1), *x.max(1), x.max()],
        "argmax": lambda x: x.int().argmax(1),
        "any": lambda x: [x.any(), x.all(1)],
        "cumsum": lambda x: x.cumsum(0),
    }
    check(functions(table), floats(3, 4) > 0)


def test_rank_zero() -> None:
    table = {
        "sum": lambda x: [x.sum(), x.sum(0), x.mean(-1), x.amax()],
        "max": lambda x: [*x.max(0), x.argmax(), x.argmin(0)],
        "softmax": lambda x: [x.softmax(0), x.log_softmax(-1)],
        "cumsum": lambda x: x.cumsum(0),
        "moments": lambda x: [x.var(correction=0), x.norm()],
        "logsumexp": lambda x: x.logsumexp(0),
    }
    check(functions(table), torch.tensor(1.5))


def test_infinities_in_logsumexp() -> None:
    x = floats(4, 5)
    x[1] = -math.inf
    x[2, 3] = math.inf
    check(lambda x: x.logsumexp(1), x)
