"""Kernels as text and constants."""

from __future__ import annotations

import math
import types
from typing import Any

import msgspec
import pytest

import tilewright.tile as tl
from tilewright.errors import KernelSourceError
from tilewright.support.bundle import Bundle, bundle_of, restored, value_of

SHIFT = 3
settings = types.ModuleType("settings")
settings.FACTOR, settings.UNUSED = 5, object()  # type: ignore[attr-defined]
thing = object()


def helper(x: float, power: int = SHIFT) -> float:
    return x**power


def kernel(x: float, n: int) -> float:
    return helper(x) * settings.FACTOR + math.floor(n) + SHIFT


def recursive(n: int) -> int:
    return 1 if n == 0 else n * recursive(n - 1)


def plain(function: Any) -> Any:
    return function


def test_a_function_survives_the_journey() -> None:
    data = msgspec.msgpack.encode(bundle_of(kernel))
    again = restored(msgspec.msgpack.decode(data, type=Bundle), plain)
    assert again(2.0, 7) == kernel(2.0, 7)
    assert again.__globals__["settings"].__dict__.get("UNUSED") is None


def test_functions_that_call_themselves_and_closures() -> None:
    assert restored(bundle_of(recursive), plain)(5) == 120
    offset = 4

    def shifted(x: int) -> int:
        return x + offset

    assert restored(bundle_of(shifted), plain)(1) == 5


def test_the_fingerprint_is_of_what_is_computed() -> None:
    def one(x: int) -> int:
        return x + SHIFT

    first = bundle_of(one).fingerprint

    def one(x: int) -> int:  # type: ignore[no-redef]
        # a comment

        return x + SHIFT

    assert bundle_of(one).fingerprint == first

    def one(x: int) -> int:  # type: ignore[no-redef]
        return x - SHIFT

    assert bundle_of(one).fingerprint != first


def test_language_and_types_travel_by_name() -> None:
    from tilewright.tile import load

    def uses(x: Any) -> Any:
        return load, tl.float32, x

    again = restored(bundle_of(uses), plain)
    assert again(1) == (load, tl.float32, 1)


def test_what_cannot_travel() -> None:
    def uses() -> Any:
        return thing

    with pytest.raises(KernelSourceError, match="`thing` in uses is a object"):
        bundle_of(uses)


def test_a_bundle_imports_nothing_else() -> None:
    with pytest.raises(KernelSourceError, match="may not import os"):
        value_of(("module", "os"))
    with pytest.raises(KernelSourceError, match="may not import subprocess"):
        value_of(("attribute", "subprocess:run"))


def computed_default(x, n=len("abc")):  # noqa: B008
    return x + n


def test_a_default_value_that_would_be_computed_elsewhere_is_refused() -> None:
    with pytest.raises(
        KernelSourceError, match=r"default value of computed_default is computed: len\('abc'\)"
    ):
        bundle_of(computed_default)
