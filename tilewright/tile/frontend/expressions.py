"""Translates a kernel's expressions to IR values, or to constexprs when everything is known at compile time."""

from __future__ import annotations

import ast
import builtins
import difflib
import math
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilewright.dtypes import DType
from tilewright.errors import (
    KernelError,
    KernelNameError,
    KernelShapeError,
    KernelSyntaxError,
    KernelTypeError,
)
from tilewright.support.source import SourceLocation
from tilewright.tile.frontend import language
from tilewright.tile.frontend.builder import Builder, describe, is_number, pointer_type, tile_type
from tilewright.tile.frontend.builtin import Builtin
from tilewright.tile.frontend.source import FunctionSource, Owner, lookup
from tilewright.tile.ir import Block, If, Pointer, Value
from tilewright.tile.op import BOOL, F32, I32

# Operators of Python: on constexprs, and the scalar function on values.
_BINARY: dict[type, tuple[Callable[[Any, Any], Any], str]] = {
    ast.Add: (operator.add, "add"),
    ast.Sub: (operator.sub, "sub"),
    ast.Mult: (operator.mul, "mul"),
    ast.Div: (operator.truediv, "div"),
    ast.FloorDiv: (operator.floordiv, "floordiv"),
    ast.Mod: (operator.mod, "mod"),
    ast.Pow: (operator.pow, "pow"),
    ast.LShift: (operator.lshift, "shl"),
    ast.RShift: (operator.rshift, "shr"),
    ast.BitAnd: (operator.and_, "and"),
    ast.BitOr: (operator.or_, "or"),
    ast.BitXor: (operator.xor, "xor"),
}
_COMPARE: dict[type, tuple[Callable[[Any, Any], Any], str, bool]] = {  # the last: with operands swapped
    ast.Eq: (operator.eq, "eq", False),
    ast.NotEq: (operator.ne, "ne", False),
    ast.Lt: (operator.lt, "lt", False),
    ast.LtE: (operator.le, "le", False),
    ast.Gt: (operator.gt, "lt", True),
    ast.GtE: (operator.ge, "le", True),
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
# Functions of Python that are called while compiling, on constexprs alone.
_PYTHON = {
    getattr(builtins, name)
    for name in (
        "int",
        "float",
        "bool",
        "len",
        "round",
        "pow",
        "str",
        "tuple",
        "range",
        "divmod",
        "repr",
        "isinstance",
    )
}


@dataclass(frozen=True)
class Absent:
    """A name that is defined on some paths to a use and not on others; `why` says which."""

    why: str


@dataclass(frozen=True)
class Method:
    value: Value
    function: Builtin


class Expressions:
    """The part of a function's compiler that evaluates expressions. The other part implements `call_function`."""

    def __init__(self, builder: Builder, source: FunctionSource, caller: SourceLocation | None) -> None:
        self.b = builder
        self.source = source
        self.caller = caller
        self.names: dict[str, Any] = {}
        self.captured: dict[tuple[Owner, str], Any] = {}  # from outside, as `source.Captured`

    def call_function(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def error(
        self, kind: type[KernelError], node: ast.AST, message: str, remedy: str | None = None
    ) -> KernelError:
        return kind(message, where=self.source.locate(node, self.caller), remedy=remedy)

    def evaluate(self, node: ast.expr) -> Any:
        """The value of an expression. An error gets the location of the innermost expression that causes it."""
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            raise self.error(KernelSyntaxError, node, f"{construct(node)} is not part of the tile language")
        outer = self.b.where
        self.b.where = self.source.locate(node, self.caller)
        try:
            return method(node)
        except KernelError as error:
            raise error.at(self.b.where) from None
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
            if isinstance(error, KernelError):
                raise
            problem = f"Python cannot compute this while compiling: {error.args[-1] if error.args else error}"
            raise self.error(KernelTypeError, node, problem, _remedy(error)) from error
        finally:
            self.b.where = outer

    # -- names and literals ------------------------------------------------------------------------------------------

    def _Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, (bytes, complex)) or node.value is Ellipsis:
            raise KernelSyntaxError(f"{node.value!r} is not part of the tile language")
        return node.value

    def _Name(self, node: ast.Name) -> Any:
        if node.id in self.names:
            value = self.names[node.id]
            if isinstance(value, Absent):
                raise KernelNameError(f"`{node.id}` is not defined here: {value.why}")
            return value
        found, value = lookup(self.source.function, node.id)
        if not found:
            close = difflib.get_close_matches(node.id, list(self.names), n=1)
            remedy = f"did you mean `{close[0]}`?" if close else None
            raise KernelNameError(f"`{node.id}` is not defined", remedy=remedy)
        if is_number(value) or isinstance(value, (str, tuple, DType)) or value is None or _usable(value):
            self.captured[self.source.function, node.id] = value
            return value
        raise KernelTypeError(
            f"`{node.id}` is a {type(value).__name__} from outside of the kernel",
            remedy="pass arrays as parameters; numbers, strings, tuples, types and functions may come from outside",
        )

    def _Tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self.evaluate(each) for each in node.elts)

    def _List(self, node: ast.List) -> tuple[Any, ...]:
        return tuple(self.evaluate(each) for each in node.elts)

    def _JoinedStr(self, node: ast.JoinedStr) -> str:
        parts = []
        for each in node.values:
            value = self.evaluate(each.value if isinstance(each, ast.FormattedValue) else each)
            parts.append(describe(value) if isinstance(value, Value) else str(value))
        return "".join(parts)

    # -- operators ---------------------------------------------------------------------------------------------------

    def _BinOp(self, node: ast.BinOp) -> Any:
        return self.binary(node.op, self.evaluate(node.left), self.evaluate(node.right))

    def binary(self, op: ast.operator, left: Any, right: Any) -> Any:
        if type(op) not in _BINARY:
            raise KernelSyntaxError(
                "the operator @ is not part of the tile language", remedy="use tl.dot(a, b)"
            )
        python, name = _BINARY[type(op)]
        if not isinstance(left, Value) and not isinstance(right, Value):
            return python(left, right)
        for value, other in ((left, right), (right, left)):
            if isinstance(value, Value) and pointer_type(value.type):
                return self.moved(name, value, other, swapped=value is right)
        return self.arithmetic(name, left, right)

    def moved(self, name: str, pointer: Value, offset: Any, swapped: bool) -> Value:
        """A pointer plus or minus integers."""
        if name not in ("add", "sub") or (name == "sub" and swapped):
            raise KernelTypeError(
                f"pointers can be moved with + and -, not combined by `{name}`",
                remedy="compute with the offsets",
            )
        by = self.b.tile(offset, "pointer arithmetic")
        if tile_type(by).dtype.is_float or tile_type(by).dtype is BOOL:
            raise KernelTypeError(
                f"a pointer moves by integers, got {by.type}", remedy="convert the offset with .to(tl.int32)"
            )
        if name == "sub":
            by = self.b.emit("neg", by)
        pointers, offsets = self.b.alike(pointer, by)
        return self.b.emit("addptr", pointers, offsets, bytes=tile_type(pointer).dtype.bytes)

    def arithmetic(self, name: str, left: Any, right: Any) -> Value:
        a, c = self.b.numbers(f"`{name}`", left, right)
        kind = tile_type(a).dtype
        if kind is BOOL and name not in ("and", "or", "xor"):
            a, c, kind = self.b.cast(a, I32), self.b.cast(c, I32), I32
        if name in ("div", "pow") and not kind.is_float:
            a, c = self.b.cast(a, F32), self.b.cast(c, F32)
        if name in ("mod", "floordiv") and kind.is_float:
            instead = "tl.fmod(x, y)" if name == "mod" else "tl.floor(x / y)"
            raise KernelTypeError(f"`{name}` takes integers, got {a.type}", remedy=f"use {instead}")
        return self.b.emit(name, a, c)

    def _UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.evaluate(node.operand)
        if isinstance(node.op, ast.Not):
            return (
                self.b.emit("not", self.b.condition(value, "not")) if isinstance(value, Value) else not value
            )
        if not isinstance(value, Value):
            return _UNARY[type(node.op)](value)
        if isinstance(node.op, ast.UAdd):
            return self.b.tile(value, "+")
        return self.b.emit("neg" if isinstance(node.op, ast.USub) else "not", value)

    def _Compare(self, node: ast.Compare) -> Any:
        left, result = self.evaluate(node.left), None
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(comparator)
            one = self.compare(op, left, right)
            result = one if result is None else self.binary(ast.BitAnd(), result, one)
            left = right
        return result

    def compare(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(op, (ast.Is, ast.IsNot)):
            same = left is right
            return same if isinstance(op, ast.Is) else not same
        if isinstance(op, (ast.In, ast.NotIn)):
            if isinstance(left, Value) or not isinstance(right, (tuple, str)):
                raise KernelSyntaxError(
                    "`in` works on constexprs only", remedy="compare with == and combine with |"
                )
            return (left in right) is isinstance(op, ast.In)
        python, name, swap = _COMPARE[type(op)]
        if not isinstance(left, Value) and not isinstance(right, Value):
            return python(left, right)
        if left is None or right is None:
            return isinstance(op, ast.NotEq)
        a, c = self.b.numbers("a comparison", left, right)
        return self.b.emit(name, *((c, a) if swap else (a, c)))

    def _BoolOp(self, node: ast.BoolOp) -> Any:
        """`and` and `or` on scalars: the second operand is evaluated only if it is needed."""
        first, *others = node.values
        result = self.evaluate(first)
        for each in others:
            both = isinstance(node.op, ast.And)
            if not isinstance(result, Value):
                if bool(result) is not both:
                    return result
                result = self.evaluate(each)
                continue
            condition = self.b.condition(result, "and" if both else "or")
            rest = partial(self._condition, each)
            known = partial(self.b.constant, not both)
            result = self.choose(condition, *((rest, known) if both else (known, rest)))
        return result

    def _condition(self, node: ast.expr) -> Value:
        return self.b.condition(self.evaluate(node), "and, or")

    def _IfExp(self, node: ast.IfExp) -> Any:
        test = self.evaluate(node.test)
        if not isinstance(test, Value):
            return self.evaluate(node.body if test else node.orelse)
        return self.choose(
            self.b.condition(test, "if"), lambda: self.evaluate(node.body), lambda: self.evaluate(node.orelse)
        )

    def choose(self, condition: Value, then: Callable[[], Any], other: Callable[[], Any]) -> Value:
        """The value of one of two expressions; only that one is evaluated."""
        with self.b.inside() as left:
            first = self.b.value(then())
        with self.b.inside() as right:
            second = self.b.value(other())
        if first.type != second.type:
            raise KernelTypeError(f"one side gives {first.type} and the other {second.type}")
        result = Value(first.type)
        branches = Block((), tuple(left), (first,)), Block((), tuple(right), (second,))
        self.b.nodes.append(If(condition, *branches, (result,), self.b.where))
        return result

    # -- subscripts, attributes, calls -------------------------------------------------------------------------------

    def _Subscript(self, node: ast.Subscript) -> Any:
        value = self.evaluate(node.value)
        if not isinstance(value, Value):
            if isinstance(node.slice, ast.Slice):
                low, high, step = (
                    None if each is None else self.b.constexpr(self.evaluate(each), "an index", int)
                    for each in (node.slice.lower, node.slice.upper, node.slice.step)
                )
                return value[low:high:step]
            index = self.evaluate(node.slice)
            if isinstance(index, Value):
                raise KernelTypeError("a tuple is indexed by constexprs", remedy="loop with tl.static_range")
            return value[index]
        axes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        rank = 0
        for position, axis in enumerate(axes):
            if isinstance(axis, ast.Slice) and (axis.lower, axis.upper, axis.step) == (None, None, None):
                rank += 1
            elif isinstance(axis, ast.Constant) and axis.value is None:
                value = self.b.emit("expand_dims", value, axis=position) if tile_type(value) else value
            else:
                raise KernelSyntaxError(
                    "tiles are indexed by `:` and `None` only",
                    remedy="add axes with x[:, None]; take elements with tl.where and a reduction, or load them",
                )
        if rank > len(tile_type(value).shape) - (len(axes) - rank):
            raise KernelShapeError(f"{rank} indices for a tile with {len(tile_type(value).shape)} axes")
        return value

    def _Attribute(self, node: ast.Attribute) -> Any:
        value = self.evaluate(node.value)
        if isinstance(value, Value):
            if node.attr in language.METHODS:
                return Method(value, language.METHODS[node.attr])
            found = language.attribute(self.b, value, node.attr)
            if found is None:
                known = ", ".join(["shape", "dtype", "T", *language.METHODS])
                raise KernelNameError(f"a value has no attribute `{node.attr}`", remedy=f"use one of {known}")
            return found
        if isinstance(value, types.ModuleType):
            if not hasattr(value, node.attr):
                names = [name for name in dir(value) if not name.startswith("_")]
                close = difflib.get_close_matches(node.attr, names, n=1)
                remedy = f"did you mean `{close[0]}`?" if close else None
                raise KernelNameError(f"module {value.__name__} has no `{node.attr}`", remedy=remedy)
            found = getattr(value, node.attr)
            if not isinstance(found, Builtin):  # what the language consists of does not change
                self.captured[value, node.attr] = found
            return found
        if isinstance(value, (DType, Pointer)) and hasattr(value, node.attr):
            return getattr(value, node.attr)
        raise KernelSyntaxError(
            f"attribute `{node.attr}` of {describe(value)} is not part of the tile language"
        )

    def _Call(self, node: ast.Call) -> Any:
        function = self.evaluate(node.func)
        args: list[Any] = []
        for each in node.args:
            if isinstance(each, ast.Starred):
                args.extend(self.evaluate(each.value))
            else:
                args.append(self.evaluate(each))
        kwargs = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.error(KernelSyntaxError, node, "** in a call is not part of the tile language")
            kwargs[keyword.arg] = self.evaluate(keyword.value)
        return self.call(function, args, kwargs)

    def compiled(self, argument: Any) -> Any:
        """A function of the user's, wrapped so that calling it compiles a call."""
        if not callable(argument):
            return argument
        return lambda *values: self.call(argument, list(values), {})

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(function, Builtin):
            if function.takes_functions:
                args = [self.compiled(each) for each in args]
                kwargs = {name: self.compiled(each) for name, each in kwargs.items()}
            return function.apply(self.b, tuple(args), kwargs)
        if isinstance(function, Method):
            return function.function.apply(self.b, (function.value, *args), kwargs)
        if isinstance(function, DType):
            return language.cast.apply(self.b, (*args, function), kwargs)
        values = [each for each in (*args, *kwargs.values()) if isinstance(each, Value)]
        if function in (min, max) and values:
            two = language.minimum if function is min else language.maximum
            result = args[0]
            for other in args[1:]:
                result = two.apply(self.b, (result, other), kwargs)
            return result
        if function is abs and values:
            return language.SCALAR_FUNCTIONS["abs"].apply(self.b, tuple(args), kwargs)
        if function in (min, max, abs, language.static_range) or function in _PYTHON or _of_math(function):
            if values:
                name = function.__name__
                instead = (
                    f"tl.{name}" if name in language.SCALAR_FUNCTIONS else "a function of tilewright.tile"
                )
                raise KernelTypeError(
                    f"Python's {name} works on constexprs, got {describe(values[0])}", remedy=f"use {instead}"
                )
            return function(*args, **kwargs)
        return self.call_function(function, args, kwargs)


def _remedy(error: Exception) -> str:
    if isinstance(error, ZeroDivisionError):
        return "divide by a constexpr that is not 0, or make the divisor a value: a parameter without tl.constexpr"
    if isinstance(error, OverflowError):
        return "use smaller constexprs: a number of a kernel has at most 64 bits"
    return "operands that are constexprs follow the rules of Python: check their types and values"


def _of_math(function: Any) -> bool:
    return isinstance(function, types.BuiltinFunctionType) and function.__module__ == math.__name__


def _usable(value: Any) -> bool:
    """An object from outside the kernel that an expression may name: a function or a module."""
    return callable(value) or isinstance(value, (types.ModuleType, Pointer))


def construct(node: ast.AST) -> str:
    names = {
        "ListComp": "a list comprehension", "GeneratorExp": "a generator expression", "DictComp": "a comprehension",
        "SetComp": "a comprehension", "Lambda": "lambda", "Dict": "a dict", "Set": "a set", "NamedExpr": "`:=`",
        "Await": "await", "Yield": "yield", "YieldFrom": "yield", "Starred": "a starred expression",
        "With": "with", "Try": "try", "ClassDef": "class", "FunctionDef": "a function inside of a kernel",
        "Raise": "raise", "Delete": "del", "Import": "import", "ImportFrom": "import", "Global": "global",
        "Nonlocal": "nonlocal", "Match": "match", "AsyncFor": "async for", "Break": "break", "Continue": "continue",
    }  # fmt: skip
    return names.get(type(node).__name__, type(node).__name__)
