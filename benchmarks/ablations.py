#!/usr/bin/env python3
"""What the parts of the tuner are worth: each left out in turn, by the tuner's own loop.

    python benchmarks/ablations.py --target cpu --markdown benchmarks/results/ablations_cpu.md
    python benchmarks/ablations.py --target cuda --markdown benchmarks/results/ablations_cuda.md
    python benchmarks/ablations.py --only space --tasks matmul,conv_3x3 --trials 24 --seconds 60      # does it work?

space       the whole space; without sketches; without templates (on a GPU: nor library calls, nor decompositions)
cost        the analytical model alone; boosted trees that begin with nothing; both, which is the default
schedule    which task of a model the next round goes to: every task in turn, the heaviest, the steepest gradient
steps       tensor instructions, dynamic partition, sketches, task scheduler, register mapping: each added in turn

The tasks are the heaviest of their kind in models of the zoo. Each run begins with an empty database and cache and has
as many trials as the others. Then the choices of a task's runs are timed interleaved, and a run's time after each round
is in units of that: runs at different moments are not compared by the clock. A model's time is the sum over its tasks,
each as often as it is called.

Every finished run is a line of --runs FILE, and is not run again: a command that was interrupted, or whose --seconds
are spent, goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from ablation_steps import STEPS, Step, Stepped, steps_section, subject_of
from ablation_tables import ALLOCATIONS, BEFORE, COSTS, MODELS, SPACES, Raced, Round, Run, Runs, document
from baselines.machine import describe
from tilewright import frontend, zoo
from tilewright.cost.boosted import Boosted
from tilewright.cost.models import register
from tilewright.db.database import Database
from tilewright.errors import SpaceError
from tilewright.graph.task import Task
from tilewright.space.candidates import Candidates, Configs
from tilewright.space.template import Work
from tilewright.support.trace import Event, Trace
from tilewright.targets.resolve import resolve_target
from tilewright.targets.target import Cutting, Target, together
from tilewright.tune.choose import Choice, best_among, choose
from tilewright.tune.effort import Tuning
from tilewright.tune.tunable import Tunable, TunableTask
from tilewright.tune.tuner import tune

FROM_NOTHING = "boosted from nothing"
RACE_SECONDS = 0.3  # of each choice of a task
BATCHES = {"cpu": 1, "cuda": 8}

# -- the tasks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A task of a model: of those that are such, the one with fewest operators, and of these the heaviest."""

    model: str
    is_such: Callable[[Task], bool]


def convolutions(task: Task) -> list[tuple[int, int]]:
    """(window, groups) of each."""
    found = []
    for node in task.graph.nodes():
        if node.op == "conv":
            window = node.inputs[1].type.shape[0 if node.attrs["layout"] == "channels_last" else -1]
            found.append((window, node.attrs["groups"]))
    return found


def has(*ops: str) -> Callable[[Task], bool]:
    return lambda task: any(node.op in ops for node in task.graph.nodes())


def depthwise(task: Task) -> bool:
    return any(groups > 1 for _, groups in convolutions(task))


TASKS = {
    "matmul": Wanted("bert-base", has("matmul", "linear")),
    "attention": Wanted("bert-base", has("attention")),
    "layer_norm": Wanted("bert-base", has("layer_norm")),
    "conv_3x3": Wanted("resnet18", lambda task: convolutions(task) == [(3, 1)]),
    "conv_1x1": Wanted("mobilenetv2", lambda task: convolutions(task) == [(1, 1)]),
    "depthwise": Wanted("mobilenetv2", depthwise),
}


