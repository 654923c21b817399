"""Sequences and optionals exist only at import, as lists and None. Nothing of them remains in the graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from tilewright.dtypes import DType
from tilewright.frontend.builder import Unsupported
from tilewright.frontend.onnx.context import Context, Value, axis_of
from tilewright.frontend.onnx.op_movement import chunks
from tilewright.frontend.onnx.registry import converter
from tilewright.graph.ir import Node

Sequence = list[Any]


def _list(value: Value) -> Sequence:
    if not isinstance(value, list):
        raise Unsupported("an operand that is not a sequence")
    return value


def _position(ctx: Context, slot: Node | None, length: int, *, after: bool = False) -> int:
    if slot is None:
        return length if after else length - 1
    position = ctx.static_int(slot)
    position += length if position < 0 else 0
    if not 0 <= position < length + after:
        raise Unsupported(f"position {position} of a sequence of {length}")
    return position


@converter("SequenceEmpty")
def sequence_empty(ctx: Context, *, dtype: int = 1) -> Sequence:
    return []


@converter("SequenceConstruct")
def sequence_construct(ctx: Context, *items: Node) -> Sequence:
    return list(items)


@converter("SequenceInsert")
def sequence_insert(ctx: Context, sequence: Value, item: Node, slot: Node | None = None) -> Sequence:
    items = list(_list(sequence))
    items.insert(_position(ctx, slot, len(items), after=True), item)
    return items


@converter("SequenceErase")
def sequence_erase(ctx: Context, sequence: Value, slot: Node | None = None) -> Sequence:
    items = list(_list(sequence))
    del items[_position(ctx, slot, len(items))]
    return items


@converter("SequenceAt")
def sequence_at(ctx: Context, sequence: Value, slot: Node) -> Value:
    items = _list(sequence)
    return items[_position(ctx, slot, len(items))]


@converter("SequenceLength")
def sequence_length(ctx: Context, sequence: Value) -> Node:
    return ctx.constant(np.array(len(_list(sequence)), np.int64))


@converter("ConcatFromSequence")
def concat_from_sequence(ctx: Context, sequence: Value, *, axis: int, new_axis: int = 0) -> Node:
    items = _list(sequence)
    if not items:
        raise Unsupported("an empty sequence")
    rank = items[0].type.rank
    if new_axis:
        return ctx.stack(items, axis_of(axis, rank + 1))
    return ctx.concat(items, axis_of(axis, rank))


@converter("SplitToSequence")
def split_to_sequence(
    ctx: Context, x: Node, split: Node | None = None, *, axis: int = 0, keepdims: int = 1
) -> Sequence:
    axis = axis_of(axis, x.type.rank)
    extent = x.shape[axis]
    if split is None:
        ctx.budget.count(extent, f"{ctx.source}: {extent} parts")
        parts = chunks(ctx, x, axis, (1,) * extent)
        return parts if keepdims else [ctx.squeeze(part, axis) for part in parts]
    widths = ctx.static_ints(split)
    if split.type.rank == 0:
        step = widths[0]
        if step < 1:
            raise Unsupported(f"parts of {step}")
        ctx.budget.count(-(-extent // step), f"{ctx.source}: parts of {step} of an axis of {extent}")
        widths = tuple(min(step, extent - begin) for begin in range(0, extent, step))
    if sum(widths) != extent or any(width < 0 for width in widths):
        raise Unsupported(f"parts {widths} of an axis of {extent}")
    return chunks(ctx, x, axis, widths)


@converter("SequenceMap")
def sequence_map(
    ctx: Context, sequence: Value, *others: Value, body: onnx.GraphProto
) -> tuple[Sequence, ...]:
    results: list[Sequence] = [[] for _ in body.output]
    ctx.budget.count(len(_list(sequence)), f"{ctx.source}: {len(_list(sequence))} elements")
    for position, item in enumerate(_list(sequence)):
        rest = [other[position] if isinstance(other, list) else other for other in others]
        for collected, value in zip(results, ctx.run_graph(body, (item, *rest)), strict=True):
            collected.append(value)
    return tuple(results)


# -- optionals --------------------------------------------------------------------------------------------------------


@converter("Optional")
def optional(ctx: Context, value: Value = None, *, type: Any = None) -> Value:
    return value


@converter("OptionalHasElement")
def optional_has_element(ctx: Context, value: Value = None) -> Node:
    return ctx.full(value is not None, DType.BOOL)


@converter("OptionalGetElement")
def optional_get_element(ctx: Context, value: Value) -> Value:
    if value is None:
        raise Unsupported("the element of an empty optional")
    return value
