"""Lower the tree of a schedule to a loop program: tiles become flat buffers, and reductions get their
initialisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright import te
from tilewright.errors import PipelineError
from tilewright.loops import ir
from tilewright.loops.ir import (
    Across,
    BoxCopy,
    Buffer,
    Copy,
    For,
    If,
    Kind,
    Prefetch,
    Program,
    Scope,
    SourceMatrix,
    Stmt,
    Store,
    Transpose,
    Warp,
)
from tilewright.loops.schedule.boxes import box
from tilewright.loops.schedule.nest import (
    BoxTransfer,
    Fetch,
    Leaf,
    Loop,
    Micro,
    Nest,
    Node,
    Path,
    Tile,
    Transfer,
    flat,
    identity,
    leaves,
    map_leaves,
    narrow_inside,
    replaced,
    stored_at,
    with_values,
)
from tilewright.loops.schedule.pipeline import copied
from tilewright.loops.schedule.rules import across
from tilewright.loops.schedule.tensorise import IntrinsicOperand, OperandAccess, match, statement_of
from tilewright.loops.tiling import with_values as with_values_in
from tilewright.te.index import coefficient, simplify

_MIN_COPIED = 4  # bytes


def lower(nest: Nest, decisions: str = "", asynchronous: bool = False) -> Program:
    """The program of the nest. `asynchronous`: pipelined tiles in memory are filled by asynchronous copies."""
    params = tuple(_buffer(tile) for tile in (*nest.inputs, nest.output))
    packings = nest.packings if any(packing is not None for packing in nest.packings) else ()
    names = {name for name, _ in nest.stages} if asynchronous else set()
    body = ir.map_exprs(_statements(_with_copies(nest.body, names)), simplify)
    return Program(nest.name, params, body, decisions, packings)


def _with_copies(nodes: Sequence[Node], names: set[str]) -> tuple[Node, ...]:
    """The nodes, in which stages of these names that fill memory are asynchronous copies."""
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop):
            leaf = node.body[0] if len(node.body) == 1 else None
            if node.kind is Kind.VECTOR and isinstance(leaf, Leaf) and _is_copy(leaf, names):
                found.append(_transfer(leaf, node.var))
            else:
                found.append(replace(node, body=_with_copies(node.body, names)))
        elif isinstance(node, Leaf) and _is_copy(node, names):
            found.append(_transfer(node, None))
        else:
            found.append(node)
    return tuple(found)


def _is_copy(leaf: Leaf, names: set[str]) -> bool:
    return leaf.stage in names and leaf.target.scope is not Scope.REGISTER


def _transfer(leaf: Leaf, lane: te.Var | None) -> Node:
    load = copied(leaf)
    assert load is not None and isinstance(load.source, Tile), "the primitive pipeline accepts copies alone"
    inside = leaf.value.cond if isinstance(leaf.value, te.Select) else None
    conditions = [*leaf.guards, *([] if inside is None else [inside])]
    first: dict[te.Var, te.Expr] = {} if lane is None else {lane: te.as_index(0)}
    if lane is not None:
        steps = [
            coefficient(flat(*each), lane)
            for each in ((leaf.target, leaf.indices), (load.source, load.indices))
        ]
        if steps != [1, 1]:
            raise PipelineError(
                f"pipeline: {leaf.stage}: the lanes of loop {lane.name} are not contiguous in memory",
                remedy="vectorise the loop of the last axis",
            )
        if any(lane in te.variables(simplify(condition)) for condition in conditions):
            raise PipelineError(
                f"pipeline: {leaf.stage}: some lanes of loop {lane.name} are outside of {load.source.name}"
            )

    def begin(indices: tuple[te.Expr, ...]) -> tuple[te.Expr, ...]:
        return tuple(simplify(te.substitute(index, first)) for index in indices)

    lanes = 1 if lane is None else lane.extent
    return Transfer(
        leaf.target,
        begin(leaf.indices),
        load.source,
        begin(load.indices),
        lanes,
        inside,
        leaf.guards,
    )


def _buffer(tile: Tile) -> Buffer:
    return Buffer(
        tile.name, tile.dtype, tile.size if tile.scope is Scope.GLOBAL else max(tile.size, 1), tile.scope
    )


def _statements(nodes: Sequence[Node], started: frozenset[str] = frozenset()) -> Stmt:
    """The nodes in order. `started`: reductions that are initialised further out."""
    stmts: list[Stmt] = []
    for node in nodes:
        begun = set(started)
        for path, leaf in leaves((node,)):
            if leaf.kind is not None and leaf.stage not in started and _begins(node, path, leaf):
                stmts.append(_beginning(node, leaf))
                begun.add(leaf.stage)
        transposed = [
            leaf for _, leaf in leaves((node,)) if leaf.stage not in begun and _fills_by_columns(node, leaf)
        ]
        begun |= {leaf.stage for leaf in transposed}
        stmts.append(_statement(node, frozenset(begun)))
        for leaf in transposed:
            side = max(leaf.target.shape)
            stmts.append(Transpose(_buffer(leaf.target), side, side, side))
    return ir.block(*stmts)


def _fills_by_columns(node: Node, leaf: Leaf) -> bool:
    """Whether the node is the outermost loop that fills a tile which is transposed afterwards."""
    moving = {var for index in leaf.indices for var in te.variables(index)}
    return leaf.transposed and isinstance(node, Loop) and node.var in moving


def _begins(node: Node, path: Path, leaf: Leaf) -> bool:
    """Whether the initialisation of a reduction belongs before this node: its outermost loop, or the leaf itself."""
    if isinstance(node, Loop):
        return node.var in leaf.reduced
    if isinstance(node, Micro):
        return True
    return not path


def _statement(node: Node, started: frozenset[str]) -> Stmt:
    if isinstance(node, Leaf):
        stored = Store(*_target(node), _combined(node, _value(node.value)), node.streamed)
        return _guarded(node.guards, stored)
    if isinstance(node, Fetch):
        return Prefetch(_buffer(node.tile), flat(node.tile, node.indices), node.level)
    if isinstance(node, Transfer):
        source = _buffer(node.source), flat(node.source, node.source_indices)
        inside = None if node.inside is None else _value(node.inside)
        target = _buffer(node.target), flat(node.target, node.indices)
        return _guarded(node.guards, Copy(*target, *source, node.lanes, inside))
    if isinstance(node, BoxTransfer):
        matrix = SourceMatrix(_buffer(node.source), node.rows, node.columns, node.stride)
        return BoxCopy(_buffer(node.target), te.as_index(0), matrix, node.row, node.column, box(node))
    if isinstance(node, Micro) and node.thread is not None:
        starts = tuple((_buffer(tile), start) for tile, start in node.starts)
        return Warp(node.intrinsic, node.thread, starts, node.pitches)
    if isinstance(node, Micro):
        found = match(node.loop, node.intrinsic)
        operands = [_operand(access) for access in (found.output, *found.inputs)]
        return _guarded(found.leaf.guards, statement_of(node.intrinsic, operands))
    if node.kind is Kind.VECTOR and len(node.body) == 1:
        (leaf,) = node.body
        if isinstance(leaf, Leaf) and node.var in leaf.reduced:
            return _across(node, leaf)
    inner = narrow_inside(node)
    if inner is not None:
        whole, last = _parts(node, inner)
        return _in_two(node, whole, _statements(whole.body, started), _statements(last, started))
    return _loop(node, _statements(node.body, started))


def _parts(outer: Loop, inner: Loop) -> tuple[Loop, tuple[Node, ...]]:
    """A loop over the whole tiles, and what its last iteration does; a vector of it becomes several shorter ones."""
    count = outer.var.extent - 1
    if outer.kind is Kind.PARALLEL:
        whole = outer
    else:
        var = te.Var(outer.name, count)
        whole = replace(outer, var=var, body=_with_var(outer.body, outer.var, var))
    tails: list[Node] = []
    start = 0
    while start < inner.rest:
        left = inner.rest - start
        size = 1 << (left.bit_length() - 1) if inner.kind is Kind.VECTOR else left
        var = te.Var(inner.name, size)
        body = _with_var(inner.body, inner.var, te.as_index(start) if size == 1 else start + var, var)
        tails += body if size == 1 else (replace(inner, var=var, body=body, rest=0, within=""),)
        start += size
    last = replaced(outer.body, inner, tuple(tails))
    return whole, _with_var(last, outer.var, te.as_index(count))


def _with_var(
    nodes: tuple[Node, ...], old: te.Var, value: te.Expr, new: te.Var | None = None
) -> tuple[Node, ...]:
    """The nodes with a loop's variable replaced by a value, of another loop or none."""
    renamed = value if isinstance(value, te.Var) else new

    def in_leaf(leaf: Leaf) -> Leaf:
        if old not in leaf.reduced:
            return leaf
        return replace(leaf, reduced=(leaf.reduced - {old}) | ({renamed} if renamed is not None else set()))

    return map_leaves(with_values(nodes, {old: value}), in_leaf)


