"""A plain search over the templates' knobs: what the analytical model thinks best is measured, then its neighbours.

    for every task, those that take most of the model's time first:
      candidates: for each value of each knob, the config with it that is predicted best; and the default program
      each of them races the best so far, in a worker process, as long as the task's share of the budget lasts
      then the neighbours of the best, until none is better
      the best must beat what the model alone would have chosen once more, or that is taken

What is found is remembered: the next compilation measures nothing.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from tilewright.cost import cpu
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine
from tilewright.measure.trial import TaskJob
from tilewright.measure.worker import Answer, Question, Worker
from tilewright.space.realise import is_legal, program_for
from tilewright.space.space import Config, Space
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu import TEMPLATES
from tilewright.support.trace import Trace
from tilewright.tune.choose import Choice, choose, descend
from tilewright.tune.memory import Found, Memory, work_key

_ENUMERATED = 4096  # combinations of knobs; of more than this, so many are drawn at random
_RACE_SECONDS = 0.06  # for two configs that take little time; others get a few runs each
_CONFIRM_SECONDS = 0.3
_TRIAL_TIMEOUT = 60.0
_LEAST_SECONDS = 3.0  # for a task: in less than this there is no choice, and others make better use of it
_HOPELESS = 1.5  # predicted at so many times the best prediction, a neighbour is not worth a trial
_BETTER = 0.98  # of the time of the best so far, before a candidate takes its place
_PERCENTILE = 25  # of the times in a race: others on the machine only ever make them longer


Predictor = Callable[[Applied, Config], float]


@dataclass(frozen=True)
class Effort:
    seconds: float  # the budget where none is given
    trials: int  # at most, for one task


@dataclass(frozen=True)
class Tuning:
    """How much to measure: a name of EFFORTS, and seconds where its own are not wanted."""

    effort: str
    budget: float | None = None

    @property
    def seconds(self) -> float:
        return EFFORTS[self.effort].seconds if self.budget is None else self.budget


EFFORTS = {"quick": Effort(60.0, 12), "full": Effort(600.0, 96)}
_ORDER = tuple(EFFORTS)


def tune(
    tasks: Mapping[str, tuple[Task, int]],
    machine: CpuMachine,
    tuning: Tuning,
    *,
    numerics: str,
    threads: int,
    trace: Trace,
) -> dict[str, Choice]:
    """A choice for every task that computes something, by key, within the seconds of `tuning`. An interrupt ends the
    search and keeps what it has."""
    deadline = time.monotonic() + tuning.seconds
    memory = Memory.default()
    works = {key: Work(task, machine, numerics) for key, (task, _) in tasks.items() if task.output.type.size}
    choices: dict[str, Choice] = {}
    shares: dict[str, float] = {}
    for key, work in works.items():
        known = _remembered(work, memory.get(work_key(work, threads)), tuning)
        choices[key] = known or choose(work)
        if known is None and choices[key].config is not None:
            shares[key] = (choices[key].predicted or 0.0) * tasks[key][1]

    most_trials = EFFORTS[tuning.effort].trials
    with Worker() as worker:
        try:
            for key in sorted(shares, key=lambda key: -shares[key]):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                share = shares.pop(key)
                fair = left * share / (share + sum(shares.values())) if share else left
                allowed = min(left, max(fair, _LEAST_SECONDS))
                with trace.span("tune.task", label=works[key].task.label, seconds=allowed) as span:
                    search = Search(works[key], threads, worker, time.monotonic() + allowed, most_trials)
                    choices[key] = search.run(choices[key])
                    span.note(trials=search.trials, failures=search.failures, best=str(choices[key].config))
                if search.finished is not None:
                    memory.add(search.found(choices[key], tuning))
        except KeyboardInterrupt:
            trace.mark("tune.interrupted")
    return choices


def _remembered(work: Work, found: Found | None, tuning: Tuning) -> Choice | None:
    """What an earlier search has found that was given at least as much: one that was starved is done again."""
    if found is None or found.effort not in _ORDER or found.budget < tuning.seconds:
        return None
    if _ORDER.index(found.effort) < _ORDER.index(tuning.effort):
        return None
    if not is_legal(work, found.config):
        return None
    return Choice(program_for(work, found.config), found.config, found.seconds)


# -- one task ---------------------------------------------------------------------------------------------------------


@dataclass
class Search:
    """The search for one task. `finished` is the time of the best once something was measured."""

    work: Work
    threads: int
    worker: Worker
    deadline: float
    most_trials: int
    trials: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    finished: float | None = None
    _tried: set[Config | None] = field(default_factory=set)
    _spent: float = 0.0  # seconds, in trials after the first

    def run(self, start: Choice) -> Choice:
        """The fastest config of those that could be tried, `start` where nothing is faster."""
        if not self._first(start.config):
            return start  # nothing to compare with; what the model chose is kept
        best = start.config
        applied = {one.space.template: one for one in applied_templates(self.work)}
        best = self._race_all(self._candidates(applied.values()), best)
        moved = True
        while moved and best is not None:
            before = best
            best = self._race_all(neighbours(applied[best.template], best, self._predicted), best)
            moved = best != before
        if best != start.config and not self._beats(best, start.config, _CONFIRM_SECONDS):
            best = start.config
        if best == start.config:
            return start
        return Choice(program_for(self.work, best), best, self.finished)

    def found(self, choice: Choice, tuning: Tuning) -> Found:
        assert self.finished is not None
        key, label = work_key(self.work, self.threads), self.work.task.label
        return Found(key, label, tuning.effort, tuning.seconds, choice.config, self.finished, self.trials)

    def _candidates(self, applied: Iterable[Applied]) -> Iterator[Config | None]:
        """By predicted time; the default program second."""
        ranked = sorted(
            (pair for one in applied for pair in promising(one, self.work, self._predicted)),
            key=lambda pair: pair[0],
        )
        configs: list[Config | None] = [config for _, config in ranked]
        if self.work.formula is not None:
            configs.insert(1, None)
        return iter(configs)

    def _predicted(self, applied: Applied, config: Config) -> float:
        return cpu.seconds(applied.terms(config), self.work.machine, self.threads)

    def _race_all(self, configs: Iterable[Config | None], best: Config | None) -> Config | None:
        for config in configs:
            if self._used_up():
                break
            if config not in self._tried and self._beats(config, best, _RACE_SECONDS):
                best = config
        return best

    def _used_up(self) -> bool:
        """Whether one more trial, and another to confirm its result, would come too late. The first trial is no
        measure: the worker starts, and asks the oracle, during it."""
        mean = self._spent / max(1, self.trials - 1)
        return self.trials >= self.most_trials or time.monotonic() + 2 * mean >= self.deadline

    def _first(self, config: Config | None) -> bool:
        answer = self._ask((config,), _RACE_SECONDS / 2)
        if answer.failed is None:
            self.finished = typical(answer.times[0])
        return answer.failed is None

    def _beats(self, config: Config | None, best: Config | None, seconds: float) -> bool:
        answer = self._ask((best, config), seconds)
        if answer.failed is not None:
            return False
        theirs, ours = (typical(times) for times in answer.times)
        if ours < _BETTER * theirs:
            self.finished = ours
            return True
        self.finished = theirs
        return False

    def _ask(self, configs: tuple[Config | None, ...], seconds: float) -> Answer:
        self.trials += 1
        self._tried.update(configs)
        left = max(1.0, self.deadline - time.monotonic())
        timeout = min(_TRIAL_TIMEOUT, left + 5.0)
        question = Question(TaskJob.of(self.work, self.threads), configs, min(seconds, left))
        begin = time.monotonic()
        answer = self.worker.ask(question, timeout)
        if self.trials > 1:
            self._spent += time.monotonic() - begin
        if answer.failed is not None:
            self.failures[answer.kind] = self.failures.get(answer.kind, 0) + 1
        return answer


def typical(times: Iterable[float]) -> float:
    return float(np.percentile(list(times), _PERCENTILE))


# -- which configs ----------------------------------------------------------------------------------------------------


def applied_templates(work: Work) -> list[Applied]:
    return [applied for template in TEMPLATES if (applied := template.apply(work)) is not None]


def promising(applied: Applied, work: Work, predicted: Predictor) -> list[tuple[float, Config]]:
    """For each value of each knob the config that is predicted best with it, best first: what is alike in all but
    knobs that hardly matter is tried once. They come from around the best prediction, and from all over the space."""
    around: list[Config] = []
    if (found := descend(applied, work)) is not None:
        around = [found[1], *variations(applied.space, found[1])]
    ranked = sorted(
        ((predicted(applied, config), config) for config in {*around, *some_configs(applied.space)}),
        key=lambda pair: (pair[0], str(pair[1])),
    )
    best_with: dict[tuple[str, object], tuple[float, Config]] = {}
    for seconds, config in ranked:
        for choice in config.values:
            best_with.setdefault(choice, (seconds, config))
    chosen = {config: seconds for seconds, config in best_with.values()}
    return sorted(((seconds, config) for config, seconds in chosen.items()), key=lambda pair: pair[0])


def some_configs(space: Space) -> Iterator[Config]:
    """All configs of a small space; of a large one, legal ones among as many combinations drawn at random."""
    if math.prod(len(knob.choices) for knob in space.knobs) <= _ENUMERATED:
        yield from space.configs()
        return
    rng = random.Random(0)
    drawn = set()
    for _ in range(_ENUMERATED):
        values = {knob.name: rng.choice(knob.choices) for knob in space.knobs}
        config = Config.of(space.template, values)
        if config not in drawn and space.legal(values):
            drawn.add(config)
            yield config


def variations(space: Space, config: Config) -> Iterator[Config]:
    """Legal configs that differ in one knob, or in one group of knobs that belong together."""
    base = dict(config.values)
    for group in space.groups():
        names = [knob.name for knob in group]
        for combination in itertools.product(*(knob.choices for knob in group)):
            values = {**base, **dict(zip(names, combination, strict=True))}
            other = Config.of(space.template, values)
            if other != config and space.legal(values):
                yield other


def neighbours(applied: Applied, config: Config, predicted: Predictor) -> list[Config]:
    """The variations of a config, the most promising first, hopeless ones left out."""
    found = {other: predicted(applied, other) for other in variations(applied.space, config)}
    limit = _HOPELESS * predicted(applied, config)
    return sorted(
        (other for other, seconds in found.items() if seconds <= limit), key=lambda other: found[other]
    )
