"""Queries of rules about a stage: its readers, its operands, its shared axes, and how much of it a tile needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.hw import CpuMachine
from tilewright.loops.schedule import Schedule
from tilewright.loops.schedule.nest import Leaf, PlainStage, Tile, find_leaf, flat, leaves, plain, reads
from tilewright.loops.tiling import power_of_two_below
from tilewright.te.index import bounds, coefficient, linear

# Calls that take more than a few instructions, with an estimate; recomputing them should be avoided.
_LONG = {"div": 8, "sqrt": 10, "rsqrt": 12, "pow": 40, "atan2": 30} | dict.fromkeys(
    ("exp", "exp2_nonpositive", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf"), 16
)

Extents = tuple[int, ...]


def stage_of(schedule: Schedule, name: str) -> PlainStage:
    """A stage that has not been scheduled yet."""
    return plain(schedule.nest, name)


def is_input(schedule: Schedule, name: str) -> bool:
    return any(tile.name == name for tile in schedule.nest.inputs)


def is_reduction(schedule: Schedule, name: str) -> bool:
    return not is_input(schedule, name) and find_leaf(schedule.nest, name)[1].kind is not None


def tile_of(schedule: Schedule, name: str) -> Tile:
    for tile in schedule.nest.inputs:
        if tile.name == name:
            return tile
    return find_leaf(schedule.nest, name)[1].target


def readers_of(schedule: Schedule, name: str) -> list[Leaf]:
    tile = tile_of(schedule, name)
    return [leaf for _, leaf in leaves(schedule.nest.body) if reads(leaf, tile)]


def loads_in(leaf: Leaf) -> list[te.Load]:
    """The loads of the leaf, in order, each once."""
    return list(dict.fromkeys(load for expr in leaf.expressions() for load in te.loads(expr)))


def needs(schedule: Schedule, name: str) -> set[str]:
    """The names of all tensors that a stage needs, inputs included."""
    found: set[str] = set()
    waiting = [] if is_input(schedule, name) else [name]
    while waiting:
        for load in loads_in(find_leaf(schedule.nest, waiting.pop())[1]):
            if load.source.name not in found:
                found.add(load.source.name)
                if not is_input(schedule, load.source.name):
                    waiting.append(load.source.name)
    return found


def is_expensive(leaf: Leaf) -> bool:
    return any(isinstance(node, te.Call) and node.op in _LONG for node in te.walk(leaf.value))


def instructions_of(leaf: Leaf) -> float:
    """Arithmetic and conversion instructions for one vector of its elements."""
    values = [node for node in te.walk(leaf.value) if node.dtype.short not in ("i64", "bool")]
    computed = sum(_LONG.get(node.op, 1) for node in values if isinstance(node, te.Call))
    others = sum(isinstance(node, te.Select | te.Cast) for node in values)
    return computed + others + (leaf.kind is not None)


def loops_of(stage: PlainStage) -> tuple[te.Var, ...]:
    """The variables of its axes of more than one element."""
    return tuple(axis for axis in stage.axes if axis is not None)


def has_reuse(stage: PlainStage) -> bool:
    """Whether elements of the stage share data: some operand does not depend on some axis."""
    axes = set(loops_of(stage))
    moved = [_moves(load) & axes for load in loads_in(stage.leaf)]
    return stage.leaf.kind is not None and any(moving != axes for moving in moved)


def _moves(load: te.Load) -> set[te.Var]:
    return {var for index in load.indices for var in te.variables(index)}


def moves_along(load: te.Load, axis: te.Var) -> bool:
    return axis in _moves(load)


def is_contiguous(load: te.Load, axis: te.Var) -> bool:
    assert isinstance(load.source, Tile)
    return coefficient(flat(load.source, load.indices), axis) == 1


def depends_on_data(leaf: Leaf) -> bool:
    """Whether it gathers: an index is itself loaded."""
    return any(te.loads(index) for load in loads_in(leaf) for index in load.indices)


@dataclass(frozen=True)
class Consumer:
    """The only stage that reads another, element by element: `axes[n]` is the consumer's loop over axis n."""

    name: str
    stage: PlainStage
    axes: tuple[te.Var | None, ...]


