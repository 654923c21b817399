"""Nested containers as plain data: round trips, and errors that name the part that does not fit."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import InputError
from tilewright.runtime import tree

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: Any
    extra: Any = None


class Leaf:
    """Anything that is neither a container nor a constant."""


constants = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8"))
)
values = st.recursive(
    st.one_of(constants, st.builds(Leaf)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text("abc", max_size=3), st.integers(-3, 3)), inner, max_size=4),
        st.builds(Pair, inner, inner),
        st.builds(Output, inner, inner),
    ),
    max_leaves=12,
)


@given(values)
def test_round_trip(value: Any) -> None:
    leaves, spec = tree.flatten(value)
    spec = json.loads(json.dumps(spec))
    assert tree.check(spec) == list(range(len(leaves)))
    assert tree.unflatten(spec, leaves) == value
    assert tree.flatten_like(spec, value) == leaves
    assert tree.flatten(tree.unflatten(spec, leaves))[1] == spec


def test_order_of_a_dict_is_kept() -> None:
    value = {"z": 1, "a": Leaf(), 3: (Leaf(),)}
    leaves, spec = tree.flatten(value)
    assert list(tree.unflatten(spec, leaves)) == ["z", "a", 3]
    turned = {3: (leaves[1],), "a": leaves[0], "z": 1}
    assert tree.flatten_like(spec, turned) == leaves


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e-320, 2**200, -0.0])
def test_numbers_that_json_lacks(number: float) -> None:
    _, spec = tree.flatten(number)
    assert tree.unflatten(json.loads(json.dumps(spec)), []) == number
    _, spec = tree.flatten(math.nan)
    assert math.isnan(tree.unflatten(spec, []))
    assert tree.flatten_like(spec, math.nan) == []


def test_arrays_are_leaves() -> None:
    leaves, spec = tree.flatten([np.zeros(3), np.float32(1)])
    assert len(leaves) == 2
    assert tree.check(spec) == [0, 1]


def without_class(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec as another process would see it: the class is not known there."""
    return {**spec, "name": "elsewhere." + spec["name"].rpartition(".")[2]}


def test_unknown_namedtuple_is_made_on_the_fly() -> None:
    leaves, spec = tree.flatten(Pair(Leaf(), 2))
    result = tree.unflatten(without_class(spec), leaves)
    assert type(result) is not Pair
    assert (type(result).__name__, result._fields) == ("Pair", ("left", "right"))
    assert result == (leaves[0], 2)
    assert tree.flatten_like(spec, result) == leaves
    assert tree.flatten_like(spec, (leaves[0], 2)) == leaves


def test_unknown_record_is_read_only() -> None:
    leaves, spec = tree.flatten(Output(Leaf(), [1]))
    record = tree.unflatten(without_class(spec), leaves)
    assert isinstance(record, tree.TreeRecord)
    assert record.logits is record["logits"] is record[0] is leaves[0]
    assert dict(record) == {"logits": leaves[0], "extra": [1]}
    assert "Output(logits=" in repr(record)
    with pytest.raises(AttributeError, match="read-only"):
        record.logits = 1
    with pytest.raises(AttributeError, match="logits"):
        _ = record.nothing
    assert copy.copy(record).logits is leaves[0]
    assert pickle.loads(pickle.dumps(tree.TreeRecord("a.B", {"x": 1}))).x == 1
    assert tree.flatten_like(spec, record) == leaves
    assert tree.flatten(record)[1]["fields"] == ["logits", "extra"]


def test_model_output_of_hugging_face() -> None:
    @dataclass
    class ModelOutput(OrderedDict):  # type: ignore[type-arg]
        logits: Any = None
        hidden: Any = None

        def __post_init__(self) -> None:
            for name in ("logits", "hidden"):
                if getattr(self, name) is not None:
                    self[name] = getattr(self, name)

    leaf = Leaf()
    leaves, spec = tree.flatten(ModelOutput(logits=leaf))
    assert (spec["kind"], spec["fields"], leaves) == ("record", ["logits"], [leaf])
    again = tree.unflatten(spec, leaves)
    assert type(again) is ModelOutput
    assert again.logits is leaf
    assert again.hidden is None


def test_registered_constructor() -> None:
    class Plain:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

    name = f"{Plain.__module__}.{Plain.__qualname__}"
    spec = {"kind": "record", "name": name, "fields": ["a"], "items": [{"kind": "leaf", "index": 0}]}
    assert isinstance(tree.unflatten(spec, [1]), tree.TreeRecord)
    tree.register(Plain)
    assert tree.unflatten(spec, [1]).fields == {"a": 1}
    tree.register(Plain, lambda a: ["built", a])
    assert tree.unflatten(spec, [1]) == ["built", 1]
    other = {**spec, "fields": ["b"]}  # another class of the same name
    assert tree.unflatten(other, [1]).b == 1


@pytest.mark.parametrize(
    ("example", "value", "path", "words"),
    [
        ((Leaf(), Leaf()), (1,), "x", "tuple of 2, got a tuple of 1"),
        ({"mask": [Leaf()]}, {"mask": [{}]}, "x['mask'][0]", "expected a tensor, got a dict"),
        ({"mask": Leaf()}, {"musk": 1}, "x", "missing ['mask'], not known ['musk']"),
        ([3], [4], "x[0]", "compiled for 3, got int 4"),
        ([3], ["3"], "x[0]", "got str '3'"),
        ([True], [1], "x[0]", "compiled for True"),
        ([None], [np.zeros(2)], "x[0]", "compiled for None, got a ndarray of shape (2,)"),
        ((Leaf(),), 5, "x", "tuple of 1, got int 5"),
        (Pair(1, Leaf()), Pair(2, 1), "x.left", "compiled for 1"),
        (Output(Leaf(), 1), {"logits": 3, "extra": 2}, "x.extra", "compiled for 1, got int 2"),
        (Output(Leaf(), 1), 7, "x", "record Output with the fields"),
    ],
)
def test_misfits_name_the_place(example: Any, value: Any, path: str, words: str) -> None:
    _, spec = tree.flatten(example)
    with pytest.raises(InputError) as caught:
        tree.flatten_like(spec, value, "x")
    assert caught.value.message.startswith(f"{path}: ")
    assert words in caught.value.message


def test_numbers_that_are_equal_fit() -> None:
    _, spec = tree.flatten((1, 2.0))
    assert tree.flatten_like(spec, [1.0, 2]) == []


def test_keys_that_json_cannot_hold() -> None:
    with pytest.raises(InputError, match="keys must be"):
        tree.flatten({(1, 2): Leaf()})


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {},
        {"kind": "leaf"},
        {"kind": "leaf", "index": -1},
        {"kind": "leaf", "index": True},
        {"kind": "constant", "type": "int", "text": "x"},
        {"kind": "constant", "type": "object", "text": "x"},
        {"kind": "tuple"},
        {"kind": "set", "items": []},
        {"kind": "dict", "keys": [], "items": [{"kind": "leaf", "index": 0}]},
        {"kind": "namedtuple", "name": "a", "fields": ["class"], "items": [{"kind": "leaf", "index": 0}]},
        {"kind": "namedtuple", "name": "a b", "fields": ["x"], "items": [{"kind": "leaf", "index": 0}]},
        {"kind": "record", "name": 3, "fields": [], "items": []},
        {"kind": "record", "name": "a", "fields": ["x y"], "items": [{"kind": "leaf", "index": 0}]},
    ],
)
def test_broken_specs_are_found(broken: Any) -> None:
    with pytest.raises(ValueError):
        tree.check(broken)
