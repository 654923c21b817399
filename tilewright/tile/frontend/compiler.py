"""Compiles a function to the tile IR: statements, control flow in SSA form, and calls of other functions.

A name is rebound by giving it another value: there are no variables in the IR. Where control flow meets, a name with
two values becomes a result of the `If`, and a name that a loop's body assigns and that exists before is carried. Both
need one type on all paths. A name that exists on one path only is `Absent` afterwards.

`return` inside an `if` takes the rest of the function as the other branch, so every function has one exit.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.errors import KernelError, KernelNameError, KernelSyntaxError, KernelTypeError
from tilewright.support.source import SourceLocation
from tilewright.tile.frontend import language, source
from tilewright.tile.frontend.builder import Builder, describe, is_number, tile_type
from tilewright.tile.frontend.expressions import Absent, Expressions, construct
from tilewright.tile.frontend.source import FunctionSource
from tilewright.tile.ir import Block, For, If, Node, TileProgram, TileType, Type, Value, While
from tilewright.tile.op import I32, I64
from tilewright.tile.verify import verify_tile_program

_DEEPEST_CALL = 32
_MAX_UNROLLED = 4096


@dataclass(frozen=True)
class Compiled:
    program: TileProgram
    # Numbers from outside of the kernel that became constants, by function and name: if one changes, compile again.
    captured: tuple[tuple[Callable[..., Any], str, Any], ...]


@dataclass(frozen=True)
class _Returned:
    value: Any


def compile_kernel(function: FunctionSource, params: dict[str, Type], constants: dict[str, Any]) -> Compiled:
    """The kernel for parameters of these types and constexpr parameters of these values, verified."""
    builder = Builder()
    values = {name: Value(type, name) for name, type in params.items()}
    body = Function(builder, function, None, 0)
    result = body.run({**values, **constants})
    if result is not None:
        raise KernelTypeError(
            f"kernel {function.name} returns {describe(result)}",
            where=function.locate(function.tree.body[-1], None),
            remedy="store results through pointers; only device functions return values",
        )
    program = TileProgram(
        function.name,
        tuple(values.values()),
        Block((), tuple(builder.nodes), ()),
        tuple(constants.items()),
        tuple(builder.names.items()),
    )
    verify_tile_program(program)
    return Compiled(program, tuple((key[0], key[1], value) for key, value in body.captured.items()))


class Function(Expressions):
    """One function, inlined at one call."""

    def __init__(
        self, builder: Builder, function: FunctionSource, caller: SourceLocation | None, depth: int
    ) -> None:
        super().__init__(builder, function, caller)
        self.depth = depth
        self.in_loop = False

    def run(self, arguments: dict[str, Any]) -> Any:
        self.names.update(arguments)
        returned = self.statements(self.source.tree.body)
        return None if returned is None else returned.value

    # -- calls -------------------------------------------------------------------------------------------------------

    def call_function(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        plain = getattr(function, "function", function)  # a kernel, or a plain function
        if not isinstance(plain, types.FunctionType):
            raise KernelTypeError(
                f"{describe(function)} cannot be called in a kernel",
                remedy="call functions of tilewright.tile, kernels, and plain functions written in the same language",
            )
        if self.depth >= _DEEPEST_CALL:
            raise KernelSyntaxError(
                f"calls nested deeper than {_DEEPEST_CALL}: recursion is not part of the tile language",
                remedy="write a loop",
            )
        where = self.b.where
        callee = Function(self.b, source.read(plain), where, self.depth + 1)
        result = callee.run(self.bind(callee.source, args, kwargs))
        self.b.where = where
        self.captured.update(callee.captured)
        return result

    def bind(self, callee: FunctionSource, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = [parameter.name for parameter in callee.parameters]
        remedy = f"call {callee.name}({', '.join(names)})"
        if len(args) > len(names):
            raise KernelTypeError(
                f"{callee.name} takes {len(names)} arguments, got {len(args)}", remedy=remedy
            )
        bound = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names or name in bound:
                problem = "is given twice" if name in bound else "is not a parameter"
                raise KernelTypeError(f"`{name}` {problem} of {callee.name}", remedy=remedy)
            bound[name] = value
        for parameter in callee.parameters:
            if parameter.name not in bound:
                if not parameter.has_default:
                    raise KernelTypeError(f"{callee.name} needs `{parameter.name}`", remedy=remedy)
                bound[parameter.name] = parameter.default
            if parameter.is_constexpr and isinstance(bound[parameter.name], Value):
                raise KernelTypeError(
                    f"`{parameter.name}` of {callee.name} is a constexpr, got {describe(bound[parameter.name])}",
                    remedy="pass a literal, or a parameter annotated tl.constexpr",
                )
        return bound

    # -- statements --------------------------------------------------------------------------------------------------

    def statements(self, body: Sequence[ast.stmt]) -> _Returned | None:
        for position, node in enumerate(body):
            self.b.where = self.source.locate(node, self.caller)
            try:
                returned = self.statement(node, body[position + 1 :])
            except KernelError as error:
                raise error.at(self.source.locate(node, self.caller)) from None
            if returned is not None:
                return returned
        return None

    def statement(self, node: ast.stmt, rest: Sequence[ast.stmt]) -> _Returned | None:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            if node.value is not None:
                value = self.evaluate(node.value)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.assign(target, value)
        elif isinstance(node, ast.AugAssign):
            if not isinstance(node.target, ast.Name):
                self.assign(node.target, None)
            assert isinstance(node.target, ast.Name)
            both = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
            ast.copy_location(both, node)
            ast.copy_location(both.left, node.target)
            self.assign(node.target, self.evaluate(both))
        elif isinstance(node, ast.Expr):
            self.evaluate(node.value)
        elif isinstance(node, ast.Return):
            return self.returned(node)
        elif isinstance(node, ast.If):
            return self.branch(node, rest)
        elif isinstance(node, ast.For):
            self.for_loop(node)
        elif isinstance(node, ast.While):
            self.while_loop(node)
        elif isinstance(node, ast.Assert):
            self.assertion(node)
        elif not isinstance(node, ast.Pass):
            remedy = None
            if isinstance(node, (ast.Break, ast.Continue)):
                remedy = "put the condition into a `while`, or into an `if` around the rest of the body"
            raise self.error(
                KernelSyntaxError, node, f"{construct(node)} is not part of the tile language", remedy
            )
        return None

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            if isinstance(value, Value) and not value.name:
                self.b.names.setdefault(value, target.id)
            self.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            if not isinstance(value, tuple) or len(value) != len(target.elts):
                raise self.error(
                    KernelTypeError,
                    target,
                    f"{len(target.elts)} names for {describe(value)}",
                    "name each value",
                )
            for each, part in zip(target.elts, value, strict=True):
                self.assign(each, part)
        else:
            raise self.error(
                KernelSyntaxError,
                target,
                "only names can be assigned to: tiles are values",
                "make another tile with tl.where, or write memory with tl.store",
            )

    def returned(self, node: ast.Return) -> _Returned:
        if self.in_loop:
            raise self.error(
                KernelSyntaxError,
                node,
                "return inside of a loop is not part of the tile language",
                "carry a flag out of the loop, and return behind it",
            )
        return _Returned(None if node.value is None else self.evaluate(node.value))

    def assertion(self, node: ast.Assert) -> None:
        message = "" if node.msg is None else self.evaluate(node.msg)
        test = self.evaluate(node.test)
        check = language.device_assert if isinstance(test, Value) else language.static_assert
        check.apply(self.b, (test, message or ast.unparse(node.test)), {})

    # -- if ----------------------------------------------------------------------------------------------------------

    def branch(self, node: ast.If, rest: Sequence[ast.stmt]) -> _Returned | None:
        test = self.evaluate(node.test)
        if not isinstance(test, Value):
            chosen = node.body if test else node.orelse
            if not _returns(chosen):
                return self.statements(chosen)
            return self.statements([*chosen, *rest]) or _Returned(None)
        try:
            condition = self.b.condition(test, "if")
        except KernelError as error:
            raise error.at(self.source.locate(node.test, self.caller)) from None
        exits = _returns(node.body) or _returns(node.orelse)
        after = list(rest) if exits else []
        before = dict(self.names)
        first, then, left = self.arm([*node.body, *after], before)
        second, other, right = self.arm([*node.orelse, *after], before)
        self.names = before
        where = self.source.locate(node, self.caller)
        if exits:
            pairs = {"the returned value": (_value_of(first), _value_of(second))}
        else:
            names = dict.fromkeys([*then, *other])
            absent = Absent(f"it is assigned in one branch of the `if` in line {where.line} only")
            pairs = {name: (then.get(name, absent), other.get(name, absent)) for name in names}
        merged = self.merge(condition, pairs, left, right, where)
        if exits:
            return _Returned(merged["the returned value"])
        self.names = merged
        return None

    def arm(
        self, body: Sequence[ast.stmt], names: dict[str, Any]
    ) -> tuple[_Returned | None, dict[str, Any], list[Node]]:
        """One arm of it: what it returns, the names behind it, its nodes."""
        self.names = dict(names)
        with self.b.inside() as nodes:
            returned = self.statements(body)
        return returned, self.names, nodes

    def merge(
        self,
        condition: Value,
        pairs: dict[str, tuple[Any, Any]],
        left: list[Node],
        right: list[Node],
        where: SourceLocation,
    ) -> dict[str, Any]:
        """Names behind an `if`, whose node is added here: a name with two values becomes a result."""
        self.b.where = where
        flat: list[tuple[Value, Value, Value]] = []

        def join(name: str, first: Any, second: Any) -> Any:
            if first is second or (
                type(first) is type(second) and not isinstance(first, Value) and first == second
            ):
                return first
            for absent in (first, second):
                if isinstance(absent, Absent):
                    return absent
            if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
                return tuple(join(name, a, b) for a, b in zip(first, second, strict=True))
            sides = []
            for given, nodes in ((first, left), (second, right)):
                if not isinstance(given, Value) and not is_number(given):
                    raise KernelTypeError(
                        f"`{name}` is {describe(first)} in one branch and {describe(second)} in the other",
                        where=where,
                    )
                sides.append(self.lifted(given, nodes))
            if sides[0].type != sides[1].type:
                raise KernelTypeError(
                    f"`{name}` is {sides[0].type} in one branch and {sides[1].type} in the other",
                    where=where,
                    remedy="convert with .to(dtype), or broadcast, so that both branches give one type",
                )
            result = Value(sides[0].type, name if name.isidentifier() else "")
            flat.append((sides[0], sides[1], result))
            return result

        merged = {name: join(name, *pair) for name, pair in pairs.items()}
        then, other = tuple(each[0] for each in flat), tuple(each[1] for each in flat)
        results = tuple(each[2] for each in flat)
        self.b.nodes.append(
            If(condition, Block((), tuple(left), then), Block((), tuple(right), other), results, where)
        )
        return merged

    def lifted(self, given: Any, nodes: list[Node]) -> Value:
        """A constexpr as a value that is made at the end of a block."""
        outer, self.b.nodes = self.b.nodes, nodes
        try:
            return self.b.value(given)
        finally:
            self.b.nodes = outer

    # -- loops -------------------------------------------------------------------------------------------------------

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
                dtype = I64 if kind.dtype is I64 else dtype
            elif not isinstance(bound, int):
                raise self.error(
                    KernelTypeError, node.iter, f"range takes integers, got {describe(bound)}", "use integers"
                )
        self.b.where = where = self.source.locate(node, self.caller)
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
        """Of a `range`; None for what is unrolled."""
        if not isinstance(node, ast.Call) or self.evaluate(node.func) is not range:
            return None
        given = [self.evaluate(each) for each in node.args]
        if not 1 <= len(given) <= 3 or node.keywords:
            raise self.error(KernelTypeError, node, "range takes one to three integers", "write range(n)")
        if len(given) == 3 and given[2] == 0 and not isinstance(given[2], Value):
            raise self.error(KernelTypeError, node, "a step of 0", "use another step")
        lower = given[0] if len(given) > 1 else 0
        return lower, given[min(len(given) - 1, 1)], given[2] if len(given) == 3 else 1

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
        for item in items:
            self.assign(node.target, item)
            self.statements(node.body)
        self.in_loop = inner

    def while_loop(self, node: ast.While) -> None:
        if node.orelse:
            raise self.error(KernelSyntaxError, node, "else of a loop is not part of the tile language")
        where = self.source.locate(node, self.caller)
        carried, init = self.carried(node.body)
        params = [Value(each.type, name) for name, each in zip(carried, init, strict=True)]
        before = dict(self.names)
        self.names.update(zip(carried, params, strict=True))
        with self.b.inside() as tested:
            test = self.evaluate(node.test)
            if not isinstance(test, Value) and test:
                raise self.error(
                    KernelSyntaxError,
                    node.test,
                    "a loop without end",
                    "use a condition that the body changes",
                )
            condition = self.b.condition(test, "while")
        self.names = before
        inside = [Value(each.type, each.name) for each in params]
        nodes, yields = self.loop_body(node.body, dict(zip(carried, inside, strict=True)), carried)
        self.match(carried, params, yields, where)
        results = [Value(each.type, each.name) for each in params]
        self.b.nodes.append(
            While(
                tuple(init), Block(tuple(params), tuple(tested), (condition,)),
                Block(tuple(inside), tuple(nodes), tuple(yields)), tuple(results), where,
            )
        )  # fmt: skip
        self.names.update(zip(carried, results, strict=True))
        self.after_loop(node.body, carried, where, [])

    def carried(self, body: Sequence[ast.stmt], *others: str) -> tuple[list[str], list[Value]]:
        """The names that a loop's body rebinds and that have a value before it, with that value. A name whose value is
        no number or tile stays a constexpr, which the body may not change."""
        names = [name for name in _assigned(body) if name in self.names and name not in others]
        kept = [name for name in names if isinstance(self.names[name], Value) or is_number(self.names[name])]
        return kept, [self.b.value(self.names[name]) for name in kept]

    def loop_body(
        self, body: Sequence[ast.stmt], names: dict[str, Any], carried: Sequence[str]
    ) -> tuple[list[Node], list[Value]]:
        before, inner = dict(self.names), self.in_loop
        self.names.update(names)
        self.in_loop = True
        with self.b.inside() as nodes:
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
            if name not in names and name in _assigned(body) and not _equal(changed, value):
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
        for name in (*_assigned(body), *also):
            if name not in self.names:
                self.names[name] = Absent(
                    f"it is assigned in the loop in line {where.line}, which may not run; give it a value before"
                )


def _value_of(returned: _Returned | None) -> Any:
    return None if returned is None else returned.value


def _equal(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Value) and not isinstance(b, Value) and type(a) is type(b) and a == b)


def _returns(body: Sequence[ast.stmt]) -> bool:
    """Whether a return is somewhere inside."""
    return any(isinstance(node, ast.Return) for stmt in body for node in ast.walk(stmt))


def _assigned(body: Sequence[ast.stmt]) -> list[str]:
    """The names that statements rebind, in order."""
    found: dict[str, None] = {}
    for stmt in body:
        for node in ast.walk(stmt):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found[node.id] = None
    return list(found)
