"""Computes once what is computed twice: a pure operation with the operands and attributes of an earlier one.

    %a = broadcast %n {shape=(4, 8)}              %a = broadcast %n {shape=(4, 8)}
    %b = broadcast %n {shape=(4, 8)}       ->     %c = add %a, %a
    %c = add %a, %b

The earlier one is in the same block or in one around it, so it has been computed wherever the later one stands. Loads
stay: a store may lie between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilewright.tile.ir import Block, Node, Op, TileProgram, Value
from tilewright.tile.op import Effect
from tilewright.tile.ops import OPS
from tilewright.tile.passes.rewrite import Rewriter


def common_subexpressions(program: TileProgram) -> TileProgram:
    return _Sharing().program(program)


class _Sharing(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, Value] = {}

    def block(self, block: Block) -> Block:
        outside = dict(self.known)
        made = super().block(block)
        self.known = outside
        return made

    def op(self, op: Op) -> Iterable[Node]:
        if OPS[op.name].effect is not Effect.PURE:
            return (op,)
        # Attributes by their text: 0.0 and -0.0 are equal, and True and 1.
        key = op.name, op.operands, tuple((name, repr(value)) for name, value in op.attrs)
        (result,) = op.results
        known = self.known.setdefault(key, result)
        if known is result:
            return (op,)
        self.same[result] = known
        return ()
