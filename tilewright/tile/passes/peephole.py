"""Simpler operations for what one node and those before it compute. The rules are functions, listed in `_RULES`.

| rule                  | before -> after                                                                        |
| --------------------- | -------------------------------------------------------------------------------------- |
| fold                  | add 2, 3 -> 5: integers, bools and what IEEE rounds in one way alone                     |
| neutral               | x + 0, x - 0, x * 1, x // 1, x / 1, x & true, x | false -> x; floats only where exact    |
| views                 | a view that changes nothing -> x; two broadcasts, transposes or reshapes -> one          |
| cast                  | a cast to the same type, there and back through a type that holds all values -> x        |
| select                | where(true, x, y) -> x; where(c, x, x) -> x                                              |
| mask                  | a load or store whose mask is true everywhere -> without a mask                          |
| branch                | an `if` on a constant -> the nodes of the block that is taken                            |

A tile that is a broadcast constant counts as that constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.tile.ir import If, Node, Op, TileProgram, TileType, Value
from tilewright.tile.op import BOOL
from tilewright.tile.ops import OPS
from tilewright.tile.passes.rewrite import Rewriter

_EXACT = frozenset(
    ["add", "sub", "mul", "min", "max", "neg", "abs", "eq", "ne", "lt", "le", "and", "or", "xor", "not"]
)
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "floordiv": 1, "div": 1, "and": True, "or": False}
_COMMUTES = frozenset(["add", "mul", "and", "or"])


def peephole(program: TileProgram) -> TileProgram:
    return _Peephole().program(program)


class _Peephole(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self.made_by: dict[Value, Op] = {}

    def op(self, op: Op) -> Iterable[Node]:
        for rule in _RULES:
            found = rule(self, op)
            if isinstance(found, Value):
                self.same[op.results[0]] = found
                return ()
            if found is not None:
                op = found
        for result in op.results:
            self.made_by[result] = op
        return (op,)

    def branch(self, node: If) -> Iterable[Node]:
        chosen = self.constant(self.value(node.condition))
        if chosen is None:
            return super().branch(node)
        block = node.then if chosen else node.other
        nodes = [made for each in block.nodes for made in self.node(each)]
        self.same.update(zip(node.results, block.yields, strict=True))
        return nodes

    def before(self, value: Value, name: str) -> Op | None:
        """The operation of this name that defines the value."""
        op = self.made_by.get(value)
        return op if op is not None and op.name == name else None

    def constant(self, value: Value) -> Any:
        """The number that all elements equal; None if it is unknown."""
        op = self.made_by.get(value)
        while op is not None and op.name in ("broadcast", "expand_dims", "reshape", "trans"):
            op = self.made_by.get(op.operands[0])
        return op.settings["value"] if op is not None and op.name == "constant" else None


Rule = Callable[[_Peephole, Op], Op | Value | None]


def _type(value: Value) -> TileType | None:
    return value.type if isinstance(value.type, TileType) else None


def _fold(p: _Peephole, op: Op) -> Op | None:
    if op.name not in _EXACT or _type(op.results[0]) is None or op.results[0].type.shape:  # type: ignore[union-attr]
        return None
    numbers = [p.constant(each) for each in op.operands]
    kinds = [_type(each) for each in op.operands]
    if None in numbers or any(kind is None or kind.dtype.is_half for kind in kinds):
        return None
    arrays = [
        np.asarray(n, kind.dtype.numpy) for n, kind in zip(numbers, kinds, strict=True) if kind is not None
    ]
    with np.errstate(all="ignore"):
        found = np.asarray(OPS[op.name].meaning(None, op.settings, *arrays))
    dtype = DType.of(found)
    return Op("constant", (), op.results, (("value", found.item()), ("dtype", dtype)), op.where)


def _neutral(p: _Peephole, op: Op) -> Value | None:
    if op.name not in _NEUTRAL:
        return None
    pairs = [op.operands, op.operands[::-1]] if op.name in _COMMUTES else [op.operands]
    for kept, other in pairs:
        number, kind = p.constant(other), _type(kept)
        if number is None or kind is None or number != _NEUTRAL[op.name]:
            continue
        if op.name in ("and", "or") and kind.dtype is not BOOL:
            continue
        if op.name == "add" and kind.dtype.is_float:  # -0.0 + 0.0 is 0.0
            continue
        if op.name == "sub" and kind.dtype.is_float and np.signbit(number):
            continue
        return kept
    return None


def _views(p: _Peephole, op: Op) -> Op | Value | None:
    if op.name not in ("broadcast", "reshape", "trans"):
        return None
    (value,) = op.operands
    inner = p.before(value, op.name)
    if inner is not None:
        attrs = op.attrs
        if op.name == "trans":
            order = tuple(inner.settings["order"][axis] for axis in op.settings["order"])
            attrs = (("order", order),)
        op = replace(op, operands=inner.operands, attrs=attrs)
        (value,) = op.operands
    if op.name == "trans" and list(op.settings["order"]) == sorted(op.settings["order"]):
        return value
    if op.name != "trans" and value.type == op.results[0].type:
        return value
    return op if inner is not None else None


def _holds(narrow: DType, wide: DType) -> bool:
    """Whether `wide` has all values of `narrow`."""
    if narrow is wide:
        return True
    if narrow.is_float or wide.is_float:
        return (narrow, wide) in _WIDER_FLOATS
    signed = narrow.is_unsigned or not wide.is_unsigned
    return wide.bytes > narrow.bytes and signed and BOOL not in (narrow, wide)


_WIDER_FLOATS = {
    (DType.F16, DType.F32), (DType.BF16, DType.F32), (DType.F16, DType.F64), (DType.BF16, DType.F64),
    (DType.F32, DType.F64),
}  # fmt: skip


def _cast(p: _Peephole, op: Op) -> Value | None:
    if op.name != "cast":
        return None
    (value,) = op.operands
    kind, to = _type(value), op.settings["dtype"]
    if kind is None or kind.dtype is to:
        return value
    inner = p.before(value, "cast")
    if inner is None:
        return None
    origin = _type(inner.operands[0])
    return inner.operands[0] if origin is not None and origin.dtype is to and _holds(to, kind.dtype) else None


def _select(p: _Peephole, op: Op) -> Value | None:
    if op.name != "select":
        return None
    condition, then, other = op.operands
    if then is other:
        return then
    chosen = p.constant(condition)
    return None if chosen is None else (then if chosen else other)


def _mask(p: _Peephole, op: Op) -> Op | None:
    at = {"load": 1, "store": 2}.get(op.name, len(op.operands))
    if len(op.operands) <= at or p.constant(op.operands[at]) is not True:
        return None
    return replace(op, operands=op.operands[:at])


_RULES: tuple[Rule, ...] = (_fold, _neutral, _views, _cast, _select, _mask)
