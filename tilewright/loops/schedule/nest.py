"""The tree of loops that a schedule transforms; its leaves compute stages, element by element.

Semantics
---------
- A `Tile` is a tensor in memory with its shape kept: an input, the output, or a local one, in scratch memory or in
  registers. Every tile that is written is written by one `Leaf`.
- A `Leaf` stores `value` at `indices` of its target, once for every iteration of the loops around it in which its
  `guards` hold. With a reduction `kind` it combines the value with the stored one; the loops in `reduced` iterate
  over the combined elements. The initial store of the identity is implicit: it belongs right before the outermost
  loop of `reduced`, in copies of the loops below that are not in `reduced`.
- A local tile belongs to the innermost loop that holds its leaf and all its readers: each iteration fills it anew. So
  loops carry no dependence except those of reductions, whose elements may be combined in any order.
- Iterations of a loop that `overlaps` write some elements twice, with the same value.
- A loop with `rest` runs so many iterations, its first, in the last iteration of the loop `within`, and all in others.
- A tile that is `kept` holds what earlier iterations of a loop computed: these iterations run in order.
- A `streamed` leaf stores around the caches. A `transposed` one fills its tile by columns, and the tile is transposed
  where the loops over its elements end.
- `Micro` is a nest that an intrinsic computes, and `Fetch` a prefetch.
- A loop that is bound to an `axis` of a GPU runs its iterations on blocks, warps or threads (`bound.py`).
- A `swizzled` tile has the 16-byte chunks of its rows permuted, each of eight rows differently, against bank conflicts;
  one with a `gap` has unused elements after each row, for the same reason.

Loops, stages and tiles have unique names within a nest, and a trace refers to them by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import ScheduleError
from tilewright.loops.ir import Kind, Scope
from tilewright.runtime.packing import Packing
from tilewright.te.index import Linear, flat_index, linear, simplify

if TYPE_CHECKING:
    from tilewright.hw.intrinsics import Intrinsic

Change = Callable[[te.Expr], te.Expr]


@dataclass(frozen=True)
class Tile(te.Source):
    name: str
    dtype: DType
    shape: tuple[int, ...]
    scope: Scope
    swizzled: bool = False
    gap: int = 0  # unused elements after each row

    @property
    def size(self) -> int:
        return math.prod(self.laid_out)

    @property
    def laid_out(self) -> tuple[int, ...]:
        """Its shape in memory."""
        return (*self.shape[:-1], self.shape[-1] + self.gap) if self.gap else self.shape


@dataclass(frozen=True)
class Loop:
    var: te.Var
    body: tuple[Node, ...]
    kind: Kind = Kind.SERIAL
    overlaps: bool = False
    axis: str = ""  # of a GPU, that it is bound to
    rest: int = 0
    within: str = ""

    @property
    def name(self) -> str:
        return self.var.name


@dataclass(frozen=True)
class Leaf:
    stage: str
    target: Tile
    indices: tuple[te.Expr, ...]
    value: te.Expr
    kind: str | None = None  # of the reduction, as in `te.Reduce`
    reduced: frozenset[te.Var] = frozenset()
    guards: tuple[te.Expr, ...] = ()
    streamed: bool = False
    transposed: bool = False

    def map(self, change: Change) -> Leaf:
        return replace(
            self,
            indices=tuple(map(change, self.indices)),
            value=change(self.value),
            guards=tuple(guard for guard in map(change, self.guards) if guard != _TRUE),
        )

    def expressions(self) -> tuple[te.Expr, ...]:
        return (*self.indices, self.value, *self.guards)


@dataclass(frozen=True)
class Micro:
    loop: Loop  # a perfect nest around one leaf, which the intrinsic computes
    intrinsic: Intrinsic
    thread: te.Var | None = None  # of a GPU's instruction: the thread's index
    starts: tuple[tuple[Tile, te.Expr], ...] = ()  # and where a thread's part of each operand begins
    pitches: tuple[int, ...] = ()  # elements of a row, of operands that are matrices in shared memory


@dataclass(frozen=True)
class Fetch:
    tile: Tile
    indices: tuple[te.Expr, ...]
    level: int


@dataclass(frozen=True)
class Transfer:
    """An asynchronous copy of `lanes` neighbours where the `guards` hold; zeros where `inside` is false. Lowering makes
    it of a leaf."""

    target: Tile
    indices: tuple[te.Expr, ...]
    source: Tile
    source_indices: tuple[te.Expr, ...]
    lanes: int
    inside: te.Expr | None
    guards: tuple[te.Expr, ...] = ()


@dataclass(frozen=True)
class BoxTransfer:
    """A copy of a whole tile by a GPU's tensor copy engine: a box of a matrix of so many rows and columns, from (`row`,
    `column`) on. Lowering makes it of a leaf and the loops that fill the tile."""

    target: Tile
    source: Tile
    rows: int
    columns: int
    stride: int
    row: te.Expr
    column: te.Expr


Node = Loop | Leaf | Micro | Fetch | Transfer | BoxTransfer
Path = tuple[Loop, ...]  # enclosing loops, outermost first

_TRUE = te.const(True, DType.BOOL)
CHUNK_BYTES, ROWS_TOGETHER = 16, 8  # of what a warp reads from shared memory at once


@dataclass(frozen=True)
class Nest:
    name: str
    inputs: tuple[Tile, ...]
    output: Tile
    body: tuple[Node, ...]
    constants: frozenset[str] = frozenset()  # the inputs that are the same in every call
    packings: tuple[Packing | None, ...] = ()  # one for each input
    stages: tuple[tuple[str, int], ...] = ()  # of pipelined tiles, by name
    bulk: tuple[str, ...] = ()  # those that the tensor copy engine fills
    specialised: bool = False  # whether threads of their own do that
    cluster: int = 1  # neighbouring blocks that it brings a tile to at once
    kept: tuple[
        tuple[str, tuple[str, ...]], ...
    ] = ()  # by stage: the loop it is kept in, and those down to its own


# -- walking ----------------------------------------------------------------------------------------------------------


def walk(nodes: tuple[Node, ...], path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every node with its enclosing loops, parents first, including those inside intrinsics."""
    for node in nodes:
        yield path, node
        if isinstance(node, Loop):
            yield from walk(node.body, (*path, node))
        elif isinstance(node, Micro):
            yield from walk((node.loop,), path)


