"""A bias as rows of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.gemmini.bias import decoded, encoded, limit, rows_for, stored_bytes


@given(st.integers(1, 20), st.data())
def test_the_rows_add_up_to_the_bias(rows: int, data: st.DataObject) -> None:
    most = limit(rows)
    bias = np.array(data.draw(st.lists(st.integers(-most, most), min_size=1, max_size=9)), np.int32)
    stored = encoded(bias, rows)
    assert stored.size == stored_bytes(bias.size, rows)
    np.testing.assert_array_equal(decoded(stored, rows), bias)


@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_the_fewest_rows_that_hold_a_magnitude(rows: int) -> None:
    assert rows_for(limit(rows)) == rows and rows_for(limit(rows) + 1) == rows + 1
    found = decoded(encoded(np.array([limit(rows), -limit(rows)], np.int32), rows), rows)
    assert found.tolist() == [limit(rows), -limit(rows)]


def test_what_no_row_holds_is_clipped() -> None:
    assert decoded(encoded(np.array([-(2**31), 10**9], np.int64), 2), 2).tolist() == [-limit(2), limit(2)]
