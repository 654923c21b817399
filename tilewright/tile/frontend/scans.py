"""Scans and reductions by a function of the user's: `tl.associative_scan` and `tl.reduce`.

Both are built of other operations of the language, so that everything that runs tiles runs them. The function is
applied to whole tiles, half as many blocks of twice the size in each step, always to what lies before and what lies
behind it: it must be associative, and need not be commutative.

    scan    blocks of d elements are scanned, and each has its total:
            [a, ab | c, cd]  and  [ab | cd]      ->      [a, ab, ab c, ab cd]  and  [ab cd]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewright.errors import KernelShapeError, KernelTypeError
from tilewright.tile.frontend.builder import Builder, describe, tile_type
from tilewright.tile.frontend.builtin import Builtin
from tilewright.tile.ir import Value
from tilewright.tile.op import check_axis

Combine = Callable[..., Any]


def _operands(b: Builder, x: Any, axis: Any, combine: Any, what: str) -> tuple[list[Value], int]:
    """The tiles with the axis moved to the end, and the axis."""
    given = list(x) if isinstance(x, (tuple, list)) else [x]
    values = b.alike(*(b.tile(each, what) for each in given))
    shape = tile_type(values[0]).shape
    if not shape:
        raise KernelShapeError(
            f"{what} needs a tile, got a scalar", remedy="a scalar has no axes: use a tile"
        )
    if not callable(combine):
        raise KernelTypeError(
            f"{what} takes a function of two values for each tile, got {describe(combine)}",
            remedy=f"write tl.{what}(x, axis, combine), with def combine(a, b): return a + b",
        )
    at = check_axis(b.constexpr(axis, "axis", int), len(shape))
    order = (*(each for each in range(len(shape)) if each != at), at)
    return [_trans(b, value, order) for value in values], at


def _trans(b: Builder, value: Value, order: Sequence[int]) -> Value:
    return value if list(order) == sorted(order) else b.emit("trans", value, order=tuple(order))


def _combined(
    b: Builder, combine: Combine, first: list[Value], second: list[Value], what: str
) -> list[Value]:
    found = combine(*first, *second)
    results = list(found) if isinstance(found, tuple) else [found]
    if len(results) != len(first):
        raise KernelTypeError(
            f"the function of {what} returns {describe(found)}, and {len(first)} tiles are combined",
            remedy="return one value for each tile",
        )
    values = [b.value(each) for each in results]
    for value, operand in zip(values, first, strict=True):
        if value.type != operand.type:
            raise KernelTypeError(
                f"the function of {what} returns {value.type} where it is given {operand.type}",
                remedy="convert what it returns, or the tile before, with .to(dtype)",
            )
    return values


def _halves(b: Builder, values: list[Value]) -> tuple[list[Value], list[Value]]:
    """The elements with even and with odd indices along the last axis."""
    even, odd = [], []
    for value in values:
        *outer, size = tile_type(value).shape
        pairs = b.emit("reshape", value, shape=(*outer, size // 2, 2))
        even.append(b.emit("split", pairs, index=0))
        odd.append(b.emit("split", pairs, index=1))
    return even, odd


def _associative_scan(b: Builder, x: Any, axis: int, combine_fn: Any, reverse: bool = False) -> Any:
    """The inclusive scan along an axis: combine_fn(combine_fn(x0, x1), x2), ... in any grouping. `x` may be a tuple of
    tiles; the function then takes all values of the left elements, then all of the right ones, and returns one for each
    tile. `reverse`: from the last element on."""
    tiles, at = _operands(b, x, axis, combine_fn, "associative_scan")
    backwards = b.constexpr(reverse, "reverse", bool)
    *outer, size = tile_type(tiles[0]).shape
    last = len(outer)
    if backwards:
        tiles = [b.emit("flip", tile, axis=last) for tile in tiles]
    totals = tiles
    scanned = [b.emit("reshape", tile, shape=(*outer, size, 1)) for tile in tiles]
    width = 1
    inner = (*range(last + 1), last + 2, last + 1)  # swaps the last two axes
    while width < size:
        blocks = size // (2 * width)
        left, right = [], []
        for tile in scanned:
            pairs = _trans(b, b.emit("reshape", tile, shape=(*outer, blocks, 2, width)), inner)
            left.append(b.emit("split", pairs, index=0))
            right.append(b.emit("split", pairs, index=1))
        before, after = _halves(b, totals)
        spread = [
            b.broadcast(b.emit("expand_dims", total, axis=last + 1), (*outer, blocks, width))
            for total in before
        ]
        joined = [
            _trans(b, b.emit("join", one, two), inner)
            for one, two in zip(
                left, _combined(b, combine_fn, spread, right, "associative_scan"), strict=True
            )
        ]
        totals = _combined(b, combine_fn, before, after, "associative_scan")
        width *= 2
        scanned = [b.emit("reshape", tile, shape=(*outer, blocks, width)) for tile in joined]
    found = [b.emit("reshape", tile, shape=(*outer, size)) for tile in scanned]
    if backwards:
        found = [b.emit("flip", tile, axis=last) for tile in found]
    back = (*range(at), last, *range(at, last))
    results = tuple(_trans(b, tile, back) for tile in found)
    return results if isinstance(x, (tuple, list)) else results[0]


def _reduce(b: Builder, x: Any, axis: int, combine_fn: Any, keep_dims: bool = False) -> Any:
    """The reduction of all elements along an axis by `combine_fn`, in any grouping; `x` may be a tuple of tiles, as for
    `associative_scan`. Prefer `sum`, `max` and the like where they apply: they are faster."""
    tiles, at = _operands(b, x, axis, combine_fn, "reduce")
    *outer, size = tile_type(tiles[0]).shape
    while size > 1:
        tiles = _combined(b, combine_fn, *_halves(b, tiles), "reduce")
        size //= 2
    kept = (*outer[:at], 1, *outer[at:]) if b.constexpr(keep_dims, "keep_dims", bool) else tuple(outer)
    results = tuple(b.emit("reshape", tile, shape=kept) for tile in tiles)
    return results if isinstance(x, (tuple, list)) else results[0]


associative_scan = Builtin(_associative_scan, "associative_scan", takes_functions=True)
reduce = Builtin(_reduce, "reduce", takes_functions=True)
