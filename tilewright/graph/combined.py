"""Reductions over neighbouring rows or columns of a value: those that the kernel that computes the value may take over.

Fusion and the templates for GPUs ask the same predicate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.dtypes import DType
from tilewright.graph.ir import Node

KINDS = {"sum": "sum", "mean": "sum", "amax": "max", "amin": "min"}


@dataclass(frozen=True)
class Combined:
    """A reduction over neighbouring rows of what `producer` computes, or, where `along`, over its columns: `size` of
    them at a time, `parts` times; of the others there are `other_size`."""

    op: str
    producer: Node
    size: int
    parts: int
    other_size: int
    along: bool = False


def combined_of(reduction: Node, strict: bool = False) -> Combined | None:
    """None where a node is something else, or not computed in float32. What lies between it and the producer may not
    move anything, and, where `strict`, not round."""
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
    """What casts among floats of at most 32 bits were made of: it is combined in 32 anyway. Where `strict`, a cast that
    rounds stays."""
    while node.op == "cast" and all(x.dtype.compute is DType.F32 for x in (node, node.inputs[0])):
        if strict and node.dtype is not DType.F32:
            break
        node = node.inputs[0]
    return node
