#!/usr/bin/env python3
"""How much is left in a model: what measuring everything finds, alongside what is chosen without a measurement.

    python benchmarks/tune_left.py plan [--model resnet50] [--points 240] [--plan FILE]
    python benchmarks/tune_left.py build [--model resnet50] [--points 240] [--builds FOLDER]
    python benchmarks/tune_left.py measure [--model resnet50] [--points 240] [--builds FOLDER] [--seconds 600]
    python benchmarks/tune_left.py report [--model resnet50] [--markdown FILE]

The configs are, of each of the model's heaviest tasks, all that no other does better by construction (`--points 0`; the
rules are in `nondominated.py`), or a part of the space: of each knob some values, evenly spread; and
all that differ from the choice without measuring in one knob. `build` makes them; or `plan` lists them, and
`builds.py` makes them on another machine with more cores.

`measure` first runs each a few times, interleaved with the choice without measuring. Those far behind the best are kept
as slow: these are not checked, since no result of theirs could make them worth taking. The others are checked and timed
 interleaved, some hundred at a time, and all of it is kept in a database. Builds and times go on where they were
 interrupted,
and hold for the templates that made them. `report` takes the fastest of each task into the model, where they alternate
with what would have been chosen, and prints what all of them together gain there. The last two want a quiet machine.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from baselines.machine import describe
from builds import Builds, ManyRunner, Planned, write_plan
from many_timing import undisturbed
from nondominated import nondominated
from search_tasks import Source, part_candidates
from tilewright import frontend, knobs, zoo
from tilewright.db.database import Database
from tilewright.db.record import Key, Record
from tilewright.db.versions import sources
from tilewright.graph.task import Partition, Task
from tilewright.hw import host
from tilewright.link import Boundary, Linked
from tilewright.measure.building import Made
from tilewright.measure.failed import Failed
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.model_runs import ModelRuns
from tilewright.targets.options import Settings
from tilewright.targets.stages import build_plan
from tilewright.targets.target import Choices, computed
from tilewright.tune.choose import Choice, choose
from tilewright.tune.confirm_in_model import Confirmed, confirm_in_model

SHARE = 0.9  # of the model's predicted time: what the heavy tasks take together
GROUP = 400  # configs that alternate with each other
GROUP_SECONDS = 8.0
NEAR = 1.2  # times as long as the best, by a few calls: what has to be checked and timed
BEST = 1 / 50  # of the configs are ahead of the one that is taken for the best: it is not there by luck
SLOW = "slow"  # kept as the failure of what is not near
TAKEN = 6  # of each task the fastest, into the model
NUMERICS = "fast"


@dataclass(frozen=True)
class Heavy:
    """A task of the model that takes a good part of its time."""

    task: Task
    calls: int
    points: int

    @cached_property
    def work(self) -> Work:
        return Work(self.task, host(), NUMERICS)

    @cached_property
    def start(self) -> Choice:
        return choose(self.work)

    @cached_property
    def configs(self) -> list[Config]:
        whole = Candidates.of(self.work, sketches=False)
        part = part_candidates(Source(lambda: self.task), self.points) if self.points else nondominated(whole)
        start = self.start.config
        return list(dict.fromkeys((start, *whole.neighbours(start), *part.configs())))

    def known(self, database: Database, threads: int) -> dict[Config, Record]:
        """What was found of each config, with the templates of today."""
        return {
            record.config: record
            for record in database.records(Key.of(self.work, threads))
            if record.versions.sources == sources()
        }

    def record(self, config: Config, seconds: float | None, failure: str, threads: int) -> Record:
        times = () if seconds is None else (seconds,)
        return Record.of(self.work, threads, config, times=times, failure=failure)


class Model:
    def __init__(
        self,
        name: str,
        points: int,
        tasks: int | None = None,
        small: bool = False,
    ) -> None:
        self._tasks = tasks
        model = zoo.build(name, seed=0, small=small)
        imported = frontend.import_model(model, zoo.example_inputs(name, batch=1, seed=1, small=small))
        self.target = CpuTarget(host())
        self.partition: Partition = self.target.partition(imported, NUMERICS, Trace.off())
        self.all = {
            key: Heavy(task, calls, points) for key, (task, calls) in computed(self.partition).items()
        }

    @property
    def heavy(self) -> dict[str, Heavy]:
        """The heaviest first: so many, or those that take most of the time."""
        seconds = {key: each.calls * (each.start.seconds or 0.0) for key, each in self.all.items()}
        ranked = sorted(seconds, key=lambda key: -seconds[key])
        if self._tasks is None:
            left = SHARE * sum(seconds.values())
            count = sum(
                sum(seconds[key] for key in ranked[:position]) < left for position in range(len(ranked))
            )
        else:
            count = self._tasks
        return {key: self.all[key] for key in ranked[:count]}


def planned(model: Model, threads: int) -> list[Planned]:
    return [
        Planned(key, TaskJob.of(each.work, threads), tuple(each.configs)) for key, each in model.heavy.items()
    ]


def measure(model: Model, database: Database, builds: Builds, threads: int, seconds: float) -> Iterator[str]:
    deadline = time.monotonic() + seconds
    with ManyRunner(threads) as runner:
        for key, each in model.heavy.items():
            start, known = each.start.config, each.known(database, threads)
            built = builds.of(key, each.configs)
            made = {config: one for config, one in built.items() if isinstance(one, Made)}
            missing = [config for config in made if config not in known]
            job = TaskJob.of(each.work, threads)
            usual = known[start].seconds if start in known else None
            if missing and start in made and time.monotonic() < deadline:
                screened = runner.screen(job, start, {config: made[config] for config in (start, *missing)})
                missing, after = near(screened)
                database.add([each.record(config, None, kind, threads) for config, kind in after.items()])
            while missing and start in made and time.monotonic() < deadline:
                group, missing = missing[:GROUP], missing[GROUP:]
                times = runner.successive_halving(
                    job, {config: made[config] for config in (start, *group)}, GROUP_SECONDS
                )
                if start not in times:
                    break  # there is nothing to compare with
                usual = usual or undisturbed(times[start])
                # In units of the choice without measuring, which is in every group: the machine is not always as fast.
                unit = usual / undisturbed(times[start])
                found = []
                for config in dict.fromkeys((start, *group)):
                    taken = unit * undisturbed(times[config]) if config in times else None
                    failure = "" if taken else runner.trial(job, config, made[config]).failure
                    found.append(each.record(config, taken, failure, threads))
                database.add(found)
            yield (
                f"{each.task.label} x {each.calls}: of {len(each.configs)} configs {len(made)} built,"
                f" {len(missing)} of these to be timed"
            )


def near(screened: Mapping[Config, float | Failed]) -> tuple[list[Config], dict[Config, str]]:
    """Those to be checked and timed, the fastest first; and of the others how they failed."""
    ratios = {config: ratio for config, ratio in screened.items() if not isinstance(ratio, Failed)}
    ranked = sorted(ratios, key=lambda config: ratios[config])
    limit = NEAR * ratios[ranked[int(BEST * len(ranked))]] if ranked else 0.0
    failed = {config: found.kind for config, found in screened.items() if isinstance(found, Failed)}
    slow = {config: SLOW for config in ranked if ratios[config] > limit}
    return [config for config in ranked if ratios[config] <= limit], {**failed, **slow}


@dataclass(frozen=True)
class Found:
    """Of a task: how many configs ran, how many of these were near the best, and what was found in the model."""

    heavy: Heavy
    ran: int
    near: int
    inside: Confirmed

    @property
    def before(self) -> float:
        """Seconds of all calls in the model, as chosen without measuring. On processors every step is timed."""
        assert self.inside.before is not None
        return self.inside.before

    @property
    def best(self) -> float:
        assert self.inside.seconds is not None
        return self.inside.seconds


def found_in(model: Model, database: Database, threads: int) -> list[Found]:
    alternatives: dict[str, list[Choice]] = {}
    ran: dict[str, list[Record]] = {}
    for key, each in model.heavy.items():
        known = each.known(database, threads)
        ran[key] = list(known.values())
        candidates = Candidates.of(each.work)
        seconds = {config: record.seconds for config, record in known.items() if record.seconds is not None}
        seconds.pop(each.start.config, None)
        alternatives[key] = [
            each.start,
            *(
                Choice(candidates.implementation(config), config, seconds[config])
                for config in sorted(seconds, key=lambda config: seconds[config])[:TAKEN]
            ),
        ]
    rest = {key: each.start for key, each in model.all.items() if key not in alternatives}

    def linked(
        partition: Partition, choices: Choices, boundary: Boundary
    ) -> tuple[Linked, Mapping[str, str]]:
        return build_plan(Settings(model.target, NUMERICS), partition, choices, boundary)

    models = ModelRuns(model.target, [model.partition], linked, threads)
    confirmed_choices = confirm_in_model(models, rest, alternatives, deadline=math.inf)
    assert confirmed_choices is not None, "there is not enough memory"
    return [
        Found(each, len(ran[key]), sum(record.failure != SLOW for record in ran[key]), confirmed_choices[key])
        for key, each in model.heavy.items()
    ]


def markdown(name: str, found: Sequence[Found]) -> str:
    lines = [
        "| task | calls | configs run | near the best | in the model, us | best found there, us | gain |",
        "|" + " --- |" * 7,
    ]
    for each in found:
        before, best = (seconds / each.heavy.calls for seconds in (each.before, each.best))
        lines.append(
            f"| {each.heavy.task.label} | {each.heavy.calls} | {each.ran} | {each.near}"
            f" | {before * 1e6:.0f} | {best * 1e6:.0f} | {before / best:.3f}x |"
        )
    before, best = sum(each.before for each in found), sum(each.best for each in found)
    complete = sum(each.ran for each in found)
    lines += [
        "",
        f"{name}: of {complete} configs of the {len(found)} heaviest tasks, the best together gain"
        f" {before / best - 1:.1%} on their {before * 1e3:.2f} ms.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    options = _options()
    model = Model(options.model, options.points, options.tasks, options.small)
    threads = options.threads or knobs.get("threads")
    builds = Builds(options.builds)
    if options.command == "plan":
        write_plan(planned(model, threads), options.plan)
        return 0
    if options.command == "build":
        with ManyRunner(threads) as runner:
            builds.complete(planned(model, threads), runner)
        return 0
    with Database.open(options.db) as database:
        if options.command == "measure":
            for line in measure(model, database, builds, threads, options.seconds):
                print(line, flush=True)
            return 0
        text = markdown(options.model, found_in(model, database, threads))
    print(text)
    if options.markdown:
        described = describe()
        where = f"{described['cpu']}, {described['cores']} cores, {described['date']}"
        head = f"# What is left in a model\n\n{where}. By `python benchmarks/tune_left.py`.\n\n"
        options.markdown.write_text(head + text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("plan", "build", "measure", "report"))
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--points", type=int, default=240, help="configs of each task, about; 0: all")
    parser.add_argument("--builds", type=Path, default=Path("tune_left_builds"))
    parser.add_argument("--plan", type=Path, default=Path("tune_left.plan"))
    parser.add_argument("--tasks", type=int, default=None, help="the heaviest; those of 90%% of the time")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--db", type=Path, default=Path("tune_left.sqlite"))
    parser.add_argument("--markdown", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
