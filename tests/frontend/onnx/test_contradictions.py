"""Sizes that contradict the data are refused, by the operator's name; what only looks like it is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.faults.hostile.building import Case, body, numbers, scalar
from tests.faults.hostile.contradictions import contradictions
from tests.frontend.onnx.checking import check, floats
from tilewright.errors import UnsupportedOpsError
from tilewright.frontend.onnx import import_onnx
from tilewright.graph.oracle import evaluate

CASES = dict(contradictions())


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_contradict_the_data_are_refused(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name]
    with pytest.raises(UnsupportedOpsError, match=name.split(":", maxsplit=1)[0]):
        import_onnx(case(tmp_path))


@pytest.mark.parametrize(("theta", "size"), [((2, 2, 3), (2, 1, 4, 5)), ((1, 3, 4), (1, 2, 3, 4, 5))])
def test_affine_grid_of_a_size_that_fits(theta: tuple[int, ...], size: tuple[int, ...]) -> None:
    check("y = AffineGrid (x, n)", {"x": floats(*theta), "n": numbers(*size)}, pin=True)


def test_a_range_of_large_numbers_is_counted_exactly(tmp_path: Path) -> None:
    """Its ends are 3 apart, and one float64."""
    first = 1 << 62
    case = body("y = Range (a, b, c)", a=scalar(first), b=scalar(first + 5), c=scalar(2))
    imported = import_onnx(case(tmp_path))
    (result,) = evaluate(imported.graph, [floats(2, 3)] if imported.graph.inputs else [])
    np.testing.assert_array_equal(result, [first, first + 2, first + 4])


def test_axes_of_a_reversal_count_from_the_end() -> None:
    text = "y = ReverseSequence <batch_axis: int = -1, time_axis: int = 0> (x, n)"
    check(text, {"x": floats(3, 3), "n": numbers(1, 3, 2)})
