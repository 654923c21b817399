"""One exponential instead of two, where one of them is of 0: a running maximum rescales what it has added up so far.

    %n = max %a, %b                        %c = lt %a, %b             which of the two is not the maximum
    %p = exp (sub %a, %n)          ->      %t = exp (select %c, %a - %n, %b - %n)
    %q = exp (sub %b, %n)                  %u = 1 + (select %c, %b - %n, %a - %n)
                                           %p = select %c, %t, %u     %q = select %c, %u, %t

The other difference is 0, or NaN where an element is NaN or the maximum is infinite: 1 plus it is its exponential, bit
for bit. This is for processors, where an exponential takes a dozen instructions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tilewright.tile.ir import Block, Node, Op, TileProgram, TileType, Value
from tilewright.tile.ops import OPS
from tilewright.tile.passes.rewrite import Rewriter


def paired_exponentials(program: TileProgram) -> TileProgram:
    return _Pairing().program(program)


@dataclass
class _Pair:
    """A maximum, and the exponentials of its operands minus it."""

    most: Op
    powers: dict[Value, list[Op]] = field(default_factory=dict)  # by operand

    @property
    def is_complete(self) -> bool:
        return all(each in self.powers for each in self.most.operands)


class _Pairing(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self.pairs: dict[Op, _Pair] = {}  # by exponential

    def block(self, block: Block) -> Block:
        made = {node.results[0]: node for node in block.nodes if isinstance(node, Op) and node.results}
        found: dict[Value, _Pair] = {}
        for op in made.values():
            shifted = made.get(op.operands[0]) if op.name == "exp" else None
            most = made.get(shifted.operands[1]) if shifted is not None and shifted.name == "sub" else None
            if shifted is None or most is None or most.name != "max" or not _is_vector(op.results[0]):
                continue
            one, other = most.operands
            if one is not other and shifted.operands[0] in (one, other):
                pair = found.setdefault(most.results[0], _Pair(most))
                pair.powers.setdefault(shifted.operands[0], []).append(op)
        for pair in found.values():
            if pair.is_complete:
                self.pairs.update((op, pair) for ops in pair.powers.values() for op in ops)
        return super().block(block)

    def node(self, node: Node) -> Iterable[Node]:
        pair = self.pairs.get(node) if isinstance(node, Op) else None
        if pair is None:
            return super().node(node)
        if node.results[0] in self.same:
            return ()
        return self._shared(pair, node)

    def _shared(self, pair: _Pair, first: Node) -> Iterable[Node]:
        nodes: list[Node] = []

        def emit(name: str, *operands: Value, **attrs: Any) -> Value:
            found = OPS[name].rule([each.type for each in operands], attrs)
            assert found is not None
            result = Value(found)
            nodes.append(Op(name, operands, (result,), tuple(attrs.items()), first.where))
            return result

        a, b = pair.most.operands
        kind = pair.most.results[0].type
        assert isinstance(kind, TileType)
        left, right, most = (self.value(each) for each in (a, b, pair.most.results[0]))
        second = emit("lt", left, right)
        of_left, of_right = emit("sub", left, most), emit("sub", right, most)
        power = emit("exp", emit("select", second, of_left, of_right))
        one = emit("broadcast", emit("constant", value=1.0, dtype=kind.dtype), shape=kind.shape)
        whole = emit("add", one, emit("select", second, of_right, of_left))
        for operand, chosen in ((a, (power, whole)), (b, (whole, power))):
            result = emit("select", second, *chosen)
            for op in pair.powers[operand]:
                self.same[op.results[0]] = result
        return nodes


def _is_vector(value: Value) -> bool:
    return isinstance(value.type, TileType) and bool(value.type.shape)