def _in_two(outer: Loop, whole: Loop, body: Stmt, last: Stmt) -> Stmt:
    if outer.kind is Kind.PARALLEL:  # the one outermost statement
        inside = te.call("lt", outer.var, te.as_index(outer.var.extent - 1))
        return For(outer.var, outer.kind, If(inside, body, last))
    return ir.block(_loop(whole, body), last)


def _loop(loop: Loop, body: Stmt) -> Stmt:
    """The loop around its body; a condition that does not depend on it is tested once, outside."""
    inside: list[te.Expr] = []
    outside: list[te.Expr] = []
    while isinstance(body, If) and body.other is None:
        (inside if loop.var in te.variables(body.cond) else outside).append(body.cond)
        body = body.then
    body = _under(inside, body)
    if loop.kind is Kind.UNROLL and any(_is_small_copy(stmt) for stmt in ir.walk_stmts(body)):
        body = ir.block(*(with_values_in(body, {loop.var: te.as_index(n)}) for n in range(loop.var.extent)))
        return _under(outside, body)
    return _under(outside, body if loop.var.extent == 1 else For(loop.var, loop.kind, body))


def _is_small_copy(stmt: Stmt) -> bool:
    """Whether it copies less than the hardware copies asynchronously: it then goes through a register of its own, from
    which it is stored later, and is written out."""
    return isinstance(stmt, Copy) and stmt.lanes * stmt.buffer.dtype.bytes < _MIN_COPIED


