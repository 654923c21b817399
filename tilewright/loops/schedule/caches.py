"""Cache tiles: local copies of operands and results, and their memory scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.hw.gpu import DESCRIBED
from tilewright.loops.ir import Scope
from tilewright.loops.schedule.nest import (
    Leaf,
    Nest,
    Node,
    Tile,
    find_leaf,
    find_tile,
    fresh,
    leaves,
    map_leaves,
    plain,
    reads,
    replaced,
    stage_nest,
    walk,
    with_loads,
    with_tile,
)


def cache_read(
    nest: Nest, tensor: str, stage: str, scope: str = "scratch", order: Sequence[int] | None = None
) -> Nest:
    """Let `stage` read a copy of `tensor`, made by a new stage `tensor.of.stage`.

        out[i, j] = a[i, j] * 2     ->     a.of.out[i, j] = a[i, j]
                                           out[i, j] = a.of.out[i, j] * 2

    With an `order`, the copy has the axes of `tensor` in this order. Needs: `stage` reads `tensor`, which is an input
    or is computed outside the loops of other stages. `compute_at` then shrinks the copy to what one iteration reads;
    without that, this only costs time. Other names: cache_read (TVM), stage_mem (Exo).
    """
    source = find_tile(nest, tensor)
    path, leaf = find_leaf(nest, stage)
    if not reads(leaf, source):
        raise ScheduleError(f"cache_read: stage {stage} does not read {tensor}")
    if source.scope is not Scope.GLOBAL:
        plain(nest, tensor)
    axes = tuple(range(len(source.shape)) if order is None else order)
    if sorted(axes) != list(range(len(source.shape))):
        raise ScheduleError(
            f"cache_read: the order of {tensor}'s axes must have each of 0 to {len(source.shape) - 1} once, got"
            f" {list(axes)}"
        )
    name = fresh(nest, f"{tensor}.of.{stage}")
    copy = Tile(name, source.dtype, tuple(source.shape[axis] for axis in axes), _scope(scope))

    def in_source(indices: tuple[te.Expr, ...]) -> tuple[te.Expr, ...]:
        return tuple(indices[axes.index(axis)] for axis in range(len(axes)))

    nodes = stage_nest(name, copy, [], None, lambda indices: te.Load(source, in_source(indices)))

    def redirect(other: Leaf) -> Leaf:
        if other is not leaf:
            return other
        (changed,) = with_loads(
            (leaf,), source, lambda indices: te.Load(copy, tuple(indices[axis] for axis in axes))
        )
        assert isinstance(changed, Leaf)
        return changed

    root = path[0] if path else leaf
    body = _before(nest, root, nodes)
    return replace(nest, body=map_leaves(body, redirect))


def cache_write(nest: Nest, stage: str, scope: str = "scratch") -> Nest:
    """Compute `stage` into a tile of its own, by a new stage `stage.local`, and copy it from there.

        out[i, j] += a[i, k] * b[k, j]     ->     out.local[i, j] += a[i, k] * b[k, j]
                                                  out[i, j] = out.local[i, j]

    Needs: nothing has been done to the stage yet. `compute_at` then shrinks the tile to what is copied at a time,
    which is how accumulators get into registers. Other names: cache_write (TVM).
    """
    found = plain(nest, stage)
    leaf = found.leaf
    name = fresh(nest, f"{stage}.local")
    local = Tile(name, leaf.target.dtype, leaf.target.shape, _scope(scope))
    inner = stage_nest(name, local, list(found.reductions), leaf.kind, found.value_at)
    outer = stage_nest(stage, leaf.target, [], None, lambda indices: te.Load(local, indices))
    return replace(nest, body=replaced(nest.body, found.root, (*inner, *outer)))


def set_scope(nest: Nest, stage: str, scope: str) -> Nest:
    """Set the memory scope of a stage's tile: "scratch" memory, or "register" (as many as needed).

        scratch product: f32[6, 16]     ->     register product: f32[6, 16]

    Needs: the stage is not the output. Registers have no addresses, so in the end all loops that the tile's index
    depends on must be unrolled or vectorised; `Schedule.program` checks it. Other names: set_scope (TVM), set_memory
    (Exo).
    """
    _, leaf = find_leaf(nest, stage)
    if leaf.target.scope is Scope.GLOBAL:
        raise ScheduleError(f"set_scope: stage {stage} is the output; cache_write gives it a tile of its own")
    return with_tile(nest, leaf.target, replace(leaf.target, scope=_scope(scope), gap=0))


def _scope(name: str) -> Scope:
    """The scope of this name: a declared one, or what the memories of described machines are called ("shared")."""
    memories = [memory for machine in DESCRIBED.values() for memory in machine.memories]
    known = {scope.value: scope for scope in Scope.declared()}
    known |= {memory.name: memory.scope for memory in memories if memory.scope is not None}
    known = {each: scope for each, scope in known.items() if scope is not Scope.GLOBAL}
    if name not in known:
        raise ScheduleError(f"the scope must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def _before(nest: Nest, root: Node, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Insert `nodes` before the outermost statement `root`, or before the one that contains it if an
    intrinsic does."""
    for top in nest.body:
        if top is root or any(node is root for _, node in walk((top,))):
            return replaced(nest.body, top, (*nodes, top))
    raise AssertionError("the statement is not in the nest")


def readers(nest: Nest, tile: Tile) -> list[Leaf]:
    return [leaf for _, leaf in leaves(nest.body) if reads(leaf, tile)]
