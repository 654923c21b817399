"""The Tunable protocol: a key, a space of candidates, and a job that a runner builds, checks and times.

A task of a model is one. The tuning loop (`tuner.py`) and its per-task state (`task_state.py`) use nothing else, and
know nothing of the machine.
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
from tilewright.measure.jobs import Job
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates, Configs
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.tune.allocate import kind_of
from tilewright.tune.choose import Choice, choose
from tilewright.tune.known import recalled


class Tunable(Protocol):
    @property
    def key(self) -> Key:
        """The key of its trials and its decision in the database."""

    @property
    def label(self) -> str:
        """Its operators, for display."""

    @property
    def layer(self) -> str:
        """The layers of the models that it computes, for display; "" if unknown."""

    @property
    def kind(self) -> str:
        """Tunables of one kind are similar and can reach similar speeds."""

    @property
    def operations(self) -> float:
        """The amount of work, in any unit shared by its kind."""

    @property
    def candidates(self) -> Configs:
        """The space that is searched."""

    @property
    def job(self) -> Job:
        """The job that the runner's processes receive to build, check and time candidates."""

    @property
    def start(self) -> Choice:
        """The choice without measuring."""

    def choice(self, config: Config, seconds: float | None) -> Choice: ...

    def code(self, choice: Choice) -> str:
        """The fingerprint of the code; a measured time is valid as long as it stays the same."""

    def known(self, decision: Decision) -> Choice | None:
        """The choice of an earlier decision; None if it is no longer valid."""

    def record(self, config: Config, **found: Any) -> Record:
        """A trial as a record of the database."""

    def predict(self, config: Config) -> float:
        """The predicted seconds."""

    def model(self, name: str, seed: int, experience: Sequence[Experience]) -> CostModel:
        """The cost model of this name, warm-started with the experience of other tasks."""

    def configs_of(self, record: Record) -> Configs | None:
        """Those that a record is one of, of this or of another tunable that it can learn from; None: it cannot."""


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

    def configs_of(self, record: Record) -> Configs | None:
        work = record.work()
        return None if work is None else Candidates.of(work)
