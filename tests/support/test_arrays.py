from __future__ import annotations

import itertools

import numpy as np
import pytest

from tilewright.support.arrays import permuted


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (300, 257), (1, 500), (2, 3, 4), (0, 200)])
def test_equals_transpose(shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    for axes in itertools.permutations(range(len(shape))):
        result = permuted(array, axes)
        assert result.flags.c_contiguous
        np.testing.assert_array_equal(result, np.transpose(array, axes))


def test_strided_source() -> None:
    array = np.arange(600 * 400).reshape(600, 400)[::2, ::2]
    np.testing.assert_array_equal(permuted(array, (1, 0)), array.T)
