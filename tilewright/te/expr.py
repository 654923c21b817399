"""Tensor expressions: index formulas that say *what* is computed, not in which order.

Semantics
---------
- A `Compute` tensor of shape S holds, at every index tuple bound to its `axes`, the value of its `body`.
- A body is a scalar expression, or a single `Reduce` at the top. A reduction inside an expression is its own stage.
- Index arithmetic is exact (int64, never overflowing). `floordiv` and `mod` round towards minus infinity.
- `Select` is lazy: a `Load` inside the arm that is not taken is not performed, so its index may be out of range there.
  Everywhere else an index out of range is a bug in the lowering: `te.interpret` raises, and programs are verified.
- Float arithmetic follows IEEE 754 in the type of the expression. 16-bit floats are storage types: a load of one is
  widened by a `Cast` to f32 before arithmetic. Integers wrap around. `div` of integers is not defined: use `floordiv`.
- A `Reduce` combines its elements in an order chosen by the schedule, starting from the identity of its kind.
  "max" and "min" propagate NaN.

Expressions are immutable and compared structurally, except that a `Tensor` is itself only (identity): two
computations of the same formula are two tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from tilewright.dtypes import DType
from tilewright.support.frozen import quickly_made
from tilewright.te.scalars import SCALARS

Number = int | float | bool
C = TypeVar("C", bound=type)


def _hashed_once(cls: C) -> C:
    """Cache the hash: expressions are keys of many tables, and a hash covers the whole expression. Hashing and
    comparing do not recurse, and shared parts are compared once. An expression found equal to another remembers it as
    its twin, because tables are queried repeatedly with the same expression."""
    made: Any = cls
    of_parts: Callable[[Any], int] = made.__hash__

    def hashed(self: Any) -> int:
        known: int | None = self.__dict__.get("_hash")
        return _hash_below(self) if known is None else known

    def equal(self: Any, other: Any) -> Any:
        if self is other:
            return True
        if other.__class__ is not self.__class__:
            return NotImplemented
        ours, theirs = self.__dict__.get("_twin", self), other.__dict__.get("_twin", other)
        if ours is theirs:
            return True
        return hash(self) == hash(other) and _same(self, other)

    def state(self: Any) -> dict[str, Any]:
        """Strings hash differently in another process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_hash", "_twin")}

    _HASH_OF_PARTS[cls] = of_parts
    made.__hash__, made.__eq__, made.__getstate__ = hashed, equal, state
    return cls


# For each class of compound expressions: the hash from the hashes of its parts.
_HASH_OF_PARTS: dict[type, Callable[[Any], int]] = {}


def _hash_below(expr: Expr) -> int:
    """The hash of `expr`; those of all subexpressions are cached afterwards."""
    waiting = [expr]
    while waiting:
        node = waiting[-1]
        known = node.__dict__
        if "_hash" not in known:
            parts = _CHILDREN[node.__class__](node)
            below = [
                part for part in parts if part.__class__ in _HASH_OF_PARTS and "_hash" not in part.__dict__
            ]
            if below:
                waiting.extend(below)
                continue
            known["_hash"] = _HASH_OF_PARTS[node.__class__](node)
        waiting.pop()
    return int(expr.__dict__["_hash"])


def _same(one: Expr, other: Expr) -> bool:
    """Whether two expressions are equal in structure. If they are, the parts of `other` remember their twins."""
    waiting = [(one, other)]
    seen: dict[tuple[int, int], tuple[Expr, Expr]] = {}
    while waiting:
        pair = a, b = waiting.pop()
        key = id(a), id(b)
        if key in seen:
            continue
        seen[key] = pair
        if a.__class__ is not b.__class__ or hash(a) != hash(b) or _own_parts(a) != _own_parts(b):
            return False
        of_parts = _CHILDREN[a.__class__]
        for of_a, of_b in zip(of_parts(a), of_parts(b), strict=True):
            if of_a is of_b:
                continue
            if of_a.__class__ not in _HASH_OF_PARTS:
                if of_a != of_b:
                    return False
            elif of_a.__dict__.get("_twin", of_a) is not of_b.__dict__.get("_twin", of_b):
                waiting.append((of_a, of_b))
    for a, b in seen.values():
        twin = a.__dict__.get("_twin", a)
        if twin is not b:
            b.__dict__["_twin"] = twin
    return True


def _own_parts(expr: Expr) -> tuple[Any, ...]:
    """The fields of an expression besides its children."""
    if isinstance(expr, Call):
        return expr.op, expr.dtype, len(expr.args)
    if isinstance(expr, Load):
        return expr.source, len(expr.indices)
    if isinstance(expr, Reduce):
        return expr.kind, expr.axes
    return (expr.dtype,)


