"""What users register costs at most its own candidates: a guard around their templates and rules.

A template that raises, or that answers with something else than it should, is left out with one warning. A config of
it that has no cost or no program is illegal. Everything else continues.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np

from tilewright.errors import SpaceError, TilewrightError, TilewrightWarning
from tilewright.space.implementation import Implementation, Kernel
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, Batched, Explaining, Featured, Template, Work
from tilewright.space.terms import Counted, Cycles, GpuTerms, Roofline, StreamTerms, Terms

T = TypeVar("T")

_COUNTED: dict[str, tuple[type, ...]] = {
    "cpu": (Terms,),
    "cuda": (GpuTerms, StreamTerms, Roofline),
    "gemmini": (Cycles, Terms),
}
_MIN_ONE = ("iterations", "blocks", "threads", "steps", "stages", "cluster", "launches")  # they divide


def left_out(what: str, doing: str, error: Exception) -> None:
    """Warn that a user's object is not used. `what`: "template 'mine'"."""
    warnings.warn(
        f"{what} cannot {doing}, and is left out there: {type(error).__name__}: {error}",
        TilewrightWarning,
        stacklevel=3,
    )


@dataclass(frozen=True)
class Guarded:
    """A user's template or sketch."""

    template: Template

    def __post_init__(self) -> None:
        if isinstance(self.template, Explaining):  # a guard has optional methods where the template has them
            object.__setattr__(self, "refusal", self._refusal)

    @property
    def name(self) -> str:
        return self.template.name

    @property
    def _what(self) -> str:
        return f"{'sketch' if self.name.startswith('sketch:') else 'template'} {self.name!r}"

    def apply(self, work: Work) -> Applied | None:
        what = self._what
        try:
            applied = self.template.apply(work)
            if applied is None:
                return None
            found = GuardedApplied(applied, what, work)
            if found.space.template != self.name:
                raise SpaceError(f"its space is called {found.space.template!r}, not {self.name!r}")
        except Exception as error:
            left_out(what, f"be asked about {work.task.label}", error)
            return None
        return found

    def _refusal(self, work: Work) -> str | None:
        assert isinstance(self.template, Explaining)
        try:
            return self.template.refusal(work)
        except Exception as error:
            left_out(self._what, f"say why it does not compute {work.task.label}", error)
            return None


@dataclass(frozen=True, eq=False)
class GuardedApplied:
    """An `Applied` of a user's template or rule. Every exception becomes a SpaceError: the config is illegal. `what`:
    for messages, such as "template 'mine'"."""

    applied: Applied
    what: str
    work: Work

    def __post_init__(self) -> None:
        # By name: `isinstance` with a protocol may ask for the space.
        if hasattr(self.applied, "features"):
            object.__setattr__(self, "features", self._features)
        if hasattr(self.applied, "terms_of"):
            object.__setattr__(self, "terms_of", self._terms_of)

    @cached_property
    def space(self) -> Space:
        """Its space, requested once and checked."""
        space = self.applied.space
        if not isinstance(space, Space):
            raise SpaceError(f"its space must be a Space, got {space!r}")
        for knob in space.knobs:
            if not isinstance(knob, Knob) or not isinstance(knob.choices, tuple):
                raise SpaceError(f"each knob must be a Knob with a tuple of choices, got {knob!r}")
            if any(type(choice) not in (int, str, bool) for choice in knob.choices):
                raise SpaceError(f"knob {knob.name!r} has choices that are not an int, a str or a bool")
        if len({knob.name for knob in space.knobs}) < len(space.knobs):
            raise SpaceError("two of its knobs have the same name")
        space.groups()  # KeyError if `together` names no knob
        return replace(space, legal=_Legal(space.legal, self.what, self.work.task.label))

    def terms(self, config: Config) -> Counted | None:
        return self._guarded(lambda: self._checked(self.applied.terms(config)))

    def program(self, config: Config) -> Kernel | Implementation:
        return self._guarded(lambda: self._verified(self.applied.program(config)))

    def _features(self, config: Config) -> dict[str, float]:
        applied = cast(Featured, self.applied)
        try:
            found = {str(name): float(each) for name, each in applied.features(config).items()}
        except Exception as error:
            left_out(self.what, f"tell the features of {config}", error)
            return {}
        return {name: each for name, each in found.items() if np.isfinite(each)}

    def _terms_of(self, values: Mapping[str, Any]) -> Counted:
        applied = cast(Batched, self.applied)
        found = self._guarded(lambda: self._checked(applied.terms_of(values), _shape(values)))
        assert found is not None
        return found

    def _checked(self, terms: Counted | None, shape: tuple[int, ...] | None = None) -> Counted | None:
        """The terms, if they are of this kind of machine and all counts are numbers. `shape`: of arrays of counts."""
        if terms is None and shape is None:
            return None
        kind = self.work.machine.kind
        parts = terms if isinstance(terms, tuple) and kind == "cuda" else (terms,)
        for part in parts:
            if not isinstance(part, _COUNTED[kind]):
                allowed = " or ".join(each.__name__ for each in _COUNTED[kind])
                raise SpaceError(f"its terms must be {allowed}, got {part!r}")
            for field in fields(part):  # type: ignore[arg-type]
                count = getattr(part, field.name)
                if field.type in ("int", "float") and not _is_count(count, field.name, shape):
                    raise SpaceError(
                        f"{field.name!r} of its terms must be a finite number that is not negative, got {count!r}"
                    )
        return terms

    def _verified(self, made: Kernel | Implementation) -> Kernel | Implementation:
        implementation = (
            made if isinstance(made, Implementation) else Implementation.single(self.work.task, made)
        )
        if any(not isinstance(part.body, Kernel) and part.call is None for part in implementation.parts):
            raise SpaceError(f"its program must be a loop program or a library call, got {made!r}")
        implementation.verify()
        return made

    def _guarded(self, asked: Callable[[], T]) -> T:
        try:
            return asked()
        except TilewrightError:
            raise
        except Exception as error:
            raise SpaceError(f"{self.what}: {type(error).__name__}: {error}") from error


def _is_count(count: Any, name: str, shape: tuple[int, ...] | None) -> bool:
    try:
        if shape is None:
            return bool(float(name in _MIN_ONE) <= count < float("inf"))
        np.broadcast_to(count, shape)
        return bool(np.all(np.isfinite(count)))
    except (TypeError, ValueError):
        return False


def _shape(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of the arrays among the values; () if there is none."""
    return np.broadcast_shapes(*(value.shape for value in values.values() if isinstance(value, np.ndarray)))


class _Legal:
    """A user's constraint: configs for which it raises are illegal."""

    def __init__(self, legal: Callable[[Mapping[str, Any]], Any], what: str, label: str) -> None:
        self._legal, self._what, self._label, self._warned = legal, what, label, False

    def __call__(self, values: Mapping[str, Any]) -> Any:
        shape = _shape(values)
        try:
            found = self._legal(values)
            return np.broadcast_to(np.asarray(found, bool), shape) if shape else bool(found)
        except Exception as error:
            if not self._warned:
                left_out(self._what, f"say which configs are legal for {self._label}", error)
            self._warned = True
            return np.zeros(shape, bool) if shape else False
