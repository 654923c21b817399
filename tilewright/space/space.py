"""Knobs, Configs and Spaces: decisions as plain data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Value = int | str | bool


@dataclass(frozen=True)
class Knob:
    """One decision: its name and what can be chosen, in an order in which neighbours are alike."""

    name: str
    choices: tuple[Value, ...]


@dataclass(frozen=True)
class Config:
    """A value for every knob of a template."""

    template: str
    values: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, template: str, values: Mapping[str, Value]) -> Config:
        return cls(template, tuple(values.items()))

    def __getitem__(self, knob: str) -> Value:
        return dict(self.values)[knob]

    def int(self, knob: str) -> int:
        value = self[knob]
        assert isinstance(value, int)
        return value

    def __str__(self) -> str:
        return f"{self.template}: " + " ".join(f"{name}={value}" for name, value in self.values)


@dataclass(frozen=True)
class Space:
    """The Configs of a template for one task: every combination of choices that `legal` admits.

    `together` names knobs whose best values depend on each other: a search that changes one at a time stops early."""

    template: str
    knobs: tuple[Knob, ...]
    legal: Callable[[Mapping[str, Value]], bool]
    together: tuple[tuple[str, ...], ...] = ()

    def groups(self) -> list[tuple[Knob, ...]]:
        """The knobs, those that are to be changed together in one group."""
        by_name = {knob.name: knob for knob in self.knobs}
        grouped = {name for names in self.together for name in names}
        alone = [(knob,) for knob in self.knobs if knob.name not in grouped]
        return [*(tuple(by_name[name] for name in names) for names in self.together), *alone]

    def configs(self) -> Iterator[Config]:
        names = [knob.name for knob in self.knobs]
        for combination in itertools.product(*(knob.choices for knob in self.knobs)):
            values = dict(zip(names, combination, strict=True))
            if self.legal(values):
                yield Config.of(self.template, values)