def leaves(nodes: tuple[Node, ...]) -> list[tuple[Path, Leaf]]:
    return [(path, node) for path, node in walk(nodes) if isinstance(node, Leaf)]


def loop_names(nodes: tuple[Node, ...]) -> list[str]:
    return [node.name for _, node in walk(nodes) if isinstance(node, Loop)]


def find_loop(nest: Nest, name: str) -> Path:
    """The loops from the outermost to the one of this name."""
    for path, node in walk(nest.body):
        if isinstance(node, Loop) and node.name == name:
            if any(isinstance(n, Micro) and node in _chain(n.loop) for _, n in walk(nest.body)):
                raise ScheduleError(
                    f"loop {name} belongs to an intrinsic: schedule it before it is tensorised"
                )
            return (*path, node)
    raise ScheduleError(f"the loop must be one of {', '.join(loop_names(nest.body))}, got {name}")


def find_leaf(nest: Nest, stage: str) -> tuple[Path, Leaf]:
    found = leaves(nest.body)
    for path, leaf in found:
        if leaf.stage == stage:
            return path, leaf
    raise ScheduleError(f"the stage must be one of {', '.join(leaf.stage for _, leaf in found)}, got {stage}")


def find_tile(nest: Nest, name: str) -> Tile:
    tiles = [*nest.inputs, *(leaf.target for _, leaf in leaves(nest.body))]
    for tile in tiles:
        if tile.name == name:
            return tile
    raise ScheduleError(f"the tensor must be one of {', '.join(tile.name for tile in tiles)}, got {name}")


def _chain(loop: Loop) -> list[Loop]:
    return [node for _, node in walk((loop,)) if isinstance(node, Loop)]


def perfect_chain(loop: Loop) -> tuple[list[Loop], Leaf] | None:
    """The loops from `loop` down to its only leaf, or None if the nest is not perfect."""
    chain = [loop]
    while len(chain[-1].body) == 1:
        (child,) = chain[-1].body
        if isinstance(child, Leaf):
            return chain, child
        if not isinstance(child, Loop):
            return None
        chain.append(child)
    return None


def narrow_inside(loop: Loop) -> Loop | None:
    """The loop of which only some iterations run in the last iteration of `loop`; None if there is none."""
    for _, node in walk(loop.body):
        if isinstance(node, Loop) and node.within == loop.name:
            return node
    return None


def reads(leaf: Leaf, tile: Tile) -> list[te.Load]:
    return [load for expr in leaf.expressions() for load in _loads_of(expr, tile)]


# -- rebuilding -------------------------------------------------------------------------------------------------------


def replaced(nodes: tuple[Node, ...], old: Node, new: tuple[Node, ...]) -> tuple[Node, ...]:
    """The tree with the node `old` (by identity) replaced by `new`."""
    result: list[Node] = []
    for node in nodes:
        if node is old:
            result.extend(new)
        elif isinstance(node, Loop):
            result.append(replace(node, body=replaced(node.body, old, new)))
        else:
            result.append(node)
    return tuple(result)


