"""Replace loops by an intrinsic (`hw/intrinsics.py`) that is declared to compute the same.

If the intrinsic's `emit` is a function, it receives a handle for each operand in memory and returns statements;
otherwise it becomes one instruction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import ScheduleError
from tilewright.hw.intrinsics import Intrinsic, PtxAssembly
from tilewright.loops.ir import Buffer, Invoke, Kind, Location, Stmt, Store, nest
from tilewright.loops.schedule.nest import (
    Leaf,
    Loop,
    Micro,
    Nest,
    Tile,
    find_loop,
    perfect_chain,
    replaced,
    row_major,
)
from tilewright.loops.text import print_expr
from tilewright.te.index import Linear, linear, simplify

_COMMUTATIVE = ("add", "mul", "min", "max", "and", "or")


@dataclass(frozen=True)
class IntrinsicOperand:
    """A tile-shaped operand in memory: element (i, j, ...) is at `base + i * strides[0] + j * strides[1] + ...`."""

    buffer: Buffer
    base: te.Expr
    strides: tuple[int, ...]

    def offset(self, *indices: te.Expr | int) -> te.Expr:
        offset = self.base
        for index, stride in zip(indices, self.strides, strict=True):
            offset = offset + te.as_index(index) * stride
        return offset

    def load(self, *indices: te.Expr | int) -> te.Expr:
        return te.Load(self.buffer, (self.offset(*indices),))

    def store(self, value: te.Expr, *indices: te.Expr | int) -> Store:
        return Store(self.buffer, self.offset(*indices), value)

    def location(self, elements: Sequence[tuple[int, ...]]) -> Location:
        """The operand of an instruction whose lanes are these elements of the tile."""
        steps = (sum(at * stride for at, stride in zip(e, self.strides, strict=True)) for e in elements)
        return Location(self.buffer, self.base, tuple(steps))


def statement_of(intrinsic: Intrinsic, operands: Sequence[IntrinsicOperand]) -> Stmt:
    """The intrinsic applied to operands in memory, the output first."""
    if isinstance(intrinsic.emit, PtxAssembly):
        raise ScheduleError(f"tensorise: {intrinsic.name} is an instruction of a GPU")
    if callable(intrinsic.emit):
        made: Stmt = intrinsic.emit(*operands)
        return made
    pairs = zip(operands, intrinsic.fragments, strict=True)
    return Invoke(intrinsic, tuple(operand.location(fragment.positions()) for operand, fragment in pairs))


def tensorise(nest: Nest, loop: str, intrinsic: Intrinsic) -> Nest:
    """Compute a nest of loops by an intrinsic.

        for m < 6: for n < 16:
          c[m, n] += a[m, k] * b[k, n]     ->     outer_product_6x16(c, a[.., k], b[k, ..])

    Needs: the nest contains one stage; its loops are the intrinsic's axes, in any order; its expression equals the
    intrinsic's up to names and the order of commutative operands; no guard depends on its loops. A trace refers to an
    intrinsic by name, which may be a registered one. Other names: tensorize (TVM), replace (Exo).
    """
    target = find_loop(nest, loop)[-1]
    match(target, intrinsic)
    return replace(nest, body=replaced(nest.body, target, (Micro(target, intrinsic),)))


# -- matching ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OperandAccess:
    tile: Tile
    base: te.Expr
    strides: tuple[int, ...]
    first: tuple[te.Expr, ...] = ()  # the indices of the operand's first element


@dataclass(frozen=True)
class Match:
    leaf: Leaf
    output: OperandAccess
    inputs: tuple[OperandAccess, ...]


def match(loop: Loop, intrinsic: Intrinsic) -> Match:
    """Match the nest as an application of the intrinsic, or raise ScheduleError with the reason."""

    def refuse(why: str) -> ScheduleError:
        return ScheduleError(f"tensorise: loop {loop.name} does not compute {intrinsic.name}: {why}")

    found = perfect_chain(loop)
    if found is None:
        raise refuse("it does not hold one stage and nothing else")
    chain, leaf = found
    inner = [each.var for each in chain]
    if any(te.variables(guard) & set(inner) for guard in leaf.guards):
        raise refuse("a guard depends on its loops")
    reduction = intrinsic.stage.reduction
    kind = None if reduction is None else reduction.kind
    if kind != leaf.kind:
        raise refuse(f"stage {leaf.stage} is {_kind(leaf.kind)}, and the intrinsic is {_kind(kind)}")
    spatial = [var for var in inner if var not in leaf.reduced]
    reduced = [var for var in inner if var in leaf.reduced]
    axes, reduced_axes = intrinsic.stage.axes, intrinsic.reduced
    if _extents(spatial) != _extents(axes) or _extents(reduced) != _extents(reduced_axes):
        raise refuse(
            f"its loops are {_shape(spatial, reduced)}, and the intrinsic's are {_shape(axes, reduced_axes)}"
        )
    for order in _orders(axes, spatial):
        for reduced_order in _orders(reduced_axes, reduced):
            loops = {**order, **reduced_order}
            bound: dict[te.Source, OperandAccess] = {}
            output = _access(leaf.target, leaf.indices, intrinsic.stage.axes, loops)
            if output is not None and _unify(intrinsic.body, leaf.value, loops, bound):
                missing = [tensor.name for tensor in intrinsic.inputs if tensor not in bound]
                assert not missing, f"{intrinsic.name} does not read {missing}"
                return Match(leaf, output, tuple(bound[tensor] for tensor in intrinsic.inputs))
    raise refuse(f"it computes {print_expr(leaf.value)}, and the intrinsic {print_expr(intrinsic.body)}")


def _kind(kind: str | None) -> str:
    return f"a {kind}" if kind else "no reduction"


def _extents(variables: Sequence[te.Var]) -> list[int]:
    return sorted(var.extent for var in variables)


def _shape(spatial: Sequence[te.Var], reduced: Sequence[te.Var]) -> str:
    text = " x ".join(str(var.extent) for var in spatial) or "none"
    return text if not reduced else f"{text}, reduced {' x '.join(str(var.extent) for var in reduced)}"


def _orders(axes: Sequence[te.Var], loops: Sequence[te.Var]) -> Iterator[dict[te.Var, te.Var]]:
    """Every assignment of loops to axes of the same extents."""
    for order in itertools.permutations(loops):
        if all(axis.extent == var.extent for axis, var in zip(axes, order, strict=True)):
            yield dict(zip(axes, order, strict=True))


def _access(
    tile: Tile, indices: tuple[te.Expr, ...], axes: Sequence[te.Expr], loops: Mapping[te.Var, te.Var]
) -> OperandAccess | None:
    """`tile` at `indices` as an operand indexed by `axes`; None if its index depends on the loops in another form."""
    form = linear(row_major(tile, indices))
    inner = set(loops.values())
    if any(not isinstance(atom, te.Var) and te.variables(atom) & inner for atom in form.terms):
        return None
    walked = {loops[axis] for axis in axes if isinstance(axis, te.Var)}
    if any(atom in inner and atom not in walked for atom in form.terms):
        return None
    base = Linear({atom: c for atom, c in form.terms.items() if atom not in inner}, form.constant)
    strides = tuple(form.terms.get(loops[axis], 0) for axis in axes if isinstance(axis, te.Var))
    begin: dict[te.Var, te.Expr] = dict.fromkeys(inner, te.as_index(0))
    first = tuple(simplify(te.substitute(index, begin)) for index in indices)
    return OperandAccess(tile, base.expr(), strides, first)


def _unify(
    pattern: te.Expr, expr: te.Expr, loops: Mapping[te.Var, te.Var], bound: dict[te.Source, OperandAccess]
) -> bool:
    """Whether `expr` is `pattern` with its axes renamed by `loops`; binds operands to their accesses."""
    if isinstance(pattern, te.Var):
        return expr == loops[pattern]
    if type(pattern) is not type(expr) or pattern.dtype is not expr.dtype:
        return False
    if isinstance(pattern, te.Const):
        return pattern == expr
    if isinstance(pattern, te.Load):
        assert isinstance(expr, te.Load) and isinstance(expr.source, Tile)
        access = _access(expr.source, expr.indices, pattern.indices, loops)
        return access is not None and bound.setdefault(pattern.source, access) == access
    if isinstance(pattern, te.Call):
        assert isinstance(expr, te.Call)
        if pattern.op != expr.op:
            return False
        orders = [expr.args, expr.args[::-1]] if pattern.op in _COMMUTATIVE else [expr.args]
        for args in orders:
            attempt = dict(bound)
            if all(_unify(p, e, loops, attempt) for p, e in zip(pattern.args, args, strict=True)):
                bound.update(attempt)
                return True
        return False
    parts = zip(te.children(pattern), te.children(expr), strict=True)
    return all(_unify(p, e, loops, bound) for p, e in parts)


# -- built-in intrinsics
# ----------------------------------------------------------------------------------------------


def outer_product(rows: int, vectors: int, lanes: int, dtype: DType = DType.F32) -> Intrinsic:
    """`c[m, n] += a[m] * b[n]` for a tile of rows x (vectors * lanes): the step of a matmul, with one
    FMA per vector."""
    width = vectors * lanes
    a, b = te.Tensor("a", (rows,), dtype), te.Tensor("b", (width,), dtype)
    c = te.compute("c", (rows, width), dtype, lambda m, n: te.reduce_over("sum", a[m] * b[n], []))
    m, u, v = te.Var("outer.m", rows), te.Var("outer.u", vectors), te.Var("outer.v", lanes)
    loops = [(m, Kind.UNROLL), (u, Kind.UNROLL), (v, Kind.VECTOR)]
    n = u * lanes + v

    def implement(out: IntrinsicOperand, left: IntrinsicOperand, right: IntrinsicOperand) -> Stmt:
        return nest(loops, out.store(te.call("fma", left.load(m), right.load(n), out.load(m, n)), m, n))

    def initialise(out: IntrinsicOperand, value: te.Expr) -> Stmt:
        return nest(loops, out.store(value, m, n))

    return Intrinsic(f"outer_product_{rows}x{width}", c, (a, b), implement, initialise)