@dataclass
class Models:
    """The tasks of the zoo's models on a target, each model partitioned once."""

    target: Target
    numerics: str = "fast"
    known: dict[tuple[str, str], dict[str, tuple[Work, int]]] = field(default_factory=dict)

    def works(self, name: str, kind_of_partition: str = "dynamic") -> dict[str, tuple[Work, int]]:
        """By key, with the number of calls."""
        asked = name, kind_of_partition
        if asked not in self.known:
            say(f"importing {name}")
            kind = self.target.machine.kind
            model = zoo.build(name, seed=0)
            inputs = zoo.example_inputs(name, batch=BATCHES[kind], seed=1)
            if kind == "cuda":
                model = model.half()
                inputs = tuple(x.half() if x.is_floating_point() else x for x in inputs)
            imported = frontend.import_model(model, inputs)
            partition = self.target.partition(
                imported, self.numerics, Trace.off(), cutting=Cutting(kind_of_partition, measured=False)
            )
            self.known[asked] = {
                key: (Work(task, self.target.machine, self.numerics), count)
                for key, (task, count) in together([partition]).items()
            }
        return self.known[asked]

    def task(self, wanted: Wanted) -> Work:
        such = [found for found in self.works(wanted.model).values() if wanted.is_such(found[0].task)]

        def weight(found: tuple[Work, int]) -> tuple[int, float]:
            work, calls = found
            nodes = sum(not node.is_input for node in work.task.graph.nodes())
            return nodes, -calls * float(work.task.flops or work.task.bytes)

        return min(such, key=weight)[0]


# -- the runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restricted(TunableTask):
    """A task with a part of its space."""

    templates: bool = True
    sketches: bool = True

    @cached_property
    def candidates(self) -> Candidates:
        return Candidates.of(self.work, self.templates, self.sketches)

    @cached_property
    def start(self) -> Choice:
        """As a compilation would choose; where it trusts none, as none is of its sketches, what is predicted best."""
        with contextlib.suppress(SpaceError):
            return choose(self.work, sketches=self.sketches, templates=self.templates)
        best = best_among(self.work, self.candidates.applied)
        if best is None:
            raise SpaceError(f"nothing of this space has a predicted time for {self.label}")
        seconds, config, _ = best
        return Choice(self.candidates.implementation(config), config, seconds)


def boosted_from_nothing(candidates: Configs, threads: int, seed: int, experience: Any) -> Boosted:
    return Boosted(candidates, threads, prior=False, seed=seed, warm=experience)


VARIANTS: dict[str, tuple[dict[str, bool], dict[str, str]]] = {
    "full": ({}, {}),
    "without sketches": ({"sketches": False}, {}),
    "without templates": ({"templates": False}, {}),
    "analytical only": ({}, {"cost_model": "analytical"}),
    FROM_NOTHING: ({}, {"cost_model": FROM_NOTHING}),
}


@dataclass
class Watch:
    """A listener of the trace: every round."""

    clock: Callable[[], float] = time.monotonic
    rounds: list[Round] = field(default_factory=list)
    ended: str = ""
    failures: Counter[str] = field(default_factory=Counter)
    _begun: float = 0.0

    def __call__(self, kind: str, event: Event) -> None:
        notes = event.notes
        if event.name == "tune.begin":
            self._begun = self.clock()
        elif event.name == "tune.end":
            self.ended = notes["why"]
        elif event.name == "tune.round" and kind == "end" and "best" in notes:
            trials = notes["trials"] + (self.rounds[-1].trials if self.rounds else 0)
            seconds = self.clock() - self._begun
            self.rounds.append(Round(notes["task"], trials, seconds, notes["best"], notes["before"]))
            self.failures.update(notes["failures"])


