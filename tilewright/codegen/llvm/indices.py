"""Index expressions as LLVM values.

An index is the sum of a value that is uniform over the lanes and a multiple of the lane's number, or else a vector of
indices. A computed value is reused as long as it dominates the code that is emitted: that is a region.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from llvmlite import ir

from tilewright import te
from tilewright.codegen.llvm import scalars
from tilewright.codegen.llvm.types import Typed, i64, splat
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine
from tilewright.loops.ir import Buffer, Scope
from tilewright.te.index import bounds, linear


@dataclass
class Offset:
    """An index at the lanes of the current vector loop: `base + constant + lane * stride`, or a vector of indices."""

    base: ir.Value | None
    constant: int
    stride: int
    vector: ir.Value | None = None


class IndexEmitter(ABC):
    """The state of a function that is being emitted: the builder, the values of loop variables, and known facts."""

    builder: ir.IRBuilder

    def __init__(self, machine: CpuMachine) -> None:
        self.machine = machine
        self.bindings: dict[te.Var, int | ir.Value] = {}
        self.lane: te.Var | None = None  # the variable of the vector loop being emitted
        self._known: dict[object, ir.Value] = {}
        self._regions: list[list[object]] = [[]]  # the keys that each region has added, the outermost first

    @abstractmethod
    def value(self, expr: te.Expr) -> Typed:
        """The value of an expression: a scalar where it is the same in every lane."""

    @property
    def lanes(self) -> int:
        return self.lane.extent if self.lane is not None else 1

    @contextmanager
    def region(self) -> Iterator[None]:
        """Values computed inside dominate what is emitted until the region is left, and nothing else."""
        self._regions.append([])
        yield
        for key in self._regions.pop():
            self._known.pop(key, None)

    def known(self, key: object, make: Callable[[], ir.Value]) -> ir.Value:
        value = self._known.get(key)
        if value is None:
            value = self._known[key] = make()
            self._regions[-1].append(key)
        return value

    def moves_with_lane(self, expr: te.Expr) -> bool:
        return self.lane is not None and self.lane in te.variables(expr)

    def offset(self, index: te.Expr) -> Offset:
        form = linear(index)
        constant, stride = form.constant, 0
        terms: list[tuple[te.Expr, int]] = []
        for atom, coefficient in form.terms.items():
            if not isinstance(atom, te.Var):
                if self.moves_with_lane(atom):
                    return Offset(None, 0, 0, self.index_vector(index))
                terms.append((atom, coefficient))
            elif atom == self.lane:
                stride = coefficient
            elif isinstance(bound := self.bindings.get(atom), int):
                constant += coefficient * bound
            else:
                terms.append((atom, coefficient))
        return Offset(self.sum_of(terms), constant, stride)

    def sum_of(self, terms: list[tuple[te.Expr, int]]) -> ir.Value | None:
        if not terms:
            return None
        if any(_reads_local_memory(atom) for atom, _ in terms):
            return self._sum(terms)
        key = ("sum", tuple((atom, c, self.unrolled_in(atom)) for atom, c in terms))
        return self.known(key, lambda: self._sum(terms))

    def unrolled_in(self, expr: te.Expr) -> tuple[int, ...]:
        """The values of unrolled variables in `expr`: the same expression is another value in another copy."""
        if isinstance(expr, te.Var):
            return ()
        bound = ((var.name, self.bindings.get(var)) for var in te.variables(expr))
        return tuple(value for _, value in sorted((n, v) for n, v in bound if isinstance(v, int)))

    def _sum(self, terms: list[tuple[te.Expr, int]]) -> ir.Value:
        total: ir.Value | None = None
        for atom, coefficient in terms:
            value = self.scalar_index(atom)
            if coefficient != 1:
                value = self.builder.mul(value, i64(coefficient), flags=("nsw",))
            total = value if total is None else self.builder.add(total, value, flags=("nsw",))
        assert total is not None
        return total

    def scalar_index(self, atom: te.Expr) -> ir.Value:
        if isinstance(atom, te.Var):
            bound = self.bindings[atom]
            return i64(bound) if isinstance(bound, int) else bound
        if isinstance(atom, te.Call):
            return self.index_call(atom, self.scalar_index_of, 1)
        return self.value(atom).value

    def scalar_index_of(self, expr: te.Expr) -> ir.Value:
        offset = self.offset(expr)
        assert offset.vector is None and offset.stride == 0
        if offset.base is None:
            return i64(offset.constant)
        return (
            self.builder.add(offset.base, i64(offset.constant), flags=("nsw",))
            if offset.constant
            else offset.base
        )

    def index_call(self, atom: te.Call, operand: Callable[[te.Expr], ir.Value], lanes: int) -> ir.Value:
        """A floordiv, mod, min, max, ... of indices; division of what is never negative is a plain unsigned one."""
        values = [operand(arg) for arg in atom.args]
        if atom.op in ("floordiv", "mod"):
            (low, _), (divisor, _) = bounds(atom.args[0]), bounds(atom.args[1])
            if low is not None and low >= 0 and divisor is not None and divisor > 0:
                return (self.builder.udiv if atom.op == "floordiv" else self.builder.urem)(*values)
        context = scalars.ScalarContext(self.builder, DType.I64, (), self.machine)
        return scalars.EMITTERS[atom.op](context, *values)

    def index_value(self, expr: te.Expr) -> Typed:
        """An integer expression as a value: a scalar, or one value per lane."""
        offset = self.offset(expr)
        if offset.vector is not None:
            return Typed(offset.vector, DType.I64, self.lanes)
        base = i64(offset.constant)
        if offset.base is not None:
            base = self.builder.add(offset.base, base) if offset.constant else offset.base
        if offset.stride == 0 or self.lanes == 1:
            return Typed(base, DType.I64, 1)
        vector = splat(self.builder, Typed(base, DType.I64, 1), self.lanes).value
        steps = ir.Constant(vector.type, [lane * offset.stride for lane in range(self.lanes)])
        return Typed(self.builder.add(vector, steps), DType.I64, self.lanes)

    def index_vector(self, index: te.Expr) -> ir.Value:
        """The index in every lane, where it is not linear in the lane."""
        form = linear(index)
        total = splat(self.builder, Typed(i64(form.constant), DType.I64, 1), self.lanes).value
        for atom, coefficient in form.terms.items():
            if isinstance(atom, te.Call) and atom.dtype is DType.I64 and self.moves_with_lane(atom):
                term = self.index_call(atom, self._index_lanes, self.lanes)
            else:
                term = splat(self.builder, self.value(atom), self.lanes).value
            if coefficient != 1:
                factor = splat(self.builder, Typed(i64(coefficient), DType.I64, 1), self.lanes).value
                term = self.builder.mul(term, factor)
            total = self.builder.add(total, term)
        return total

    def _index_lanes(self, expr: te.Expr) -> ir.Value:
        return splat(self.builder, self.index_value(expr), self.lanes).value


@lru_cache(maxsize=4096)
def _reads_local_memory(expr: te.Expr) -> bool:
    """Whether it reads a buffer that may be written between two evaluations: inputs never are."""
    return any(
        isinstance(load.source, Buffer) and load.source.scope is not Scope.GLOBAL for load in te.loads(expr)
    )