def _guarded(guards: Sequence[te.Expr], stmt: Stmt) -> Stmt:
    return _under([_value(guard) for guard in guards], stmt)


def _under(conditions: Sequence[te.Expr], stmt: Stmt) -> Stmt:
    for condition in reversed(conditions):
        stmt = If(condition, stmt)
    return stmt


def _across(loop: Loop, leaf: Leaf) -> Stmt:
    """A horizontal reduction over the lanes of a register tile."""
    found = across(loop, leaf)
    assert found is not None and leaf.kind is not None
    value: te.Expr = Across(leaf.kind, _buffer(found.tile), found.start, loop.var.extent)
    if found.inside is not None:
        value = te.select(_value(found.inside), value, identity(leaf))
    return Store(*_target(leaf), _combined(leaf, value))


def _beginning(node: Node, leaf: Leaf) -> Stmt:
    """Store the identity to every element that the reduction inside `node` combines into."""

    def visit_all(nodes: Sequence[Node]) -> Stmt:
        return ir.block(*(visit(c) for c in nodes if any(o.stage == leaf.stage for _, o in leaves((c,)))))

    def visit(inner: Node) -> Stmt:
        if isinstance(inner, Loop):
            if inner.var in leaf.reduced:
                return visit_all(inner.body)
            narrow = narrow_inside(inner)
            if narrow is not None and any(o.stage == leaf.stage for _, o in leaves((narrow,))):
                whole, last = _parts(inner, narrow)
                return _in_two(inner, whole, visit_all(whole.body), visit_all(last))
            return _loop(inner, visit_all(inner.body))
        if isinstance(inner, Micro) and inner.thread is not None:
            (tile, start), fragment = inner.starts[0], inner.intrinsic.fragments[0]
            number = te.Var(f"{tile.name}.n", fragment.size)
            store = Store(_buffer(tile), start + number, identity(leaf))
            return For(inner.thread, Kind.THREAD, For(number, Kind.UNROLL, store))
        if isinstance(inner, Micro):
            if inner.intrinsic.initialise is None:
                return visit(inner.loop)
            found = match(inner.loop, inner.intrinsic)
            out = _operand(found.output)
            return _guarded(outside(found.leaf), inner.intrinsic.initialise(out, identity(leaf)))
        assert isinstance(inner, Leaf) and inner.stage == leaf.stage
        return _guarded(outside(inner), Store(*_target(inner), identity(inner)))

    def outside(inner: Leaf) -> list[te.Expr]:
        return [guard for guard in inner.guards if not te.variables(guard) & inner.reduced]

    return visit(node)


def _target(leaf: Leaf) -> tuple[Buffer, te.Expr]:
    return _buffer(leaf.target), stored_at(leaf)


def _combined(leaf: Leaf, value: te.Expr) -> te.Expr:
    """The value that a leaf stores, including the previous value of a reduction."""
    if leaf.kind is None:
        return value
    kept = te.Load(_buffer(leaf.target), (flat(leaf.target, leaf.indices),))
    if leaf.kind == "sum" and isinstance(value, te.Call) and value.op == "mul" and value.dtype.is_float:
        return te.call("fma", *value.args, kept)
    return te.call(te.REDUCE_COMBINERS[leaf.kind], kept, value)


def _value(expr: te.Expr) -> te.Expr:
    """The expression with its loads at flat offsets."""

    def rule(node: te.Expr) -> te.Expr | None:
        if not (isinstance(node, te.Load) and isinstance(node.source, Tile)):
            return None
        return te.Load(_buffer(node.source), (flat(node.source, node.indices),))

    return te.rewrite(expr, rule)


def _operand(access: OperandAccess) -> IntrinsicOperand:
    return IntrinsicOperand(_buffer(access.tile), access.base, access.strides)