def map_leaves(nodes: tuple[Node, ...], change: Callable[[Leaf], Leaf]) -> tuple[Node, ...]:
    def visit(node: Node) -> Node:
        if isinstance(node, Loop):
            return replace(node, body=map_leaves(node.body, change))
        if isinstance(node, Leaf):
            return change(node)
        if isinstance(node, Micro):
            loop = visit(node.loop)
            assert isinstance(loop, Loop)
            return replace(node, loop=loop)
        return node

    return tuple(map(visit, nodes))


def map_exprs(nodes: tuple[Node, ...], change: Change) -> tuple[Node, ...]:
    """The tree with `change` applied to every expression in it."""
    changed = map_leaves(nodes, lambda leaf: leaf.map(change))

    def visit(node: Node) -> Node:
        if isinstance(node, Loop):
            return replace(node, body=tuple(map(visit, node.body)))
        if isinstance(node, Fetch):
            return replace(node, indices=tuple(map(change, node.indices)))
        if isinstance(node, BoxTransfer):
            return replace(node, row=change(node.row), column=change(node.column))
        if isinstance(node, Micro) and node.starts:
            return replace(node, starts=tuple((tile, change(start)) for tile, start in node.starts))
        return node

    return tuple(map(visit, changed))


def with_values(nodes: tuple[Node, ...], values: Mapping[te.Var, te.Expr]) -> tuple[Node, ...]:
    """The tree with variables replaced by expressions, and simplified."""
    return map_exprs(nodes, lambda expr: simplify(te.substitute(expr, values)))


def with_loads(
    nodes: tuple[Node, ...], tile: Tile, change: Callable[[tuple[te.Expr, ...]], te.Expr]
) -> tuple[Node, ...]:
    """The tree with every read of `tile` replaced by `change` of its indices, and simplified where it has any."""

    def rule(node: te.Expr) -> te.Expr | None:
        return change(node.indices) if isinstance(node, te.Load) and node.source == tile else None

    def in_expr(expr: te.Expr) -> te.Expr:
        return simplify(te.rewrite(expr, rule)) if _loads_of(expr, tile) else expr

    return map_exprs(nodes, in_expr)


def _loads_of(expr: te.Expr, tile: Tile) -> list[te.Load]:
    return [load for load in te.loads(expr) if load.source == tile]


def with_tile(nest: Nest, old: Tile, new: Tile) -> Nest:
    """The nest with one tile replaced by another of the same shape."""
    body = with_loads(nest.body, old, lambda indices: te.Load(new, indices))
    body = map_leaves(body, lambda leaf: replace(leaf, target=new) if leaf.target == old else leaf)
    return replace(nest, body=body)


def fresh(nest: Nest, name: str) -> str:
    """Return `name`, which must not be used yet by a loop, a stage or a tensor."""
    stages = {leaf.stage for _, leaf in leaves(nest.body)}
    tiles = {tile.name for tile in nest.inputs}
    if name in stages | tiles or name in loop_names(nest.body):
        raise ScheduleError(f"there is something named {name} already")
    return name


# -- memory offsets
# ---------------------------------------------------------------------------------------------------


def row_major(tile: Tile, indices: tuple[te.Expr, ...]) -> te.Expr:
    """The offset of an element, row-major."""
    return _rejoined(linear(flat_index(indices, tile.laid_out))).expr()


