"""The space of a tuned kernel, as its user writes it: knobs with their choices and predicates, or a list of configs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.errors import AutotuneError
from tilewright.space.space import Knob, Space, Value

Where = Callable[..., bool]
SpaceLike = Mapping[str, Sequence[Value] | Knob] | Sequence[Mapping[str, Value]]


@dataclass(frozen=True)
class KernelSpace:
    """`listed`: of a list of configs, the values of each, in the order of the knobs; None: every combination."""

    knobs: tuple[Knob, ...]
    where: tuple[Where, ...] = ()
    listed: tuple[tuple[Value, ...], ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(knob.name for knob in self.knobs)

    def space(self, template: str, arguments: Mapping[str, Any], kept: Sequence[str]) -> Space:
        """The space of one launch: predicates may depend on its arguments. `kept`: the knobs that matter there."""
        predicates = [(each, _names_of(each)) for each in self.where]
        knobs = tuple(knob for knob in self.knobs if knob.name in kept)
        others = {knob.name: knob.start for knob in self.knobs if knob.name not in kept}
        # Of a list, configs that differ in knobs that do not count here are one.
        listed = (
            None
            if self.listed is None
            else {
                tuple(v for v, knob in zip(row, self.knobs, strict=True) if knob.name in kept)
                for row in self.listed
            }
        )

        def legal(values: Mapping[str, Value]) -> bool:
            if listed is not None and tuple(values[knob.name] for knob in knobs) not in listed:
                return False
            known = {**arguments, **others, **values}
            return all(predicate(**{name: known[name] for name in names}) for predicate, names in predicates)

        return Space(template, knobs, legal)


def kernel_space(space: SpaceLike, where: Where | Sequence[Where], parameters: Sequence[str]) -> KernelSpace:
    """Raise AutotuneError for what is not a space, and for a predicate of names that the kernel does not have."""
    predicates = tuple(where) if isinstance(where, list | tuple) else (where,)
    if isinstance(space, Mapping):
        knobs = tuple(_knob(name, choices) for name, choices in space.items())
        listed = None
    else:
        knobs, listed = _of_list(space)
    if not knobs:
        raise AutotuneError(
            "the space has no knob", remedy='give choices by name, such as {"BLOCK": (64, 128)}'
        )
    known = {*parameters, *(knob.name for knob in knobs)}
    for predicate in predicates:
        if not callable(predicate):
            raise AutotuneError(f"a predicate must be a function of knobs and arguments, got {predicate!r}")
        for name in _names_of(predicate):
            if name not in known:
                raise AutotuneError(
                    f"a predicate takes `{name}`, which is neither a knob nor a parameter of the kernel",
                    remedy=f"use some of {', '.join(sorted(known))}",
                )
    return KernelSpace(knobs, predicates, listed)


def _knob(name: str, choices: Sequence[Value] | Knob) -> Knob:
    if isinstance(choices, Knob):
        return choices
    if isinstance(choices, str) or not isinstance(choices, Sequence | range):
        raise AutotuneError(
            f"knob {name!r} must have a sequence of choices, got {choices!r}",
            remedy=f'write {{"{name}": (32, 64)}}',
        )
    found = tuple(dict.fromkeys(choices))
    if not found:
        raise AutotuneError(f"knob {name!r} has nothing to choose from", remedy="give it at least one value")
    for choice in found:
        if not isinstance(choice, bool | int | str):
            raise AutotuneError(
                f"knob {name!r}: a choice must be a whole number, a bool or a string, got {choice!r}"
            )
    ordered = all(isinstance(choice, int) and not isinstance(choice, bool) for choice in found)
    if ordered:
        return Knob(name, tuple(sorted(found, key=int)), default=found[0])
    return Knob(name, found, ordered=False)


def _of_list(
    configs: Sequence[Mapping[str, Value]],
) -> tuple[tuple[Knob, ...], tuple[tuple[Value, ...], ...]]:
    if isinstance(configs, str) or not isinstance(configs, Sequence) or not configs:
        raise AutotuneError(
            f"a space must be a dict of knobs or a list of configs, got {configs!r}",
            remedy='write {"BLOCK": (64, 128)}, or [{"BLOCK": 64}, {"BLOCK": 128}]',
        )
    first = configs[0]
    for config in configs:
        if not isinstance(config, Mapping) or config.keys() != first.keys():
            raise AutotuneError(f"every config must have the knobs {', '.join(first)}, got {config!r}")
    knobs = tuple(_knob(name, [config[name] for config in configs]) for name in first)
    return knobs, tuple(dict.fromkeys(tuple(config[name] for name in first) for config in configs))


def _names_of(predicate: Where) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(predicate).parameters.values()
    except (TypeError, ValueError):
        raise AutotuneError(f"the parameters of the predicate {predicate!r} cannot be read") from None
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        raise AutotuneError(
            "a predicate takes its knobs and arguments by name, not as * or **",
            remedy="write lambda BLOCK_M, BLOCK_N: BLOCK_M * BLOCK_N <= 8192",
        )
    return tuple(each.name for each in parameters if each.default is each.empty)
