"""Addresses of arrays, and the tensors that a call returns, by every road that a call may take to them."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from tests.runtime import toys
from tilewright.dtypes import DType
from tilewright.runtime.plan import TensorSpec
from tilewright.runtime.ports import OutPort, array_address


@pytest.mark.parametrize("dtype", list(DType), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7)], ids=str)
@pytest.mark.parametrize("writable", [True, False])
def test_the_address_of_an_array(dtype: DType, shape: tuple[int, ...], writable: bool) -> None:
    whole = np.zeros((3, *shape), dtype.numpy)
    whole.flags.writeable = writable
    for array in (whole, whole[1:], np.zeros(shape, dtype.numpy)):
        assert array_address(array) == array.ctypes.data


def test_taking_an_address_leaves_no_hold_on_the_array() -> None:
    array = np.zeros(4, np.float32)
    alive = weakref.ref(array)
    array_address(array)
    del array
    assert alive() is None


@pytest.mark.parametrize("shape", [(), (1,), (0,), (4, 0, 3), (3, 1, 5), (300, 1000)], ids=str)
def test_a_new_tensor_is_as_torch_makes_it(shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    tensor, address = OutPort(TensorSpec("y", "f32", shape)).new_torch()
    usual = torch.empty(shape, dtype=torch.float32)
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == (
        usual.shape,
        usual.stride(),
        usual.dtype,
        usual.device,
    )
    assert address == tensor.data_ptr() and not tensor.requires_grad


def test_a_read_only_array_is_taken_where_it_lies() -> None:
    x = np.arange(4, dtype=np.float32)
    x.flags.writeable = False
    np.testing.assert_array_equal(toys.identity((4,))(x), x)


def test_a_kept_frame_follows_the_number_of_threads() -> None:
    model = toys.identity((8, 2), extent=8, threads=1)
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    for count in (1, 2, 3, 1, 2):
        model.threads = count
        np.testing.assert_array_equal(model(x), x)
        (frame,) = model.executor._free
        assert frame.call.threads == count
        assert (frame.call.launcher is not None) == (count > 1)
