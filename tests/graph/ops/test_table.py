"""The op table as a whole: nothing in it is without a case, a meaning in PyTorch and the attributes that it reads."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import numpy as np
import pytest

from tests.graph.ops import (
    test_composites,
    test_contractions,
    test_creation,
    test_elementwise,
    test_movement,
    test_ordering,
    test_reductions,
    test_resize,
    test_scatter,
    test_tile_kernels,
    test_windows,
)
from tests.graph.ops.checks import F32, Case, check_lowering, node_of, oracle_of
from tilewright.graph.op import Fusion, flops_of, op_of, table

CASES: list[Case] = [
    *test_composites.CASES,
    *test_contractions.CASES,
    *test_contractions.TRANSPOSES,
    *test_creation.CASES,
    *test_elementwise.CASES,
    *test_movement.CASES,
    *test_ordering.CASES,
    *test_reductions.CASES,
    *test_resize.CASES,
    *test_scatter.CASES,
    *test_tile_kernels.CASES,
    *test_windows.CASES,
]
DECOMPOSED = {"conv_transpose", "batch_norm"}


def test_every_operator_has_a_case() -> None:
    assert {case.op for case in CASES} == set(table())


def test_every_operator_is_compared_with_torch() -> None:
    assert {case.op for case in CASES if case.torch is not None} == set(table())


def test_every_operator_is_lowered_or_decomposed() -> None:
    assert {name for name, op in table().items() if op.lower is None} == DECOMPOSED


def test_names_are_the_keys() -> None:
    assert all(op.name == name for name, op in table().items())
    for name in table():
        if op_of(name).attrs:
            assert inspect.isfunction(op_of(name).infer)


# Operands with an extent of 0 beyond those in the cases of the families.
EMPTY: list[tuple[str, list[tuple[int, ...]], dict[str, Any]]] = [
    ("relu", [(0,)], {}),
    ("add", [(0, 3), (1, 3)], {}),
    ("add", [(0,), (1,)], {}),
    ("gelu", [(2, 0)], {"approximate": "none"}),
    ("erf", [(0,)], {}),
    ("permute", [(0, 3)], {"axes": (1, 0)}),
    ("flip", [(0, 3)], {"axes": (0,)}),
    ("slice", [(0, 3)], {"starts": (0, 1), "stops": (0, 3), "steps": (1, 2)}),
    ("amax", [(0, 3)], {"axes": (1,), "keepdims": True}),
    ("argmin", [(0, 3)], {"axis": 1, "keepdims": False}),
    ("var", [(0, 3)], {"axes": (1,), "correction": 1, "keepdims": False}),
    ("var", [(3, 0)], {"axes": (1,), "correction": 1, "keepdims": False}),
    ("matmul", [(0, 2, 3), (3, 4)], {}),
    ("linear", [(0, 3), (4, 3), (4,)], {}),
    ("rms_norm", [(0, 4), (4,)], {"dims": 1, "eps": 1e-5}),
    ("layer_norm", [(4, 0)], {"dims": 1, "eps": 1e-5}),
    ("group_norm", [(0, 4, 3)], {"groups": 2, "eps": 1e-5}),
    ("group_norm", [(2, 4, 0), (4,), (4,)], {"groups": 2, "eps": 1e-5}),
    ("attention", [(0, 3, 4), (0, 5, 4), (0, 5, 2)], {"causal": True, "scale": 1.0}),
    ("attention", [(2, 0, 4), (2, 5, 4), (2, 5, 2)], {"causal": False, "scale": 1.0}),
    ("attention", [(2, 3, 4), (2, 0, 4), (2, 0, 2)], {"causal": False, "scale": 1.0}),
    ("adaptive_avg_pool", [(0, 2, 5)], {"sizes": (2,), "layout": "channels_first"}),
    ("adaptive_max_pool", [(2, 0, 5)], {"sizes": (2,), "layout": "channels_first"}),
]


@pytest.mark.parametrize(("op", "shapes", "attrs"), EMPTY)
def test_empty_operands(op: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any]) -> None:
    arrays = [np.ones(shape, F32.numpy) for shape in shapes]
    oracle_of(op, arrays, **attrs)
    if op not in DECOMPOSED:
        check_lowering(op, arrays, **attrs)


# -- work ---------------------------------------------------------------------------------------------------------


def flops(op: str, *shapes: tuple[int, ...], **attrs: Any) -> int:
    return flops_of(node_of(op, [np.zeros(shape, np.float32) for shape in shapes], attrs))


def test_flops() -> None:
    conv = test_contractions.conv_attrs(2, groups=2)
    assert flops("add", (2, 3), (3,)) == 6
    assert flops("permute", (2, 3), axes=(1, 0)) == 0
    assert flops("sum", (2, 3), axes=(1,), keepdims=False) == 6
    assert flops("mean", (2, 3), axes=(1,), keepdims=False) == 8
    assert flops("matmul", (5, 2, 3), (3, 4)) == 2 * 5 * 2 * 3 * 4
    assert flops("linear", (2, 3), (4, 3), (4,)) == 2 * 2 * 3 * 4 + 2 * 4
    assert flops("conv", (1, 4, 5, 5), (6, 2, 3, 3), **conv) == 2 * (6 * 3 * 3) * (2 * 3 * 3)
    assert flops("conv", (1, 4, 5, 5), (6, 2, 3, 3), (6,), **conv) == (6 * 3 * 3) * (2 * 2 * 3 * 3 + 1)
    transposed = test_contractions.conv_transpose((1, 3, 4, 5), (3, 2, 2, 2))
    assert flops("conv_transpose", (1, 3, 4, 5), (3, 2, 2, 2), **transposed.attrs) == 2 * (3 * 4 * 5) * (
        2 * 2 * 2
    )
    assert flops("max_pool", (1, 2, 6), **test_windows.max_attrs((3,))) == 2 * 2 * 3
    assert flops("softmax", (2, 3), axis=1) == 5 * 6
    assert flops("attention", (2, 3, 4), (2, 5, 4), (2, 5, 6), causal=False, scale=1.0) == 2 * 3 * 5 * (
        8 + 12 + 5
    )
    seen = 1 + 2 + 3  # pairs of a query and a key
    assert flops("attention", (2, 3, 4), (2, 5, 4), (2, 5, 6), causal=True, scale=1.0) == 2 * seen * 25


SUMMED = [name for name in sorted(table()) if op_of(name).fusion in (Fusion.COMPLEX, Fusion.REDUCTION)]


@pytest.mark.parametrize("name", SUMMED)
def test_the_work_of_what_combines_elements_is_stated(name: str) -> None:
    """More than one operation for each result, in some case at least; a running sum has one."""
    counted = []
    for case in CASES:
        if case.op != name:
            continue
        node = node_of(name, case.arrays(case.dtypes[0]), case.attrs)
        flops = flops_of(node)
        assert flops >= 0 and (node.type.size or not flops), case
        counted.append((flops, node.type.size))
    enough = operator.ge if name == "cumsum" else operator.gt
    assert any(results and enough(flops, results) for flops, results in counted)
