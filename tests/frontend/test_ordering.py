"""Sorting, running reductions, searching, and writes at indices that are data."""

from __future__ import annotations

from typing import Any

import torch

from tests.frontend.checking import check, floats, functions, integers

NAN = float("nan")


def special(*shape: int) -> torch.Tensor:
    x = floats(*shape)
    x.view(-1)[1], x.view(-1)[4], x.view(-1)[5] = NAN, x.view(-1)[2], float("inf")
    return x


def test_sorting() -> None:
    table: dict[str, Any] = {
        "sort": lambda x: x.sort(),
        "first axis, downwards": lambda x: x.sort(0, descending=True),
        "stable": lambda x: torch.sort(x, stable=True, dim=-1),
        "argsort": lambda x: x.argsort(-1, True),
        "msort": torch.msort,
        "topk": lambda x: x.topk(3),
        "smallest": lambda x: x.topk(2, 0, largest=False),
        "nothing": lambda x: x.topk(0),
        "kth": lambda x: x.kthvalue(2),
        "kth, kept": lambda x: x.kthvalue(2, 0, True),
    }
    check(functions(table), floats(4, 7))
    check(functions(table), torch.randperm(28).reshape(4, 7))
    # Which of equal elements a selection takes is not said.
    check(functions({name: table[name] for name in ("sort", "stable", "argsort", "msort")}), special(4, 7))


def test_of_no_dimensions() -> None:
    table: dict[str, Any] = {
        "sort": lambda x: x.sort(),
        "topk": lambda x: x.topk(1),
        "kth": lambda x: x.kthvalue(1),
        "median": lambda x: x.median(0),
        "cumprod": lambda x: x.cumprod(0),
        "cummax": lambda x: x.cummax(0),
        "scatter": lambda x: x.scatter(0, torch.tensor(0), 3.0),
    }
    check(functions(table), torch.tensor(2.5))


def test_medians_and_quantiles() -> None:
    table: dict[str, Any] = {
        "median": lambda x: x.median(1),
        "of all": torch.median,
        "without NaN": lambda x: x.nanmedian(1, True),
        "all without NaN": torch.nanmedian,
        "quantile": lambda x: torch.quantile(x, 0.3, 1),
        "several": lambda x: torch.quantile(x, torch.tensor([0.0, 0.4, 1.0]), 0, keepdim=True),
        "of all, nearest": lambda x: torch.quantile(x, 0.7, interpolation="nearest"),
        "midpoint": lambda x: torch.nanquantile(x, 0.6, 1, interpolation="midpoint"),
        "lower": lambda x: torch.nanquantile(x, 0.6, interpolation="lower"),
    }
    check(functions(table), floats(4, 6))
    check(functions(table), special(4, 6))


def test_running() -> None:
    table: dict[str, Any] = {
        "prod": lambda x: x.cumprod(1),
        "max": lambda x: x.cummax(0),
        "min": lambda x: x.cummin(1),
        "logsumexp": lambda x: x.logcumsumexp(1),
    }
    check(functions(table), floats(4, 6))
    check(functions({k: f for k, f in table.items() if k != "logsumexp"}), special(4, 6))
    check(functions({k: table[k] for k in ("prod", "max", "min")}), integers(3, 5))
    check(lambda x: x.cummax(1), floats(3, 5) > 0)


def test_searching() -> None:
    lines, values = torch.tensor([[-1.0, 0.0, 0.5], [-2.0, 0.5, 2.0]]), special(2, 4)
    check(lambda b, v: torch.searchsorted(b, v), lines, values)
    check(lambda b, v: torch.searchsorted(b, v, right=True, out_int32=True), lines, values)
    check(lambda b, v: (torch.bucketize(v, b), torch.bucketize(v, b, right=True)), lines[1], values)
    check(lambda b: torch.bucketize(0.5, b), lines[0])
    check(lambda v: torch.histc(v, 5, -1, 1), floats(9))
    check(lambda v: torch.histc(v, 4), floats(9))
    check(lambda v: torch.isin(v, torch.tensor([1, 3])), integers(3, 4))


