"""Stable fingerprints of plain data: the same in every process, on every machine, for every version of Python.

`hash()` is salted per process and `repr` shortens arrays. Here every value is written as a tag, a length and bytes,
so that two different values never write the same bytes, and the whole is hashed with SHA-256.

Distinct: `1`, `1.0` and `True`; `0.0` and `-0.0`; `"a"` and `b"a"`. Equal: lists and tuples; dicts with another order
of items; NaNs of different bits.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_DIGITS = 32


def fingerprint(*parts: Any) -> str:
    """32 hexadecimal digits for `parts`: str, int, float, bool, None, bytes, enum members (by class and name), NumPy
    arrays, and tuples, lists and dicts of these. Raises TypeError for anything else."""
    digest = hashlib.sha256()
    _write(digest, parts)
    return digest.hexdigest()[:_DIGITS]


def _write(digest: Any, value: Any) -> None:
    # bool before int and enums first: an IntEnum is an int, and so is True.
    if isinstance(value, enum.Enum):
        _leaf(digest, b"e", f"{type(value).__name__}.{value.name}".encode())
    elif value is None:
        _leaf(digest, b"n", b"")
    elif isinstance(value, bool):
        _leaf(digest, b"b", b"1" if value else b"0")
    elif isinstance(value, int):
        _leaf(digest, b"i", str(value).encode())
    elif isinstance(value, float):
        # struct, not repr: exact by construction. All NaNs count as one.
        _leaf(digest, b"f", b"nan" if value != value else struct.pack("<d", value))
    elif isinstance(value, str):
        _leaf(digest, b"s", value.encode())
    elif isinstance(value, (bytes, bytearray, memoryview)):
        _leaf(digest, b"y", bytes(value))
    elif isinstance(value, np.ndarray):
        _array(digest, value)
    elif isinstance(value, (tuple, list)):
        digest.update(b"t%d:" % len(value))
        for item in value:
            _write(digest, item)
    elif isinstance(value, Mapping):
        # Sorted by the fingerprint of the key, because keys of mixed types cannot be compared.
        items = sorted((fingerprint(key), key) for key in value)
        digest.update(b"d%d:" % len(items))
        for _, key in items:
            _write(digest, key)
            _write(digest, value[key])
    else:
        raise TypeError(f"no stable fingerprint for a {type(value).__name__}: {value!r}")


def _leaf(digest: Any, tag: bytes, payload: bytes) -> None:
    digest.update(b"%s%d:" % (tag, len(payload)))
    digest.update(payload)


def _array(digest: Any, array: np.ndarray) -> None:
    if array.dtype.hasobject:
        raise TypeError("no stable fingerprint for an array of objects")
    # `name` distinguishes bfloat16 from other two-byte types, which `str` does not; bytes are hashed in little-endian
    # order.
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    _write(digest, ("array", array.dtype.name, array.shape))
    digest.update(np.ascontiguousarray(little).view(np.uint8).data if array.size else b"")
