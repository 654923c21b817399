"""A kernel's source as plain data, for another process: text and constants, never pickled code.

    Bundle = the text of the kernel and of the functions that it calls, and what each name in them stands for

A name stands for a constant, another function of the bundle, a module that every process may import, or a namespace of
such things. In the other process the text is compiled anew, without its decorators.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import importlib
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable
from typing import Any

import msgspec

from tilewright.dtypes import DType
from tilewright.errors import KernelSourceError

# Modules that a process may import by name. Of any other module, the attributes that are used travel.
_IMPORTED = ("tilewright", "triton", "math", "numpy", "operator", "builtins")
_LAZY = __future__.annotations.compiler_flag  # annotations are not evaluated
# In default values, the only part of a function's text that is evaluated where it is restored.
_EVALUATED = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.UnaryOp, ast.BinOp),
    *(ast.expr_context, ast.unaryop, ast.operator),
)
_DEEPEST = 8  # tuples and namespaces inside each other

Reference = tuple[str, Any]  # kind and value


class FunctionText(msgspec.Struct, frozen=True):
    name: str
    text: str  # with decorators, without indentation
    origin: str  # file and line, for people
    names: tuple[tuple[str, Reference], ...]


class Bundle(msgspec.Struct, frozen=True):
    """The first function is the kernel."""

    functions: tuple[FunctionText, ...]

    @property
    def fingerprint(self) -> str:
        """A fingerprint of what the kernel computes. Comments, decorators, file names and blank lines do not count."""
        digest = hashlib.sha256()
        for function in self.functions:
            digest.update(ast.dump(_definition(function)).encode())
            digest.update(repr(function.names).encode())
        return digest.hexdigest()[:32]


# -- in the process of the user ---------------------------------------------------------------------------------------


def bundle_of(function: Callable[..., Any]) -> Bundle:
    """Raise KernelSourceError if a name stands for something that cannot travel."""
    collected = _Collected()
    collected.number_of(function)
    return Bundle(tuple(each for each in collected.functions if each is not None))


def constant_reference(value: Any, what: str) -> Reference:
    """A constant as plain data; `what` names it in a KernelSourceError."""
    return _Collected().reference(value, what, set(), 0)


class _Collected:
    def __init__(self) -> None:
        self.functions: list[FunctionText | None] = []
        self._numbers: dict[Any, int] = {}

    def number_of(self, function: Callable[..., Any]) -> int:
        if function in self._numbers:
            return self._numbers[function]
        number = self._numbers[function] = len(self.functions)
        self.functions.append(None)
        self.functions[number] = self._text_of(function)
        return number

    def _text_of(self, function: Callable[..., Any]) -> FunctionText:
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError):
            raise KernelSourceError(f"the source of {function.__name__} cannot be read") from None
        text = textwrap.dedent("".join(lines))
        file = inspect.getsourcefile(function) or "<unknown>"
        found = FunctionText(function.__name__, text, f"{file}:{first}", ())
        tree = _definition(found)
        used: dict[str, set[str]] = {}  # names, and the attributes of each that are used
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                used.setdefault(node.id, set())
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used.setdefault(node.value.id, set()).add(node.attr)
        code = inspect.unwrap(function).__code__
        outside = {*code.co_names, *code.co_freevars}
        defaults = [each for each in (*tree.args.defaults, *tree.args.kw_defaults) if each is not None]
        outside |= {node.id for each in defaults for node in ast.walk(each) if isinstance(node, ast.Name)}
        names = []
        for name, attributes in sorted(used.items()):
            if name not in outside:
                continue
            exists, value = _lookup(function, name)
            if exists:
                reference = self.reference(value, f"`{name}` in {function.__name__}", attributes, 0)
                names.append((name, reference))
        return msgspec.structs.replace(found, names=tuple(names))

    def reference(self, value: Any, what: str, attributes: set[str], depth: int) -> Reference:
        if depth > _DEEPEST:
            raise KernelSourceError(f"{what} is nested too deeply to be sent to another process")
        if isinstance(value, float):
            return ("float", value.hex())  # JSON has no infinity
        if value is None or isinstance(value, bool | int | str):
            return ("value", value)
        if isinstance(value, DType):
            return ("dtype", value.short)
        if isinstance(value, tuple | list):
            return ("tuple", [self.reference(each, what, set(), depth + 1) for each in value])
        if isinstance(value, types.ModuleType):
            if value.__name__.split(".")[0] in _IMPORTED:
                return ("module", value.__name__)
            known = {each for each in attributes if hasattr(value, each)}
            parts = {
                each: self.reference(getattr(value, each), f"{what}.{each}", set(), depth + 1)
                for each in known
            }
            return ("namespace", dict(sorted(parts.items())))
        plain = _plain(value)
        home = getattr(value, "__module__", None)
        if isinstance(plain, types.FunctionType) and not _is_imported(plain):
            return ("function", self.number_of(plain))
        name = getattr(value, "__name__", "")
        for module in (home, "tilewright.tile"):
            if isinstance(module, str) and module.split(".")[0] in _IMPORTED and name:
                found = getattr(importlib.import_module(module), name, None)
                if found is value:
                    return ("attribute", f"{module}:{name}")
        if hasattr(value, "value") and type(value).__name__ == "constexpr":  # of Triton
            return ("constexpr", self.reference(value.value, what, set(), depth + 1))
        raise KernelSourceError(
            f"{what} is a {type(value).__name__}, which cannot be sent to the process that measures",
            remedy="pass it as a parameter, or make it a number, a string, a tuple or a function",
        )


def _plain(value: Any) -> Any:
    """The function inside a kernel or a `triton.jit` function."""
    for name in ("function", "fn"):
        if isinstance(getattr(value, name, None), types.FunctionType):
            return getattr(value, name)
    return value


def _is_imported(function: types.FunctionType) -> bool:
    return str(function.__module__).split(".")[0] in _IMPORTED


def _lookup(function: Callable[..., Any], name: str) -> tuple[bool, Any]:
    plain: Any = inspect.unwrap(function)
    if name in plain.__code__.co_freevars:
        cell = plain.__closure__[plain.__code__.co_freevars.index(name)]
        try:
            return True, cell.cell_contents
        except ValueError:
            return False, None
    return name in plain.__globals__, plain.__globals__.get(name)


# -- in the other process ---------------------------------------------------------------------------------------------


def restored(bundle: Bundle, wrap: Callable[[types.FunctionType], Any]) -> Any:
    """The kernel: each function compiled from its text and given to `wrap`."""
    made: list[Any] = [None] * len(bundle.functions)
    spaces: list[dict[str, Any]] = [
        {"__name__": f"tilewright_bundle_{number}"} for number in range(len(bundle.functions))
    ]
    # Callees first: a default value or an annotation may name one.
    for number in reversed(range(len(bundle.functions))):
        function, space = bundle.functions[number], spaces[number]
        file = f"<{function.name} of {function.origin}>"
        linecache.cache[file] = (len(function.text), None, function.text.splitlines(keepends=True), file)
        for name, reference in function.names:
            space[name] = _value(reference, made)
        tree = ast.Module([_definition(function)], [])
        exec(compile(tree, file, "exec", flags=_LAZY), space)
        made[number] = wrap(space[function.name])
    for function, space in zip(
        bundle.functions, spaces, strict=True
    ):  # calls in a circle: names of what came later
        for name, reference in function.names:
            if reference[0] == "function":
                space[name] = made[reference[1]]
    return made[0]


def value_of(reference: Reference) -> Any:
    """The value that a constant represents."""
    return _value((reference[0], reference[1]), [])


def _value(reference: Reference, made: list[Any]) -> Any:
    kind, value = reference
    if kind == "value":
        return value
    if kind == "float":
        return float.fromhex(value)
    if kind == "dtype":
        return DType.parse(value)
    if kind == "tuple":
        return tuple(_value((each[0], each[1]), made) for each in value)
    if kind == "function":
        return made[value]
    if kind == "module":
        return importlib.import_module(_allowed(value))
    if kind == "attribute":
        module, _, name = value.partition(":")
        return getattr(importlib.import_module(_allowed(module)), name)
    if kind == "constexpr":
        inner = _value((value[0], value[1]), made)
        return importlib.import_module("triton.language").constexpr(inner)
    if kind == "namespace":
        module_ = types.ModuleType("namespace")
        for name, each in value.items():
            setattr(module_, name, _value((each[0], each[1]), made))
        return module_
    raise KernelSourceError(f"a bundle has a reference of an unknown kind {kind!r}")


def _allowed(module: str) -> str:
    if module.split(".", maxsplit=1)[0] not in _IMPORTED:
        raise KernelSourceError(f"a bundle may not import {module}")
    return module


def _definition(function: FunctionText) -> ast.FunctionDef:
    tree = ast.parse(function.text).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise KernelSourceError(
            f"{function.name} is not a function made by def", remedy="decorate a plain def"
        )
    tree.decorator_list = []
    for default in filter(None, (*tree.args.defaults, *tree.args.kw_defaults)):
        if any(not isinstance(node, _EVALUATED) for node in ast.walk(default)):
            raise KernelSourceError(
                f"a default value of {function.name} is computed: {ast.unparse(default)}",
                remedy="give a number, a string, a tuple or a name of one",
            )
    return tree
