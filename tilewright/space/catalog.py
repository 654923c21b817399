"""Which templates there are for each kind of machine: the one table that `Candidates` asks.

    templates       structured by hand, library calls and decompositions among them
    sketches        structures that rules derive from a task's expressions
    default         the program that every task with a formula has

A user's own are added with `register`, or by a package that names them as an entry point of the group
`tilewright.templates` (a callable that registers them).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from tilewright.errors import OptionError, SpaceError, TilewrightError, TilewrightWarning
from tilewright.graph.task import Task
from tilewright.hw.machine import KINDS
from tilewright.space import registration
from tilewright.space.implementation import Implementation, Kernel
from tilewright.space.space import Config, Space
from tilewright.space.template import Applied, Template, Work
from tilewright.space.terms import Counted
from tilewright.support.plugins import entry_points

T = TypeVar("T")

ENTRY_POINTS = "tilewright.templates"
SKETCHED = "sketch:"  # what the names of derived structures begin with

# What derives structures from a task; each is an Applied of its own.
Derivation = Callable[[Work], Iterable[Applied]]


@dataclass
class Catalog:
    """The templates of one kind of machine.

    `is_hopeless`: of a task for which the default program is no candidate where there is any other.
    `trusted_sketches`: the names of those whose predicted times are as good as a template's.
    `predicts_default`: whether that is so of the default program."""

    templates: tuple[Template, ...]
    sketches: Derivation
    default: Template
    is_hopeless: Callable[[Task], bool] = lambda task: False
    trusted_sketches: tuple[str, ...] = ()
    predicts_default: bool = False
    registered: list[Template] = field(default_factory=list)

    @property
    def all_templates(self) -> tuple[Template, ...]:
        return (*self.templates, *self.registered)

    def trusted(self, work: Work, sketches: bool = True, templates: bool = True) -> list[Applied]:
        """What a choice without measurement is made among: templates and trusted sketches; other sketches where none of
        these applies and the default program is compared too; and the default program, where its time is predicted.
        `sketches`, `templates`: whether these are asked at all."""
        asked = self.all_templates if templates else ()
        found = [applied for t in asked if (applied := t.apply(work)) is not None]
        if not self.predicts_default:
            return found
        derived = list(self.sketches(work)) if sketches else []
        trusted = [applied for applied in derived if applied.space.template in self.trusted_sketches]
        default = self.default.apply(work)
        return [*(found or derived), *(trusted if found else []), *([] if default is None else [default])]


def catalog(kind: str) -> Catalog:
    """SpaceError where there are no templates for such machines."""
    _load_entry_points()
    return _built_in(kind)


@lru_cache(maxsize=8)
def _built_in(kind: str) -> Catalog:
    makers = {"cpu": _cpu, "cuda": _cuda}
    if kind not in makers:
        raise SpaceError(f"there are no templates for machines of the kind {kind!r}")
    return makers[kind]()


def _cpu() -> Catalog:
    from tilewright.space.sketches import derive
    from tilewright.space.templates.cpu import TEMPLATES
    from tilewright.space.templates.cpu.default import Default

    return Catalog(TEMPLATES, derive, Default())


def _cuda() -> Catalog:
    from tilewright.space.decompositions import DECOMPOSITIONS
    from tilewright.space.libraries import LIBRARIES
    from tilewright.space.sketches.cuda import SKETCHES
    from tilewright.space.sketches.cuda.block_reduction import BlockReduction
    from tilewright.space.templates.cuda import TEMPLATES
    from tilewright.space.templates.cuda.default import Default, is_hopeless

    def derive(work: Work) -> list[Applied]:
        return [applied for sketch in SKETCHES if (applied := sketch.apply(work)) is not None]

    return Catalog(
        (*LIBRARIES, *TEMPLATES, *DECOMPOSITIONS),
        derive,
        Default(),
        is_hopeless,
        trusted_sketches=(BlockReduction.name,),
        predicts_default=True,
    )


# -- a user's own -----------------------------------------------------------------------------------------------------


def register(template: Template, target: str = "cpu", module: str | None = None) -> Template:
    """Add a template of your own to all compilations for `target`. `module`: the name of the module that registers it
    when it is imported, for processes that build kernels; the one in which its class is, where none is given."""
    if target not in KINDS:
        raise OptionError(f"target must be one of {', '.join(map(repr, KINDS))}, got {target!r}")
    name = getattr(template, "name", None)
    if not isinstance(name, str) or not name or not callable(getattr(template, "apply", None)):
        raise OptionError(
            f"{template!r} is not a template",
            remedy="give it a `name` and a method `apply(work)` that returns None or an Applied",
        )
    found = _built_in(target)
    taken = {each.name for each in (*found.all_templates, found.default)}
    if name in taken or name.startswith(SKETCHED):
        raise OptionError(f"there is a template {name!r} already", remedy="choose another name")
    found.registered.append(Guarded(template))
    registration.remember(f"template {name!r}", template, module)
    return template


def unregister(name: str, target: str = "cpu") -> None:
    """The template of this name is asked no more."""
    found = _built_in(target)
    found.registered[:] = [each for each in found.registered if each.name != name]
    registration.forget(f"template {name!r}")


@dataclass(frozen=True)
class Guarded:
    """A user's template: what it raises costs its own candidates, and is said once."""

    template: Template

    @property
    def name(self) -> str:
        return self.template.name

    def apply(self, work: Work) -> Applied | None:
        try:
            applied = self.template.apply(work)
            if applied is None:
                return None
            if applied.space.template != self.name:
                raise SpaceError(f"its space is called {applied.space.template!r}, not {self.name!r}")
        except Exception as error:
            self._warn(error, work)
            return None
        return GuardedApplied(applied, self.name)

    def _warn(self, error: Exception, work: Work) -> None:
        warnings.warn(
            f"template {self.name!r} cannot be asked about {work.task.label}, and is left out there:"
            f" {type(error).__name__}: {error}",
            TilewrightWarning,
            stacklevel=2,
        )


@dataclass(frozen=True)
class GuardedApplied:
    """Every exception of a user's is a SpaceError: the candidate is illegal, and others go on."""

    applied: Applied
    name: str

    @property
    def space(self) -> Space:
        return self.applied.space

    def terms(self, config: Config) -> Counted | None:
        return self._guarded(lambda: self.applied.terms(config))

    def program(self, config: Config) -> Kernel | Implementation:
        return self._guarded(lambda: self.applied.program(config))

    def _guarded(self, asked: Callable[[], T]) -> T:
        try:
            return asked()
        except TilewrightError:
            raise
        except Exception as error:
            raise SpaceError(f"template {self.name!r}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=1)
def _load_entry_points() -> None:
    """What installed packages add. One that fails is named in a warning and left out."""
    for entry in entry_points(ENTRY_POINTS).values():
        try:
            entry.load()()
        except Exception as error:
            words = f"the templates of {entry.value} cannot be used: {type(error).__name__}: {error}"
            warnings.warn(words, TilewrightWarning, stacklevel=2)
