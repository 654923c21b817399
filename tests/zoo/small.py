"""The models of the zoo whose small versions differ: bert-base and bert-large are bert-tiny there."""

from __future__ import annotations

from tilewright import zoo


def distinct(names: list[str]) -> list[str]:
    """Of models that are the same when they are small, the first."""
    first: dict[object, str] = {}
    for name in names:
        entry = zoo.entry(name)
        first.setdefault((entry.model, entry.inputs, entry.configure(True, {})), name)
    return list(first.values())


SMALL_MODELS = distinct(zoo.names())
