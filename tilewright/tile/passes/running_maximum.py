"""A running maximum rescales what has been added up once for several iterations of its loop.

    for %i in range(0, %n, 8) carrying %best, %total:      for %i in range(0, %n - %n % 32, 32) carrying %best, %total:
      %x = <%i>                                              %x0 = <%i>   %x1 = <%i + 8>   %x2 = ...   %x3 = ...
      %now = max %best, %x                            ->     %now = max %best, %x0, %x1, %x2, %x3
      %total = %total * exp(%best - %now)                    %total = %total * exp(%best - %now)
               + exp(%x - %now)                                       + exp(%x0 - %now) + ... + exp(%x3 - %now)
      yield %now, %total                                     yield %now, %total
                                                           and the loop as it was for the iterations that are left

The other form has one number for a whole tile: a maximum %best, reduce {max} %x, and the sum of exp(%x - %now). Both
are NaN where the loop as written makes one of -inf - -inf: when the maximum is -inf after one iteration. This is for
processors, where an exponential takes a dozen instructions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.support.source import SourceLocation
from tilewright.tile.ir import Block, For, Node, Op, TileProgram, TileType, Value, While
from tilewright.tile.op import Effect
from tilewright.tile.ops import OPS
from tilewright.tile.passes.exponents import puts_back, through_views
from tilewright.tile.passes.rewrite import Rewriter

_TOGETHER = 4  # iterations
_LARGEST = 1 << 30  # of steps: then no number of the new loop's bounds wraps around
_BYTES = 1 << 15  # of the tiles of these iterations: they may be kept on the stack, and are read twice
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
        if lower is None or lower < 0 or step is None or not 0 < step * _TOGETHER < _LARGEST:
            return (made,)
        carried = _carried(made)
        return (made,) if carried is None else _Grouped(made, step).nodes(carried)


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
    if not is_whole or any(_bytes(each.tile) * _TOGETHER > _BYTES for each in maxima):
        return None
    return [found[param] for param in params]


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
    """The two loops that take the place of one."""

    def __init__(self, loop: For, step: int) -> None:
        self.loop, self.step = loop, step
        self.made = {op.results[0]: op for op in loop.body.nodes if isinstance(op, Op)}
        self.where: SourceLocation | None = loop.where

    def nodes(self, carried: Sequence[_Maximum | _Total]) -> list[Node]:
        loop, before = self.loop, list[Node]()
        kind = loop.upper.type
        assert isinstance(kind, TileType)
        by = self.emit(before, "constant", value=self.step * _TOGETHER, dtype=kind.dtype)
        span = self.emit(before, "sub", self.emit(before, "max", loop.upper, loop.lower), loop.lower)
        groups = self.emit(before, "mul", self.emit(before, "floordiv", span, by), by)
        middle = self.emit(before, "add", loop.lower, groups)
        between = tuple(Value(each.type) for each in loop.results)
        first = For(loop.lower, middle, by, loop.init, self.body(carried), between, loop.where)
        return [*before, first, replace(loop, lower=middle, init=between)]

    def body(self, carried: Sequence[_Maximum | _Total]) -> Block:
        nodes: list[Node] = []
        params = tuple(Value(each.type, each.name) for each in self.loop.body.params)
        index, same = params[0], dict(zip(self.loop.body.params, params, strict=True))
        kind = index.type
        assert isinstance(kind, TileType)
        copies = [{**same}]
        for number in range(1, _TOGETHER):
            by = self.emit(nodes, "constant", value=number * self.step, dtype=kind.dtype)
            copies.append({**same, self.loop.body.params[0]: self.emit(nodes, "add", index, by)})
        maxima = [each for each in carried if isinstance(each, _Maximum)]
        tiles = {most.param: [self.copied(nodes, most.tile, copy) for copy in copies] for most in maxima}
        final: dict[Value, Value] = {}
        started: dict[Value, Value] = {}  # the maxima after one iteration
        for most in maxima:
            best, (first, *others) = same[most.param], tiles[most.param]
            if most.reduced is None:
                started[most.param] = now = self.emit(nodes, "max", best, first)
                for each in others:
                    now = self.emit(nodes, "max", now, each)
            else:
                whole = first
                for each in others:
                    whole = self.emit(nodes, "max", whole, each)
                attrs = most.reduced.settings
                started[most.param] = self.emit(
                    nodes, "max", best, self.emit(nodes, "reduce", first, **attrs)
                )
                now = self.emit(nodes, "max", best, self.emit(nodes, "reduce", whole, **attrs))
            final[most.param] = now
        for total in carried:
            if isinstance(total, _Total):
                inputs = same[total.param], tiles[total.most.param], final[total.most.param]
                final[total.param] = self.summed(nodes, total, same, *inputs, started[total.most.param])
        yields = tuple(final[param] for param in self.loop.body.params[1:])
        return Block(params, tuple(nodes), yields)

    def summed(
        self,
        nodes: list[Node],
        total: _Total,
        same: Mapping[Value, Value],
        before: Value,
        tiles: Sequence[Value],
        now: Value,
        started: Value,
    ) -> Value:
        best = same[total.most.param]
        shift = self.made[total.power.operands[0]].operands[1]
        copy = {**same, total.most.now.results[0]: now}
        most = self.copied(nodes, shift, copy)
        powers = [self.emit(nodes, "exp", self.emit(nodes, "sub", tile, most)) for tile in tiles]
        while len(powers) > 1:
            pairs = zip(powers[::2], powers[1::2], strict=True)
            powers = [self.emit(nodes, "add", *pair) for pair in pairs]
        (added,) = powers
        if total.reduced is not None:
            added = self.emit(nodes, "reduce", added, **total.reduced.settings)
        factor = self.emit(nodes, "exp", self.emit(nodes, "sub", best, now))
        nan = self.emit(nodes, "sub", started, started)  # 0 unless it is infinite
        scaled = self.emit(nodes, "mul", self.emit(nodes, "add", before, nan), factor)
        return self.emit(nodes, "add", scaled, added)

    def copied(self, nodes: list[Node], value: Value, copy: dict[Value, Value]) -> Value:
        """The value computed again, with other values in place of those in `copy`."""
        op = self.made.get(value)
        if value in copy or op is None:
            return copy.get(value, value)
        operands = tuple(self.copied(nodes, each, copy) for each in op.operands)
        result = Value(value.type)
        nodes.append(replace(op, operands=operands, results=(result,)))
        copy[value] = result
        return result

    def emit(self, nodes: list[Node], name: str, *operands: Value, **attrs: Any) -> Value:
        found = OPS[name].rule([each.type for each in operands], attrs)
        assert found is not None
        result = Value(found)
        nodes.append(Op(name, operands, (result,), tuple(attrs.items()), self.where))
        return result
