"""A launch of a kernel as something to tune: its key, its space, what a config costs, and the job of the runner."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from tilewright.cost.analytical import Analytical
from tilewright.cost.boosted import Experience
from tilewright.cost.model import CostModel
from tilewright.cost.models import cost_model_named
from tilewright.db.record import Decision, Key, Record
from tilewright.db.versions import sources
from tilewright.dtypes import DType
from tilewright.errors import InternalError, TilewrightError
from tilewright.hw import Machine
from tilewright.hw.machine import description
from tilewright.measure.calibration import machine_key
from tilewright.measure.jobs import Job
from tilewright.measure.kernel_job import Grid3
from tilewright.numerics import recorded
from tilewright.runtime.plan import PREDICTED, Origin
from tilewright.space.candidates import Configs
from tilewright.space.implementation import Implementation, Kernel
from tilewright.space.space import Config, Space
from tilewright.space.template import Applied
from tilewright.space.terms import Counted
from tilewright.support.fingerprint import fingerprint
from tilewright.tune.choose import Choice
from tilewright.tune.known import origin_of

NOTHING = Implementation((), ())  # a kernel is launched by itself: it is not an implementation of a task
_LISTED = 256  # configs of a space of which all are predicted
_QUICK_SECONDS = 0.15  # to choose a config at a first launch


class Launched(Protocol):
    """The interface of what is launched: a tile kernel, or one of Triton."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """The fingerprint of its source."""

    def toolchain(self) -> str | None:
        """The version of the compiler that makes machine code of it; None: Tilewright's own."""

    def terms(
        self, launch: LaunchFacts, config: Config, machine: Machine
    ) -> tuple[Counted, dict[str, float]]:
        """The costs of a config, and its features. Raises TilewrightError if it cannot be compiled."""


@dataclass(frozen=True)
class LaunchFacts:
    """Facts about a launch besides its config, as plain data: of this one, or of one in the records. `key`: the values
    that the user named. `options`: knobs that go to the code generator."""

    key: Mapping[str, Any]
    scalars: Mapping[str, bool | int | float]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    constants: Mapping[str, Any]
    options: tuple[str, ...]
    grid: Callable[[LaunchFacts, Config], Grid3] = field(compare=False)

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors, each counted once."""
        return sum(
            math.prod(shape) * DType.parse(self.dtypes[name]).bytes for name, shape in self.shapes.items()
        )

    @property
    def same_problem(self) -> str:
        """Launches that agree in this differ in the values of the key alone."""
        constants = {name: repr(value) for name, value in self.constants.items() if name not in self.key}
        return fingerprint(dict(self.dtypes), constants, [type(v).__name__ for v in self.scalars.values()])

    def text(self, name: str, source: str) -> str:
        return json.dumps(
            {
                "kernel": name,
                "source": source,
                "problem": self.same_problem,
                "key": {name: _plain(value) for name, value in self.key.items()},
                "scalars": dict(self.scalars),
                "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            },
            sort_keys=True,
        )

    def like(self, text: str, source: str) -> LaunchFacts | None:
        """The launch that a record is of, if it differs from this one in the values of its key alone."""
        try:
            found = json.loads(text)
            if found["source"] != source or found["problem"] != self.same_problem:
                return None
            shapes = {name: tuple(map(int, found["shapes"][name])) for name in self.shapes}
            scalars = {name: found["scalars"][name] for name in self.scalars}
            key = {name: found["key"][name] for name in self.key}
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return LaunchFacts(key, scalars, shapes, self.dtypes, self.constants, self.options, self.grid)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class KernelApplied:
    """The configs of one launch, with what each costs: as a template's are for a task."""

    launched: Launched
    facts: LaunchFacts
    space: Space
    machine: Machine
    _counted: dict[Config, tuple[Counted, dict[str, float]] | TilewrightError] = field(default_factory=dict)

    def terms(self, config: Config) -> Counted | None:
        return self._of(config)[0]

    def features(self, config: Config) -> dict[str, float]:
        return self._of(config)[1]

    def program(self, config: Config) -> Kernel | Implementation:
        raise InternalError(f"{config} is launched by itself, and makes no implementation of a task")

    def _of(self, config: Config) -> tuple[Counted, dict[str, float]]:
        if config not in self._counted:
            try:
                self._counted[config] = self.launched.terms(self.facts, config, self.machine)
            except TilewrightError as error:
                self._counted[config] = error
        found = self._counted[config]
        if isinstance(found, TilewrightError):
            raise found
        return found


