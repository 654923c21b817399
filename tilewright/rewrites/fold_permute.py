"""fold-permute: fold a permute before a flattening reshape into the rows of the constant matrix that follows.

    %1 = permute(%x) {axes=(0, 3, 1, 2)}              NHWC -> NCHW
    %2 = reshape(%1) {shape=(N, C H W)}       ->      %2 = reshape(%x) {shape=(N, H W C)}
    %3 = matmul(%2, %w)                               %3 = matmul(%2, %w')

with the rows of w' in the order of H W C. They are reordered at compile time, and w is not kept. Many networks have
this pattern between the last convolution and the first dense layer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tilewright.graph.ir import Graph, Node, rebuild
from tilewright.graph.op import apply
from tilewright.rewrites.base import Pass
from tilewright.rewrites.shapes import inverse, is_identity, reordered, reshape_to

Uses = Mapping[Node, Sequence[Node]]


@dataclass(frozen=True)
class FoldPermute(Pass):
    name = "fold-permute"

    def run(self, graph: Graph) -> Graph:
        users = graph.users()

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            if node.op != "matmul" or not _owns_constant(node, users):
                return None
            rows, weight = operands
            base = rows
            while base.op == "reshape":
                base = base.inputs[0]
            if base.op != "permute":
                return None
            axes = base.attrs["axes"]
            begin = _flattened_from(axes, base.shape, rows.shape[-1])
            if begin is None:
                return None
            flat = reshape_to(base.inputs[0], rows.shape)
            moved = _with_rows_moved(weight, base.shape[begin:], _positions(axes, begin))
            return apply("matmul", flat, moved, name=node.name, source=node.source)

        return rebuild(graph, rule)


def absorbs(
    reader: Node, axes: Sequence[int], shape: Sequence[int], users: Uses, outputs: Collection[Node]
) -> bool:
    """Whether a permute of a tensor of `shape`, read only by `reader`, will be folded: `reader` is the reshape that
    flattens it for constant matrices."""
    if reader.op != "reshape" or reader in outputs:
        return False
    permuted = reordered(shape, axes)
    return all(
        user.op == "matmul"
        and user.inputs[0] is reader
        and _owns_constant(user, users)
        and _flattened_from(axes, permuted, reader.shape[-1]) is not None
        for user in users[reader]
    )


def _owns_constant(matmul: Node, users: Uses) -> bool:
    """Whether the second operand is a constant matrix with no other reader."""
    weight = matmul.inputs[1]
    if weight.type.rank != 2:
        return False
    while weight.op == "permute" and len(users[weight]) == 1:
        weight = weight.inputs[0]
    return weight.is_constant and len(users[weight]) == 1


def _flattened_from(axes: Sequence[int], permuted: Sequence[int], length: int) -> int | None:
    """The first of the axes that are flattened to `length`, if the permute moves no others."""
    for begin in range(len(axes) - 1, -1, -1):
        if math.prod(permuted[begin:]) == length and is_identity(axes[:begin]):
            return begin
    return None


def _positions(axes: Sequence[int], begin: int) -> list[int]:
    """The position of each flattened axis after the permute."""
    return [position - begin for position in inverse(axes)[begin:]]


def _with_rows_moved(weight: Node, extents: Sequence[int], positions: Sequence[int]) -> Node:
    """`weight`, whose rows enumerate `extents`, with the rows reordered by `positions`. The constant below a
    transposed matrix is moved once, not twice."""
    length, columns = weight.shape
    if weight.op == "permute":
        split = reshape_to(weight.inputs[0], (columns, *extents))
        axes = (*(position + 1 for position in positions), 0)
    else:
        split = reshape_to(weight, (*extents, columns))
        axes = (*positions, len(extents))
    return reshape_to(apply("permute", split, axes=axes), (length, columns))
