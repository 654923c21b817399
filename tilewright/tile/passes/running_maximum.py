"""A running maximum rescales what has been added up once for several iterations of its loop.

    for %i in range(0, %n, 8)               the first iteration as it is; then
        carrying %best, %total:             for %g in range(8, %n, 64) carrying %best, %total:
      %x = <%i>                               for %i in range(%g, min(%g + 64, %n), 8) carrying %now = %best:
      %now = max %best, %x            ->        %now = max %now, <%i>
      %total = %total * exp(%best - %now)     %start = %total * exp(%best - %now)
               + exp(%x - %now)               for %i in the same range carrying %total = %start:
      yield %now, %total                        %total = %total + exp(<%i> - %now)
                                              yield %now, %total

The other form has one number for a whole tile: a maximum %best, reduce {max} %x, and the sum of exp(%x - %now); then
the inner loops carry tiles, which are reduced after them. A value that is NaN in the loop as written is NaN here: by an
element that is NaN or inf in any iteration, by -inf - -inf only in the first one. This is for CPUs: an exponential
takes them a dozen instructions, and the second inner loop reads from L1 again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tilewright.dtypes import DType
from tilewright.tile.ir import Block, For, Node, Op, TileProgram, TileType, Value, While
from tilewright.tile.op import Effect
from tilewright.tile.ops import OPS
from tilewright.tile.passes.exponents import puts_back, through_views
from tilewright.tile.passes.rewrite import Rewriter

_TOGETHER = 8  # iterations, if the tiles are small
_BYTES = 1 << 14  # of the tiles of these iterations at most: they are read twice
_LARGEST = 1 << 30  # of steps: then no number of the new loops' bounds wraps around
_HARMLESS = (Effect.PURE, Effect.READ)
_LARGE = frozenset(["dot", "sort", "cumsum", "reshape", "join", "split", "flip"])  # which keep what they make


def grouped_rescaling(program: TileProgram) -> TileProgram:
    return _Grouping().program(program)


@dataclass(frozen=True)
class _Maximum:
    """A carried maximum: of the elements of a tile, or of all of it (`reduced`: by which operation)."""

    param: Value
    now: Op
    tile: Value
    reduced: Op | None


@dataclass(frozen=True)
class _Total:
    """A carried sum of exponentials of a tile minus the maximum. `power` is one iteration's, `reduced` its sum."""

    param: Value
    total: Op
    most: _Maximum
    power: Op
    reduced: Op | None