@dataclass(frozen=True)
class KernelConfigs(Configs):
    one: KernelApplied

    @property
    def machine(self) -> Machine:
        return self.one.machine

    @property
    def label(self) -> str:
        return self.one.launched.name

    @cached_property
    def applied(self) -> tuple[Applied, ...]:
        return (self.one,)


def template_of(launched: Launched) -> str:
    return f"{launched.name}@{launched.source[:12]}"


@dataclass(frozen=True)
class TunableKernel:
    """A launch on a machine. `make_job`: copies its tensors, so it is called when something is measured."""

    launched: Launched
    facts: LaunchFacts
    space: Space
    machine: Machine
    threads: int
    make_job: Callable[[TunableKernel], Job]
    layer: str = ""

    @cached_property
    def key(self) -> Key:
        task = fingerprint(
            "kernel", self.launched.source, self.facts.same_problem, sorted(self.facts.key.items())
        )
        tools = self.launched.toolchain()
        if tools is None:
            return Key.of_task(task, self.machine, "fast", self.threads)
        return Key(task, machine_key(self.machine), tools, recorded("fast"), self.threads)

    @property
    def label(self) -> str:
        return self.launched.name

    @property
    def kind(self) -> str:
        return f"kernel {self.launched.name}"

    @cached_property
    def operations(self) -> float:
        return float(sum(math.prod(shape) for shape in self.facts.shapes.values())) or 1.0

    @cached_property
    def candidates(self) -> KernelConfigs:
        return KernelConfigs(KernelApplied(self.launched, self.facts, self.space, self.machine))

    @cached_property
    def job(self) -> Job:
        return self.make_job(self)

    @cached_property
    def start(self) -> Choice:
        return self.predicted(math.inf)

    def predicted(self, seconds: float = _QUICK_SECONDS) -> Choice:
        """The config that the analytical model expects to be the fastest among those that there is time to compile:
        starting with the default, one group of knobs after another; then, in a small space, all others."""
        deadline = time.monotonic() + seconds
        best = self.space.default()
        if self.candidates.size == 1:
            return Choice(NOTHING, best, None, Origin("only"))
        expected = self.predict(best)
        asked, moved = {best}, True
        while moved:
            moved = False
            for config in self.space.neighbours(best):
                if config in asked:
                    continue
                if time.monotonic() > deadline:
                    return Choice(NOTHING, best, expected, PREDICTED)
                asked.add(config)
                if (predicted := self.predict(config)) < expected:
                    best, expected, moved = config, predicted, True
        for config in self.space.configs() if self.space.size <= _LISTED else ():
            if time.monotonic() > deadline:
                break
            if config not in asked and (predicted := self.predict(config)) < expected:
                best, expected = config, predicted
        return Choice(NOTHING, best, expected, PREDICTED)

    def choice(self, config: Config, seconds: float | None) -> Choice:
        return Choice(NOTHING, config, seconds)

    def code(self, choice: Choice) -> str:
        """A fingerprint of the space. After a config is added, the search continues and measures nothing twice."""
        return fingerprint([(knob.name, list(knob.choices)) for knob in self.space.knobs], self._legal_count)

    @cached_property
    def _legal_count(self) -> int:
        return sum(1 for _ in self.space.configs()) if self.space.size <= 4096 else -1

    def known(self, decision: Decision) -> Choice | None:
        if decision.versions.sources != sources() or decision.config not in self.space:
            return None
        choice = Choice(NOTHING, decision.config, decision.seconds, origin_of(decision))
        return choice if decision.code == self.code(choice) or not decision.trials else None

    def record(self, config: Config, **found: Any) -> Record:
        return Record(
            key=self.key,
            label=self.label,
            text=self.facts.text(self.launched.name, self.launched.source),
            constants=(),
            machine=description(self.machine),
            config=config,
            **found,
        )

    def predict(self, config: Config) -> float:
        return self._analytical.seconds(config)

    @cached_property
    def _analytical(self) -> Analytical:
        return Analytical(self.candidates, self.threads)

    def model(self, name: str, seed: int, experience: Sequence[Experience]) -> CostModel:
        return cost_model_named(name)(self.candidates, self.threads, seed, experience)

    def configs_of(self, record: Record) -> Configs | None:
        """Those of a record of the same kernel with other values of its key."""
        if record.config.template != self.space.template:
            return None
        facts = self.facts.like(record.text, self.launched.source)
        if facts is None:
            return None
        return KernelConfigs(KernelApplied(self.launched, facts, self.space, self.machine))