def consumer_of(schedule: Schedule, name: str) -> Consumer | None:
    """The only stage that reads this one, if it is not a reduction and reads each element once at the same index."""
    found = readers_of(schedule, name)
    if len(found) != 1 or found[0].kind is not None:
        return None
    reader = stage_of(schedule, found[0].stage)
    accesses = {load.indices for load in reads(found[0], tile_of(schedule, name))}
    if len(accesses) != 1:
        return None
    (indices,) = accesses
    axes: list[te.Var | None] = []
    for index in indices:
        if isinstance(index, te.Const):
            axes.append(None)
        elif isinstance(index, te.Var) and index in loops_of(reader) and index not in axes:
            axes.append(index)
        else:
            return None
    if {axis for axis in axes if axis is not None} != set(loops_of(reader)):
        return None
    return Consumer(reader.leaf.stage, reader, tuple(axes))


def lanes_for(machine: CpuMachine, leaf: Leaf, extent: int) -> int:
    """Lanes for a vector loop along the last axis, with this many iterations: the machine's for the widest type
    involved, or fewer. An index that all lanes share is loaded once, whatever its type."""
    lane = te.variables(leaf.indices[-1]) if leaf.indices else frozenset()
    shared = {
        inner
        for load in loads_in(leaf)
        for index in load.indices
        for inner in te.loads(index)
        if lane and not any(te.variables(each) & lane for each in inner.indices)
    }
    elements = [leaf.target.dtype, *(load.dtype for load in loads_in(leaf) if load not in shared)]
    widest = max(elements, key=lambda dtype: dtype.compute.bytes)
    return min(machine.lanes(widest), power_of_two_below(extent))


# -- how much of a tensor is read -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One axis of a region that is read: its size is the span of the reader's axes, each times its step."""

    whole: int  # upper bound, used if nothing better is known
    steps: tuple[tuple[int, int], ...] | None = None  # (axis of the reader, step)
    fixed: int = 1  # elements if the reader's axes are fixed

    def extent(self, box: Extents) -> int:
        if self.steps is None:
            return self.whole
        return min(self.whole, self.fixed + sum((box[axis] - 1) * step for axis, step in self.steps))


def box_reader(reader: Leaf, axes: Sequence[te.Var | None], tile: Tile) -> Callable[[Extents], Extents]:
    """How much of `tile` the reader reads along each axis while it computes a box of its own tensor."""
    loads = reads(reader, tile)
    assert loads, f"{reader.stage} does not read {tile.name}"
    sides = [
        _side([load.indices[axis] for load in loads], axes, extent) for axis, extent in enumerate(tile.shape)
    ]
    return lambda box: tuple(side.extent(box) for side in sides)


def _side(indices: Sequence[te.Expr], axes: Sequence[te.Var | None], extent: int) -> Side:
    forms = [linear(index) for index in indices]
    if any(form.terms != forms[0].terms for form in forms):
        return Side(extent)
    offsets = [form.constant for form in forms]
    fixed = max(offsets) - min(offsets) + 1
    steps: list[tuple[int, int]] = []
    for atom, factor in forms[0].terms.items():
        if isinstance(atom, te.Var) and atom in axes:
            steps.append((axes.index(atom), abs(factor)))
            continue
        low, high = bounds(atom)
        if low is None or high is None or te.loads(atom):
            return Side(extent)
        fixed += (high - low) * abs(factor)
    return Side(extent, tuple(steps), fixed)


def largest(boxes: Sequence[Extents]) -> Extents:
    """The smallest box that holds each of these if they start at the same index."""
    return tuple(max(sides) for sides in zip(*boxes, strict=True))


def bytes_of(tile: Tile, extents: Extents) -> int:
    return math.prod(extents) * tile.dtype.bytes


def walked_by(load: te.Load) -> tuple[te.Var | None, ...] | None:
    """The variable that steps along each axis of the loaded tensor; None for an axis of one element. Returns None if
    the access has another form."""
    assert isinstance(load.source, Tile)
    found: list[te.Var | None] = []
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        form = linear(index)
        if not form.terms and extent == 1:
            found.append(None)
            continue
        if form.constant or len(form.terms) != 1:
            return None
        ((atom, step),) = form.terms.items()
        if not isinstance(atom, te.Var) or step != 1 or atom.extent != extent or atom in found:
            return None
        found.append(atom)
    return tuple(found)
