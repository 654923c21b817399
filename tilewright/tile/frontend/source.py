"""The source of a function: its syntax tree, its parameters, and locations of its nodes for errors."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.errors import KernelSyntaxError
from tilewright.support.source import SourceLocation


@dataclass(frozen=True)
class Parameter:
    name: str
    is_constexpr: bool
    default: Any = inspect.Parameter.empty

    @property
    def has_default(self) -> bool:
        return self.default is not inspect.Parameter.empty


@dataclass(frozen=True, eq=False)
class FunctionSource:
    function: Callable[..., Any]
    name: str
    file: str
    first_line: int  # of the text, in the file
    indent: int
    lines: tuple[str, ...]  # as in the file
    tree: ast.FunctionDef
    parameters: tuple[Parameter, ...]

    def locate(self, node: ast.AST, caller: SourceLocation | None) -> SourceLocation:
        line = getattr(node, "lineno", 1)
        column = getattr(node, "col_offset", 0)
        end = getattr(node, "end_col_offset", column + 1)
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        width = end - column if getattr(node, "end_lineno", line) == line else len(text) - column
        return SourceLocation(
            self.file, self.first_line + line - 1, column + self.indent, width, text, self.name, caller
        )


def lookup(owner: Any, name: str) -> tuple[bool, Any]:
    """Look up a name that a function uses: in its closure, then in its module, then among Python's built-ins. Of a
    module, an attribute."""
    if isinstance(owner, types.ModuleType):
        return hasattr(owner, name), getattr(owner, name, None)
    function = inspect.unwrap(owner)
    if name in function.__code__.co_freevars:
        cell = function.__closure__[function.__code__.co_freevars.index(name)]
        try:
            return True, cell.cell_contents
        except ValueError:
            return False, None
    if name in function.__globals__:
        return True, function.__globals__[name]
    builtins = function.__globals__.get("__builtins__", {})
    names = builtins if isinstance(builtins, dict) else vars(builtins)
    return name in names, names.get(name)


Owner = Callable[..., Any] | types.ModuleType
Captured = Sequence[
    tuple[Owner, str, Any]
]  # a function and a name that it uses, or a module and an attribute; value


def is_current(captured: Captured) -> bool:
    """Whether the outside names that a kernel uses still have the same values: constants, functions and modules."""
    for owner, name, value in captured:
        if _namespace(owner, name).get(name, _MISSING) is value:
            continue
        found, now = lookup(owner, name)
        if not found or not _same(now, value):
            return False
    return True


_MISSING = object()


def _namespace(owner: Owner, name: str) -> Mapping[str, Any]:
    """Where `lookup` finds most names: for launches, which ask each time."""
    if type(owner) is types.ModuleType:
        return owner.__dict__
    if type(owner) is types.FunctionType and not owner.__dict__ and name not in owner.__code__.co_freevars:
        return owner.__globals__
    return {}


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    plain = isinstance(one, (tuple, float, int, str)) and type(one) is type(other)
    return plain and constexpr_key(one) == constexpr_key(other)


def constexpr_key(value: Any) -> Any:
    """A constexpr as a part of a key: two values have one key only if a kernel compiles to the same code for both. In
    Python 1 == 1.0 == True and 0.0 == -0.0, inside of tuples as well."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return type(value), *map(constexpr_key, value)
    return type(value), value


def read(function: Callable[..., Any]) -> FunctionSource:
    """The source of a kernel. Raises KernelSyntaxError if the function has no source, or parameters that kernels cannot
    have."""
    name = getattr(function, "__name__", "kernel")
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise KernelSyntaxError(
            f"the source of {name} cannot be read",
            remedy="write the kernel in a file or a notebook cell, not in a string or an interactive prompt",
        ) from None
    text = "".join(lines)
    try:
        tree = ast.parse(textwrap.dedent(text)).body[0]
    except SyntaxError:
        tree = None
    if not isinstance(tree, ast.FunctionDef):
        raise KernelSyntaxError(f"{name} is not a function made by def", remedy="decorate a plain def")
    indent = len(lines[0]) - len(lines[0].lstrip())
    file = inspect.getsourcefile(function) or "<unknown>"
    source = FunctionSource(
        function, name, file, first, indent, tuple(each.rstrip("\n") for each in lines), tree, ()
    )
    return FunctionSource(function, name, file, first, indent, source.lines, tree, tuple(_parameters(source)))


def _parameters(source: FunctionSource) -> list[Parameter]:
    args = source.tree.args
    for starred in (args.vararg, args.kwarg):
        if starred is not None:
            raise KernelSyntaxError(
                f"parameter *{starred.arg}: a kernel takes a fixed number of parameters",
                where=source.locate(starred, None),
                remedy="name each parameter",
            )
    signature = inspect.signature(source.function)
    found = []
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        annotation = "" if arg.annotation is None else ast.unparse(arg.annotation).strip("'\"")
        constexpr = annotation.split(".")[-1] == "constexpr"
        found.append(Parameter(arg.arg, constexpr, signature.parameters[arg.arg].default))
    return found
