"""A schedule for a GPU as a nest that can be lowered: loops that are bound become indices of blocks, warps and threads.

    block.y i < 4: block.x j < 8: ...        ->    parallel b < 32: ...          with i = b // 8, j = b % 8
    thread.y i < 16: thread.x j < 8: ...     ->    thread t < 128: ...           with i = t // 8, j = t % 8
    warp.y i < 2: warp.x j < 2: ...          ->    ...                           with i = t // 64, j = t // 32 % 2

A tile in registers is divided: its index loses what depends on threads or warps, which must be the same for all who
access it. If instructions of warps access it, it is made of their fragments, and loops over one fragment's elements
become a loop over those that a thread holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tilewright import te
from tilewright.errors import ScheduleError
from tilewright.hw.gpu import MAX_THREADS, WARP
from tilewright.hw.intrinsics import Fragment, PtxAssembly
from tilewright.hw.warpgroups import ROW_BYTES, WARPGROUP
from tilewright.loops.ir import Kind, Scope
from tilewright.loops.schedule.boxes import with_boxes
from tilewright.loops.schedule.kinds import BLOCK_AXES, THREAD_AXES, WARP_AXES, WARPGROUP_AXES
from tilewright.loops.schedule.nest import (
    Leaf,
    Loop,
    Micro,
    Nest,
    Node,
    Path,
    Tile,
    flat,
    leaves,
    map_leaves,
    perfect_chain,
    row_major,
    walk,
    with_loads,
    with_values,
)
from tilewright.loops.schedule.patches import Patches, patches_of
from tilewright.loops.schedule.tensorise import OperandAccess, match
from tilewright.loops.schedule.vectors import over_lanes
from tilewright.te.index import Linear, bounds, coefficient, divisor_of, linear, simplify

# Threads of an iteration.
_TOGETHER = dict.fromkeys(WARP_AXES, WARP) | dict.fromkeys(WARPGROUP_AXES, WARPGROUP)
_PAIR = 2  # neighbours of a fragment that are stored at once
T = TypeVar("T")


def is_bound(nest: Nest) -> bool:
    return any(isinstance(node, Loop) and node.axis for _, node in walk(nest.body))


def gpu_form(nest: Nest) -> Nest:
    """The nest with its bound loops replaced; ScheduleError if threads differ or exchange registers."""
    nest = with_boxes(nest)
    threads = _thread_count(nest)
    nest = _divided(nest)
    form = _Form(te.Var("thread", threads), _fragments(nest))
    return replace(nest, body=_in_lanes(form.rebuilt(nest.body)))


def _in_lanes(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """What vector loops access, in terms of whole vectors: accesses to memory are then seen to be contiguous."""
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop):
            is_vector = node.kind is Kind.VECTOR
            body = _of_lane(node.body, node.var) if is_vector else _in_lanes(node.body)
            node = replace(node, body=body)
        found.append(node)
    return tuple(found)


def _of_lane(nodes: tuple[Node, ...], lane: te.Var) -> tuple[Node, ...]:
    return map_leaves(nodes, lambda leaf: leaf.map(lambda expr: over_lanes(expr, lane)))


def _thread_count(nest: Nest) -> int:
    counts: dict[str, int] = {}
    for path, leaf in leaves(nest.body):
        bound = [loop for loop in path if loop.kind is Kind.THREAD]
        if not bound:
            raise ScheduleError(
                f"bind: no loop of stage {leaf.stage} is bound to threads: all of them would compute it",
                remedy="bind one of its loops to thread.x, or inline it",
            )
        count = math.prod(loop.var.extent for loop in bound)
        counts[leaf.stage] = count * _TOGETHER.get(bound[0].axis, 1)
    if len(set(counts.values())) > 1:
        text = ", ".join(f"{stage} by {count}" for stage, count in counts.items())
        raise ScheduleError(
            f"bind: stages are computed by different numbers of threads: {text}",
            remedy="split and bind each stage for the same number of threads; a warp is 32",
        )
    (threads,) = set(counts.values())
    if threads > MAX_THREADS:
        raise ScheduleError(f"bind: {threads} threads in a block, of at most {MAX_THREADS}")
    return threads


# -- tiles in registers -----------------------------------------------------------------------------------------------


def _divided(nest: Nest) -> Nest:
    """Each thread, or warp, holds its own part of a tile in registers."""
    bound = {
        node.var: node.axis
        for _, node in walk(nest.body)
        if isinstance(node, Loop) and node.kind is Kind.THREAD
    }
    for tile in _register_tiles(nest):
        shares: dict[tuple[tuple[tuple[str, int], ...], ...], str] = {}
        extents = [1] * len(tile.shape)
        parts: list[list[te.Expr]] = []
        for stage, indices in _accesses(nest, tile):
            forms = [_own_part(tile, stage, index, bound) for index in indices]
            shares.setdefault(tuple(share for _, share in forms), stage)
            parts.append([own for own, _ in forms])
            for axis, (own, _) in enumerate(forms):
                low, high = bounds(own)
                if low is None or high is None or low < 0:
                    raise ScheduleError(
                        f"{tile.name} is in registers, and stage {stage} accesses it out of bounds"
                    )
                extents[axis] = max(extents[axis], high + 1)
        if len(shares) > 1:
            one, other, *_ = shares.values()
            raise ScheduleError(
                f"{tile.name} is in registers, which are a thread's own, and stages {one} and {other} divide it"
                " differently among threads",
                remedy="bind both in the same way, or keep the tile in shared memory",
            )
        if not any(share for share in next(iter(shares))):
            continue
        # A thread's elements may be patches among those of others.
        patches = [patches_of([linear(own) for own in each]) for each in zip(*parts, strict=True)]
        shape = tuple(
            extent if each is None or each.span != extent else each.size
            for extent, each in zip(extents, patches, strict=True)
        )
        without = [
            each if each is not None and each.span == extent else None
            for extent, each in zip(extents, patches, strict=True)
        ]
        nest = _with_part(nest, tile, replace(tile, shape=shape), bound, without)
    return nest


def _register_tiles(nest: Nest) -> list[Tile]:
    return [leaf.target for _, leaf in leaves(nest.body) if leaf.target.scope is Scope.REGISTER]


def _accesses(nest: Nest, tile: Tile) -> list[tuple[str, tuple[te.Expr, ...]]]:
    found = []
    for _, leaf in leaves(nest.body):
        if leaf.target == tile:
            found.append((leaf.stage, leaf.indices))
        for expr in leaf.expressions():
            found += [(leaf.stage, load.indices) for load in te.loads(expr) if load.source == tile]
    return found


def _own_part(
    tile: Tile, stage: str, index: te.Expr, bound: dict[te.Var, str]
) -> tuple[te.Expr, tuple[tuple[str, int], ...]]:
    """An index without its terms in threads, and these terms by axis."""
    form = linear(index)
    if any(not isinstance(atom, te.Var) and te.variables(atom) & set(bound) for atom in form.terms):
        raise ScheduleError(
            f"{tile.name} is in registers, and stage {stage} divides it among threads by a fused loop",
            remedy="bind the loops of its axes separately",
        )
    own = {atom: c for atom, c in form.terms.items() if atom not in bound}
    share = sorted(
        (bound[atom], c) for atom, c in form.terms.items() if isinstance(atom, te.Var) and atom in bound
    )
    return Linear(own, form.constant).expr(), tuple(share)


def _with_part(
    nest: Nest, tile: Tile, part: Tile, bound: dict[te.Var, str], patches: Sequence[Patches | None]
) -> Nest:
    def own(indices: tuple[te.Expr, ...]) -> tuple[te.Expr, ...]:
        found = (_own_part(tile, "", index, bound)[0] for index in indices)
        return tuple(
            index if each is None else each.position(linear(index)).expr()
            for index, each in zip(found, patches, strict=True)
        )

    body = with_loads(nest.body, tile, lambda indices: te.Load(part, own(indices)))

    def in_leaf(leaf: Leaf) -> Leaf:
        return replace(leaf, target=part, indices=own(leaf.indices)) if leaf.target == tile else leaf

    return replace(nest, body=map_leaves(body, in_leaf))


def _is_warp_level(node: Node) -> bool:
    return isinstance(node, Micro) and isinstance(node.intrinsic.emit, PtxAssembly)


def _operands(node: Micro) -> list[tuple[Fragment, OperandAccess]]:
    found = match(node.loop, node.intrinsic)
    return list(zip(node.intrinsic.fragments, (found.output, *found.inputs), strict=True))


def _fragments(nest: Nest) -> dict[str, Fragment]:
    """The fragment of each tile that consists of fragments, by name: all instructions must agree on it."""
    found: dict[str, Fragment] = {}
    for _, node in walk(nest.body):
        if not _is_warp_level(node):
            continue
        assert isinstance(node, Micro)
        for fragment, access in _operands(node):
            tile, name = access.tile, node.intrinsic.name
            if tile.scope is not fragment.scope:
                wanted = {Scope.REGISTER: "registers", Scope.SCRATCH: "shared memory"}[fragment.scope]
                raise ScheduleError(
                    f"tensorise: {name} takes {fragment.tensor.name} from {wanted}, and {tile.name} is in"
                    f" {tile.scope.value}",
                    remedy="cache_read puts an operand there",
                )
            if access.strides[-1] != 1:
                raise ScheduleError(f"tensorise: {name}: the rows of {tile.name} are not contiguous")
            if _is_matrix(fragment):
                _check_matrix(nest, name, tile, access)
            if tile.scope is not Scope.REGISTER:
                continue
            shape = _last(tile.shape, fragment)
            if math.prod(shape) != tile.size or any(
                extent % size for extent, size in zip(shape, fragment.tensor.shape, strict=True)
            ):
                raise ScheduleError(
                    f"tensorise: {name}: {tile.name}{list(tile.shape)} is not made of whole fragments"
                )
            before = found.setdefault(tile.name, fragment)
            one, many = sorted((before, fragment), key=lambda each: each.size)
            if not _is_made_of(many, one) or (many.size > one.size and _columns(tile, one) > 1):
                raise ScheduleError(
                    f"tensorise: {name}: the threads of a warp hold {tile.name} otherwise than another instruction"
                    " leaves it"
                )
            found[tile.name] = one
    return found


def _is_matrix(fragment: Fragment) -> bool:
    """Whether an instruction reads the whole operand from shared memory, where a descriptor says how it lies."""
    return fragment.scope is Scope.SCRATCH and fragment.lanes == 1


def _check_matrix(nest: Nest, name: str, tile: Tile, access: OperandAccess) -> None:
    row_bytes = tile.shape[-1] * tile.dtype.bytes
    if not tile.swizzled or row_bytes not in ROW_BYTES or access.strides[0] != tile.shape[-1]:
        raise ScheduleError(
            f"tensorise: {name} takes {tile.name} in swizzled rows of {', '.join(map(str, sorted(ROW_BYTES)))} bytes,"
            f" and its rows have {row_bytes} bytes and are {'' if tile.swizzled else 'not '}swizzled",
            remedy=f"swizzle({tile.name!r}), and split the reduction so that its rows are as long",
        )
    if tile.name not in nest.bulk:
        raise ScheduleError(
            f"tensorise: {name} reads {tile.name} beside the copy engine, and what threads store is not seen there",
            remedy=f'pipeline({tile.name!r}, stages, copy="bulk")',
        )


def _held_by(fragment: Fragment) -> int:
    """How many threads hold a tile together."""
    return max(WARP, fragment.lanes)


def _is_made_of(many: Fragment, one: Fragment) -> bool:
    """Whether a fragment is several of another, below each other."""
    rows, *others = one.tensor.shape
    height, *same = many.tensor.shape
    threads = _held_by(one)
    if (
        others != same
        or height % rows
        or many.size != one.size * (height // rows)
        or threads != _held_by(many)
    ):
        return False
    held = _held(one)
    parts = [held[lane * one.size : (lane + 1) * one.size] for lane in range(threads)]
    below = [
        (row + number * rows, *rest)
        for part in parts
        for number in range(height // rows)
        for row, *rest in part
    ]
    return below == _held(many)


def _columns(tile: Tile, fragment: Fragment) -> int:
    """Fragments beside each other in a tile."""
    shapes = list(zip(_last(tile.shape, fragment), fragment.tensor.shape, strict=True))
    return math.prod(extent // size for extent, size in shapes[1:])


def _last(axes: Sequence[T], fragment: Fragment) -> tuple[T, ...]:
    """Those of a tile's axes that a fragment has; the axes before them are of one element, such as a batch."""
    return tuple(axes[len(axes) - len(fragment.tensor.shape) :])


