"""Nested containers of tensors as plain JSON data, without torch.

A spec is a dict with a `kind`:

    {"kind": "leaf", "index": 0}                                        a tensor, the index-th of the flat list
    {"kind": "constant", "type": "int", "text": "3"}                    None, bool, int, float or str, part of the model
    {"kind": "tuple", "items": [spec, ...]}        also "list"
    {"kind": "dict", "keys": ["a", 1], "items": [spec, ...]}            insertion order; keys are str, int, float, bool
    {"kind": "namedtuple", "name": "mod.Out", "fields": [...], "items": [...]}
    {"kind": "record", "name": "mod.ModelOutput", "fields": [...], "items": [...]}    a dataclass, or a class of which
                                                                        `register_record` has been told

Constants are kept as text because JSON has no infinities and no integers beyond 64 bits.

A namedtuple or a record is rebuilt as its own class if this process knows it, because it was flattened here or
registered. Otherwise, for example after loading an artifact without the framework, it becomes a generated namedtuple
or a `TreeRecord`. Nothing is ever imported or evaluated by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tilewright.errors import InputError

Spec = dict[str, Any]

_CONSTANTS: dict[type, str] = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str"}
_SEQUENCES = {"tuple": tuple, "list": list}

# Qualified name -> constructor with the fields as keywords.
_constructors: dict[str, Callable[..., Any]] = {}
# Class -> function that returns its fields, for classes that are not dataclasses.
_fields: dict[type, Callable[[Any], Mapping[str, Any]]] = {}


def register(cls: type, construct: Callable[..., Any] | None = None) -> None:
    """Rebuild namedtuples or records of this name by `construct(**fields)`; by the class itself if not given."""
    _constructors[_qualified_name(cls)] = construct or cls


def register_record(
    cls: type, fields: Callable[[Any], Mapping[str, Any]], construct: Callable[..., Any]
) -> None:
    """Treat objects of exactly this class as records: `fields` returns their contents by name, and
    `construct(**fields)` makes one."""
    _fields[cls] = fields
    register(cls, construct)


class TreeRecord(Mapping[str, Any]):
    """Replaces a dataclass or ModelOutput that this process does not know: read-only, by attribute or key."""

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_fields", dict(fields))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look these up before `_fields` exists
            raise AttributeError(name)
        try:
            return object.__getattribute__(self, "_fields")[name]
        except KeyError:
            raise AttributeError(f"{self._name} has no field {name!r}; it has {list(self._fields)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self._name} is read-only")

    def __getitem__(self, key: str | int) -> Any:
        return tuple(self._fields.values())[key] if isinstance(key, int) else self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._fields.items())
        return f"{self._name.rpartition('.')[2]}({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TreeRecord, (self._name, self._fields)


# -- value -> spec ---------------------------------------------------------------------------------------------------


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of `value` in order, and its spec. Everything that is neither a container nor a constant is
    a leaf."""
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves)


def _flatten(value: Any, leaves: list[Any]) -> Spec:
    kind = type(value)
    if kind in _CONSTANTS:
        return _constant(value)
    if fields := _record_fields(value):
        if kind not in _fields:
            register(kind)
        name, items = fields
        return {
            "kind": name,
            "name": _qualified_name(kind),
            "fields": list(items),
            "items": [_flatten(item, leaves) for item in items.values()],
        }
    if isinstance(value, TreeRecord):
        specs = [_flatten(value[name], leaves) for name in value]
        return {"kind": "record", "name": value._name, "fields": list(value), "items": specs}
    if isinstance(value, (tuple, list)):
        sequence = "tuple" if isinstance(value, tuple) else "list"
        return {"kind": sequence, "items": [_flatten(item, leaves) for item in value]}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int, float, bool):
                raise InputError(f"a dict with the key {key!r}: keys must be str, int, float or bool")
        return {"kind": "dict", "keys": list(value), "items": [_flatten(value[key], leaves) for key in value]}
    leaves.append(value)
    return {"kind": "leaf", "index": len(leaves) - 1}


