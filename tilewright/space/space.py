"""Knobs, Configs and Spaces: decisions as plain data.

A knob knows which of its values are similar, how to mix two of them, and how a learned model sees them. So a search
asks a space for samples, neighbours, mutations and crossovers, all legal, and knows no knob by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any

from tilewright.errors import SpaceError
from tilewright.support.frozen import quickly_made

if TYPE_CHECKING:
    import numpy as np

Value = int | str | bool

_AT_ONCE = 512  # configs whose legality is checked at once
_DRAWS = 64  # random combinations tried before searching nearby for a legal one
_LOOKED_AT = 100_000  # combinations examined before a space is considered empty
_ILLEGAL_IN_A_ROW = 1_000_000  # combinations after which listing a space ends


@dataclass(frozen=True)
class Knob:
    """One decision: its name and its choices. If `ordered`, neighbouring choices are similar.

    The default is the first choice unless one is named.
    """

    name: str
    choices: tuple[Value, ...]
    default: Value | None = None
    ordered: bool = True

    @property
    def start(self) -> Value:
        return self.choices[0] if self.default is None else self.default

    def neighbours(self, value: Value) -> tuple[Value, ...]:
        """The adjacent choices; without an order, all others."""
        at = self.choices.index(value)
        if self.ordered:
            return tuple(self.choices[n] for n in (at - 1, at + 1) if 0 <= n < len(self.choices))
        return (*self.choices[:at], *self.choices[at + 1 :])

    def encode(self, value: Value) -> tuple[float, ...]:
        """Features for a learned model: the index and, for numbers, the magnitude; without an order, a one-hot
        vector."""
        return self._codes[value]

    def crossover(self, a: Value, b: Value, rng: Random) -> Value:
        return rng.choice((a, b))

    @cached_property
    def _codes(self) -> dict[Value, tuple[float, ...]]:
        positions = range(len(self.choices))
        if not self.ordered:
            return {
                choice: tuple(float(n == at) for n in positions) for at, choice in enumerate(self.choices)
            }
        last = max(1, len(self.choices) - 1)
        if all(isinstance(choice, int) and not isinstance(choice, bool) for choice in self.choices):
            return {
                choice: (at / last, math.log2(1 + abs(int(choice)))) for at, choice in enumerate(self.choices)
            }
        return {choice: (at / last,) for at, choice in enumerate(self.choices)}


def combinations(knobs: Sequence[Knob]) -> dict[str, np.ndarray]:
    """Every combination of choices, as one array for each knob; the last knob changes first."""
    import numpy as np  # the database imports this file, and listing it needs no NumPy

    grid = np.meshgrid(*(np.array(knob.choices) for knob in knobs), indexing="ij")
    return {knob.name: column.ravel() for knob, column in zip(knobs, grid, strict=True)}


@quickly_made
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

    `together` names knobs whose best values depend on each other. A search changes them together, because changing
    one at a time would get stuck, and a crossover takes all of them from the same config.

    `batched`: whether `legal` also takes arrays, one element for each config.
    """

    template: str
    knobs: tuple[Knob, ...]
    legal: Callable[[Mapping[str, Any]], Any]  # a bool; of arrays, an array of them
    together: tuple[tuple[str, ...], ...] = ()
    batched: bool = False

    def __post_init__(self) -> None:
        for knob in self.knobs:
            if not knob.choices:
                raise SpaceError(f"knob {knob.name!r} of {self.template!r} has nothing to choose from")
            if knob.start not in knob.choices:
                raise SpaceError(
                    f"the default {knob.start!r} of knob {knob.name!r} of {self.template!r} is not one of its choices"
                )

    def __contains__(self, config: Config) -> bool:
        """Whether it is legal here. It may come from another version's records."""
        values = dict(config.values)
        return (
            config.template == self.template
            and values.keys() == {knob.name for knob in self.knobs}
            and all(values[knob.name] in knob.choices for knob in self.knobs)
            and self.legal(values)
        )

    def recalled(self, config: Config) -> Config | None:
        """A config of an earlier version, with the defaults of knobs added since; None if it is not legal."""
        values = dict(config.values)
        known = {knob.name: values.pop(knob.name, knob.start) for knob in self.knobs}
        found = Config.of(config.template, known)
        return found if not values and found in self else None

    @cached_property
    def size(self) -> int:
        """The number of combinations, legal or not."""
        return math.prod(len(knob.choices) for knob in self.knobs)

    def groups(self) -> list[tuple[Knob, ...]]:
        """The knobs in groups; those of a group are changed together."""
        by_name = {knob.name: knob for knob in self.knobs}
        grouped = {name for names in self.together for name in names}
        alone = [(knob,) for knob in self.knobs if knob.name not in grouped]
        return [*(tuple(by_name[name] for name in names) for names in self.together), *alone]

    def configs(self) -> Iterator[Config]:
        """All legal configs; the last knob changes first. After a million illegal combinations, the rest counts as
        illegal too."""
        return self._listed(_ILLEGAL_IN_A_ROW)

    def _listed(self, most: int) -> Iterator[Config]:
        """The legal configs, until `most` combinations in a row are illegal."""
        if self.batched:
            yield from self._legal_in_batches(most)
            return
        names = [knob.name for knob in self.knobs]
        illegal = 0
        for combination in itertools.product(*(knob.choices for knob in self.knobs)):
            values = dict(zip(names, combination, strict=True))
            if self.legal(values):
                illegal = 0
                yield Config.of(self.template, values)
            elif (illegal := illegal + 1) >= most:
                return

    def _legal_in_batches(self, most: int) -> Iterator[Config]:
        import numpy as np

        inner = self._checked_at_once
        outer = self.knobs[: len(self.knobs) - len(inner)]
        columns = combinations(inner)
        count = math.prod(len(knob.choices) for knob in inner)
        illegal = 0
        for combination in itertools.product(*(knob.choices for knob in outer)):
            values = {knob.name: value for knob, value in zip(outer, combination, strict=True)}
            legal = np.broadcast_to(self.legal({**values, **columns}), (count,))
            illegal = 0 if legal.any() else illegal + count
            if illegal >= most:
                return
            for at in np.flatnonzero(legal):
                own = {name: column[at].item() for name, column in columns.items()}
                yield Config.of(self.template, {**values, **own})

    @property
    def _checked_at_once(self) -> tuple[Knob, ...]:
        """The last knobs, as many as have few combinations."""
        first, count = len(self.knobs), 1
        while first and count * len(self.knobs[first - 1].choices) <= _AT_ONCE:
            first -= 1
            count *= len(self.knobs[first].choices)
        return self.knobs[first:]

    @cached_property
    def first(self) -> Config | None:
        """The first legal config; None if there is none among the first hundred thousand combinations."""
        return next(self._listed(_LOOKED_AT), None)

    # -- one config -----------------------------------------------------------------------------------------------

    def default(self) -> Config:
        """Every knob's default; if these are not legal together, the first legal config. Raises SpaceError if there
        is none."""
        if (found := self._legal_or_none({knob.name: knob.start for knob in self.knobs})) is not None:
            return found
        if (first := self.first) is None:
            names = ", ".join(repr(knob.name) for knob in self.knobs)
            raise SpaceError(f"no values of the knobs {names} are legal together in {self.template!r}")
        return first

    def sample(self, rng: Random) -> Config | None:
        """A random legal config; None if there is none."""
        for _ in range(_DRAWS):
            values = {knob.name: rng.choice(knob.choices) for knob in self.knobs}
            if (found := self._legal_or_none(values)) is not None:
                return found
        if (found := self.first) is None:
            return None
        for _ in range(2 * len(self.knobs)):  # legal configs are rare: walk away from a known one
            found = self.mutate(found, rng)
        return found

    def neighbours(self, config: Config) -> list[Config]:
        """Configs that differ in one group of knobs, by one step each. The relation is symmetric."""
        found = []
        for group in self.groups():
            choices = [(config[knob.name], *knob.neighbours(config[knob.name])) for knob in group]
            for combination in itertools.islice(itertools.product(*choices), 1, None):
                other = self._changed(config, group, combination)
                if other is not None:
                    found.append(other)
        return found

    def mutate(self, config: Config, rng: Random) -> Config:
        """Change one group of knobs: a step to a neighbour, or a jump. Returns the same config if there is no other
        nearby."""
        groups = self.groups()
        for _ in range(_DRAWS if groups else 0):
            group = rng.choice(groups)
            step = rng.random() < 0.5
            combination = tuple(
                rng.choice((config[knob.name], *knob.neighbours(config[knob.name])) if step else knob.choices)
                for knob in group
            )
            other = self._changed(config, group, combination)
            if other is not None and other != config:
                return other
        return config

    def crossover(self, a: Config, b: Config, rng: Random) -> Config:
        """Take each group of knobs from either config; return one of the two if no mixture is legal."""
        groups = self.groups()
        for _ in range(_DRAWS // 4):
            values = dict(a.values)
            for group in groups:
                if len(group) == 1:
                    (knob,) = group
                    values[knob.name] = knob.crossover(a[knob.name], b[knob.name], rng)
                else:
                    parent = rng.choice((a, b))
                    values.update({knob.name: parent[knob.name] for knob in group})
            if (found := self._legal_or_none(values)) is not None:
                return found
        return rng.choice((a, b))

    def encode(self, config: Config) -> tuple[float, ...]:
        """The encodings of all knobs in order; the same length for all configs."""
        values = dict(config.values)
        return tuple(number for knob in self.knobs for number in knob.encode(values[knob.name]))

    def _changed(
        self, config: Config, group: tuple[Knob, ...], combination: tuple[Value, ...]
    ) -> Config | None:
        names = (knob.name for knob in group)
        return self._legal_or_none({**dict(config.values), **dict(zip(names, combination, strict=True))})

    def _legal_or_none(self, values: Mapping[str, Value]) -> Config | None:
        return Config.of(self.template, values) if self.legal(values) else None
