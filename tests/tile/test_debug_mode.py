"""Debug mode: accesses out of bounds, reads of what nothing wrote, races between instances, assertions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tilewright import errors

WIDTH = 8


@tilewright.kernel
def unmasked(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


def test_an_access_out_of_bounds() -> None:
    x, out = np.zeros(20, np.float32), np.zeros(32, np.float32)
    with pytest.raises(errors.OutOfBoundsError) as caught:
        unmasked[2](x, out, BLOCK=16, debug=True)
    assert "program instance (1, 0, 0): load of `x` at element offset 20 (tile index (4,))" in str(
        caught.value
    )
    assert "12 elements of the access" in str(caught.value)
    assert caught.value.where is not None and "tl.load(x + at)" in caught.value.where.text
    inside = np.zeros((4, 8), np.float32)[:, :4]
    with pytest.raises(errors.OutOfBoundsError, match="element offset 4 "):
        unmasked.interpret[1](inside, out, BLOCK=16)  # between the rows of a view


@tilewright.kernel
def accumulate(out, n):
    for i in range(n):
        tl.store(out + i, tl.load(out + i) + 1)


def test_a_read_of_what_nothing_wrote() -> None:
    out = np.zeros(4, np.float32)
    accumulate[1](out, 4, debug=True)
    with pytest.raises(
        errors.UnwrittenReadError, match=r"instance \(0, 0, 0\): load of `out` at element offset 0"
    ):
        accumulate[1](out, 4, debug=True, unwritten=["out"])


@tilewright.kernel
def writes_same(x, out):
    tl.store(out, tl.program_id(0))


@tilewright.kernel
def reads_neighbour(x, out):
    i = tl.program_id(0)
    tl.store(out + i, tl.load(x + i + 1))


@tilewright.kernel
def reads_then_writes(x, out):
    i = tl.program_id(0)
    value = tl.load(x)
    if i == 0:
        tl.store(x, value + 1)


@tilewright.kernel
def mixes_atomics(x, out):
    if tl.program_id(0) == 0:
        tl.atomic_add(out, 1.0)
    else:
        tl.store(out, 2.0)


@tilewright.kernel
def adds(x, out):
    tl.atomic_add(out, 1.0)


@pytest.mark.parametrize("kernel", [writes_same, mixes_atomics])
def test_races_between_writes(kernel: Any) -> None:
    x, out = np.zeros(8, np.float32), np.zeros(8, np.float32)
    kernel[3](x, out)
    with pytest.raises(
        errors.RaceError, match=r"instance \(1, 0, 0\): race on element offset 0 of `out`"
    ) as caught:
        kernel[3](x, out, debug=True)
    assert re.search(
        r"and instance \(0, 0, 0\) (writes|adds to) it at .*test_debug_mode.py:\d+", str(caught.value)
    )


def test_races_between_reads_and_writes_also_through_two_views() -> None:
    x = np.zeros(9, np.float32)
    reads_neighbour[8](x, np.zeros(8, np.float32), debug=True)
    with pytest.raises(errors.RaceError, match="element offset 1"):
        reads_neighbour[8](x, x, debug=True)
    with pytest.raises(errors.RaceError, match="race"):
        reads_neighbour[8](x, x[:8], debug=True)
    # One instance writes what the others read after it: found although it is the first that wrote.
    with pytest.raises(errors.RaceError, match=r"this instance reads it, and instance .* writes it"):
        reads_then_writes[2](x, x, debug=True)


def test_atomics_alone_do_not_race() -> None:
    out = np.zeros(1, np.float32)
    adds[5](out, out, debug=True)
    assert out[0] == 5


@tilewright.kernel
def adds_and_reads(x, out):
    tl.atomic_add(x, 1.0)
    if tl.program_id(0) == 1:
        tl.store(out, tl.load(x))


@tilewright.kernel
def adds_and_writes(x, out):
    tl.atomic_add(x, 1.0)
    if tl.program_id(0) == 1:
        tl.store(x, 2.0)


@pytest.mark.parametrize("kernel", [adds_and_reads, adds_and_writes])
def test_an_instance_that_adds_last_races_with_one_that_added_before(kernel: Any) -> None:
    x, out = np.zeros(1, np.float32), np.zeros(1, np.float32)
    with pytest.raises(
        errors.RaceError, match=r"\(1, 0, 0\): race .* and instance \(0, 0, 0\) adds to it at"
    ):
        kernel[2](x, out, debug=True)
    kernel[1](x, out, debug=True)


@tilewright.kernel
def forgets_other(x, out, n):
    at = tl.arange(0, 8)
    tl.store(out, tl.sum(tl.load(x + at, mask=at < n), axis=0))


def test_debug_mode_shows_the_use_of_a_masked_element() -> None:
    x, out = np.ones(8, np.float32), np.zeros(1, np.float32)
    forgets_other[1](x, out, 5, debug=True)
    assert np.isnan(out[0])


@tilewright.kernel
def asserts(x, n):
    at = tl.arange(0, 8)
    assert WIDTH == 8
    tl.device_assert(at < n, "too many")


def test_device_assert() -> None:
    asserts[1](np.zeros(1), 5)
    with pytest.raises(
        errors.DeviceAssertionError, match=r"instance \(0, 0, 0\): assertion failed at index \(5,\): too"
    ):
        asserts[1](np.zeros(1), 5, debug=True)
