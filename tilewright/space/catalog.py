"""The table of templates for each kind of machine, which `Candidates` reads.

    templates       written by hand, including library calls and decompositions
    sketches        structures for tasks of any class: derived by rules, on GPUs also some that are written by hand
    default         the program that every task with a formula has

Users add theirs with `register` and `register_sketch`, or with an entry point of the group `tilewright.templates`: a
callable that registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from tilewright.errors import OptionError, SpaceError
from tilewright.graph.task import Task
from tilewright.hw.machine import KINDS
from tilewright.space import registration
from tilewright.space.guard import Guarded
from tilewright.space.template import Applied, Template, Work
from tilewright.space.tile_operator import tile_operator_of
from tilewright.support.plugins import register_installed
from tilewright.support.suggest import one_of

ENTRY_POINTS = "tilewright.templates"
SKETCHED = "sketch:"  # prefix of the names of sketches

# Finds the structures that a task has; each is an Applied of its own.
Derivation = Callable[[Work], Iterable[Applied]]


@dataclass
class Catalog:
    """The templates of one kind of machine.

    - `is_hopeless`: whether the default program of a task is left out if there is any other candidate.
    - `trusted_sketches`: the names of those whose predicted times are as reliable as a template's.
    - `only_tuned`: the names of those that are never chosen without measuring, because nothing calibrates their times.
    - `written`: the sketches that no rules derive.
    - `predicts_default`: whether the same holds for the default program.
    """

    templates: tuple[Template, ...]
    derive: Derivation
    default: Template
    written: tuple[Template, ...] = ()
    is_hopeless: Callable[[Task], bool] = lambda task: False
    trusted_sketches: tuple[str, ...] = ()
    only_tuned: tuple[str, ...] = ()
    predicts_default: bool = False
    registered: list[Guarded] = field(default_factory=list)
    registered_sketches: list[Guarded] = field(default_factory=list)

    @property
    def all_templates(self) -> tuple[Template, ...]:
        return (*self.templates, *self.registered)

    def sketches(self, work: Work) -> list[Applied]:
        """The sketches of a task: its own, and those that users registered."""
        found = [*self._written(work), *self.derive(work)]
        taken = {applied.space.template for applied in found}
        own = (applied for sketch in self.registered_sketches if (applied := sketch.apply(work)) is not None)
        return [*found, *(applied for applied in own if applied.space.template not in taken)]

    def _written(self, work: Work, names: Collection[str] | None = None) -> list[Applied]:
        """The written sketches of a task, with these names."""
        asked = [sketch for sketch in self.written if names is None or sketch.name in names]
        return [applied for sketch in asked if (applied := sketch.apply(work)) is not None]

    def trusted(self, work: Work, sketches: bool = True, templates: bool = True) -> list[Applied]:
        """The candidates for a choice without measuring: templates and trusted sketches; other sketches if none of
        these applies and the default program is compared too; and the default program, if its time is predicted.

        `sketches`, `templates`: whether these are considered at all.
        """
        if (written := tile_operator_of(work.task, work.machine.kind)) is not None:
            return [written]
        asked = self.all_templates if templates else ()
        found = [applied for t in asked if (applied := t.apply(work)) is not None]
        if not self.predicts_default:
            return found
        if sketches and found:
            found += self._written(work, self.trusted_sketches)
        elif sketches:
            found += [each for each in self.sketches(work) if each.space.template not in self.only_tuned]
        default = self.default.apply(work)
        return found if default is None else [*found, default]


def catalog(kind: str) -> Catalog:
    """The catalog of a kind of machine; raises SpaceError if it has no templates."""
    register_installed(ENTRY_POINTS)
    return _built_in(kind)


@lru_cache(maxsize=8)
def _built_in(kind: str) -> Catalog:
    makers = {"cpu": _cpu, "cuda": _cuda, "gemmini": _gemmini}
    if kind not in makers:
        raise SpaceError(f"the kind of a machine must be one of {', '.join(makers)}, got {kind!r}")
    return makers[kind]()


def _cpu() -> Catalog:
    from tilewright.space.sketches import derive
    from tilewright.space.templates.cpu import TEMPLATES
    from tilewright.space.templates.cpu.default import Default

    return Catalog(TEMPLATES, derive, Default())


def _cuda() -> Catalog:
    from tilewright.space.decompositions import DECOMPOSITIONS
    from tilewright.space.libraries import LIBRARIES
    from tilewright.space.sketches import derive
    from tilewright.space.sketches.cuda import SKETCHES
    from tilewright.space.sketches.cuda.block_reduction import BlockReduction
    from tilewright.space.sketches.cuda.warpgroup_chain import WarpgroupChain
    from tilewright.space.sketches.cuda.warpgroups import WarpgroupMatmul
    from tilewright.space.templates.cuda import TEMPLATES
    from tilewright.space.templates.cuda.default import Default, is_hopeless

    return Catalog(
        (*LIBRARIES, *TEMPLATES, *DECOMPOSITIONS),
        derive,
        Default(),
        SKETCHES,
        is_hopeless,
        trusted_sketches=(BlockReduction.name,),
        only_tuned=(WarpgroupMatmul.name, WarpgroupChain.name),
        predicts_default=True,
    )


def _gemmini() -> Catalog:
    from tilewright.space.templates.gemmini import Accelerated, OnHost

    processor = _cpu()
    hosted = tuple(OnHost(template) for template in processor.templates)
    return Catalog((Accelerated(), *hosted), lambda work: (), OnHost(processor.default, always=True))


# -- user-defined templates
# -------------------------------------------------------------------------------------------


def register(template: Template, target: str = "cpu", module: str | None = None) -> Template:
    """Add a template to all compilations for `target`. `module`: the module that registers it on import, for worker
    processes; by default, the one that defines its class."""
    name = _checked(template, target, "a template")
    found = _built_in(target)
    taken = {each.name for each in (*found.all_templates, found.default)}
    if name in taken or name.startswith(SKETCHED):
        raise OptionError(f"there is a template {name!r} already", remedy="choose another name")
    found.registered.append(Guarded(template))
    registration.remember(f"template {name!r}", template, module)
    return template


def unregister(name: str, target: str = "cpu") -> None:
    """Remove the template of this name."""
    found = _built_in(target)
    found.registered[:] = [each for each in found.registered if each.name != name]
    registration.forget(f"template {name!r}")


def register_sketch(sketch: Template, target: str = "cpu", module: str | None = None) -> Template:
    """Add a sketch to all compilations for `target`. It is a template whose name begins with "sketch:": without tuning,
    it is chosen only for tasks that no template computes. `module`: as of `register`."""
    name = _checked(sketch, target, "a sketch")
    if not name.startswith(SKETCHED) or name == SKETCHED:
        raise OptionError(
            f"the name of a sketch must begin with {SKETCHED!r}, got {name!r}",
            remedy=f'call it "{SKETCHED}{name.removeprefix(SKETCHED) or "mine"}", or register it as a template',
        )
    found = _built_in(target)
    if name in {each.name for each in (*found.written, *found.registered_sketches)}:
        raise OptionError(f"there is a sketch {name!r} already", remedy="choose another name")
    found.registered_sketches.append(Guarded(sketch))
    registration.remember(f"sketch {name!r}", sketch, module)
    return sketch


def unregister_sketch(name: str, target: str = "cpu") -> None:
    """Remove the sketch of this name."""
    found = _built_in(target)
    found.registered_sketches[:] = [each for each in found.registered_sketches if each.name != name]
    registration.forget(f"sketch {name!r}")


def _checked(template: object, target: str, what: str) -> str:
    """The name of what is registered; OptionError if it cannot be."""
    one_of("target", target, KINDS)
    name = getattr(template, "name", None)
    if not isinstance(name, str) or not name or not callable(getattr(template, "apply", None)):
        raise OptionError(
            f"{template!r} is not {what}",
            remedy="give it a `name` and a method `apply(work)` that returns None or an Applied",
        )
    return name
