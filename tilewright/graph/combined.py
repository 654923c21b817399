"""Reductions over neighbouring rows or columns of a value that the kernel of the value may include.

Fusion and the GPU templates use the same predicate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.dtypes import DType
from tilewright.graph.ir import Node

KINDS = {"sum": "sum", "mean": "sum", "amax": "max", "amin": "min"}


@dataclass(frozen=True)
class Combined:
    """A reduction over neighbouring rows of `producer`'s result or, if `along`, over its columns: `size` of them at a
    time, `parts` times; the other dimension has `other_size`."""

    op: str
    producer: Node
    size: int
    parts: int
    other_size: int
    along: bool = False


def combined_of(reduction: Node, strict: bool = False) -> Combined | None:
    """Match a reduction; None if the node has another form or is not computed in float32. Nodes between it and the
    producer must not move data nor, if `strict`, round."""
    source = reduction.inputs[0] if reduction.op in KINDS else None
    if source is None or reduction.dtype.compute is not DType.F32 or not source.type.size:
        return None
    axes = tuple(reduction.attrs["axes"])
    rank = source.type.rank
    along = axes == (rank - 1,)
    if not axes or not (along or axes == tuple(range(axes[0], rank - 1))):
        return None
    producer = _before_casts(source, strict)
    size = math.prod(source.shape[axes[0] : rank if along else -1])
    if along:
        whole = size
        if producer.op == "reshape" and producer.inputs[0].shape[-1:] == (math.prod(producer.shape[-2:]),):
            producer = _before_casts(producer.inputs[0], strict)
            whole = producer.shape[-1]
        return Combined(reduction.op, producer, size, whole // size, source.type.size // whole, along)
    columns = source.shape[-1]
    while producer.op == "reshape" and producer.inputs[0].shape[-1:] == (columns,):
        producer = _before_casts(producer.inputs[0], strict)
    return Combined(reduction.op, producer, size, math.prod(source.shape[: axes[0]]), columns)


def _before_casts(node: Node, strict: bool) -> Node:
    """The operand below casts among floats of at most 32 bits, because the reduction is in 32 bits anyway. If
    `strict`, a cast that rounds stays."""
    while node.op == "cast" and all(x.dtype.compute is DType.F32 for x in (node, node.inputs[0])):
        if strict and node.dtype is not DType.F32:
            break
        node = node.inputs[0]
    return node