@contextlib.contextmanager
def nothing_kept() -> Iterator[Path]:
    """A folder for the database, and a cache, in which nothing is: what one run has built costs the next as much."""
    before = os.environ.get("TILEWRIGHT_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ["TILEWRIGHT_CACHE_DIR"]
            else:
                os.environ["TILEWRIGHT_CACHE_DIR"] = before


def trials_until_found(
    tuning: Tuning, tunables: Mapping[str, tuple[Tunable, int]], choices: Mapping[str, Choice]
) -> dict[str, int]:
    """Of each task, its trials up to that of its choice; none where that was not measured."""
    found = {}
    with Database.open(tuning.db) as database:
        for key, (tunable, _) in tunables.items():
            configs = [record.config for record in database.records(tunable.key)]
            if choices[key].config in configs:
                found[key] = configs.index(choices[key].config) + 1
    return found


@dataclass
class Bench:
    """Runs what the file does not have yet, until the time is spent."""

    target: Target
    runs: Runs
    seconds: float
    seed: int = 0
    threads: int | None = None
    search: str = "guided"
    runner: Callable[[int], Any] | None = None
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def tuned(
        self,
        subject: str,
        variant: str,
        tunables: Callable[[], Mapping[str, tuple[Tunable, int]]],
        trials: int,
        **options: str,
    ) -> Run | None:
        """One run; None where the time was up before its end."""
        known = self.runs.get(subject, variant, self.seed, trials)
        if known is not None:
            return known
        if self.left <= 0:
            return None
        watch, threads = Watch(), self.target.threads(self.threads)
        begun = time.monotonic()
        try:
            some = tunables()
            with nothing_kept() as folder:
                tuning = Tuning(
                    "quick",
                    self.left,
                    self.seed,
                    self.search,
                    folder / "runs.sqlite",
                    trials=trials,
                    **options,
                )
                choices = tune(
                    some,
                    tuning,
                    threads=threads,
                    trace=Trace(listener=watch),
                    runner=self.runner or self.target.runner,
                    timed=frozenset(some),
                )
                found = trials_until_found(tuning, some, choices)
        except SpaceError:
            some, choices, found, watch.ended = {}, {}, {}, "nothing computes it"
        if watch.ended == "interrupted":
            raise KeyboardInterrupt
        done = watch.rounds[-1].trials if watch.rounds else 0
        failed = "".join(f", {count} {kind}" for kind, count in watch.failures.items())
        say(
            f"{subject}, {variant}: {done} trials{failed}, {time.monotonic() - begun:.0f} s ({watch.ended});"
            f" {max(0.0, self.left):.0f} s left"
        )
        if watch.ended == "budget":  # less than the others have had
            return None
        run = Run(
            subject,
            variant,
            self.seed,
            trials,
            watch.ended,
            tuple(watch.rounds),
            {key: count for key, (_, count) in some.items()},
            {key: tunable.start.config for key, (tunable, _) in some.items()},
            {key: choice.config for key, choice in choices.items()},
            found,
        )
        self.runs.add(run)
        return run

    def task(self, name: str, work: Work, variants: Sequence[str], trials: int) -> None:
        """A run for each variant, and a race of what they have chosen."""
        threads = self.target.threads(self.threads)
        found = {}
        for variant in variants:
            restricted, options = VARIANTS[variant]
            run = self.tuned(name, variant, partial(_alone, work, threads, restricted), trials, **options)
            if run is None:
                return
            found[variant] = run
        self.race(name, {work.task.key: work}, found, trials)

    def race(self, subject: str, works: Mapping[str, Work], runs: Mapping[str, Run], trials: int) -> None:
        """What each task takes as each run has chosen, and as would be chosen without measuring."""
        if self.runs.raced(subject, self.seed, trials, list(runs)) is not None or self.left <= 0:
            return
        chosen = {variant: run.chosen for variant, run in runs.items()}
        chosen |= {BEFORE: next(iter(runs.values())).start}
        threads = self.target.threads(self.threads)
        seconds: dict[str, dict[str, float]] = {variant: {} for variant in chosen}
        with nothing_kept(), (self.runner or self.target.runner)(threads) as runner:
            for key, work in works.items():
                configs = list(dict.fromkeys(some[key] for some in chosen.values() if key in some))
                times = runner.race(TunableTask(work, threads).job, configs, RACE_SECONDS * len(configs))
                medians = {
                    config: statistics.median(each)
                    for config, each in zip(configs, times, strict=True)
                    if each
                }
                for variant, some in chosen.items():
                    if some.get(key) in medians:
                        seconds[variant][key] = medians[some[key]]
        self.runs.add(Raced(subject, self.seed, trials, tuple(runs), seconds))

    def model(self, name: str, works: Mapping[str, tuple[Work, int]], trials: int) -> None:
        """A run for each allocation, with so many trials for each task on average, and a race."""
        threads = self.target.threads(self.threads)

        def tunables() -> dict[str, tuple[Tunable, int]]:
            return {key: (TunableTask(work, threads), count) for key, (work, count) in works.items()}

        found = {}
        for allocation in ALLOCATIONS:
            run = self.tuned(name, allocation, tunables, trials * len(works), allocation=allocation)
            if run is None:
                return
            found[allocation] = run
        self.race(name, {key: work for key, (work, _) in works.items()}, found, trials * len(works))

    def steps(self, name: str, models: Models, trials: int) -> None:
        """A run for each step, with so many trials for each task on average, and a race."""
        threads = self.target.threads(self.threads)
        cuts = {kind: models.works(name, kind) for kind in dict.fromkeys(step.partition for step in STEPS)}
        most = trials * max(map(len, cuts.values()))
        found = {}
        for step in STEPS:

            def tunables(step: Step = step) -> dict[str, tuple[Tunable, int]]:
                works = cuts[step.partition].items()
                return {key: (Stepped(work, threads, step=step), count) for key, (work, count) in works}

            run = self.tuned(subject_of(name), step.name, tunables, most, allocation=step.allocation)
            if run is None:
                return
            found[step.name] = run
        every = {key: work for works in cuts.values() for key, (work, _) in works.items()}
        self.race(subject_of(name), every, found, most)


def _alone(work: Work, threads: int, restricted: Mapping[str, Any]) -> dict[str, tuple[Tunable, int]]:
    """SpaceError where nothing of this space computes it."""
    tunable = Restricted(work, threads, **restricted)
    if not tunable.candidates.is_legal(tunable.start.config):
        raise SpaceError(f"{tunable.start.config} is not in the space")
    return {work.task.key: (tunable, 1)}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    register(FROM_NOTHING, boosted_from_nothing)
    target = resolve_target(options.target)
    runs = Runs.open(options.runs)
    bench = Bench(target, runs, options.seconds, options.seed, options.threads)
    models = Models(target)
    variants = [
        *dict.fromkeys(
            [
                *(SPACES if "space" in options.only else ()),
                *(COSTS.values() if "cost" in options.only else ()),
            ]
        )
    ]
    try:
        for name in options.tasks if variants else ():
            if bench.left > 0:
                bench.task(name, models.task(TASKS[name]), variants, options.trials)
        for name in options.models if "schedule" in options.only else ():
            if bench.left > 0:
                bench.model(name, models.works(name), options.model_trials)
        for name in options.models if "steps" in options.only else ():
            if bench.left > 0:
                bench.steps(name, models, options.model_trials)
    except KeyboardInterrupt:
        say("interrupted; the same command with the same --runs goes on from here")
    machine = describe() | {"target": target.machine.describe()}
    text = document(runs, machine, options)
    if "steps" in options.only:
        text += steps_section(runs, options.models, options.seed, options.model_trials)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    return 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            wanted = text.split(",")
            for name in wanted:
                if name not in known:
                    raise argparse.ArgumentTypeError(f"must be among {', '.join(known)}, got {name!r}")
            return wanted

        return parse

    add = parser.add_argument
    add("--target", choices=tuple(BATCHES), default="cpu")
    add(
        "--only",
        type=names(("space", "cost", "schedule", "steps")),
        default=["space", "cost", "schedule", "steps"],
    )
    add("--tasks", type=names(list(TASKS)), default=list(TASKS))
    add("--models", type=names(zoo.names()), default=list(MODELS))
    add("--trials", type=int, default=24, help="of each run of a task")
    add(
        "--model-trials", type=int, default=8, help="of each run of a model, for each of its tasks on average"
    )
    add("--seconds", type=float, default=900.0, help="after which no run begins; the next command goes on")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=None)
    add("--runs", type=Path, default=None, help="a file of finished runs, which are not run again")
    add("--markdown", type=Path, default=None)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
