"""einsum, as sums, permutations and one batched matmul per pair of operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.frontend.builder import Unsupported
from tilewright.frontend.torch.context import Context
from tilewright.frontend.torch.registry import converter
from tilewright.graph.ir import Node


@dataclass(frozen=True)
class _Term:
    """A tensor with a label for each axis."""

    node: Node
    labels: tuple[str, ...]

    def extent(self, label: str) -> int:
        return self.node.shape[self.labels.index(label)]


@converter("aten.einsum.default")
def einsum(ctx: Context, equation: str, tensors: Sequence[Node], path: object = None) -> Node:
    terms, result = _parse(equation, tensors)
    first, *rest = [_without(ctx, terms[i], i, terms, result) for i in range(len(terms))]
    for i, term in enumerate(rest):
        wanted = set(result).union(*(later.labels for later in rest[i + 1 :]))
        first = _contract(ctx, first, term, wanted)
    order = [first.labels.index(label) for label in result if label in first.labels]
    node = ctx.permute(first.node, order)
    return ctx.reshape(node, ctx.shape)


def _parse(equation: str, tensors: Sequence[Node]) -> tuple[list[_Term], tuple[str, ...]]:
    """Parse the labels of the operands and of the result. The axes of an ellipsis get digit labels."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    subscripts = left.split(",")
    terms = []
    covered = 0
    for text, node in zip(subscripts, tensors, strict=True):
        before, dots, after = text.partition("...")
        spare = node.type.rank - len(before) - len(after)
        covered = max(covered, spare if dots else 0)
        labels = (*before, *(str(d) for d in range(spare - 1, -1, -1)), *after)
        if len(set(labels)) < len(labels):
            raise Unsupported("einsum with a label twice in one operand")
        terms.append(_Term(node, labels))
    ellipsis = tuple(str(d) for d in range(covered - 1, -1, -1))
    if arrow:
        before, dots, after = right.partition("...")
        return terms, (*before, *(ellipsis if dots else ()), *after)
    letters = [label for term in terms for label in term.labels if not label.isdigit()]
    return terms, (*ellipsis, *sorted(label for label in set(letters) if letters.count(label) == 1))


def _without(
    ctx: Context, term: _Term, position: int, terms: Sequence[_Term], result: Sequence[str]
) -> _Term:
    """The term summed over labels that only it has."""
    others = set(result).union(*(other.labels for i, other in enumerate(terms) if i != position))
    axes = tuple(axis for axis, label in enumerate(term.labels) if label not in others)
    if not axes:
        return term
    kept = tuple(label for label in term.labels if label in others)
    return _Term(ctx.emit("sum", term.node, axes=axes, keepdims=False), kept)


def _contract(ctx: Context, a: _Term, b: _Term, wanted: set[str]) -> _Term:
    """The product of two terms, summed over common labels that are not needed any more."""
    shared = [label for label in a.labels if label in b.labels]
    batch = [label for label in shared if label in wanted]
    summed = [label for label in shared if label not in wanted]
    left = [label for label in a.labels if label not in shared]
    right = [label for label in b.labels if label not in shared]
    if any(a.extent(label) != b.extent(label) for label in summed):
        raise Unsupported("einsum that broadcasts a summed axis")
    sizes = {label: max(a.extent(label), b.extent(label)) for label in batch}
    sizes |= {label: a.extent(label) for label in (*left, *summed)} | {
        label: b.extent(label) for label in right
    }

    def arranged(term: _Term, rows: Sequence[str], columns: Sequence[str]) -> Node:
        """[batch..., rows, columns], batch axes of one element left as they are."""
        node = ctx.permute(term.node, [term.labels.index(label) for label in (*batch, *rows, *columns)])
        lead = [term.extent(label) for label in batch]
        return ctx.reshape(node, (*lead, _size(sizes, rows), _size(sizes, columns)))

    product = ctx.emit("matmul", arranged(a, left, summed), arranged(b, summed, right))
    labels = (*batch, *left, *right)
    return _Term(ctx.reshape(product, [sizes[label] for label in labels]), labels)


def _size(sizes: dict[str, int], labels: Sequence[str]) -> int:
    return math.prod(sizes[label] for label in labels)
