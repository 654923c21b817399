"""Loops of a kernel: what they carry, `break` and `continue`.

A name that the body assigns and that exists before is carried, and needs one type. `continue` ends the body: what is
behind an `if` that has one is compiled into its other branch. `break` does so as well and sets a flag, which the loop
carries: a `while` goes on as long as it is false, and a `for` over values with a `break` becomes such a `while`.

    for i in range(n):                     i, left = 0, False
        if i * i > m:          ->          while not left and i < n:
            break                              if i * i > m: left = True
        total += i                             else:         total += i
                                               i += 1
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.dtypes import DType
from tilewright.errors import KernelNameError, KernelSyntaxError, KernelTypeError
from tilewright.support.source import SourceLocation
from tilewright.tile.frontend.builder import Builder, are_same, describe, is_number, tile_type
from tilewright.tile.frontend.expressions import Absent, Expressions
from tilewright.tile.frontend.source import FunctionSource
from tilewright.tile.ir import Block, For, Node, TileType, Value, While
from tilewright.tile.op import BOOL, I32, I64

_MAX_UNROLLED = 4096
_MAX_UNROLLED_BREAKS = 128  # iterations that a value may end: each is inside of the one before
_BROKEN = "break "  # the name of the flag: no name of a user's
_COUNTER = "next "  # the name of the index that a `while` counts


class Loops(Expressions):
    """The part of a function's compiler that compiles loops. The other part implements the methods that raise."""

    def __init__(self, builder: Builder, source: FunctionSource, caller: SourceLocation | None) -> None:
        super().__init__(builder, source, caller)
        self.in_loop = False

    def statements(self, body: Sequence[ast.stmt]) -> Any:
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Any) -> None:
        raise NotImplementedError

    def merge(
        self,
        condition: Value,
        pairs: dict[str, tuple[Any, Any]],
        left: list[Node],
        right: list[Node],
        where: SourceLocation,
    ) -> dict[str, Any]:
        raise NotImplementedError

    def leave(self, node: ast.Break | ast.Continue) -> None:
        """Compile a `break` or `continue`: the rest of the body is skipped."""
        if isinstance(node, ast.Break):
            self.names[_BROKEN] = True

    # -- for ---------------------------------------------------------------------------------------------------------

    def for_loop(self, node: ast.For) -> None:
        if node.orelse:
            raise self.error(KernelSyntaxError, node, "else of a loop is not part of the tile language")
        bounds = self.range_bounds(node.iter)
        if bounds is None:
            self.unrolled(node)
            return
        if not isinstance(node.target, ast.Name):
            raise self.error(KernelSyntaxError, node.target, "the index of a loop must be a name")
        dtype = I32
        for bound in bounds:
            if isinstance(bound, Value):
                kind = tile_type(bound)
                if kind.shape or kind.is_pointer or not kind.dtype.is_integer:
                    raise self.error(
                        KernelTypeError,
                        node.iter,
                        f"range takes integer scalars, got {kind}",
                        "use .to(tl.int32)",
                    )
                dtype = I64 if kind.dtype.bytes == 8 or kind.dtype is DType.U32 else dtype
            elif not isinstance(bound, int):
                raise self.error(
                    KernelTypeError, node.iter, f"range takes integers, got {describe(bound)}", "use integers"
                )
        self.b.where = where = self.source.locate(node, self.caller)
        if leaves(node.body, ast.Break):
            self.counted_while(node, node.target.id, bounds, where, wide=dtype is I64)
            return
        lower, upper, step = (
            self.b.cast(each, dtype) if isinstance(each, Value) else self.b.constant(each, dtype)
            for each in bounds
        )
        index = Value(TileType(dtype), node.target.id)
        carried, init = self.carried(node.body, node.target.id)
        params = [Value(each.type, name) for name, each in zip(carried, init, strict=True)]
        nodes, yields = self.loop_body(
            node.body, {**dict(zip(carried, params, strict=True)), index.name: index}, carried
        )
        self.match(carried, params, yields, where)
        results = [Value(each.type, each.name) for each in params]
        body = Block((index, *params), tuple(nodes), tuple(yields))
        self.b.nodes.append(For(lower, upper, step, tuple(init), body, tuple(results), where))
        self.names.update(zip(carried, results, strict=True))
        self.after_loop(node.body, carried, where, [node.target.id])

    def range_bounds(self, node: ast.expr) -> tuple[Any, Any, Any] | None:
        """The bounds of a `range`; None if the loop is unrolled."""
        if not isinstance(node, ast.Call) or self.evaluate(node.func) is not range:
            return None
        given = [self.evaluate(each) for each in node.args]
        if not 1 <= len(given) <= 3 or node.keywords:
            raise self.error(KernelTypeError, node, "range takes one to three integers", "write range(n)")
        if len(given) == 3 and given[2] == 0 and not isinstance(given[2], Value):
            raise self.error(KernelTypeError, node, "a step of 0", "use another step")
        lower = given[0] if len(given) > 1 else 0
        return lower, given[min(len(given) - 1, 1)], given[2] if len(given) == 3 else 1

    def counted_while(
        self, node: ast.For, index: str, bounds: tuple[Any, Any, Any], where: SourceLocation, *, wide: bool
    ) -> None:
        """Compile a `for` with a `break` as a `while`. The counter has 64 bits, so that the value after the last
        iteration does not overflow."""
        lower, upper, step = (
            self.b.cast(each, I64) if isinstance(each, Value) else self.b.constant(each, I64)
            for each in bounds
        )
        up = None if isinstance(bounds[2], Value) else bounds[2] > 0

        def condition() -> Value:
            now = self.names[_COUNTER]
            if up is not None:
                return self.b.emit("lt", *((now, upper) if up else (upper, now)))
            zero = self.b.constant(0, I64)
            rising, falling = self.b.emit("lt", zero, step), self.b.emit("lt", step, zero)
            below, above = self.b.emit("lt", now, upper), self.b.emit("lt", upper, now)
            return self.b.emit("or", self.b.emit("and", rising, below), self.b.emit("and", falling, above))

        def begin() -> None:
            counter = self.names[_COUNTER]
            self.names[index] = counter if wide else self.b.cast(counter, I32)
            if not self.names[index].name:
                self.b.names.setdefault(self.names[index], index)
            self.names[_COUNTER] = self.b.emit("add", counter, step)

        outer = self.names.get(_COUNTER)
        self.names[_COUNTER] = lower
        self.conditional(node.body, condition, [_COUNTER], [index], where, begin)
        self.names[_COUNTER] = outer

    def unrolled(self, node: ast.For) -> None:
        items = self.evaluate(node.iter)
        if not isinstance(items, (range, tuple)):
            raise self.error(
                KernelSyntaxError,
                node.iter,
                f"a loop over {describe(items)} is not part of the tile language",
                "loop over range(...), tl.static_range(...) or a tuple",
            )
        if len(items) > _MAX_UNROLLED:
            raise self.error(
                KernelSyntaxError, node.iter, f"{len(items)} unrolled iterations, of at most {_MAX_UNROLLED}",
                "use range, which is not unrolled",
            )  # fmt: skip
        inner, self.in_loop = self.in_loop, True
        outer = self.names.pop(_BROKEN, None)
        self.unroll(node, items)
        self.names.pop(_BROKEN, None)
        if outer is not None:
            self.names[_BROKEN] = outer
        self.in_loop = inner

    def unroll(self, node: ast.For, items: Sequence[Any]) -> None:
        """The iterations over `items`, unrolled; those after a `break` that depends on a value are inside an `if`."""
        for position, item in enumerate(items):
            self.names[_BROKEN] = False
            self.assign(node.target, item)
            self.statements(node.body)
            broken = self.names[_BROKEN]
            if broken is True:
                return
            if not isinstance(broken, Value) or position + 1 == len(items):
                continue
            if len(items) > _MAX_UNROLLED_BREAKS:
                raise self.error(
                    KernelSyntaxError,
                    node.iter,
                    f"{len(items)} unrolled iterations with a break, of at most {_MAX_UNROLLED_BREAKS}",
                    "use range, which is not unrolled",
                )
            where = self.source.locate(node, self.caller)
            before = dict(self.names)
            with self.b.inside() as others:
                self.unroll(node, items[position + 1 :])
            after, self.names = self.names, before
            absent = Absent(f"it is assigned in the loop in line {where.line}, which may end before")
            pairs = {
                name: (before.get(name, absent), after.get(name, absent))
                for name in dict.fromkeys([*before, *after])
                if name != _BROKEN
            }
            self.names = self.merge(broken, pairs, [], others, where)
            return

    # -- while -------------------------------------------------------------------------------------------------------

    def while_loop(self, node: ast.While) -> None:
        if node.orelse:
            raise self.error(KernelSyntaxError, node, "else of a loop is not part of the tile language")

        def condition() -> Value:
            test = self.evaluate(node.test)
            if not isinstance(test, Value) and test and not leaves(node.body, ast.Break):
                raise self.error(
                    KernelSyntaxError,
                    node.test,
                    "a loop without end",
                    "use a condition that the body changes, or leave it with break",
                )
            return self.b.condition(test, "while")

        self.conditional(node.body, condition, [], [], self.source.locate(node, self.caller), lambda: None)

    def conditional(
        self,
        body: Sequence[ast.stmt],
        condition: Callable[[], Value],
        also: list[str],
        hidden: list[str],
        where: SourceLocation,
        begin: Callable[[], None],
    ) -> None:
        """Compile a `while`. `also`: names that it carries in addition to those that the body assigns; `hidden`: names
        that `begin` redefines in each iteration."""
        before = dict(self.names)
        breaks = leaves(body, ast.Break)
        if breaks:
            also = [*also, _BROKEN]
            self.names[_BROKEN] = False
        carried, init = self.carried(body, *hidden)
        carried, init = [*carried, *also], [*init, *(self.b.value(self.names[name]) for name in also)]
        params = [Value(each.type, name.strip()) for name, each in zip(carried, init, strict=True)]
        self.names = {**before, **dict(zip(carried, params, strict=True))}
        with self.b.inside() as tested:
            if breaks:
                done = self.names[_BROKEN]
                going = self.choose(done, lambda: self.b.constant(False, BOOL), condition)
            else:
                going = condition()
        self.names = before
        inside = [Value(each.type, each.name) for each in params]
        names = dict(zip(carried, inside, strict=True)) | dict.fromkeys(hidden, 0)
        nodes, yields = self.loop_body(body, names, carried, begin)
        self.match(carried, params, yields, where)
        results = [Value(each.type, each.name) for each in params]
        self.b.nodes.append(
            While(
                tuple(init), Block(tuple(params), tuple(tested), (going,)),
                Block(tuple(inside), tuple(nodes), tuple(yields)), tuple(results), where,
            )
        )  # fmt: skip
        found = zip(carried, results, strict=True)
        self.names.update((name, value) for name, value in found if name != _BROKEN)
        self.after_loop(body, carried, where, hidden)

    # -- what is carried ---------------------------------------------------------------------------------------------

    def carried(self, body: Sequence[ast.stmt], *others: str) -> tuple[list[str], list[Value]]:
        """The names that a loop's body rebinds and that have a value before it, with that value. A name whose value is
        neither a number nor a tile stays a constexpr, which the body may not change."""
        names = [name for name in _assigned(body) if name in self.names and name not in others]
        kept = [name for name in names if isinstance(self.names[name], Value) or is_number(self.names[name])]
        return kept, [self.b.value(self.names[name]) for name in kept]

    def loop_body(
        self,
        body: Sequence[ast.stmt],
        names: dict[str, Any],
        carried: Sequence[str],
        begin: Callable[[], None] = lambda: None,
    ) -> tuple[list[Node], list[Value]]:
        """The body's nodes, and the values that it yields. `begin` compiles what precedes the user's statements."""
        before, inner = dict(self.names), self.in_loop
        self.names.update(names)
        self.in_loop = True
        self.names[_BROKEN] = False
        with self.b.inside() as nodes:
            begin()
            self.statements(body)
            yields = []
            for name in carried:
                found = self.names[name]
                if isinstance(found, Absent):
                    raise KernelNameError(
                        f"`{name}` is not defined at the end of the loop's body: {found.why}"
                    )
                yields.append(self.b.value(found))
        for name, value in before.items():  # a constexpr is the same in every iteration
            changed = self.names.get(name)
            if isinstance(value, Absent):
                continue
            if name not in names and name in _assigned(body) and not are_same(changed, value):
                raise KernelTypeError(
                    f"`{name}` is {describe(value)} before the loop, and the loop changes it to {describe(changed)}",
                    remedy="use a name of its own inside the loop, or unroll it with tl.static_range",
                )
        self.names, self.in_loop = before, inner
        return nodes, yields

    def match(
        self, names: Sequence[str], params: Sequence[Value], yields: Sequence[Value], where: SourceLocation
    ) -> None:
        for name, param, last in zip(names, params, yields, strict=True):
            if param.type != last.type:
                raise KernelTypeError(
                    f"`{name}` is {param.type} before the loop, and {last.type} after its body",
                    where=where,
                    remedy=f"start `{name}` with the type that it has in the loop, as with tl.zeros, or convert"
                    " it with .to(dtype)",
                )

    def after_loop(
        self, body: Sequence[ast.stmt], carried: Sequence[str], where: SourceLocation, also: list[str]
    ) -> None:
        """Update the names after a loop. `also`: its index, which has no value after the loop even if it had one
        before."""
        for name in (*_assigned(body), *also):
            if name in also or name not in self.names:
                self.names[name] = Absent(
                    f"it is assigned in the loop in line {where.line}, which may not run; give it a value before"
                )


def leaves(body: Sequence[ast.stmt], kind: type | tuple[type, ...] = (ast.Break, ast.Continue)) -> bool:
    """Whether these statements contain a `break` or `continue` of their loop."""
    for stmt in body:
        if isinstance(stmt, kind):
            return True
        if isinstance(stmt, ast.If) and (leaves(stmt.body, kind) or leaves(stmt.orelse, kind)):
            return True
    return False


def _assigned(body: Sequence[ast.stmt]) -> list[str]:
    """The names that statements rebind, in order."""
    found: dict[str, None] = {}
    for stmt in body:
        for node in ast.walk(stmt):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found[node.id] = None
    return list(found)