def _held(fragment: Fragment) -> list[tuple[int, ...]]:
    """The elements that a thread holds, in order."""
    return [
        tuple(int(at) for at in fragment.element(lane, n))
        for lane in range(_held_by(fragment))
        for n in range(fragment.size)
    ]


# -- loops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    thread: te.Var
    fragments: dict[str, Fragment]

    def rebuilt(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        found: list[Node] = []
        for node in nodes:
            if not isinstance(node, Loop):
                found.append(node)
            elif node.axis in BLOCK_AXES:
                chain = _chain(node)
                number = te.Var("block", math.prod(loop.var.extent for loop in chain))
                body = with_values(self.rebuilt(chain[-1].body), _positions(chain, BLOCK_AXES, number))
                found.append(Loop(number, body, Kind.PARALLEL))
            elif node.axis in THREAD_AXES:
                chain = _chain(node)
                body = with_values(chain[-1].body, _positions(chain, THREAD_AXES, self.thread))
                found.append(Loop(self.thread, body, Kind.THREAD))
            elif node.axis in _TOGETHER:
                chain, together = _chain(node), _TOGETHER[node.axis]
                axes = WARP_AXES if together == WARP else WARPGROUP_AXES
                values = _positions(chain, axes, self.thread // together)
                found += with_values(self.warp_level(chain[-1].body, together), values)
            else:
                found.append(replace(node, body=self.rebuilt(node.body)))
        return tuple(found)

    def warp_level(self, nodes: Sequence[Node], together: int) -> tuple[Node, ...]:
        """The work of a warp or warpgroup, so many threads: instructions, and stages that each thread computes for its
        part of a fragment."""
        found: list[Node] = []
        for node in nodes:
            if isinstance(node, Micro):
                found.append(self.instruction(node, together))
                continue
            if not isinstance(node, Loop):
                raise ScheduleError(
                    "bind: below loops of warps there are instructions, and stages that use their results"
                )
            held = self.of_fragment(node)
            inner = node if held is not None else replace(node, body=self.warp_level(node.body, together))
            found.append(inner if held is None else held)
        return tuple(found)

    def instruction(self, node: Micro, together: int) -> Node:
        if not _is_warp_level(node):
            raise ScheduleError(f"bind: {node.intrinsic.name} must be an instruction of a whole warp")
        wanted = max(_held_by(fragment) for fragment in node.intrinsic.fragments)
        if wanted != together:
            raise ScheduleError(
                f"bind: {node.intrinsic.name} is carried out by {wanted} threads, and its loops are bound to units of"
                f" {together}",
                remedy=f"bind them to {'warp' if wanted == WARP else 'warpgroup'}.x",
            )
        starts, pitches = [], []
        for fragment, access in _operands(node):
            pitches.append(access.tile.shape[-1] if _is_matrix(fragment) else 0)
            if _is_matrix(fragment):
                starts.append((access.tile, simplify(row_major(access.tile, access.first))))
                continue
            if access.tile.scope is Scope.REGISTER:
                starts.append((self.held_tile(access.tile), self.start(access.tile, access.first)))
                continue
            lane = self.thread % WARP % fragment.lanes
            offset = fragment.element(lane, te.as_index(0))
            ahead = access.first[: len(access.first) - len(offset)]
            last = zip(_last(access.first, fragment), offset, strict=True)
            at = (*ahead, *(simplify(first + more) for first, more in last))
            starts.append((access.tile, flat(access.tile, at)))
        matrices = tuple(pitches) if any(pitches) else ()
        return replace(node, thread=self.thread, starts=tuple(starts), pitches=matrices)

    def held_tile(self, tile: Tile) -> Tile:
        """The part of a tile that a thread holds: its part of each fragment."""
        return replace(tile, shape=(tile.size // _held_by(self.fragments[tile.name]),), gap=0)

    def start(self, tile: Tile, first: Sequence[te.Expr]) -> te.Expr:
        """The start of a thread's part of the fragment whose first element is given."""
        fragment = self.fragments[tile.name]
        number: te.Expr = te.as_index(0)
        indices, shape = _last(first, fragment), _last(tile.shape, fragment)
        for index, extent, size in zip(indices, shape, fragment.tensor.shape, strict=True):
            number = number * (extent // size) + index // size
        return simplify(number * fragment.size)

    def of_fragment(self, loop: Loop, most: int = _PAIR) -> Node | None:
        """The loops over one fragment's elements as a loop of threads, each over those that it holds, `most` at once;
        None if these loops are further inside."""
        chained = perfect_chain(loop)
        if chained is None:
            return None
        chain, leaf = chained
        reads = [
            load
            for load in te.loads(leaf.value)
            if isinstance(load.source, Tile) and load.source.name in self.fragments
        ]
        if not reads:
            raise ScheduleError(
                f"bind: stage {leaf.stage} is below loops of warps and uses no result of an instruction",
                remedy="bind its loops to threads",
            )
        load = reads[0]
        tile = load.source
        assert isinstance(tile, Tile)
        fragment = self.fragments[tile.name]
        inner = [
            self.element_loop(chain, leaf, tile, index, size)
            for index, size in zip(_last(load.indices, fragment), fragment.tensor.shape, strict=True)
        ]
        if loop not in inner:
            return None
        if set(chain) != set(inner) or any(
            other.indices != load.indices or other.source != tile for other in reads
        ):
            raise ScheduleError(
                f"bind: stage {leaf.stage} must read {tile.name} once, in loops over whole fragments"
            )
        many = most if fragment.size % most == 0 else 1
        turn, pair = te.Var(f"{loop.name}.n", fragment.size // many), te.Var(f"{loop.name}.v", many)
        number = turn * many + pair
        at = fragment.element(self.thread % _held_by(fragment), number)
        first = [
            simplify(te.substitute(index, {each.var: te.as_index(0) for each in inner}))
            for index in load.indices
        ]
        start = self.start(tile, first)
        held = self.held_tile(tile)
        body = with_loads((leaf,), tile, lambda indices: te.Load(held, (start + number,)))
        values = {each.var: value for each, value in zip(inner, at, strict=True)}
        body = with_values(body, values)
        if many > 1:
            (of_pair,) = body
            assert isinstance(of_pair, Leaf)
            guards = [_of_both(guard, pair) for guard in of_pair.guards]
            body = (replace(of_pair, guards=tuple(guard for guard in guards if guard is not None)),)
            many = 1 if None in guards else many
        if many == 1 and pair.extent > 1:
            return self.of_fragment(loop, 1)
        nodes: tuple[Node, ...] = (Loop(pair, body, Kind.VECTOR),) if many > 1 else body
        return Loop(self.thread, (Loop(turn, nodes, Kind.UNROLL),), Kind.THREAD)

    def element_loop(self, chain: Sequence[Loop], leaf: Leaf, tile: Tile, index: te.Expr, size: int) -> Loop:
        form = linear(index)
        for each in chain:
            if form.terms.get(each.var) == 1 and each.var.extent == size:
                return each
        raise ScheduleError(
            f"bind: stage {leaf.stage} reads {tile.name}, which threads of a warp hold in fragments, and has no loop of"
            f" {size} elements along one of its axes",
            remedy=f"split the loop by {size}",
        )


def _of_both(guard: te.Expr, pair: te.Var) -> te.Expr | None:
    """A guard that is the same for both of two neighbours, as one that does not name them; None if they may differ."""
    if pair not in te.variables(guard):
        return guard
    if isinstance(guard, te.Call) and guard.op == "and":
        parts = [_of_both(part, pair) for part in guard.args]
        return None if None in parts else te.all_of([part for part in parts if part is not None])
    if not (isinstance(guard, te.Call) and guard.op == "lt" and isinstance(guard.args[1], te.Const)):
        return None
    first = simplify(te.substitute(guard.args[0], {pair: te.as_index(0)}))
    even = divisor_of(first) % pair.extent == 0 and int(guard.args[1].value) % pair.extent == 0
    return te.call("lt", first, guard.args[1]) if even and coefficient(guard.args[0], pair) == 1 else None


def _chain(loop: Loop) -> Path:
    """The bound loops from this one on; `rules.py` keeps them together."""
    chain = [loop]
    while len(chain[-1].body) == 1:
        (child,) = chain[-1].body
        if not (isinstance(child, Loop) and child.axis.partition(".")[0] == loop.axis.partition(".")[0]):
            break
        chain.append(child)
    return tuple(chain)


def _positions(chain: Path, axes: Sequence[str], number: te.Expr) -> dict[te.Var, te.Expr]:
    """The index of each loop from the number of a block, thread or warp; the last axis is the fastest."""
    values: dict[te.Var, te.Expr] = {}
    inner = 1
    total = math.prod(loop.var.extent for loop in chain)
    for loop in sorted(chain, key=lambda each: -axes.index(each.axis)):
        value = number // inner if inner > 1 else number
        inner *= loop.var.extent
        values[loop.var] = value if inner == total else value % loop.var.extent
    return values
