"""Estimates how large the formula of a fused group becomes.

In a formula, a value that is read twice appears twice: `x * sigmoid(x)` duplicates the expression of `x`, and a chain
of n of them has 2^n copies of its input. Traversing a formula takes time proportional to its size and stack
proportional to its depth, so `fuse` stops growing a group when either is too large. An `Expansion` is the
contribution of one operator, computed from its lowering.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilewright import te
from tilewright.graph.ir import Node, TensorType
from tilewright.graph.op import Application, Fusion, op_of

# Limits of a formula: scalar operations, loads and indices, counted with repetition, and nesting depth. The models of
# the zoo have at most 207, nested 15 deep.
MAX_PARTS = 2000
MAX_DEPTH = 80


@dataclass(frozen=True)
class Written:
    """A value in a formula: its number of copies, its maximum depth, and the growth factor of its indices. A reshape
    repeats each index several times, so a chain of reshapes and permutes doubles the indices each time."""

    times: int
    depth: int
    indices: int = 1

    def within(self, other: Written) -> Written:
        """The same inside an expression that appears as `other` says."""
        return Written(self.times * other.times, self.depth + other.depth, self.indices * other.indices)

    def plus(self, other: Written) -> Written:
        return Written(
            self.times + other.times, max(self.depth, other.depth), max(self.indices, other.indices)
        )


NOWHERE = Written(0, 0)


@dataclass(frozen=True)
class Expansion:
    """An operator's formula: its size, its depth, and how each operand appears in it."""

    parts: int
    depth: int
    reads: tuple[Written, ...]


def expansion_of(node: Node) -> Expansion:
    """The expansion of an operator; only an estimate for contractions and reductions, whose result is read as one
    value."""
    count = len(node.inputs)
    if node.is_input or node.is_constant:
        return Expansion(1, 1, ())
    record = op_of(node.op)
    if record.fusion is Fusion.COMPLEX:
        return Expansion(1, 1, (Written(1, 8),) * count)
    if record.fusion is Fusion.REDUCTION:
        return Expansion(16, 8, (Written(3, 8),) * count)
    if record.lower is None:
        return Expansion(8, 8, (Written(2, 8),) * count)
    return _lowered(
        node.op, tuple(node.attrs.items()), tuple(operand.type for operand in node.inputs), node.type
    )


@lru_cache(maxsize=4096)
def _lowered(
    op: str, attrs: tuple[tuple[str, Any], ...], inputs: tuple[TensorType, ...], type: TensorType
) -> Expansion:
    lower = op_of(op).lower
    assert lower is not None
    operands = [te.Tensor(f"x{n}", each.shape, each.dtype) for n, each in enumerate(inputs)]
    output = lower(Application(inputs, type, dict(attrs), ""), operands)
    nothing = (NOWHERE,) * len(operands)
    known: dict[te.Source, Expansion] = {
        operand: Expansion(1, 1, (*nothing[:n], Written(1, 0), *nothing[n + 1 :]))
        for n, operand in enumerate(operands)
    }
    for stage in te.stages(output):
        known[stage] = _written_out(stage.body, known, nothing)
    return known[output]


def _written_out(
    body: te.Expr, known: Mapping[te.Source, Expansion], nothing: tuple[Written, ...]
) -> Expansion:
    """The expansion of a stage whose sources are `known`."""
    parts, deepest, reads = 0, 0, list(nothing)
    waiting = [(body, 1)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(node, te.Load):
            # The operand's expression replaces the load. The load's indices are substituted into it, at greater
            # depth.
            indices = [index for index in node.indices if not isinstance(index, te.Var)]
            inside = depth - 1 + max((_depth(index) - 1 for index in indices), default=0)
            source = known[node.source]
            parts, deepest = parts + source.parts, max(deepest, inside + source.depth)
            waiting.extend((index, depth + 1) for index in indices)
            here = Written(1, inside, _repeated(indices))
            reads = [
                before.plus(below.within(here)) if below.times else before
                for before, below in zip(reads, source.reads, strict=True)
            ]
            continue
        parts += 1
        waiting.extend((child, depth + 1) for child in te.children(node))
    return Expansion(parts, deepest, tuple(reads))


def _repeated(indices: Sequence[te.Expr]) -> int:
    """The maximum number of occurrences of a variable in the indices."""
    found = Counter(node for index in indices for node in te.walk(index) if isinstance(node, te.Var))
    return max(found.values(), default=1)


def _depth(expr: te.Expr) -> int:
    deepest, waiting = 0, [(expr, 1)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        waiting.extend((child, depth + 1) for child in te.children(node))
    return deepest