class Expr:
    """A scalar-valued expression. Operators build `Call`s: `a + b`, `a * 2`, `a // 4`, `a % 4`."""

    __slots__ = ()
    dtype: DType

    def __add__(self, other: Expr | Number) -> Expr:
        return call("add", self, other)

    def __radd__(self, other: Number) -> Expr:
        return call("add", other, self)

    def __sub__(self, other: Expr | Number) -> Expr:
        return call("sub", self, other)

    def __rsub__(self, other: Number) -> Expr:
        return call("sub", other, self)

    def __mul__(self, other: Expr | Number) -> Expr:
        return call("mul", self, other)

    def __rmul__(self, other: Number) -> Expr:
        return call("mul", other, self)

    def __truediv__(self, other: Expr | Number) -> Expr:
        return call("div", self, other)

    def __rtruediv__(self, other: Number) -> Expr:
        return call("div", other, self)

    def __floordiv__(self, other: Expr | Number) -> Expr:
        return call("floordiv", self, other)

    def __mod__(self, other: Expr | Number) -> Expr:
        return call("mod", self, other)

    def __neg__(self) -> Expr:
        return call("neg", self)


@dataclass(frozen=True, eq=False)
class Const(Expr):
    """A number. 0.0 and -0.0 differ, and NaN equals itself, so equal constants are interchangeable."""

    value: Number
    dtype: DType

    def _key(self) -> tuple[Any, ...]:
        value = self.value
        if isinstance(value, float) and (value != value or value == 0.0):
            return str(value), self.dtype
        return value, self.dtype

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._key() == other._key() if isinstance(other, Const) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.value) if self.value == self.value else 0  # Python's NaNs compare unequal


@quickly_made
@dataclass(frozen=True, eq=False)
class Var(Expr):
    """An index variable with values in [0, extent)."""

    name: str
    extent: int

    dtype = DType.I64

    # Written out, because variables are keys of nearly every table: a hash is made once, and nothing is copied to
    # compare two.

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not Var:
            return NotImplemented
        return self.name == other.name and self.extent == other.extent

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash((self.name, self.extent))
        return known

    def __getstate__(self) -> dict[str, Any]:
        """Strings hash differently in another process."""
        return {"name": self.name, "extent": self.extent}


@_hashed_once
@quickly_made
@dataclass(frozen=True)
class Load(Expr):
    """The element of `source` at `indices`. In tensor expressions the source is a `Tensor`; in loop programs, a flat
    `loops.Buffer` with one index."""

    source: Source
    indices: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.source.dtype


@_hashed_once
@quickly_made
@dataclass(frozen=True)
class Call(Expr):
    """A scalar function of `te.scalars.SCALARS` applied to arguments."""

    op: str
    args: tuple[Expr, ...]
    dtype: DType


@_hashed_once
@quickly_made
@dataclass(frozen=True)
class Cast(Expr):
    """A conversion as in C: float to integer truncates, and anything to bool is `!= 0`."""

    value: Expr
    dtype: DType


@_hashed_once
@quickly_made
@dataclass(frozen=True)
class Select(Expr):
    """`then` if `cond`, else `other`; lazy in its loads."""

    cond: Expr
    then: Expr
    other: Expr

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.then.dtype


@_hashed_once
@dataclass(frozen=True)
class Reduce(Expr):
    """`kind` ("sum", "prod", "max", "min", "any", "all") of `body` over all values of `axes`."""

    kind: str
    body: Expr
    axes: tuple[Var, ...]

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.body.dtype


REDUCE_COMBINERS = {
    "sum": "add",
    "prod": "mul",
    "max": "max",
    "min": "min",
    "any": "or",
    "all": "and",
}


def reduce_identity(kind: str, dtype: DType) -> Const:
    """The initial value of a reduction, which is neutral."""
    if kind in ("sum", "prod"):
        one = 1 if kind == "prod" else 0
        return Const(float(one) if dtype.is_float else one, dtype)
    if kind in ("any", "all"):
        return Const(kind == "all", DType.BOOL)
    lowest = kind == "max"
    if dtype.is_float:
        return Const(float("-inf") if lowest else float("inf"), dtype)
    if dtype is DType.BOOL:
        return Const(not lowest, dtype)
    import numpy as np

    info = np.iinfo(dtype.numpy)
    return Const(int(info.min if lowest else info.max), dtype)


class Source:
    """Something a `Load` reads."""

    name: str
    dtype: DType


