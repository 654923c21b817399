"""Control flow, unrolled.

- `If` with a condition known at compile time is one of its branches; otherwise both are computed and each result is
  selected, which needs equal types. If a branch cannot be computed for these shapes (a model for two sampling rates
  has one of each), the condition must be known: the inputs that decide it are pinned.
- `Loop` and `Scan` are unrolled if their trip count is known at compile time, within the budget of nodes; every
  iteration counts, even of an empty body. A Loop whose condition depends on the call runs its full trip count, with
  what it carries kept once the condition is false; what it would collect per iteration then has no static shape and
  is unsupported.
"""

from __future__ import annotations

from typing import Any

import onnx

from tilewright.dtypes import DType
from tilewright.frontend.builder import Ints, Unsupported
from tilewright.frontend.onnx.context import Context, Value, axis_of
from tilewright.frontend.onnx.registry import NotStatic, converter
from tilewright.graph.ir import Node


@converter("If")
def if_(
    ctx: Context, condition: Node, *, then_branch: onnx.GraphProto, else_branch: onnx.GraphProto
) -> tuple[Value, ...]:
    if ctx.statics.is_static(condition):
        taken = then_branch if bool(ctx.static(condition).reshape(-1)[0]) else else_branch
        return tuple(ctx.run_graph(taken, ()))
    before = len(ctx.failures)
    try:
        then, other = ctx.run_graph(then_branch, ()), ctx.run_graph(else_branch, ())
        chosen = ctx.reshape(condition, ())
        return tuple(_selected(ctx, chosen, a, b) for a, b in zip(then, other, strict=True))
    except _Differ:
        return tuple(then if bool(ctx.static(condition).reshape(-1)[0]) else other)
    except Unsupported:
        if not ctx.statics.can_know(condition):
            raise
    del ctx.failures[before:]
    taken = then_branch if bool(ctx.static(condition).reshape(-1)[0]) else else_branch
    return tuple(ctx.run_graph(taken, ()))


class _Differ(Exception):
    """Two values of different types, between which no select can choose."""


def _selected(ctx: Context, condition: Node, a: Value, b: Value) -> Value:
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [_selected(ctx, condition, x, y) for x, y in zip(a, b, strict=True)]
    if isinstance(a, Node) and isinstance(b, Node) and a.type == b.type:
        return ctx.select(condition, a, b)
    raise _Differ


@converter("Loop")
def loop(
    ctx: Context, trips: Node | None, condition: Node | None, *carried: Value, body: onnx.GraphProto
) -> Any:
    most = None if trips is None else int(ctx.static(trips).reshape(-1)[0])
    states = list(carried)
    scanned: list[list[Node]] = [[] for _ in range(len(body.output) - 1 - len(states))]
    going: Node = ctx.full(True, DType.BOOL) if condition is None else ctx.reshape(condition, ())
    dynamic = False
    done = 0
    while most is None or done < most:
        if not dynamic:
            try:
                if not bool(ctx.static(going).reshape(-1)[0]):
                    break
            except NotStatic:
                if trips is None or scanned:
                    raise
                dynamic = True
        index = ctx.constant(_index(done))
        results = ctx.run_graph(body, (index, going, *states))
        after = ctx.reshape(results[0], ())
        new = results[1 : 1 + len(states)]
        if dynamic:
            try:
                new = [_selected(ctx, going, value, old) for value, old in zip(new, states, strict=True)]
            except _Differ:
                raise Unsupported(
                    "a value whose shape changes in a loop that ends when the data says so"
                ) from None
            after = ctx.both(going, after)
        for collected, value in zip(scanned, results[1 + len(states) :], strict=True):
            collected.append(value)
        states, going = list(new), after
        done += 1
    gathered = []
    for position, collected in enumerate(scanned):
        if not collected:
            raise Unsupported(f"scan output {position} of a loop that never runs")
        gathered.append(ctx.stack(collected, 0))
    return (*states, *gathered)


def _index(value: int) -> Any:
    import numpy as np

    return np.array(value, np.int64)


@converter("Scan", since=9)
def scan(
    ctx: Context,
    *operands: Node,
    body: onnx.GraphProto,
    num_scan_inputs: int,
    scan_input_axes: Ints | None = None,
    scan_input_directions: Ints | None = None,
    scan_output_axes: Ints | None = None,
    scan_output_directions: Ints | None = None,
) -> tuple[Node, ...]:
    count = len(operands) - num_scan_inputs
    states, sequences = list(operands[:count]), list(operands[count:])
    axes = scan_input_axes or (0,) * num_scan_inputs
    backward = scan_input_directions or (0,) * num_scan_inputs
    positions = [axis_of(axis, x.type.rank) for axis, x in zip(axes, sequences, strict=True)]
    lengths = {x.shape[axis] for axis, x in zip(positions, sequences, strict=True)}
    if len(lengths) != 1:
        raise Unsupported(f"sequences of the lengths {sorted(lengths)}")
    (length,) = lengths
    ctx.budget.count(length, f"{ctx.source}: {length} iterations")
    outputs: list[list[Node]] = [[] for _ in range(len(body.output) - count)]
    for step in range(length):
        items = [
            ctx.index_axis(x, axis, length - 1 - step if back else step)
            for x, axis, back in zip(sequences, positions, backward, strict=True)
        ]
        results = ctx.run_graph(body, (*states, *items))
        states = results[:count]
        for collected, value in zip(outputs, results[count:], strict=True):
            collected.append(value)
    output_axes = scan_output_axes or (0,) * len(outputs)
    reversed_ = scan_output_directions or (0,) * len(outputs)
    gathered = []
    for collected, axis, back in zip(outputs, output_axes, reversed_, strict=True):
        if not collected:
            raise Unsupported("a scan over sequences without elements")
        ordered = list(reversed(collected)) if back else collected
        gathered.append(ctx.stack(ordered, axis_of(axis, collected[0].type.rank + 1)))
    return (*states, *gathered)


@converter("Scan", since=8)
def scan8(
    ctx: Context,
    lengths: Node | None,
    *operands: Node,
    body: onnx.GraphProto,
    num_scan_inputs: int,
    directions: Ints | None = None,
) -> tuple[Node, ...]:
    """Opset 8: everything has a leading batch axis, and every batch element is scanned separately."""
    if lengths is not None:
        raise Unsupported("sequences of different lengths")
    results = []
    ctx.budget.count(operands[0].shape[0], f"{ctx.source}: {operands[0].shape[0]} sequences")
    for batch in range(operands[0].shape[0]):
        part = [ctx.index_axis(x, 0, batch) for x in operands]
        results.append(
            scan(ctx, *part, body=body, num_scan_inputs=num_scan_inputs, scan_input_directions=directions)
        )
    return tuple(ctx.stack(parts, 0) for parts in zip(*results, strict=True))
