"""Fingerprints are stable over processes and tell different values apart."""

from __future__ import annotations

import enum
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.dtypes import DType
from tilewright.support.fingerprint import fingerprint


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Size(enum.IntEnum):
    RED = 1


DISTINCT = [
    (),
    (None,),
    (1,),
    (1.0,),
    (True,),
    ("1",),
    (b"1",),
    ("a", "b"),
    ("ab",),
    (("a", "b"),),
    (("a",), "b"),
    (0.0,),
    (-0.0,),
    (float("nan"),),
    (Colour.RED,),
    (Colour.BLUE,),
    (Size.RED,),
    (DType.F32,),
    ({"a": 1},),
    ({"a": 2},),
    ({},),
    (np.zeros(3),),
    (np.zeros(3, np.float32),),
    (np.zeros((3, 1)),),
    (np.zeros((1, 3)),),
    (np.zeros(2, np.float16),),
    (np.zeros(2, ml_dtypes.bfloat16),),
    (np.zeros(0),),
    (np.zeros((0, 4)),),
]


def test_distinct_values_have_distinct_fingerprints() -> None:
    assert len({fingerprint(*parts) for parts in DISTINCT}) == len(DISTINCT)


def test_form() -> None:
    assert len(fingerprint("x")) == 32
    assert int(fingerprint("x"), 16) >= 0


def test_what_is_not_told_apart() -> None:
    assert fingerprint([1, 2]) == fingerprint((1, 2))
    assert fingerprint({"a": 1, 2: "b"}) == fingerprint({2: "b", "a": 1})
    a = np.arange(12.0).reshape(3, 4)
    assert fingerprint(a) == fingerprint(np.asfortranarray(a))
    assert fingerprint(a[:, ::2]) == fingerprint(a[:, ::2].copy())
    assert fingerprint(a.astype(">f8")) == fingerprint(a)


def test_the_same_in_another_process() -> None:
    code = (
        "import numpy as np; from tilewright.dtypes import DType;"
        "from tilewright.support.fingerprint import fingerprint;"
        "print(fingerprint('x', 1, 2.5, None, {'b': (1,), 'a': DType.F32}, np.arange(6, dtype='i4').reshape(2, 3)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = fingerprint("x", 1, 2.5, None, {"b": (1,), "a": DType.F32}, np.arange(6, dtype="i4").reshape(2, 3))
    assert found == {here}


def test_a_known_value() -> None:
    # A change of the scheme would orphan every stored record: it must be deliberate.
    assert fingerprint("tilewright", 1) == "15577b1c069496f76955bb62f24a22b0"


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, np.array([object()])])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="no stable fingerprint"):
        fingerprint(value)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: (
        st.tuples(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(plain, plain)
def test_equal_exactly_when_the_values_are(a: object, b: object) -> None:
    # `repr` tells 1 from True and 0.0 from -0.0, as the fingerprint does; dicts compare sorted.
    def written(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key!r}:{written(value[key])}" for key in sorted(value)) + "}"
        if isinstance(value, tuple):
            return "(" + ",".join(map(written, value)) + ")"
        return repr(value)

    assert (fingerprint(a) == fingerprint(b)) == (written(a) == written(b))
