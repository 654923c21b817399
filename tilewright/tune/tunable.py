"""What can be tuned: something with a key, a space of candidates, and a job that a runner builds, checks and times.

A task of a model is one. The loop (`tuner.py`) and its state of one (`task_state.py`) know nothing else of it, nor of
the machine that it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from tilewright.codegen.generator import code_of
from tilewright.cost.analytical import Analytical
from tilewright.cost.boosted import Experience
from tilewright.cost.model import CostModel
from tilewright.cost.models import cost_model_named
from tilewright.db.record import Decision, Key, Record
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.tune.allocate import kind_of
from tilewright.tune.choose import Choice, choose
from tilewright.tune.known import recalled


class Tunable(Protocol):
    @property
    def key(self) -> Key:
        """Under which its trials and its decision are remembered."""

    @property
    def label(self) -> str:
        """For people: its operators."""

    @property
    def layer(self) -> str:
        """For people: the layers of the models that it computes; "" where none is known."""

    @property
    def kind(self) -> str:
        """Tunables of one kind are alike: what one has reached, another may."""

    @property
    def operations(self) -> float:
        """How much there is to do, in any unit that its kind shares."""

    @property
    def candidates(self) -> Candidates:
        """The space that is searched."""

    @property
    def job(self) -> TaskJob:
        """What the runner's processes are told: they build, check and time by it."""

    @property
    def start(self) -> Choice:
        """What would run if nothing were measured."""

    def choice(self, config: Config, seconds: float | None) -> Choice: ...

    def code(self, choice: Choice) -> str:
        """The fingerprint of what runs: a measured time holds as long as this does."""

    def known(self, decision: Decision) -> Choice | None:
        """What an earlier decision stands for today; None where it does not hold any more."""

    def record(self, config: Config, **found: Any) -> Record:
        """A trial as it is remembered."""

    def predict(self, config: Config) -> float:
        """Seconds, without any measurement."""

    def model(self, name: str, seed: int, experience: Sequence[Experience]) -> CostModel:
        """The model of this name that learns its times, from experience with others to begin with."""


@dataclass(frozen=True)
class TunableTask:
    """A task on a machine. `threads`: 0 on a GPU."""

    work: Work
    threads: int
    layer: str = ""

    @cached_property
    def key(self) -> Key:
        return Key.of(self.work, self.threads)

    @property
    def label(self) -> str:
        return self.work.task.label

    @property
    def kind(self) -> str:
        nodes = self.work.task.graph.nodes()
        return kind_of(node.op for node in nodes if not node.is_input and not node.is_constant)

    @property
    def operations(self) -> float:
        return float(self.work.task.flops or self.work.task.bytes)

    @cached_property
    def candidates(self) -> Candidates:
        return Candidates.of(self.work)

    @cached_property
    def job(self) -> TaskJob:
        return TaskJob.of(self.work, self.threads)

    @cached_property
    def start(self) -> Choice:
        return choose(self.work)

    def choice(self, config: Config, seconds: float | None) -> Choice:
        if config == self.start.config:
            return Choice(self.start.implementation, config, seconds or self.start.seconds)
        return Choice(self.candidates.implementation(config), config, seconds)

    def code(self, choice: Choice) -> str:
        return code_of(choice.implementation, self.work.machine, self.work.numerics)

    def known(self, decision: Decision) -> Choice | None:
        return recalled(self.work, decision)

    def record(self, config: Config, **found: Any) -> Record:
        return Record.of(self.work, self.threads, config, **found)

    def predict(self, config: Config) -> float:
        return Analytical(self.candidates, self.threads).seconds(config)

    def model(self, name: str, seed: int, experience: Sequence[Experience]) -> CostModel:
        return cost_model_named(name)(self.candidates, self.threads, seed, experience)
