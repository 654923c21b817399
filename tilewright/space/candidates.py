"""All candidates of one task: the configs of every template and sketch, as one space.

Searches, cost models and measuring see a task only through this class, so that they treat a template's config and a
derived structure's config alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from tilewright.errors import InternalError, SpaceError
from tilewright.hw import Machine
from tilewright.loops.ir import Program
from tilewright.space.catalog import SKETCHED, Catalog, catalog
from tilewright.space.implementation import Implementation
from tilewright.space.space import Config, Space
from tilewright.space.template import Applied, Work
from tilewright.space.tile_operator import tile_operator_of

_ENUMERATED = 4096  # number of combinations up to which all configs of a space are listed before sampling
_PATIENCE = 8  # draws per wanted config before a sample is left short


class Configs:
    """The configs of several spaces as one, for searches and cost models: of a task (`Candidates`), or of a kernel.

    `machine`: what they run on. `label`: what they compute, for people. `applied`: the spaces, with what each config
    costs."""

    @property
    def machine(self) -> Machine:
        raise NotImplementedError

    @property
    def label(self) -> str:
        raise NotImplementedError

    @cached_property
    def applied(self) -> tuple[Applied, ...]:
        raise NotImplementedError

    @property
    def constants(self) -> frozenset[int]:
        """Numbers of inputs that are the same in every call."""
        return frozenset()

    def program(self, config: Config) -> Program:
        """The loop program of a config whose terms are counted there."""
        raise InternalError(f"{config} is not a loop program")

    def of_config(self, config: Config) -> Applied:
        """The template or derived structure that a config belongs to; raises InternalError if there is none."""
        found = self._named(config.template)
        if found is None:
            raise InternalError(f"no template called {config.template!r} computes {self.label}")
        return found

    def is_legal(self, config: Config) -> bool:
        """Whether this is a config of this work. It may come from another version's records."""
        found = self._named(config.template)
        return found is not None and config in found.space

    def recalled(self, config: Config) -> Config | None:
        """A recorded config as a config of this version: knobs added since then get their defaults. None if it is no
        longer legal."""
        found = self._named(config.template)
        return None if found is None else found.space.recalled(config)

    # -- the interface for searches -------------------------------------------------------------------------------

    @cached_property
    def size(self) -> int:
        """The number of combinations of knob values, legal or not."""
        return sum(applied.space.size for applied in self.applied)

    def configs(self) -> Iterator[Config]:
        for applied in self.applied:
            yield from applied.space.configs()

    def sample(self, rng: Random, count: int) -> list[Config]:
        """Draw `count` distinct configs, evenly from all templates; fewer if there are fewer, or if legal ones are
        too rare."""
        if self.size <= max(_ENUMERATED, count):
            found = list(self.configs())
            rng.shuffle(found)
            return found[:count]
        spaces = [applied.space for applied in self.applied]
        drawn: dict[Config, None] = {}
        for _ in range(_PATIENCE * count):
            if len(drawn) >= count:
                break
            config = rng.choice(spaces).sample(rng)
            assert config is not None
            drawn.setdefault(config)
        return list(drawn)

    def neighbours(self, config: Config) -> list[Config]:
        return self._space(config).neighbours(config)

    def mutate(self, config: Config, rng: Random) -> Config:
        """Change one group of knobs; if nothing can be changed, return a config of any template."""
        mutated = self._space(config).mutate(config, rng)
        if mutated != config:
            return mutated
        other = rng.choice(self.applied).space.sample(rng)
        assert other is not None
        return other

    def crossover(self, a: Config, b: Config, rng: Random) -> Config:
        """Mix two configs of a template; of two different templates, mutate one config."""
        if a.template == b.template:
            return self._space(a).crossover(a, b, rng)
        return self.mutate(rng.choice((a, b)), rng)

    def encode(self, config: Config) -> tuple[float, ...]:
        """The knobs as features for a learned model; the same length for all configs of a template."""
        return self._space(config).encode(config)

    def _space(self, config: Config) -> Space:
        return self.of_config(config).space

    def _named(self, name: str) -> Applied | None:
        return next((applied for applied in self.applied if applied.space.template == name), None)


@dataclass(frozen=True)
class Candidates(Configs):
    """The configs of one task. The default program is among them if there is one, unless another candidate
    is sure to be faster.

    `only`: use these instead of what templates and rules offer.
    """

    work: Work
    templates: bool = True
    sketches: bool = True
    only: tuple[Applied, ...] = ()

    @classmethod
    def of(cls, work: Work, templates: bool = True, sketches: bool = True) -> Candidates:
        written = tile_operator_of(work.task, work.machine.kind)
        return cls(work, templates, sketches, () if written is None else (written,))

    @property
    def machine(self) -> Machine:
        return self.work.machine

    @property
    def label(self) -> str:
        return self.work.task.label

    @property
    def constants(self) -> frozenset[int]:
        return self.work.task.constants

    @cached_property
    def applied(self) -> tuple[Applied, ...]:
        """The templates with at least one legal config. Raises SpaceError if nothing computes this work."""
        found: Sequence[Applied] = self.only or (*self._from_templates(), *self._from_sketches())
        usable = tuple(applied for applied in found if applied.space.sample(Random(0)) is not None)
        if not self.only and not (usable and self._catalog.is_hopeless(self.work.task)):
            usable = (*usable, *self._from_default())
        if not usable:
            raise SpaceError(
                f"no template and no sketch computes {self.work.task.label}, and it has no default program"
            )
        return usable

    def implementation(self, config: Config) -> Implementation:
        """The implementation that a config describes, with its loop programs verified."""
        made = self.of_config(config).program(config)
        found = made if isinstance(made, Implementation) else Implementation.single(self.work.task, made)
        found.verify()
        return found

    def program(self, config: Config) -> Program:
        """The verified program of a config that is one loop program."""
        return self.implementation(config).program

    # -- construction ---------------------------------------------------------------------------------------------

    @property
    def _catalog(self) -> Catalog:
        return catalog(self.work.machine.kind)

    def _named(self, name: str) -> Applied | None:
        """Find one template by name, without applying the others."""
        if name not in self._looked_up:
            if self.only or "applied" in self.__dict__:
                found = list(self.applied)
            elif name == self._catalog.default.name:
                found = self._from_default()
            elif name.startswith(SKETCHED):
                found = self._from_sketches()
            else:
                found = self._from_templates(name)
            self._looked_up.update({applied.space.template: applied for applied in found})
        return self._looked_up.get(name)

    @cached_property
    def _looked_up(self) -> dict[str, Applied]:
        return {}

    def _from_templates(self, name: str | None = None) -> list[Applied]:
        if not self.templates:
            return []
        wanted = [t for t in self._catalog.all_templates if name in (None, t.name)]
        return [applied for template in wanted if (applied := template.apply(self.work)) is not None]

    def _from_sketches(self) -> list[Applied]:
        return list(self._catalog.sketches(self.work)) if self.sketches else []

    def _from_default(self) -> list[Applied]:
        applied = self._catalog.default.apply(self.work)
        return [] if applied is None else [applied]
