"""Moves out of a loop what is the same in each of its iterations.

    for %i in range(%a, %b, %c):              %t = mul %x, %y
      %t = mul %x, %y                   ->    for %i in range(%a, %b, %c):
      ... %t ... %i                             ... %t ... %i

Pure operations whose operands are defined outside move, out of all loops they can leave. They are computed once even if
the loop has no iteration; therefore not divisions of integers, which are undefined by 0, and not what is large: a tile
that a sum or a matmul has made would wait in memory. What stands under an `if` stays there.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.tile.ir import Block, For, Node, Op, TileProgram, Value, While
from tilewright.tile.op import Effect
from tilewright.tile.ops import OPS
from tilewright.tile.passes.rewrite import Rewriter

_STAYS = frozenset(["floordiv", "mod", "dot", "reduce", "cumsum", "sort", "make_block_ptr"])


def hoist(program: TileProgram) -> TileProgram:
    return _Hoisting().program(program)


class _Hoisting(Rewriter):
    def loop(self, node: For | While) -> Iterable[Node]:
        (made,) = super().loop(node)  # loops inside first: what leaves them may leave this one too
        assert isinstance(made, (For, While))
        moved: list[Node] = []
        if isinstance(made, For):
            body = _without(made.body, moved)
            if not moved:
                return (made,)
            return (*moved, For(made.lower, made.upper, made.step, made.init, body, made.results, made.where))
        condition, body = _without(made.condition, moved), _without(made.body, moved)
        if not moved:
            return (made,)
        return (*moved, While(made.init, condition, body, made.results, made.where))


def _without(block: Block, moved: list[Node]) -> Block:
    """The block without the operations that can be hoisted; these are appended to `moved`."""
    inside: set[Value] = set(block.params)
    kept: list[Node] = []
    for node in block.nodes:
        if isinstance(node, Op) and _may_leave(node) and not inside.intersection(node.operands):
            moved.append(node)
            continue
        kept.append(node)
        inside.update(node.results)
    return Block(block.params, tuple(kept), block.yields) if len(kept) < len(block.nodes) else block


def _may_leave(op: Op) -> bool:
    return OPS[op.name].effect is Effect.PURE and op.name not in _STAYS
