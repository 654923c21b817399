"""Finds ranges of numbers in a softmax: exponents that are not positive, and sums within known bounds.

    %m = reduce %x {max}       %d = sub %x, %m: at most 0           %s = reduce (exp %d) {sum}: from 1 to the number of
    %m = max %x, %best         %d = sub %best, %m: the same              terms, as one of them is exp(0); or NaN

Both are NaN where %x has one, or an infinity that is its maximum. `made` maps a value to the operation that defines it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.tile.ir import Op, TileType, Value

Made = Mapping[Value, Op]
Users = Mapping[Value, Sequence[object]]  # nodes, and blocks that yield the value


def nonpositive(made: Made, value: Value) -> bool:
    """Whether a value is x - m, where m is a maximum over elements that include x; or a choice of two such values."""
    op = made.get(value)
    if op is not None and op.name == "select":
        return all(nonpositive(made, each) for each in op.operands[1:])
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


def may_ignore_nan(made: Made, users: Users, op: Op) -> bool:
    """Whether a maximum may be that of the numbers among its elements: it is only subtracted from them in a softmax,
    which is NaN in the whole row anyway, as the sum of the exponentials is."""
    if op.settings["kind"] != "max":
        return False
    for shifted in _users_of_views(users, op.results[0]):
        if not isinstance(shifted, Op) or shifted.name != "sub" or shifted.operands[0] is not op.operands[0]:
            return False
        if _reduced_there(made, shifted.operands[1]) is not op:
            return False
        for power in users.get(shifted.results[0], ()):
            if not isinstance(power, Op) or power.name != "exp":
                return False
            if not all(_is_nan_anyway(made, each, power, op) for each in users.get(power.results[0], ())):
                return False
    return True


def _is_nan_anyway(made: Made, user: object, power: Op, most: Op) -> bool:
    """Whether a user of the exponentials of a softmax is NaN in a whole row of the maximum if one of them is."""
    if not isinstance(user, Op):
        return False
    if user.name == "reduce":
        axes = {each.settings["axis"] % _rank(each.operands[0]) for each in (user, most)}
        return bool(user.settings["kind"] == "sum") and len(axes) == 1
    if user.name != "div" or not sums_exponentials(made, user.operands[1]):
        return False
    total = _reduced_there(made, user.operands[1])
    return total is not None and total.operands[0] is power.results[0]


def _users_of_views(users: Users, value: Value) -> list[object]:
    """What uses a value, or a view that repeats it."""
    found: list[object] = []
    for user in users.get(value, ()):
        if isinstance(user, Op) and user.name in ("broadcast", "expand_dims"):
            found += _users_of_views(users, user.results[0])
        else:
            found.append(user)
    return found


def _reaches(made: Made, most: Value, value: Value, expanded: tuple[int, ...] = ()) -> bool:
    """Whether `most` is a maximum over elements that include `value`. `expanded`: the axes that views have added to
    it."""
    op, added = through_views(made, most)
    expanded += added
    if op is None:
        return False
    if op.name == "max":
        return any(each is value or _reaches(made, each, value, expanded) for each in op.operands)
    found = op.name == "reduce" and op.settings["kind"] == "max" and op.operands[0] is value
    return found and puts_back(op, expanded)


def _reduced_there(made: Made, value: Value) -> Op | None:
    """The reduction whose result is `value`, broadcast back along the reduced axis."""
    op, expanded = through_views(made, value)
    return op if op is not None and op.name == "reduce" and puts_back(op, expanded) else None


def through_views(made: Made, value: Value) -> tuple[Op | None, tuple[int, ...]]:
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


def puts_back(op: Op, expanded: tuple[int, ...]) -> bool:
    """Whether views with these new axes move a reduction's result back to the positions of its operand's elements."""
    rank = _rank(op.operands[0])
    return rank == 1 or expanded == (op.settings["axis"] % rank,)


def _rank(value: Value) -> int:
    return len(value.type.shape) if isinstance(value.type, TileType) else 0
