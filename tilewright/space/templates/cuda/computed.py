"""Fused prologues: operands of a GEMM that are computed from tensors in memory.

    a[m, k] = value(x[m, k], gate[m, k], scale[k], mean[m], ...)    and zero where a guard does not hold

The inputs of an element are loaded when a tile is prefetched. When the tile is needed, its elements are computed,
rounded to the multiplied type, and stored in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.gpu.tensor import ComputedOperand
from tilewright.loops.gpu.thread_index import VECTOR_BYTES, at_positions, positions, vector_lanes
from tilewright.loops.ir import Buffer, Kind, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import with_values
from tilewright.te.index import coefficient, linear, simplify
from tilewright.te.scalars import EXPENSIVE_CALLS as EXPENSIVE

_EXPENSIVE = 10.0  # instructions
_MAX_KEPT = 16  # maximum bytes of registers per element


@dataclass(frozen=True)
class Element:
    """`value`, computed from `main`, the load that depends on most axes, and from others; zero where `guard` is
    false."""

    main: te.Load
    guard: te.Expr | None
    value: te.Expr

    @property
    def loads(self) -> list[te.Load]:
        return list(dict.fromkeys(te.loads(self.value)))

    @property
    def variables(self) -> set[te.Var]:
        return te.variables(self.value) | (te.variables(self.guard) if self.guard is not None else set())


def element_of(expr: te.Expr) -> Element | None:
    """Match an expression as an Element; None if an index is itself loaded, or a part is read under a condition."""
    guards: list[te.Expr] = []
    while True:
        if isinstance(expr, te.Cast) and expr.dtype is DType.F32 and expr.value.dtype.is_half:
            expr = expr.value
        elif isinstance(expr, te.Select) and isinstance(expr.other, te.Const) and expr.other.value == 0:
            if te.loads(expr.cond):
                break
            guards.append(expr.cond)
            expr = expr.then
        else:
            break
    loads = te.loads(expr)
    plain = all(
        load.indices and all(isinstance(atom, te.Var) for atom in linear(load.indices[0]).terms)
        for load in loads
    )
    if not loads or not plain or _depends_on_positions(expr):
        return None
    main = max(loads, key=lambda load: len(te.variables(load)))
    return Element(main, te.all_of(guards), expr)


def _depends_on_positions(expr: te.Expr) -> bool:
    """Whether variables occur outside of load indices."""
    if isinstance(expr, te.Load):
        return False
    return isinstance(expr, te.Var) or any(map(_depends_on_positions, te.children(expr)))


def computed_operand(
    element: Element,
    dtype: DType,
    outer: Sequence[te.Var],
    k_axes: Sequence[te.Var],
    batch: Sequence[te.Var],
) -> ComputedOperand | None:
    """The element as an operand of type `dtype`, with each group of axes fused."""
    if not outer or not set(k_axes) & element.variables:
        return None
    main = element.main.indices[0]
    transposed = coefficient(main, k_axes[-1]) != 1 and coefficient(main, outer[-1]) == 1
    along = outer[-1] if transposed else k_axes[-1]
    lanes = _lanes(element, dtype, along)
    lane = te.Var("v", lanes)
    numbers = [
        te.Var(name, _count(axes) // (lanes if is_along else 1))
        for name, axes, is_along in (("outer", outer, transposed), ("at_k", k_axes, not transposed))
    ]
    first = [number * lanes if number is numbers[not transposed] else number for number in numbers]
    position = [at + lane if at is first[not transposed] else at for at in first]

    def there(expr: te.Expr) -> te.Expr:
        return simplify(at_positions(at_positions(expr, outer, position[0]), k_axes, position[1]))

    kept: list[Buffer] = []
    reads: list[Stmt] = []
    known: dict[te.Expr, te.Expr] = {}
    for number, load in enumerate(element.loads):
        moved = there(load)
        assert isinstance(moved, te.Load)
        moves = lane in te.variables(moved.indices[0])
        buffer = Buffer(f"kept{number}", load.dtype, lanes if moves else 1, Scope.REGISTER)
        kept.append(buffer)
        index: te.Expr = lane if moves else te.as_index(0)
        store = Store(buffer, index, moved)
        reads.append(nest([(lane, Kind.VECTOR)], store) if moves else store)
        known[load] = te.Load(buffer, (index,))
    value = Buffer("value", dtype, lanes, Scope.REGISTER)
    computed = te.cast(te.rewrite(element.value, known.get), dtype)
    found = ComputedOperand(
        buffers=tuple(
            dict.fromkeys(load.source for load in element.loads if isinstance(load.source, Buffer))
        ),
        batch=tuple(axis for axis in batch if axis in element.variables),
        kept=tuple(kept),
        value=value,
        inside=None if element.guard is None else _condition(element.guard, outer, k_axes, first),
        read=with_values(block(*reads), {}),
        compute=with_values(nest([(lane, Kind.VECTOR)], Store(value, lane, computed)), {}),
        work=sum(_instructions(node) for node in te.walk(element.value)),
        transposed=transposed,
        lanes=lanes,
    )
    return found if found.kept_bytes <= _MAX_KEPT else None


def _condition(
    guard: te.Expr, outer: Sequence[te.Var], k_axes: Sequence[te.Var], first: Sequence[te.Expr]
) -> te.Expr:
    return simplify(te.substitute(guard, {**positions(first[0], outer), **positions(first[1], k_axes)}))


def _count(axes: Sequence[te.Var]) -> int:
    count = 1
    for axis in axes:
        count *= axis.extent
    return count


def _lanes(element: Element, dtype: DType, along: te.Var) -> int:
    """Contiguous neighbours that are loaded at once."""
    if coefficient(element.main.indices[0], along) != 1:
        return 1
    if element.guard is not None and along in te.variables(element.guard):
        return 1
    accesses = [(load.indices[0], load.dtype.bytes) for load in element.loads]
    return min(vector_lanes(accesses, along), VECTOR_BYTES // dtype.bytes)


def _instructions(node: te.Expr) -> float:
    if isinstance(node, te.Call):
        return _EXPENSIVE if node.op in EXPENSIVE else 1.0
    return 1.0 if isinstance(node, te.Cast | te.Select) else 0.0