def flat(tile: Tile, indices: tuple[te.Expr, ...]) -> te.Expr:
    """The offset of an element in memory."""
    if not tile.swizzled:
        return row_major(tile, indices)
    *_, row, column = indices
    wide = CHUNK_BYTES // tile.dtype.bytes
    chunks = tile.shape[-1] // wide
    mask = row % ROWS_TOGETHER if chunks >= ROWS_TOGETHER else row // (ROWS_TOGETHER // chunks) % chunks
    chunk = te.call("xor", column // wide, mask)
    return simplify(row_major(tile, (*indices[:-1], te.as_index(0))) + chunk * wide + column % wide)


def stored_at(leaf: Leaf) -> te.Expr:
    """The offset at which a leaf stores; of a transposed one, before the tile is transposed."""
    if not leaf.transposed:
        return flat(leaf.target, leaf.indices)
    first, second = (axis for axis, extent in enumerate(leaf.target.shape) if extent != 1)
    indices = list(leaf.indices)
    indices[first], indices[second] = indices[second], indices[first]
    return flat(leaf.target, tuple(indices))


def _rejoined(form: Linear) -> Linear:
    """Simplify `(x // n) * (c * n) + (x % n) * c` to `x * c`: two fused axes with contiguous strides."""
    for atom, factor in form.terms.items():
        if not (isinstance(atom, te.Call) and atom.op == "mod" and isinstance(atom.args[1], te.Const)):
            continue
        whole, divisor = atom.args
        quotient = linear(te.call("floordiv", whole, divisor))
        if len(quotient.terms) != 1 or quotient.constant:
            continue
        ((other, one),) = quotient.terms.items()
        if one == 1 and form.terms.get(other) == factor * int(divisor.value):  # type: ignore[attr-defined]
            rest = {a: c for a, c in form.terms.items() if a not in (atom, other)}
            return _rejoined(Linear(rest, form.constant) + linear(whole).scaled(factor))
    return form


# -- unscheduled stages
# -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainStage:
    """A stage in its initial form: its own loops over its whole shape, outermost in the program."""

    root: Node
    leaf: Leaf
    axes: tuple[te.Var | None, ...]  # the loop over each axis of the target; None: the axis has one element
    reductions: tuple[Loop, ...]  # outermost first

    def value_at(self, indices: Sequence[te.Expr]) -> te.Expr:
        """The stage's value at an index of its target."""
        positions = zip(self.axes, indices, strict=True)
        return te.substitute(self.leaf.value, {axis: index for axis, index in positions if axis is not None})


def plain(nest: Nest, stage: str, *, reductions_too: bool = True) -> PlainStage:
    """The stage, if its loops (`reductions_too`: including its reduction loops) are unchanged."""
    path, leaf = find_leaf(nest, stage)

    def refuse(why: str) -> ScheduleError:
        return ScheduleError(f"stage {stage} has been scheduled already: {why}; do this before")

    root: Node = path[0] if path else leaf
    if all(node is not root for node in nest.body):
        raise refuse("an intrinsic computes it")
    for loop in path:
        if len(loop.body) != 1:
            raise refuse(f"its loop {loop.name} holds other statements too")
        ours = loop.var in leaf.reduced
        if loop.kind is not Kind.SERIAL:
            raise refuse(f"its loop {loop.name} is {loop.kind.value}")
        if (loop.overlaps and (reductions_too or not ours)) or loop.rest:
            raise refuse(f"its loop {loop.name} was split")
    if leaf.streamed or leaf.transposed:
        raise refuse("its stores were changed")
    axes: list[te.Var | None] = []
    spatial = {loop.var for loop in path if loop.var not in leaf.reduced}
    for index, extent in zip(leaf.indices, leaf.target.shape, strict=True):
        if extent == 1 and isinstance(index, te.Const):
            axes.append(None)
        elif isinstance(index, te.Var) and index in spatial and index.extent == extent:
            axes.append(index)
        else:
            raise refuse("its loops were split, fused or placed elsewhere")
    if {axis for axis in axes if axis is not None} != spatial:
        raise refuse("its loops were split, fused or placed elsewhere")
    if leaf.guards and (reductions_too or any(te.variables(g) - leaf.reduced for g in leaf.guards)):
        raise refuse("it is guarded")
    reductions = tuple(loop for loop in path if loop.var in leaf.reduced)
    return PlainStage(root, leaf, tuple(axes), reductions)


def identity(leaf: Leaf) -> te.Expr:
    """The initial value of a reduction's elements; zero without a reduction."""
    if leaf.kind is not None:
        return te.reduce_identity(leaf.kind, leaf.target.dtype)
    return te.cast(te.const(0, leaf.target.dtype.compute), leaf.target.dtype)


def nested(loops: list[Loop], inner: tuple[Node, ...]) -> tuple[Node, ...]:
    """`inner` inside copies of these loops, the first outermost."""
    for loop in reversed(loops):
        inner = (replace(loop, body=inner),)
    return inner


def stage_nest(
    stage: str,
    target: Tile,
    reduction_loops: list[Loop],
    kind: str | None,
    value: Callable[[tuple[te.Expr, ...]], te.Expr],
) -> tuple[Node, ...]:
    """The plain nest of a stage: a loop for every axis of `target` with more than one element, then the reduction
    loops. `value` returns the element at an index. A reduction over one element is that element."""
    axes = [te.Var(f"{stage}.i{position}", extent) for position, extent in enumerate(target.shape)]
    indices: tuple[te.Expr, ...] = tuple(axis if axis.extent != 1 else te.as_index(0) for axis in axes)
    reduced = frozenset(loop.var for loop in reduction_loops)
    leaf = Leaf(stage, target, indices, simplify(value(indices)), kind if reduced else None, reduced)
    spatial = [Loop(axis, ()) for axis in axes if axis.extent != 1]
    return nested([*spatial, *reduction_loops], (leaf,))