def _record_fields(value: Any) -> tuple[str, dict[str, Any]] | None:
    """("namedtuple" or "record", its fields) for a value that is one."""
    if type(value) in _fields:
        return "record", dict(_fields[type(value)](value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", {name: getattr(value, name) for name in value._fields}
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return None
    if isinstance(value, Mapping):  # Hugging Face's ModelOutput: fields that are None are absent
        return "record", {name: value[name] for name in value}
    return "record", {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init
    }


def _constant(value: Any) -> Spec:
    text = value.hex() if type(value) is float else str(value)
    return {"kind": "constant", "type": _CONSTANTS[type(value)], "text": text}


def constant_value(spec: Spec) -> Any:
    name, text = spec["type"], spec["text"]
    if name == "none":
        return None
    if name == "bool":
        return text == "True"
    if name == "int":
        return int(text)
    return float.fromhex(text) if name == "float" else text


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# -- spec -> value ---------------------------------------------------------------------------------------------------


def unflatten(spec: Spec, leaves: Sequence[Any]) -> Any:
    kind = spec["kind"]
    if kind == "leaf":
        return leaves[spec["index"]]
    if kind == "constant":
        return constant_value(spec)
    items = [unflatten(item, leaves) for item in spec["items"]]
    if kind in _SEQUENCES:
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return dict(zip(spec["keys"], items, strict=True))
    name, fields = spec["name"], dict(zip(spec["fields"], items, strict=True))
    construct = _constructors.get(name)
    if construct is not None:
        try:
            return construct(**fields)
        except TypeError:
            pass  # another class of the same name with other fields: use the neutral form
    if kind == "namedtuple":
        return _namedtuple_class(name.rpartition(".")[2], tuple(spec["fields"]))(*items)
    return TreeRecord(name, fields)


@lru_cache(maxsize=256)
def _namedtuple_class(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


# -- a value that must fit a spec ------------------------------------------------------------------------------------


def flatten_like(spec: Spec, value: Any, path: str = "value") -> list[Any]:
    """The leaves of `value`, in the order of the spec's indices; InputError names the part that does not fit.

    Lists and tuples are interchangeable, and a mapping may replace a record with the same fields. Constants must be
    equal, because they were compiled in.
    """
    found: dict[int, Any] = {}
    collect(spec, value, path, found)
    return [found[index] for index in range(len(found))]


def collect(spec: Spec, value: Any, path: str, into: dict[int, Any]) -> None:
    """Like `flatten_like`, adding index -> leaf to `into`."""
    kind = spec["kind"]
    if kind == "leaf":
        if type(value) in (tuple, list, dict):
            raise InputError(f"{path}: expected a tensor, got {describe(value)}")
        into[spec["index"]] = value
    elif kind == "constant":
        expected = constant_value(spec)
        if not _same_constant(expected, value):
            raise InputError(f"{path}: the model was compiled for {expected!r}, got {describe(value)}")
    elif kind in _SEQUENCES:
        items = spec["items"]
        if not isinstance(value, (tuple, list)) or len(value) != len(items):
            raise InputError(f"{path}: expected {_expected(spec)}, got {describe(value)}")
        for index, (item, element) in enumerate(zip(items, value, strict=True)):
            collect(item, element, f"{path}[{index}]", into)
    elif kind == "dict":
        if not isinstance(value, Mapping):
            raise InputError(f"{path}: expected {_expected(spec)}, got {describe(value)}")
        check_keys(spec["keys"], value, path)
        for key, item in zip(spec["keys"], spec["items"], strict=True):
            collect(item, value[key], f"{path}[{key!r}]", into)
    else:
        fields = _fields_of(spec, value, path)
        for name, item in zip(spec["fields"], spec["items"], strict=True):
            collect(item, fields[name], f"{path}.{name}", into)


def check_keys(keys: Sequence[Any], value: Mapping[Any, Any], path: str) -> None:
    missing = [key for key in keys if key not in value]
    unknown = [key for key in value if key not in keys]
    if missing or unknown:
        problems = [
            f"{what} {names}" for what, names in (("missing", missing), ("not known", unknown)) if names
        ]
        raise InputError(f"{path}: expected the keys {list(keys)}; {', '.join(problems)}")


def _fields_of(spec: Spec, value: Any, path: str) -> Mapping[str, Any]:
    names = spec["fields"]
    if type(value) in _fields:
        held = _fields[type(value)](value)
        if set(held) == set(names):
            return held
    elif isinstance(value, Mapping):
        if set(value) == set(names):
            return value
    elif spec["kind"] == "namedtuple" and isinstance(value, (tuple, list)):
        own_names: Any = getattr(value, "_fields", names)
        if list(own_names) == names and len(value) == len(names):
            return dict(zip(names, value, strict=True))
    elif all(hasattr(value, name) for name in names):
        return {name: getattr(value, name) for name in names}
    raise InputError(f"{path}: expected {_expected(spec)}, got {describe(value)}")


def _same_constant(expected: Any, value: Any) -> bool:
    kinds = type(expected), type(value)
    if kinds[0] is not kinds[1] and set(kinds) != {int, float}:
        return False
    if isinstance(expected, float) and isinstance(value, float) and math.isnan(expected):
        return math.isnan(value)
    return bool(expected == value)


def _expected(spec: Spec) -> str:
    kind = spec["kind"]
    if kind == "dict":
        return f"a dict with the keys {spec['keys']}"
    if kind in _SEQUENCES:
        return f"a {kind} of {len(spec['items'])}"
    return f"a {kind} {spec['name'].rpartition('.')[2]} with the fields {spec['fields']}"


def describe(value: Any) -> str:
    """A short text for messages: never the contents of a tensor."""
    if type(value) in _CONSTANTS:
        return f"{type(value).__name__} {value!r}" if value is not None else "None"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    return f"a value of type {type(value).__qualname__}"


# -- a spec that came from a file ------------------------------------------------------------------------------------


def check(spec: Any, depth: int = 0) -> list[int]:
    """The leaf indices of a spec, in order; raises ValueError if it is invalid."""
    if not isinstance(spec, dict) or depth > 200:
        raise ValueError("a tree that is not a dict, or too deep")
    kind = spec.get("kind")
    if not isinstance(kind, str):
        raise ValueError(f"a tree of kind {kind!r}")
    if kind == "leaf":
        index = spec.get("index")
        if type(index) is not int or index < 0:
            raise ValueError(f"a leaf with the index {index!r}")
        return [index]
    if kind == "constant":
        if spec.get("type") not in _CONSTANTS.values() or not isinstance(spec.get("text"), str):
            raise ValueError("a constant without type or text")
        constant_value(spec)  # raises ValueError for a text that is not of its type
        return []
    items = spec.get("items")
    if not isinstance(items, list):
        raise ValueError(f"a {kind!r} without items")
    if kind == "dict":
        names = spec.get("keys")
    elif kind in ("namedtuple", "record"):
        names = spec.get("fields")
        name = spec.get("name")
        if not isinstance(name, str) or not isinstance(names, list):
            raise ValueError(f"a {kind} without a name or fields")
        if not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise ValueError(f"a {kind} with fields that are not names")
        if kind == "namedtuple":
            _namedtuple_class(name.rpartition(".")[2], tuple(names))  # raises ValueError for invalid names
    elif kind in _SEQUENCES:
        names = items
    else:
        raise ValueError(f"a tree of kind {kind!r}")
    if not isinstance(names, list) or len(names) != len(items):
        raise ValueError(f"a {kind} with a different number of names and items")
    return [index for item in items for index in check(item, depth + 1)]
