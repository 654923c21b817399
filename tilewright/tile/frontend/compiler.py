"""Compiles a function to the tile IR: statements, control flow in SSA form, and calls of other functions.

A name is rebound by giving it another value: there are no variables in the IR. Where control flow meets, a name with
two values becomes a result of the `If`, and a name that a loop's body assigns and that exists before is carried. Both
need one type on all paths. A name that exists on one path only is `Absent` afterwards.

`return` inside an `if` takes the rest of the function as the other branch, so every function has one exit; `break` and
`continue` take the rest of the loop's body. `loops.py` has the loops.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.errors import KernelError, KernelSyntaxError, KernelTypeError
from tilewright.support.source import SourceLocation
from tilewright.tile.frontend import language, source
from tilewright.tile.frontend.builder import Builder, are_same, describe, is_number
from tilewright.tile.frontend.expressions import Absent, construct
from tilewright.tile.frontend.loops import Loops, leaves
from tilewright.tile.frontend.source import Captured, FunctionSource
from tilewright.tile.ir import Block, If, Node, TileProgram, Type, Value
from tilewright.tile.verify import verify_tile_program

_DEEPEST_CALL = 32


@dataclass(frozen=True)
class Compiled:
    program: TileProgram
    # What comes from outside of the kernel, by function or module and name: if it changes, compile again.
    captured: Captured


@dataclass(frozen=True)
class _Returned:
    value: Any


@dataclass(frozen=True)
class _Left:
    """The end of a loop's body: the rest is not executed, or has been compiled inside an `if`."""


Ended = _Returned | _Left  # why the statements of a block stopped before its end


def compile_kernel(function: FunctionSource, params: dict[str, Type], constants: dict[str, Any]) -> Compiled:
    """The verified tile program of a kernel for these parameter types and constexpr values."""
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


class Function(Loops):
    """One function, inlined at one call."""

    def __init__(
        self, builder: Builder, function: FunctionSource, caller: SourceLocation | None, depth: int
    ) -> None:
        super().__init__(builder, function, caller)
        self.depth = depth

    def run(self, arguments: dict[str, Any]) -> Any:
        self.names.update(arguments)
        return _value_of(self.statements(self.source.tree.body))

    # -- calls -------------------------------------------------------------------------------------------------------

    def call_function(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        plain = getattr(function, "function", function)  # a kernel, or a plain function
        if not isinstance(plain, types.FunctionType):
            same = _named(getattr(function, "__name__", ""))
            raise KernelTypeError(
                f"{describe(function)} cannot be called in a kernel",
                remedy=f"use tl.{same}"
                if same
                else "call functions of tilewright.tile, kernels, and plain functions written in the same language",
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

    def statements(self, body: Sequence[ast.stmt]) -> Ended | None:
        for position, node in enumerate(body):
            self.b.where = self.source.locate(node, self.caller)
            try:
                ended = self.statement(node, body[position + 1 :])
            except KernelError as error:
                raise error.at(self.source.locate(node, self.caller)) from None
            if ended is not None:
                return ended
        return None

    def statement(self, node: ast.stmt, rest: Sequence[ast.stmt]) -> Ended | None:
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
        elif isinstance(node, (ast.Break, ast.Continue)):
            self.leave(node)
            return _Left()
        elif not isinstance(node, ast.Pass):
            raise self.error(KernelSyntaxError, node, f"{construct(node)} is not part of the tile language")
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

    def branch(self, node: ast.If, rest: Sequence[ast.stmt]) -> Ended | None:
        test = self.evaluate(node.test)
        exits = any(_returns(body) or leaves(body) for body in (node.body, node.orelse))
        after = list(rest) if exits else []
        if not isinstance(test, Value):
            ended = self.statements([*(node.body if test else node.orelse), *after])
            return ended or self.ended(None) if exits else ended
        try:
            condition = self.b.condition(test, "if")
        except KernelError as error:
            raise error.at(self.source.locate(node.test, self.caller)) from None
        before = dict(self.names)
        first, then, left = self.arm([*node.body, *after], before)
        second, other, right = self.arm([*node.orelse, *after], before)
        self.names = before
        where = self.source.locate(node, self.caller)
        if exits and not self.in_loop:
            pairs = {"the returned value": (_value_of(first), _value_of(second))}
            return self.ended(self.merge(condition, pairs, left, right, where)["the returned value"])
        names = dict.fromkeys([*then, *other])
        absent = Absent(f"it is assigned in one branch of the `if` in line {where.line} only")
        pairs = {name: (then.get(name, absent), other.get(name, absent)) for name in names}
        self.names = self.merge(condition, pairs, left, right, where)
        return self.ended(None) if exits else None

    def ended(self, value: Any) -> Ended:
        """The end of a block whose rest is inside an `if`: a function returns, and a loop's body ends."""
        return _Left() if self.in_loop else _Returned(value)

    def arm(
        self, body: Sequence[ast.stmt], names: dict[str, Any]
    ) -> tuple[Ended | None, dict[str, Any], list[Node]]:
        """One arm of an `if`: its return value, the names after it, and its nodes."""
        self.names = dict(names)
        with self.b.inside() as nodes:
            ended = self.statements(body)
        return ended, self.names, nodes

    def merge(
        self,
        condition: Value,
        pairs: dict[str, tuple[Any, Any]],
        left: list[Node],
        right: list[Node],
        where: SourceLocation,
    ) -> dict[str, Any]:
        """The names after an `if`, whose node is added here: a name with two values becomes a result."""
        self.b.where = where
        flat: list[tuple[Value, Value, Value]] = []

        def join(name: str, first: Any, second: Any) -> Any:
            if are_same(first, second):
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
        """A constexpr as a value that is defined at the end of a block."""
        outer, self.b.nodes = self.b.nodes, nodes
        try:
            return self.b.value(given)
        finally:
            self.b.nodes = outer


def _named(name: str) -> str:
    """The name of the language's function that other libraries call `name`; "" if there is none."""
    others = {
        "absolute": "abs",
        "power": "pow",
        "transpose": "trans",
        "matmul": "dot",
        "amax": "max",
        "amin": "min",
    }
    found = others.get(name, name)
    known = (
        language.SCALAR_FUNCTIONS.keys() | language.METHODS.keys() | {"where", "maximum", "minimum", "dot"}
    )
    return found if found in known else ""


def _value_of(ended: Ended | None) -> Any:
    return ended.value if isinstance(ended, _Returned) else None


def _returns(body: Sequence[ast.stmt]) -> bool:
    """Whether a statement contains a return."""
    return any(isinstance(node, ast.Return) for stmt in body for node in ast.walk(stmt))
