"""Removes operations without uses: pure ones, and loads.

An access out of bounds whose value is not used is undefined, so a load may go. Loops and branches stay, also those
without uses: they may not end, and may have effects.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.tile.ir import Block, Node, Op, TileProgram, Value, blocks_of, operands_of
from tilewright.tile.op import Effect
from tilewright.tile.ops import OPS
from tilewright.tile.passes.rewrite import Rewriter

_REMOVABLE = (Effect.PURE, Effect.READ)


def dead_code(program: TileProgram) -> TileProgram:
    used: set[Value] = set()
    _mark(program.body, used)
    return _Removing(used).program(program)


def _mark(block: Block, used: set[Value]) -> None:
    """Mark live nodes from the end: a node's operands are live only if the node is."""
    used.update(block.yields)
    for node in reversed(block.nodes):
        if isinstance(node, Op) and _goes(node, used):
            continue
        used.update(operands_of(node))
        for inner in reversed(blocks_of(node)):
            _mark(inner, used)


def _goes(op: Op, used: set[Value]) -> bool:
    return OPS[op.name].effect in _REMOVABLE and not used.intersection(op.results)


class _Removing(Rewriter):
    def __init__(self, used: set[Value]) -> None:
        super().__init__()
        self.used = used

    def op(self, op: Op) -> Iterable[Node]:
        return () if _goes(op, self.used) else (op,)
