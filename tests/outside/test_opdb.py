"""A sample of the suite of PyTorch's operators that fits in CI; `python -m tests.outside.opdb_suite` is all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outside import opdb_suite
from tests.outside.opdb_suite import BAD, EXCLUDED, RANK, l2_error, read_baseline, run

# One or two of each family.
NAMES = (
    "add cat cumprod einsum expand floor_divide gather index_put linalg_det log_softmax matmul median"
    " native_layer_norm nn_functional_avg_pool2d nn_functional_conv2d nn_functional_interpolate_bilinear"
    " pow roll scatter_reduce_mean sort topk var"
)
SAMPLE = NAMES.split()


def test_a_sample_is_right_and_as_good_as_the_baseline() -> None:
    results = run(SAMPLE, 1, 2, False)
    assert set(results) == set(SAMPLE) and not set(results) & set(EXCLUDED)
    baseline = {**dict.fromkeys(SAMPLE, "full"), **read_baseline()}
    problems = [
        f"{name}: {kind}, was {baseline[name]}: {detail}"
        for name, (kind, _, detail) in results.items()
        if kind in BAD or RANK[kind] > max(RANK[baseline[name]], RANK["full"])
    ]
    assert not problems, "\n".join(problems)
    assert sum(kind == "full" for kind, _, _ in results.values()) >= len(SAMPLE) // 2


def test_the_baseline() -> None:
    baseline = read_baseline()
    assert not set(baseline) & set(EXCLUDED)
    assert not set(baseline.values()) & set(BAD)
    assert list(baseline.values()).count("full") >= 250


@pytest.mark.outside
def test_all() -> None:
    assert opdb_suite.main([]) == 0


def test_what_counts_as_wrong() -> None:
    import torch

    right = torch.tensor([1.0, float("nan"), float("inf")])
    assert opdb_suite.difference(right.clone(), right) == ""
    assert opdb_suite.difference(torch.tensor([1.0, 2.0, float("inf")]), right) == "error inf"
    assert opdb_suite.difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == "error 0.5"
    assert "instead of" in opdb_suite.difference(torch.ones(2), torch.ones(1, 2))
    assert l2_error(torch.tensor([1.0001]), torch.ones(1)) == pytest.approx(1e-4, rel=1e-2)
    assert Path(opdb_suite.BASELINE).name == "opdb_baseline.txt"
