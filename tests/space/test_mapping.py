"""Which iterations an instruction takes over: the test on access matrices, and what it lets through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loops.gpu.products import Product
from tests.space.sketches.cuda.tasks import CONVOLUTIONS, product_task
from tilewright.dtypes import DType
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200
from tilewright.hw.tensor_cores import multiply
from tilewright.space.contraction import TwoFactorContraction, contraction_of
from tilewright.space.mapping import (
    Matrix,
    access_matrix,
    is_valid,
    mappings,
    times,
    transposed,
)
from tilewright.space.template import GpuWork

PRODUCT = ((True, True, False), (True, False, True), (False, True, True))


def contraction(task: Task) -> TwoFactorContraction:
    formula = GpuWork(task, H200).formula
    assert formula is not None
    found = contraction_of(formula, [DType.F16, DType.BF16, DType.F32])
    assert found is not None
    return found


def test_the_instruction_says_what_moves_with_what() -> None:
    iterations, matrix = access_matrix(multiply(16, DType.F16))
    assert [axis.extent for axis in iterations] == [16, 8, 16]
    assert matrix == PRODUCT


def test_a_convolution_as_a_product() -> None:
    """Of n, y, x, o, ky, kx, c: pixels are rows, a window's elements are summed."""
    image, weight = (
        (True, True, True, False, True, True, True),
        (False, False, False, True, True, True, True),
    )
    algorithm: Matrix = ((True, True, True, True, False, False, False), image, weight)
    rows, columns, instruction_k = (
        tuple(at in which for at in range(7)) for which in ((0, 1, 2), (3,), (4, 5, 6))
    )
    assert is_valid(algorithm, PRODUCT, (rows, columns, instruction_k))
    assert not is_valid(algorithm, PRODUCT, (columns, rows, instruction_k)), (
        "the operands would have to be exchanged"
    )
    assert not is_valid(algorithm, PRODUCT, (instruction_k, columns, rows)), "pixels are not summed"


@settings(max_examples=25)
@given(st.lists(st.sampled_from([*transposed(PRODUCT), (True, True, True)]), min_size=1, max_size=4))
def test_what_is_valid_is_walked_as_the_instruction_walks(columns: list[tuple[bool, bool, bool]]) -> None:
    """Of all matchings: those where every axis has its iteration's column, and every iteration has an axis."""
    algorithm = transposed(tuple(columns))
    for at in itertools.product(range(3), repeat=len(columns)):
        matching: Matrix = tuple(tuple(number == iteration for number in at) for iteration in range(3))
        expected = set(at) == {0, 1, 2} and all(
            column == transposed(PRODUCT)[number] for column, number in zip(columns, at, strict=True)
        )
        assert is_valid(algorithm, PRODUCT, matching) == expected
        assert times(matching, transposed(matching)) == tuple(
            tuple(i == j and i in at for j in range(3)) for i in range(3)
        )


@pytest.mark.parametrize("swapped", [False, True])
def test_products_have_their_mapping(swapped: bool) -> None:
    """A batch that both factors move with is left to the blocks."""
    case = Product(40, 24, 56, batch=3, transposed_a=swapped, transposed_b=not swapped)
    (mapping,) = mappings(contraction(product_task(case)), multiply(16, DType.F16))
    assert mapping.sizes == (40, 24, 56)
    assert [axis.extent for axis in mapping.batch] == [3]


def test_windows_are_summed_inside_or_around() -> None:
    work = contraction(CONVOLUTIONS[0].task())
    found = mappings(work, multiply(16, DType.F16))
    assert [(mapping.sizes, len(mapping.outer)) for mapping in found] == [
        ((392, 64, 576), 0),
        ((392, 64, 192), 1),
        ((392, 64, 64), 2),
    ]
