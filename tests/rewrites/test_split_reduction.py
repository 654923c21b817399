from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rewrites.helpers import assert_same_function, graph_of, ops_of, weight, x_input
from tests.rewrites.oracles import Whims
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.rewrites.oracle import FewestBytes
from tilewright.rewrites.split_reduction import SplitReduction
from tilewright.tune.oracle import PredictedCosts


def predicted(cores: int) -> PredictedCosts:
    return PredictedCosts(replace(host(), cores=cores))


def product(m: int, n: int, k: int, dtype: DType = DType.F32) -> Node:
    return apply("matmul", x_input(m, k, dtype=dtype), weight(k, n, dtype=dtype))


def split(output: Node, cores: int) -> Graph:
    return SplitReduction(predicted(cores)).run(graph_of(output))


def test_few_results_with_long_sums_are_cut_for_the_cores() -> None:
    assert ops_of(split(product(1, 16, 32768), cores=4)) == ["reshape", "reshape", "matmul", "sum"]
    assert ops_of(split(product(4, 16, 32768), cores=4)) == ["reshape", "permute", "reshape", "matmul", "sum"]


def test_one_core_gains_nothing() -> None:
    assert ops_of(split(product(4, 16, 32768), cores=1)) == ["matmul"]


@pytest.mark.parametrize("m,n,k", [(128, 768, 768), (512, 512, 8192), (4, 16, 1000), (4, 16, 32749)])
def test_what_keeps_all_cores_busy_or_cannot_be_cut_stays_whole(m: int, n: int, k: int) -> None:
    assert ops_of(split(product(m, n, k), cores=2)) == ["matmul"]


@pytest.mark.parametrize("dtype", [DType.F16, DType.I32])
def test_partial_sums_lose_nothing(dtype: DType) -> None:
    assert ops_of(split(product(4, 16, 32768, dtype), cores=4)) == ["matmul"]


def test_where_no_machine_is_in_sight_nothing_is_cut() -> None:
    graph = graph_of(product(1, 16, 32768))
    assert SplitReduction(FewestBytes()).run(graph) is graph


def reduction(op: str, *shape: int, axes: tuple[int, ...] = (0,), keepdims: bool = False) -> Node:
    return apply(op, x_input(*shape), axes=axes, keepdims=keepdims)


@pytest.mark.parametrize("op", ["sum", "mean", "amax", "amin"])
def test_reductions_to_few_results_are_cut_for_the_cores(op: str) -> None:
    assert ops_of(split(reduction(op, 1 << 16, 64), cores=4)) == ["reshape", op, op, "reshape"]
    assert ops_of(split(reduction(op, 1 << 20), cores=4)) == ["reshape", op, op, "reshape"]


@pytest.mark.parametrize(
    "output",
    [
        reduction("sum", 1 << 16, 64, axes=(1,)),
        reduction("sum", 65521, 64),
        reduction("sum", 512, 1 << 10),
        reduction("sum", 1 << 12, 16),
        reduction("sum", 1 << 10, 64, 1 << 10, axes=(0, 2)),
        reduction("prod", 1 << 16, 64),
    ],
    ids=["many results", "a prime number of terms", "few terms", "few elements", "axes apart", "no sum"],
)
def test_other_reductions_stay_whole(output: Node) -> None:
    assert ops_of(split(output, cores=4)) == [output.op]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("op", ["sum", "mean", "amax", "amin"])
def test_a_reduction_is_the_same_function_however_it_is_cut(op: str, seed: int) -> None:
    inner = reduction(op, 3, 1 << 14, 2, 5, axes=(1, 2), keepdims=seed % 2 == 0)
    before = graph_of(apply("relu", inner))
    assert_same_function(before, SplitReduction(Whims(seed)).run(before))


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_same_function_however_it_is_cut(seed: int) -> None:
    x = x_input(3, 4096)
    left = apply("relu", apply("matmul", x, weight(4096, 5)))
    right = apply("matmul", apply("exp", apply("mul", x, weight(4096, seed=1))), weight(4096, 5, seed=2))
    before = graph_of(apply("add", left, right))
    assert_same_function(before, SplitReduction(Whims(seed)).run(before))
