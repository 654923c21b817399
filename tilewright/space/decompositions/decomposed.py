"""The common part of decompositions: a task as two kernels, one of them a template's.

A decomposition proposes variants, each a cut of the task into sub-tasks. Another template computes one of them, and
its knobs become knobs of the decomposition; the default programs compute the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewright.errors import SpaceError
from tilewright.graph.ir import Node
from tilewright.space.implementation import Implementation, SubTask
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Applied, GpuWork
from tilewright.space.templates.cuda.default import Default
from tilewright.space.templates.default import DEFAULT
from tilewright.space.terms import Counted


@dataclass(frozen=True)
class CutVariant:
    """One cut. `main` is the index of the sub-task that `inner` computes; the others have default programs."""

    subtasks: tuple[SubTask, ...]
    main: int
    inner: Applied


@dataclass(frozen=True)
class Decomposed:
    """A decomposition applied to one task. `count`: the knob that selects a variant, if there are several."""

    name: str
    work: GpuWork
    variants: Mapping[int, CutVariant]
    count: str = ""

    @cached_property
    def space(self) -> Space:
        """The knobs of all variants; a combination is legal if the variant's own space has it."""
        choices: dict[str, dict[Value, None]] = {}
        unordered: set[str] = set()
        together: dict[tuple[str, ...], None] = {}
        for variant in self.variants.values():
            inner = variant.inner.space
            together |= dict.fromkeys(inner.together)
            for knob in inner.knobs:
                choices.setdefault(knob.name, {}).update(dict.fromkeys(knob.choices))
                if not knob.ordered:
                    unordered.add(knob.name)
        knobs = [
            Knob(name, _in_order(values, name not in unordered), ordered=name not in unordered)
            for name, values in choices.items()
        ]
        if self.count:
            knobs.insert(0, Knob(self.count, tuple(self.variants)))
        return Space(self.name, tuple(knobs), self._is_legal, together=tuple(together))

    def _is_legal(self, values: Mapping[str, Value]) -> bool:
        variant, inner = self._split(values)
        return variant is not None and Config.of(variant.inner.space.template, inner) in variant.inner.space

    def _split(self, values: Mapping[str, Value]) -> tuple[CutVariant | None, dict[str, Value]]:
        """Split values into the variant and the knobs of its inner template."""
        number = int(values[self.count]) if self.count else next(iter(self.variants))
        inner = {name: value for name, value in values.items() if name != self.count}
        return self.variants.get(number), inner

    def _variant(self, config: Config) -> tuple[CutVariant, Config]:
        variant, inner = self._split(dict(config.values))
        if variant is None:
            raise SpaceError(f"{config} does not cut {self.work.task.label}")
        return variant, Config.of(variant.inner.space.template, inner)

    def terms(self, config: Config) -> Counted:
        variant, inner = self._variant(config)
        return tuple(
            counted
            for number, subtask in enumerate(variant.subtasks)
            if (counted := self._terms_of(number, subtask, variant, inner)) is not None
        )

    def _terms_of(self, number: int, subtask: SubTask, variant: CutVariant, inner: Config) -> Counted | None:
        if number == variant.main:
            return variant.inner.terms(inner)
        return self._default(subtask).terms(DEFAULT)

    def program(self, config: Config) -> Implementation:
        variant, inner = self._variant(config)
        parts = []
        for number, subtask in enumerate(variant.subtasks):
            applied = variant.inner if number == variant.main else self._default(subtask)
            body = applied.program(inner if number == variant.main else DEFAULT)
            assert not isinstance(body, Implementation)
            parts.append(subtask.by(body))
        return Implementation(_inputs(variant.subtasks), tuple(parts))

    def _default(self, subtask: SubTask) -> Applied:
        """The default program of a sub-task, cached: it is the same for all configs of a variant."""
        if subtask not in self._defaults:
            applied = Default().apply(GpuWork(subtask.task, self.work.machine, self.work.numerics))
            if applied is None:
                raise SpaceError(f"{subtask.task.label} has no default program")
            self._defaults[subtask] = applied
        return self._defaults[subtask]

    @cached_property
    def _defaults(self) -> dict[SubTask, Applied]:
        return {}


def _inputs(subtasks: Sequence[SubTask]) -> tuple[Node, ...]:
    """The inputs of the graph that was cut, in order."""
    found = {node.attrs["index"]: node for subtask in subtasks for node in subtask.operands if node.is_input}
    return tuple(found[number] for number in sorted(found))


def _in_order(values: Mapping[Value, None], ordered: bool) -> tuple[Value, ...]:
    numbers = ordered and all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    return tuple(sorted(values, key=int)) if numbers else tuple(values)
