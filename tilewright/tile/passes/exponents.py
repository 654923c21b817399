"""Finds ranges of numbers in a softmax: exponents that are not positive, and sums within known bounds.

    %m = reduce %x {max}       %d = sub %x, %m: at most 0           %s = reduce (exp %d) {sum}: from 1 to the number of
    %m = max %x, %best         %d = sub %best, %m: the same              terms, as one of them is exp(0); or NaN

Both are NaN where %x has one, or an infinity that is its maximum. `made` maps a value to the operation that defines it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.tile.ir import Op, TileType, Value

Made = Mapping[Value, Op]


def nonpositive(made: Made, value: Value) -> bool:
    """Whether a value is x - m, where m is a maximum over elements that include x."""
    op = made.get(value)
    return op is not None and op.name == "sub" and _reaches(made, op.operands[1], op.operands[0])


def sums_exponentials(made: Made, value: Value) -> bool:
    """Whether it is the sum of exp(x - m) over all elements that the maximum m is taken over, repeated or not."""
    total = _reduced_there(made, value)
    if total is None or total.settings["kind"] != "sum":
        return False
    power = made.get(total.operands[0])
    shifted = made.get(power.operands[0]) if power is not None and power.name == "exp" else None
    if shifted is None or shifted.name != "sub":
        return False
    most = _reduced_there(made, shifted.operands[1])
    return (
        most is not None
        and most.settings == {**total.settings, "kind": "max"}
        and most.operands[0] is shifted.operands[0]
    )


def _reaches(made: Made, most: Value, value: Value, expanded: tuple[int, ...] = ()) -> bool:
    """Whether `most` is a maximum over elements that include `value`. `expanded`: the axes that views have added to
    it."""
    op, added = _through_views(made, most)
    expanded += added
    if op is None:
        return False
    if op.name == "max":
        return any(each is value or _reaches(made, each, value, expanded) for each in op.operands)
    found = op.name == "reduce" and op.settings["kind"] == "max" and op.operands[0] is value
    return found and _put_back(op, expanded)


def _reduced_there(made: Made, value: Value) -> Op | None:
    """The reduction whose result is `value`, broadcast back along the reduced axis."""
    op, expanded = _through_views(made, value)
    return op if op is not None and op.name == "reduce" and _put_back(op, expanded) else None


def _through_views(made: Made, value: Value) -> tuple[Op | None, tuple[int, ...]]:
    """The operation whose result views repeat, and the axes that they add to it."""
    op = made.get(value)
    added: list[int] = []
    while op is not None and op.name in ("broadcast", "expand_dims"):
        old, new = (_rank(each) for each in (op.operands[0], op.results[0]))
        if op.name == "expand_dims":
            added.append(op.settings["axis"] % new)
        elif old:
            added += [0] * (new - old)
        op = made.get(op.operands[0])
    return op, tuple(added)


def _put_back(op: Op, expanded: tuple[int, ...]) -> bool:
    """Whether views with these new axes move a reduction's result back to the positions of its operand's elements."""
    rank = _rank(op.operands[0])
    return rank == 1 or expanded == (op.settings["axis"] % rank,)


def _rank(value: Value) -> int:
    return len(value.type.shape) if isinstance(value.type, TileType) else 0