def test_scatter() -> None:
    index = torch.tensor([[0, 2, 1], [4, 4, 0]])
    for function in (
        lambda x, s: x.scatter(1, index[:, :2], s),
        lambda x, s: x.scatter(1, index, 2.5),
        lambda x, s: x.scatter(0, index[:1] % 3, s, reduce="add"),
        lambda x, s: x.scatter(1, index, 2.0, reduce="multiply"),
        lambda x, s: x.scatter_add(1, index, s),
        *(
            lambda x, s, r=reduce, i=include: x.scatter_reduce(1, index, s, r, include_self=i)
            for reduce in ("sum", "prod", "mean", "amax", "amin")
            for include in (True, False)
        ),
    ):
        check(function, floats(3, 5), floats(2, 3, seed=1))
    check(lambda x: x.scatter_reduce(0, torch.tensor([1, 1]), x[:2], "mean"), integers(4))


def test_along_an_axis() -> None:
    index = torch.tensor([2, 0])
    table: dict[str, Any] = {
        "add": lambda x, s: x.index_add(0, index, s, alpha=2),
        "twice": lambda x, s: x.index_add(0, torch.tensor([1, 1]), s),
        "copy": lambda x, s: x.index_copy(0, index, s),
        "fill": lambda x, s: x.index_fill(1, index, 4.0),
        "mean": lambda x, s: x.index_reduce(0, index, s, "mean", include_self=False),
        "max": lambda x, s: x.index_reduce(0, index, s, "amax"),
        "put": lambda x, s: x.put(torch.tensor([[0, -1]]), s[:1, :2]),
        "added": lambda x, s: x.put(torch.tensor([3, 3]), s[0, :2], True),
        "masked": lambda x, s: x.masked_scatter(x > 0, x * 10),
        "diagonal": lambda x, s: x.diagonal_scatter(s[:, 0], 2),
    }
    check(functions(table), floats(3, 4), floats(2, 4, seed=1))


def test_index_put() -> None:
    rows, columns = torch.tensor([0, 2, -1]), torch.tensor([1, 1, 0])

    def put(*indices: Any, accumulate: bool = False) -> Any:
        return lambda x, v: torch.index_put(x, indices, v, accumulate)

    check(put(rows), floats(4, 5), floats(3, 5))
    check(put(rows, columns), floats(4, 5, 2), floats(3, 2))
    check(put(rows, columns, accumulate=True), floats(4, 5), floats(3))
    check(put(rows[:, None], columns[None]), floats(4, 5), floats(1))
    check(lambda x, v: _assigned(x, (slice(None), rows), v), floats(2, 4, 3), floats(3, 3))
    check(lambda x, v: _assigned(x, (rows, slice(None), columns), v), floats(4, 2, 3), floats(3, 2))
    check(lambda x, v: _assigned(x, (x[:, 0] > 0,), v), floats(4, 3), floats(3))
    check(lambda x, v: torch.index_put(x, (x > 0,), v, True), floats(4, 3), floats(1))


def _assigned(x: torch.Tensor, where: Any, value: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[where] = value
    return x


def test_signs() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, -0.0, float("inf"), -float("inf")])
    table: dict[str, Any] = {
        "signbit": torch.signbit,
        "copysign": lambda x: torch.copysign(torch.ones(6), x),
        "a number": lambda x: torch.copysign(x, -1.0),
        "angle": torch.angle,
    }
    check(functions(table), x)


def test_pooling_with_indices() -> None:
    pools: dict[str, Any] = {
        "plain": lambda x: torch.nn.functional.max_pool2d(x, 2, return_indices=True),
        "padded": lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1, 1, True, return_indices=True),
        "dilated": lambda x: torch.nn.functional.max_pool2d(x, 2, 1, 0, 2, return_indices=True),
    }
    check(functions(pools), floats(2, 3, 7, 6))

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        values, positions = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
        return torch.nn.functional.max_unpool2d(values, positions, 2)

    check(there_and_back, floats(2, 3, 6, 6))


def test_powers() -> None:
    check(lambda x: (torch.linalg.matrix_power(x, 5), torch.linalg.matrix_power(x, 0)), floats(2, 3, 3))
    check(lambda x: (torch.linalg.vander(x), torch.linalg.vander(x, N=2)), floats(2, 4))
    check(lambda x: torch.nn.functional.pdist(x), floats(5, 3))
