#!/usr/bin/env python3
"""How much is left in a model: what measuring everything finds, beside what is chosen without a measurement.

    python benchmarks/tune_left.py build [--model resnet50] [--points 240] [--builds FOLDER] [--machine FILE]
    python benchmarks/tune_left.py measure [--model resnet50] [--points 240] [--seconds 600]
    python benchmarks/tune_left.py report [--model resnet50] [--markdown FILE]

The configs are, of each of the model's heaviest tasks, all that no other does better by construction (`--points 0`), or
a part of the space: of each knob some values, evenly spread; and all that differ from the choice without measuring in
one knob. `build` makes them, on this machine or, for the one that `--machine` describes, on another with more cores.
`measure` times them in turns, some hundred at a time beside the choice without measuring, and keeps all of it in a
database. Both go on where they were interrupted. `report` takes the fastest of each task into the model, where they
take turns with what would have been chosen, and prints what all of them together gain there. The last two want a quiet
machine.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

import msgspec

from builds import Builds
from peers.machine import describe
from search_tasks import Source, part_candidates
from tilewright import frontend, knobs, zoo
from tilewright.db.database import Database
from tilewright.db.record import Key, Record
from tilewright.graph.task import Partition, Task
from tilewright.hw import CpuMachine, host
from tilewright.measure.building import Made
from tilewright.measure.runner import Runner
from tilewright.measure.timing import undisturbed
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.promising import promising
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.target import computed
from tilewright.tune.choose import Choice, choose
from tilewright.tune.rehearse import Verdict, rehearse

SHARE = 0.9  # of the model's predicted time: what the heavy tasks take together
GROUP = 192  # configs that take turns with each other
GROUP_SECONDS = 8.0
TAKEN = 6  # of each task the fastest, into the model
NUMERICS = "fast"


@dataclass(frozen=True)
class Heavy:
    """A task of the model that takes a good part of its time."""

    task: Task
    calls: int
    points: int
    machine: CpuMachine

    @cached_property
    def work(self) -> Work:
        return Work(self.task, self.machine, NUMERICS)

    @cached_property
    def start(self) -> Choice:
        return choose(self.work)

    @cached_property
    def configs(self) -> list[Config]:
        whole = Candidates.of(self.work, sketches=False)
        part = (
            part_candidates(Source(lambda: self.task), self.points, self.machine)
            if self.points
            else promising(whole)
        )
        start = self.start.config
        return list(dict.fromkeys((start, *whole.neighbours(start), *part.configs())))

    def known(self, database: Database, threads: int) -> dict[Config, float]:
        """Seconds of what was measured; infinite where that failed."""
        found: dict[Config, float] = {}
        for record in database.records(Key.of(self.work, threads)):
            seconds = math.inf if record.seconds is None else record.seconds
            found[record.config] = min(seconds, found.get(record.config, math.inf))
        return found

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
        machine: CpuMachine | None = None,
    ) -> None:
        self._tasks = tasks
        machine = machine or host()
        model = zoo.build(name, seed=0, small=small)
        imported = frontend.import_model(model, zoo.example_inputs(name, batch=1, seed=1, small=small))
        self.target = CpuTarget(machine)
        self.partition: Partition = self.target.partitioned(imported, NUMERICS, Trace.off())
        self.all = {
            key: Heavy(task, calls, points, machine)
            for key, (task, calls) in computed(self.partition).items()
        }

    @property
    def heavy(self) -> dict[str, Heavy]:
        """The heaviest first: so many, or those that take most of the time."""
        seconds = {key: each.calls * (each.start.predicted or 0.0) for key, each in self.all.items()}
        ranked = sorted(seconds, key=lambda key: -seconds[key])
        if self._tasks is None:
            left = SHARE * sum(seconds.values())
            count = sum(sum(seconds[key] for key in ranked[:place]) < left for place in range(len(ranked)))
        else:
            count = self._tasks
        return {key: self.all[key] for key in ranked[:count]}


def build(model: Model, builds: Builds, threads: int) -> Iterator[str]:
    with Runner(threads) as runner:
        for key, each in model.heavy.items():
            yield from builds.complete(key, TaskJob.of(each.work, threads), each.configs, runner)


def measure(model: Model, database: Database, builds: Builds, threads: int, seconds: float) -> Iterator[str]:
    deadline = time.monotonic() + seconds
    with Runner(threads) as runner:
        for key, each in model.heavy.items():
            start, known = each.start.config, each.known(database, threads)
            built = builds.of(key, each.configs)
            made = {config: one for config, one in built.items() if isinstance(one, Made)}
            missing = [config for config in made if config not in known]
            job = TaskJob.of(each.work, threads)
            while missing and start in made and time.monotonic() < deadline:
                group, missing = missing[:GROUP], missing[GROUP:]
                times = runner.heats(job, {config: made[config] for config in (start, *group)}, GROUP_SECONDS)
                if start not in times:
                    break  # there is nothing to compare with
                usual = undisturbed(times[start])
                known.setdefault(start, usual)
                # In units of the choice without measuring, which is in every group: the machine is not always as fast.
                unit = known[start] / usual
                for config in dict.fromkeys((start, *group)):
                    taken = unit * undisturbed(times[config]) if config in times else None
                    failure = "" if taken else runner.trial(job, config, made[config]).failure
                    database.add([each.record(config, taken, failure, threads)])
            yield (
                f"{each.task.label} x {each.calls}: of {len(each.configs)} configs {len(made)} built,"
                f" {len(missing)} of these to be timed"
            )


@dataclass(frozen=True)
class Found:
    """Of a task: how many configs were measured, and what was found in the model."""

    heavy: Heavy
    measured: int
    inside: Verdict


def found_in(model: Model, database: Database, threads: int) -> list[Found]:
    contenders: dict[str, list[Choice]] = {}
    measured: dict[str, int] = {}
    for key, each in model.heavy.items():
        known = each.known(database, threads)
        measured[key] = len(known)
        start = each.start.config
        others = sorted((config for config in known if config != start), key=lambda config: known[config])
        candidates = Candidates.of(each.work)
        usable = [
            c for c in others if known[c] < math.inf and candidates.is_legal(c)
        ]  # of records of any age
        taken = usable[:TAKEN]
        contenders[key] = [
            each.start,
            *(Choice(candidates.program(config), config, known[config]) for config in taken),
        ]
    rest = {key: each.start for key, each in model.all.items() if key not in contenders}
    models = model.target.staged([model.partition], NUMERICS, threads)
    verdicts = rehearse(models, rest, contenders, deadline=math.inf)
    assert verdicts is not None, "there is not enough memory"
    return [Found(each, measured[key], verdicts[key]) for key, each in model.heavy.items()]


def markdown(name: str, found: Sequence[Found]) -> str:
    lines = [
        "| task | calls | configs measured | in the model, us | best found there, us | gain |",
        "|" + " --- |" * 6,
    ]
    for each in found:
        before, best = (seconds / each.heavy.calls for seconds in (each.inside.before, each.inside.seconds))
        lines.append(
            f"| {each.heavy.task.label} | {each.heavy.calls} | {each.measured}"
            f" | {before * 1e6:.0f} | {best * 1e6:.0f} | {before / best:.3f}x |"
        )
    before, best = sum(each.inside.before for each in found), sum(each.inside.seconds for each in found)
    complete = sum(each.measured for each in found)
    lines += [
        "",
        f"{name}: of {complete} configs of the {len(found)} heaviest tasks, the best together gain"
        f" {before / best - 1:.1%} on their {before * 1e3:.2f} ms.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    options = _options()
    machine = msgspec.json.decode(options.machine.read_bytes(), type=CpuMachine) if options.machine else None
    model = Model(options.model, options.points, options.tasks, options.small, machine)
    threads = options.threads or knobs.get("threads")
    builds = Builds(options.builds)
    if options.command == "build":
        for line in build(model, builds, threads):
            print(line, flush=True)
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
    parser.add_argument("command", choices=("build", "measure", "report"))
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--points", type=int, default=240, help="configs of each task, about; 0: all")
    parser.add_argument("--builds", type=Path, default=Path("tune_left_builds"))
    parser.add_argument("--machine", type=Path, default=None, help="what to build for, as JSON")
    parser.add_argument("--tasks", type=int, default=None, help="the heaviest; those of 90% of the time")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--db", type=Path, default=Path("tune_left.sqlite"))
    parser.add_argument("--markdown", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