class _Grouping(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self.constants: dict[Value, Any] = {}

    def op(self, op: Op) -> Iterable[Node]:
        if op.name == "constant":
            self.constants[op.results[0]] = op.settings["value"]
        return (op,)

    def loop(self, node: For | While) -> Iterable[Node]:
        (made,) = super().loop(node)
        if not isinstance(made, For):
            return (made,)
        lower, step = (self.constants.get(each) for each in (made.lower, made.step))
        if lower is None or step is None or not (0 <= lower < _LARGEST and 0 < step * _TOGETHER < _LARGEST):
            return (made,)
        carried = _carried(made)
        if carried is None:
            return (made,)
        size = sum(_bytes(each.tile) for each in carried if isinstance(each, _Maximum))
        together = min(_TOGETHER, _BYTES // size)
        return (made,) if together < 2 else _Grouped(made, carried, step * together).nodes()


def _carried(loop: For) -> list[_Maximum | _Total] | None:
    """What each parameter of the loop is; None if one is neither a maximum nor a sum, or the body has effects."""
    nodes, (_, *params) = loop.body.nodes, loop.body.params
    made: dict[Value, Op] = {}
    for node in nodes:
        if not isinstance(node, Op) or OPS[node.name].effect not in _HARMLESS or node.name in _LARGE:
            return None
        made.update((result, node) for result in node.results)
    outside = _Dependence(made, frozenset(params))
    found: dict[Value, _Maximum | _Total] = {}
    pairs = list(zip(params, loop.body.yields, strict=True))
    for param, final in pairs:
        most = _maximum(made, param, final, outside)
        if most is not None:
            found[param] = most
    maxima = [each for each in found.values() if isinstance(each, _Maximum)]
    for param, final in pairs:
        totals = [_total(made, param, final, most) for most in maxima if param not in found]
        found.update((param, total) for total in totals if total is not None)
    is_whole = maxima and len(found) == len(params) and len(maxima) < len(params)
    return [found[param] for param in params] if is_whole else None


class _Dependence:
    def __init__(self, made: Mapping[Value, Op], params: frozenset[Value]) -> None:
        self.made, self.known = made, dict.fromkeys(params, True)

    def __call__(self, value: Value) -> bool:
        """Whether a value depends on what the loop carries."""
        if value not in self.known:
            op = self.made.get(value)
            self.known[value] = op is not None and any(map(self, op.operands))
        return self.known[value]


def _maximum(made: Mapping[Value, Op], param: Value, final: Value, depends: _Dependence) -> _Maximum | None:
    now = made.get(final)
    if now is None or now.name != "max" or param not in now.operands or not _is_float(final):
        return None
    (other,) = [each for each in now.operands if each is not param] or [param]
    if depends(other):
        return None
    reduced = made.get(other)
    if reduced is None or reduced.name != "reduce" or reduced.settings["kind"] != "max":
        return _Maximum(param, now, other, None)
    return _Maximum(param, now, reduced.operands[0], reduced)


def _total(made: Mapping[Value, Op], param: Value, final: Value, most: _Maximum) -> _Total | None:
    total = made.get(final)
    if total is None or total.name != "add":
        return None
    for one, other in (total.operands, total.operands[::-1]):
        scaled, power, reduced = made.get(one), made.get(other), None
        if scaled is None or scaled.name != "mul" or param not in scaled.operands:
            continue
        (factor,) = [made.get(each) for each in scaled.operands if each is not param] or [None]
        if not _is_power(made, factor, most.param, most, None):
            continue
        if most.reduced is not None:
            reduced = power
            if reduced is None or reduced.name != "reduce" or not _reduces_alike(reduced, most.reduced):
                continue
            power = made.get(reduced.operands[0])
        if power is not None and _is_power(made, power, most.tile, most, most.reduced):
            return _Total(param, total, most, power, reduced)
    return None


def _is_power(made: Mapping[Value, Op], op: Op | None, of: Value, most: _Maximum, along: Op | None) -> bool:
    """Whether an operation is exp(of - now); of a reduced tile, with the maximum put back along the reduced axis."""
    shifted = made.get(op.operands[0]) if op is not None and op.name == "exp" else None
    if shifted is None or shifted.name != "sub" or shifted.operands[0] is not of:
        return False
    now, expanded = through_views(made, shifted.operands[1])
    return now is most.now and (not expanded if along is None else puts_back(along, expanded))


def _reduces_alike(total: Op, most: Op) -> bool:
    return bool(total.settings == {**most.settings, "kind": "sum"})


def _bytes(tile: Value) -> int:
    assert isinstance(tile.type, TileType)
    return math.prod(tile.type.shape) * tile.type.dtype.bytes


def _is_float(value: Value) -> bool:
    return isinstance(value.type, TileType) and not value.type.is_pointer and value.type.dtype.is_float


class _Grouped:
    """The loops that take the place of one. `span`: what the index of the outer loop grows by."""

    def __init__(self, loop: For, carried: Sequence[_Maximum | _Total], span: int) -> None:
        self.loop, self.span = loop, span
        self.maxima = [each for each in carried if isinstance(each, _Maximum)]
        self.totals = [each for each in carried if isinstance(each, _Total)]
        self.made = {op.results[0]: op for op in loop.body.nodes if isinstance(op, Op)}
        self.nodes_here: list[Node] = []

    def nodes(self) -> list[Node]:
        loop = self.loop
        middle = self.emit("add", loop.lower, loop.step)
        between = tuple(Value(each.type) for each in loop.results)
        first = replace(loop, upper=self.emit("min", middle, loop.upper), results=between)
        span = self.constant(self.span)
        with self.inside() as nodes:
            block = self.group(nodes, span)
        rest = For(middle, loop.upper, span, between, block, loop.results, loop.where)
        return [*self.nodes_here, first, rest]

    def group(self, nodes: list[Node], span: Value) -> Block:
        index, *params = (Value(each.type, each.name) for each in self.loop.body.params)
        before = dict(zip(self.loop.body.params[1:], params, strict=True))
        is_last = self.emit("le", self.emit("sub", self.loop.upper, index), span)
        end = self.emit("select", is_last, self.loop.upper, self.emit("add", index, span))
        after = self.most(index, end, before)
        self.sums(index, end, before, after)
        return Block((index, *params), tuple(nodes), tuple(after[param] for param in before))

    def most(self, first: Value, end: Value, before: Mapping[Value, Value]) -> dict[Value, Value]:
        """The new maxima, by the parameters of the loop as written."""
        starts = [
            before[each.param] if each.reduced is None else self.filled(-math.inf, each.tile)
            for each in self.maxima
        ]

        def step(copy: dict[Value, Value], carried: Sequence[Value]) -> list[Value]:
            tiles = [self.copied(each.tile, copy) for each in self.maxima]
            return [self.emit("max", *pair) for pair in zip(carried, tiles, strict=True)]

        after: dict[Value, Value] = {}
        for each, found in zip(self.maxima, self.inner(first, end, starts, step), strict=True):
            if each.reduced is not None:
                found = self.emit("reduce", found, **each.reduced.settings)
                found = self.emit("max", before[each.param], found)
            after[each.param] = found
        return after

    def sums(
        self, first: Value, end: Value, before: Mapping[Value, Value], after: dict[Value, Value]
    ) -> None:
        """Adds the new sums to `after`."""
        scaled, starts, shifts = [], list[Value](), list[Value]()
        for each in self.totals:
            best, now = before[each.most.param], after[each.most.param]
            factor = self.power(best, now)
            scaled.append(self.emit("mul", before[each.param], factor))
            starts.append(scaled[-1] if each.reduced is None else self.filled(0.0, each.most.tile))
            shift = self.made[each.power.operands[0]].operands[1]
            shifts.append(self.copied(shift, {each.most.now.results[0]: now}))

        def step(copy: dict[Value, Value], carried: Sequence[Value]) -> list[Value]:
            found = []
            for each, shift, total in zip(self.totals, shifts, carried, strict=True):
                found.append(self.emit("add", total, self.power(self.copied(each.most.tile, copy), shift)))
            return found

        results = self.inner(first, end, starts, step)
        for each, start, found in zip(self.totals, scaled, results, strict=True):
            if each.reduced is not None:
                found = self.emit("add", start, self.emit("reduce", found, **each.reduced.settings))
            after[each.param] = found

    def power(self, value: Value, most: Value) -> Value:
        """exp(value - most), which is at most 1."""
        below = self.emit("sub", value, most)
        assert isinstance(below.type, TileType)
        if below.type.dtype is not DType.F32:
            return self.emit("exp", below)
        scaled = self.emit("mul", below, self.filled(math.log2(math.e), below))
        return self.emit("exp2_nonpositive", scaled)

    def inner(
        self,
        first: Value,
        end: Value,
        starts: Sequence[Value],
        step: Callable[[dict[Value, Value], Sequence[Value]], list[Value]],
    ) -> tuple[Value, ...]:
        """The results of a loop over a group's iterations."""
        index = Value(first.type)
        carried, results = (tuple(Value(each.type) for each in starts) for _ in range(2))
        with self.inside() as nodes:
            yields = step({self.loop.body.params[0]: index}, carried)
        block = Block((index, *carried), tuple(nodes), tuple(yields))
        where = self.loop.where
        self.nodes_here.append(For(first, end, self.loop.step, tuple(starts), block, results, where))
        return results

    @contextmanager
    def inside(self) -> Iterator[list[Node]]:
        """What is emitted meanwhile."""
        outside, self.nodes_here = self.nodes_here, []
        yield self.nodes_here
        self.nodes_here = outside

    def copied(self, value: Value, copy: dict[Value, Value]) -> Value:
        """The value computed again, with other values in place of those in `copy`."""
        op = self.made.get(value)
        if value in copy or op is None:
            return copy.get(value, value)
        operands = tuple(self.copied(each, copy) for each in op.operands)
        copy[value] = Value(value.type)
        self.nodes_here.append(replace(op, operands=operands, results=(copy[value],)))
        return copy[value]

    def constant(self, number: int) -> Value:
        kind = self.loop.upper.type
        assert isinstance(kind, TileType)
        return self.emit("constant", value=number, dtype=kind.dtype)

    def filled(self, number: float, like: Value) -> Value:
        assert isinstance(like.type, TileType)
        scalar = self.emit("constant", value=number, dtype=like.type.dtype)
        return self.emit("broadcast", scalar, shape=like.type.shape)

    def emit(self, name: str, *operands: Value, **attrs: Any) -> Value:
        found = OPS[name].rule([each.type for each in operands], attrs)
        assert found is not None
        result = Value(found)
        self.nodes_here.append(Op(name, operands, (result,), tuple(attrs.items()), self.loop.where))
        return result
