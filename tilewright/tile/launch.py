"""Warm launches: the second launch of a kernel with arguments of the same kind, without asking everything again.

A launch is looked up by the signature of its arguments: the type of each tensor and where it is, the width of each
number, the constexprs, the facts of `executors.py`, the options. What is not plain (defaults, tensors with holes, a
program without code) has no signature, and takes the long way in `kernel.py`, which checks and explains; nothing is
remembered that the long way has not accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.tile.executors import Launchable, are_disjoint
from tilewright.tile.frontend.source import Captured, constexpr_key, is_current
from tilewright.tile.ir import MAX_GRID

_I32_MIN, _I32_END = -(2**31), 2**31
_I64_END = 2**63
_F32_MAX = float(np.finfo(np.float32).max)
_MAX_KNOWN = 4096  # entries, before all are forgotten: constexprs that change with every call


def remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry to a table of bounded size."""
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known[key] = value


class WarmLaunches:
    """The launches of a kernel so far, by signature."""

    def __init__(self, names: Sequence[str], constexprs: Sequence[bool]) -> None:
        self._names = tuple(names)
        self._constexprs = tuple(constexprs)
        self._known: dict[Any, tuple[Launchable, Captured]] = {}
        self._tensors: set[type] = set()  # types of tensors that have been launched; arrays are known
        self._divisors = False

    def launch(
        self, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any] | None
    ) -> bool:
        """Launch a known signature; return False if it is unknown."""
        if not self._known:
            return False
        found = self._signature(args, kwargs, options)
        if found is None:
            return False
        key, values, given = found
        try:
            known = self._known.get(key)
        except TypeError:  # not hashable
            return False
        if known is None:
            return False
        launchable, captured = known
        if not is_current(captured):
            return False
        sizes = grid(dict(zip(self._names, given, strict=True))) if callable(grid) else grid
        if type(sizes) is not tuple:
            sizes = (sizes,)
        for size in sizes:
            if type(size) is not int or not 0 < size <= MAX_GRID:
                return False
        count = len(sizes)
        if not 1 <= count <= 3:
            return False
        launchable((*sizes, 1, 1)[:3], values)
        return True

    def remember(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        launchable: Launchable,
        captured: Captured,
        divisors: bool,
    ) -> None:
        """Remember a launch that was prepared in full."""
        self._divisors = self._divisors or divisors
        for value in (*args, *kwargs.values()):
            if hasattr(value, "data_ptr"):
                self._tensors.add(type(value))
        found = self._signature(args, kwargs, options)
        if found is None:
            return
        remember(self._known, found[0], (launchable, captured))

    def _signature(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any] | None
    ) -> tuple[tuple[Any, ...], list[Any], tuple[Any, ...]] | None:
        """The key, the values of the parameters, and the arguments in their order."""
        names = self._names
        given = args
        if kwargs:
            try:
                given = args + tuple([kwargs[name] for name in names[len(args) :]])
            except KeyError:
                return None
        if len(given) != len(names) or len(args) + len(kwargs) != len(names):
            return None
        key: list[Any] = []
        values: list[Any] = []
        spans: list[tuple[int, int]] = []
        for value, constexpr in zip(given, self._constexprs, strict=True):
            kind = type(value)
            if constexpr:
                key.append((kind, value) if kind is int or kind is bool else constexpr_key(value))
                continue
            key.append(kind)
            if kind is int:
                if _I32_MIN <= value < _I32_END:
                    key.append(4)
                elif -_I64_END <= value < _I64_END:
                    key.append(8)
                else:
                    return None
                values.append(value)
            elif kind is float:
                if not -_F32_MAX <= value <= _F32_MAX and value - value == 0.0:
                    return None  # it is rounded to infinity first
                values.append(value)
            elif kind is bool:
                values.append(value)
            elif kind in self._tensors:
                if not value.is_contiguous():
                    return None
                key.append(value.dtype)
                key.append(value.device)
                address = value.data_ptr()
                values.append(address)
                spans.append((address, address + value.nbytes))
            elif kind is np.ndarray:
                flags = value.flags
                if not flags.c_contiguous:
                    return None
                key.append(value.dtype)
                key.append(flags.writeable)
                address = value.__array_interface__["data"][0]
                values.append(address)
                spans.append((address, address + value.nbytes))
            else:
                return None
        if len(spans) > 1:
            key.append(are_disjoint(spans))
        if self._divisors:
            key.extend([value & -value & 15 for value in values if type(value) is int])
        if options:
            key.append(tuple(options.items() if len(options) == 1 else sorted(options.items())))
        return tuple(key), values, given
