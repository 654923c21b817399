"""Finds the rows of a dot's result that are used: those inside the masks of later stores.

    %c = dot %a, %b, %acc                       rows from %end - %start on are never stored, and have no other
    store %p, %c, (%start + arange) < %end      use: a code generator need not compute them

A block at the end of a tensor has fewer rows than others, and blocks of ragged groups nearly all do. Elementwise
operations, reductions of another axis, and a dot, for its first operand, do not mix rows. For a value that
a loop carries, only limits that are the same in all iterations count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.te.scalars import SCALARS
from tilewright.tile.ir import (
    Block,
    BlockPointerType,
    For,
    If,
    Node,
    Op,
    TileProgram,
    TileType,
    Value,
    While,
    blocks_of,
    walk,
)

_EACH_ELEMENT = frozenset([*SCALARS, "cast", "bitcast", "select"])


@dataclass(frozen=True)
class RowLimit:
    """Row i is used only if start + i < end: two scalars of one type. A start of None is 0."""

    start: Value | None
    end: Value


Limits = frozenset[RowLimit] | None  # a row is used if one of them allows it; None: any row may be


def observed_rows(program: TileProgram) -> dict[Op, frozenset[RowLimit]]:
    """The limits of each dot of two matrices whose uses all have one."""
    found = _Observed(program)
    found.solve()
    limits = {
        op: found.seen.get(op.results[0], frozenset())
        for op in found.made.values()
        if op.name == "dot" and len(_shape(op.results[0])) == 2
    }
    return {op: each for op, each in limits.items() if each}


class _Observed:
    def __init__(self, program: TileProgram) -> None:
        self.body = program.body
        self.nodes = list(walk(program.body))
        self.made = {result: node for node in self.nodes if isinstance(node, Op) for result in node.results}
        self.inside: dict[Node, set[Value]] = {}  # values that a loop's blocks define
        self.seen: dict[Value, Limits] = {}
        self.changed = False

    def solve(self) -> None:
        self.changed = True
        while self.changed:
            self.changed = False
            for node in reversed(self.nodes):
                self._node(node)

    def _see(self, value: Value, limits: Limits) -> None:
        old = self.seen.get(value, frozenset())
        new = None if old is None or limits is None else old | limits
        if new != old:
            self.seen[value] = new
            self.changed = True

    def _all(self, values: Iterable[Value]) -> None:
        for value in values:
            self._see(value, None)

    def _of(self, value: Value) -> Limits:
        return self.seen.get(value, frozenset())

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        if isinstance(node, Op):
            self._op(node)
        elif isinstance(node, For):
            self._all((node.lower, node.upper, node.step))
            self._loop(node, (node.body.params[1:], node.results), node.init, node.body)
        elif isinstance(node, While):
            self._all(node.condition.yields)
            params = node.condition.params, node.body.params, node.results
            self._loop(node, params, node.init, node.body)
        else:
            self._all((node.condition,))
            self._branches(node)

    def _branches(self, node: If) -> None:
        for block in (node.then, node.other):
            for result, value in zip(node.results, block.yields, strict=True):
                self._see(value, self._of(result))

    def _loop(
        self, node: For | While, becomes: Sequence[Sequence[Value]], init: Sequence[Value], body: Block
    ) -> None:
        """Carried values become any of `becomes`: in another iteration, where values defined inside the loop differ."""
        inside = self._inside(node)
        for values in becomes:
            for value, first, last in zip(values, init, body.yields, strict=True):
                limits = self._of(value)
                if limits is not None and any(inside & {each.start, each.end} for each in limits):
                    limits = None
                self._see(first, limits)
                self._see(last, limits)

    def _inside(self, node: Node) -> set[Value]:
        if node not in self.inside:
            found: set[Value] = set()
            for block in blocks_of(node):
                found.update(block.params)
                for each in walk(block):
                    found.update(each.results)
                    found.update(param for inner in blocks_of(each) for param in inner.params)
            self.inside[node] = found
        return self.inside[node]

    def _op(self, op: Op) -> None:
        if op.name in ("store", "store_block"):
            pointer, value, *masks = op.operands
            self._all((pointer, *masks))
            limit = self._stored(op)
            self._see(value, None if limit is None else frozenset([limit]))
        elif op.name in _EACH_ELEMENT:
            for operand in op.operands:
                self._see(operand, self._of(op.results[0]))
        elif op.name == "dot" and len(_shape(op.results[0])) == 2:
            limits = self._of(op.results[0])
            for number, operand in enumerate(op.operands):
                self._see(operand, None if number == 1 else limits)
        elif self._keeps_rows(op):
            self._see(op.operands[0], self._of(op.results[0]))
        else:
            self._all(op.operands)

    def _keeps_rows(self, op: Op) -> bool:
        """Whether a row of the result depends only on the same row of the operand."""
        if op.name not in ("broadcast", "expand_dims", "reduce", "cumsum"):
            return False
        shape, result = _shape(op.operands[0]), _shape(op.results[0])
        if not shape or shape[:1] != result[:1]:
            return False
        if op.name == "broadcast":
            return len(shape) == len(result)
        if op.name == "expand_dims":
            return bool(op.settings["axis"] % len(result))
        return bool(op.settings["axis"] % len(shape))

    # -- masks -------------------------------------------------------------------------------------------------------

    def _stored(self, op: Op) -> RowLimit | None:
        """The limit that a store sets by its mask; None if it stores all rows."""
        kind = op.operands[0].type
        if isinstance(kind, BlockPointerType):
            made = self.made.get(op.operands[0])
            if made is None or made.name != "make_block_ptr" or 0 not in op.settings["check"]:
                return None
            rank = len(kind.block)
            return RowLimit(made.operands[1 + 2 * rank], made.operands[1])
        return self._limit(op.operands[2], kind.shape[0]) if len(op.operands) > 2 and kind.shape else None

    def _limit(self, mask: Value, rows: int) -> RowLimit | None:
        op = self._through_views(mask, rows)
        if op is None:
            return None
        if op.name == "and":
            found = (self._limit(each, rows) for each in op.operands)
            return next((each for each in found if each is not None), None)
        if op.name != "lt":
            return None
        index, bound = self._through_views(op.operands[0], rows), self._scalar(op.operands[1])
        if index is None or bound is None:
            return None
        if index.name == "arange":
            return RowLimit(None, bound) if index.settings["start"] == 0 else None
        if index.name != "add":
            return None
        for one, other in (index.operands, index.operands[::-1]):
            numbers, start = self._through_views(one, rows), self._scalar(other)
            if numbers is not None and numbers.name == "arange" and start is not None:
                return RowLimit(start, bound) if numbers.settings["start"] == 0 else None
        return None

    def _through_views(self, value: Value, rows: int) -> Op | None:
        """The operation that defines a value, looking through views that keep the rows in their positions."""
        op = self.made.get(value)
        while op is not None and op.name in ("broadcast", "expand_dims"):
            if not self._keeps_rows(op):
                return None
            op = self.made.get(op.operands[0])
        return op if op is not None and _shape(op.results[0])[:1] == (rows,) else None

    def _scalar(self, value: Value) -> Value | None:
        """The scalar that a tile is a broadcast of."""
        while _shape(value):
            op = self.made.get(value)
            if op is None or op.name not in ("broadcast", "expand_dims"):
                return None
            value = op.operands[0]
        return value


def _shape(value: Value) -> tuple[int, ...]:
    return value.type.shape if isinstance(value.type, TileType) else value.type.block
