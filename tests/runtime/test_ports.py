"""Addresses of arrays, and the tensors that a call returns, by every road that a call may take to them."""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import pytest

from tests.runtime import toys
from tilewright.dtypes import DType
from tilewright.errors import InputError
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


# -- memory that is shorter than the shape says -----------------------------------------------------------------------


def test_views_within_their_memory_are_taken() -> None:
    whole = np.arange(64, dtype=np.float32)
    views = [whole[8:40], whole[::-1][:32], whole[::2], np.frombuffer(whole.tobytes(), np.float32)[:32]]
    views += [np.broadcast_to(np.float32(3), (32,)), np.lib.stride_tricks.as_strided(whole, (32,), (8,))]
    views += [np.frombuffer(mmap.mmap(-1, 4096), np.float32)[-32:], whole.reshape(8, 8).T.reshape(-1)[:32]]
    model = toys.identity((32,))
    for view in views:
        np.testing.assert_array_equal(model(view), view)


def test_arrays_beyond_their_memory_are_refused() -> None:
    short = np.zeros(8, np.float32)
    strided = np.lib.stride_tricks.as_strided
    frozen = np.frombuffer(bytes(32), np.float32)
    model = toys.identity((32,))
    for view in (
        strided(short, (32,), (4,)),
        strided(short, (32,), (1 << 20,)),
        strided(short[4:], (32,), (-4,)),
        strided(short, (64,), (4,))[16:48],
        strided(frozen, (32,), (4,)),
        strided(short, (4, 8), (32, 4)).reshape(32),
    ):
        with pytest.raises(
            InputError, match=r"f32\[32\] whose memory is shorter than that\n  try: pass a tensor that owns"
        ):
            model(view)


def test_tensors_beyond_their_storage_are_refused() -> None:
    torch = pytest.importorskip("torch")
    model = toys.identity((32,))
    whole = torch.arange(64.0)
    for view in (
        whole[:32],
        whole[32:],
        whole[::2],
        torch.tensor(3.0).expand(32),
        whole.view(8, 8).T.reshape(-1)[:32],
    ):
        assert torch.equal(model(view), view)
    for keep, view in ((8, torch.zeros(32)), (100, torch.zeros(64)[32:]), (64, torch.zeros(64)[::2])):
        view.untyped_storage().resize_(keep)
        with pytest.raises(InputError, match="whose memory is shorter"):
            model(view)