@dataclass(frozen=True, eq=False)
class Tensor(Source):
    """A tensor of known shape: an input, or a `Compute`."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    def __getitem__(self, indices: Expr | int | Sequence[Expr | int]) -> Expr:
        """The element at `indices`, widened to the arithmetic type."""
        items = tuple(indices) if isinstance(indices, Sequence) else (indices,)
        assert len(items) == len(self.shape), (
            f"{self.name}{list(self.shape)} indexed with {len(items)} indices"
        )
        return cast(Load(self, tuple(as_index(item) for item in items)), self.dtype.compute)


@dataclass(frozen=True, eq=False)
class Compute(Tensor):
    axes: tuple[Var, ...]
    body: Expr

    @property
    def reduction(self) -> Reduce | None:
        return self.body if isinstance(self.body, Reduce) else None


def as_index(value: Expr | int) -> Expr:
    return Const(int(value), DType.I64) if not isinstance(value, Expr) else value


def const(value: Number, dtype: DType) -> Const:
    if dtype.is_float:
        return Const(float(value), dtype)
    return Const(bool(value) if dtype is DType.BOOL else int(value), dtype)


def cast(value: Expr, dtype: DType) -> Expr:
    if value.dtype is dtype:
        return value
    if isinstance(value, Const) and not dtype.is_half:
        return const(value.value, dtype)
    return (_as_stored(value, dtype) if dtype.is_half else None) or Cast(value, dtype)


def _as_stored(value: Expr, dtype: DType) -> Expr | None:
    """An element of type `dtype` that was widened and only selected, not computed with, in its original type."""
    if isinstance(value, Cast) and value.value.dtype is dtype:
        return value.value
    if isinstance(value, Const) and value.value == 0:
        return const(value.value, dtype)
    if not isinstance(value, Select):
        return None
    then, other = _as_stored(value.then, dtype), _as_stored(value.other, dtype)
    return None if then is None or other is None else Select(value.cond, then, other)


def element(value: Expr) -> Load | None:
    """The load that a value is, possibly widened from 16 bits to f32; None if it computes more than that."""
    if isinstance(value, Cast) and value.dtype is DType.F32 and value.value.dtype.is_half:
        value = value.value
    return value if isinstance(value, Load) else None


def call(op: str, *args: Expr | Number) -> Expr:
    """`op` applied to `args`; plain numbers take the type of the first expression among them."""
    scalar = SCALARS[op]
    assert len(args) == scalar.arity, f"{op} takes {scalar.arity} arguments, got {len(args)}"
    dtype = next(arg.dtype for arg in args if isinstance(arg, Expr))
    exprs = tuple(arg if isinstance(arg, Expr) else const(arg, dtype) for arg in args)
    assert all(arg.dtype is dtype for arg in exprs), f"{op} of {[arg.dtype for arg in exprs]}: types differ"
    return Call(op, exprs, DType.BOOL if scalar.predicate else dtype)


def select(cond: Expr, then: Expr | Number, other: Expr | Number) -> Expr:
    if not isinstance(then, Expr):
        assert isinstance(other, Expr)
        then = const(then, other.dtype)
    other = other if isinstance(other, Expr) else const(other, then.dtype)
    assert cond.dtype is DType.BOOL and then.dtype is other.dtype
    return Select(cond, then, other)


def all_of(conditions: Sequence[Expr]) -> Expr | None:
    """The conjunction of conditions, or None if there are none."""
    result: Expr | None = None
    for condition in conditions:
        result = condition if result is None else call("and", result, condition)
    return result


def compute(
    name: str, shape: Sequence[int], dtype: DType, formula: Callable[..., Expr], *, cast_result: bool = True
) -> Compute:
    """The tensor whose element at (i, j, ...) is `formula(i, j, ...)`, rounded to `dtype`.

    A formula that is a `reduce_over(...)` makes a reduction stage; its type must be the stage's.
    """
    axes = tuple(Var(f"i{position}", extent) for position, extent in enumerate(shape))
    body = formula(*axes)
    if cast_result and not isinstance(body, Reduce):
        body = cast(body, dtype)
    assert body.dtype is dtype, f"{name}: formula is {body.dtype}, tensor is {dtype}"
    return Compute(name, tuple(shape), dtype, axes, body)


def reduce_axes(extents: Sequence[int]) -> tuple[Var, ...]:
    """Fresh reduction axes (r0, r1, ...) for one stage."""
    return tuple(Var(f"r{position}", extent) for position, extent in enumerate(extents))


def reduce_over(kind: str, body: Expr, axes: Sequence[Var]) -> Reduce:
    return Reduce(kind, body, tuple(axes))


def children(expr: Expr) -> tuple[Expr, ...]:
    return _CHILDREN.get(expr.__class__, _nothing)(expr)


def _nothing(expr: Expr) -> tuple[Expr, ...]:
    return ()


# For each class of expressions, its children. A table, because a compilation asks for them millions of times.
_CHILDREN: dict[type, Callable[[Any], tuple[Expr, ...]]] = {
    Var: _nothing,
    Const: _nothing,
    Call: operator.attrgetter("args"),
    Load: operator.attrgetter("indices"),
    Cast: lambda expr: (expr.value,),
    Select: operator.attrgetter("cond", "then", "other"),
    Reduce: lambda expr: (expr.body,),
}
_LEAVES = frozenset([Var, Const])


def with_children(expr: Expr, parts: tuple[Expr, ...]) -> Expr:
    """`expr` with its children replaced; the node itself if nothing changed."""
    if all(map(operator.is_, parts, children(expr))):
        return expr
    if isinstance(expr, Load):
        return Load(expr.source, parts)
    if isinstance(expr, Call):
        return Call(expr.op, parts, expr.dtype)
    if isinstance(expr, Cast):
        return Cast(parts[0], expr.dtype)
    if isinstance(expr, Select):
        return Select(*parts)
    assert isinstance(expr, Reduce)
    return Reduce(expr.kind, parts[0], expr.axes)


def walk(expr: Expr) -> Iterator[Expr]:
    """`expr` and everything below it, parents first."""
    stack = [expr]
    while stack:
        node = stack.pop()
        yield node
        if node.__class__ not in _LEAVES:
            stack.extend(reversed(children(node)))


def rewrite(expr: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """`expr` rebuilt bottom-up; `rule` receives each rebuilt node and may replace it (None keeps it). A shared node
    is rewritten once, and its replacement is shared."""
    done: dict[int, Expr] = {}
    waiting = [expr]
    while waiting:
        node = waiting[-1]
        if id(node) in done:
            waiting.pop()
            continue
        parts = children(node)
        missing = None
        for part in parts:
            if id(part) in done:
                continue
            if part.__class__ in _LEAVES:  # as most are
                replacement = rule(part)
                done[id(part)] = part if replacement is None else replacement
            else:
                missing = part
                break  # it comes before the parts to its right
        if missing is not None:
            waiting.append(missing)
            continue
        rebuilt = with_children(node, tuple([done[id(part)] for part in parts])) if parts else node
        replacement = rule(rebuilt)
        done[id(node)] = rebuilt if replacement is None else replacement
        waiting.pop()
    return done[id(expr)]


def shared(expr: Expr) -> Expr:
    """`expr` with equal subexpressions as one object, so that work per object is done once."""
    known: dict[Expr, Expr] = {}
    return rewrite(expr, lambda node: known.setdefault(node, node))


def substitute(expr: Expr, values: Mapping[Var, Expr]) -> Expr:
    """`expr` with variables replaced, all at once."""
    if not values:
        return expr
    return rewrite(expr, lambda node: values.get(node) if node.__class__ is Var else None)


def loads(expr: Expr) -> list[Load]:
    return [node for node in walk(expr) if isinstance(node, Load)]


def unguarded_loads(expr: Expr) -> list[Load]:
    """Loads that are always performed: not those in the arms of a `Select`."""
    found: list[Load] = []
    waiting = [expr]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Load):
            found.append(node)
        waiting.extend((node.cond,) if isinstance(node, Select) else reversed(children(node)))
    return found


def variables(expr: Expr) -> set[Var]:
    return set(_variables(expr))


@lru_cache(maxsize=16384)
def _variables(expr: Expr) -> frozenset[Var]:
    return frozenset(node for node in walk(expr) if isinstance(node, Var))


def stages(output: Tensor) -> list[Compute]:
    """The computed tensors that `output` needs, producers first, `output` last."""
    order: dict[Source, None] = {}
    waiting: list[tuple[Source, Iterator[Source]]] = [(output, _sources(output))]
    entered: set[Source] = {output}
    while waiting:
        tensor, sources = waiting[-1]
        following = next((source for source in sources if source not in entered), None)
        if following is None:
            waiting.pop()
            order[tensor] = None
        else:
            entered.add(following)
            waiting.append((following, _sources(following)))
    return [tensor for tensor in order if isinstance(tensor, Compute)]


def _sources(tensor: Source) -> Iterator[Source]:
    """The tensors that it is computed from, in the order in which they are read."""
    return (load.source for load in loads(tensor.body)) if isinstance(tensor, Compute) else iter(())
