#!/usr/bin/env python3
"""Object code of configs in files: made in one go or on another machine, and timed when this one is quiet.

    python benchmarks/builds.py PLAN --builds FOLDER [--builders 16]

builds what a plan lists, which another benchmark wrote, for the machine that it names. It may be ended at any moment
and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed
sys.path.append(str(Path(__file__).resolve().parent))  # if this is imported as `benchmarks.builds`

import msgspec

from many_timing import QuickTiming, SuccessiveHalving
from tilewright.codegen.generator import generator
from tilewright.db.versions import sources
from tilewright.hw import host
from tilewright.measure.building import Made
from tilewright.measure.failed import Failed
from tilewright.measure.jobs import Job
from tilewright.measure.runner import Runner, WhenBuilt
from tilewright.measure.single import Built
from tilewright.measure.timing import Raced
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config
from tilewright.support.fingerprint import fingerprint
from tilewright.support.process import Dead

SAID_SECONDS = 10.0  # between two lines of progress
_LENGTH = struct.Struct("<Q")


class Kept(msgspec.Struct, frozen=True):
    """One line of a file, so to speak: a config, and what came of building it."""

    config: Config
    made: Made | Failed


class Planned(msgspec.Struct, frozen=True):
    """A task, and the configs of it that are to be built."""

    name: str
    job: TaskJob
    configs: tuple[Config, ...]


class ManyRunner(Runner):
    """Builds and times thousands of configs of many tasks."""

    def __init__(self, threads: int, *, builders: int | None = None) -> None:
        super().__init__(threads, builders=builders, timing="many_timing:serve")

    def __enter__(self) -> ManyRunner:
        return self

    def build_all(self, wanted: Iterable[tuple[Job, Config]], done: WhenBuilt) -> None:
        """Build configs of any tasks, in about this order, and pass each to `done` when it is ready."""
        orders = list(self._build_orders(wanted, done))
        self._queue.extend(orders)
        self._work_off(lambda: not self._queue and not self._busy, None)

    def successive_halving(
        self, job: Job, made: Mapping[Config, Made], seconds: float
    ) -> dict[Config, list[float]]:
        """Time many configs, whoever built them, by successive halving for about this long: all at first, then those
        near the best. A config that fails has no times."""
        self.build(job, [])  # its validation
        return self._interleaved(job, made, lambda numbers: SuccessiveHalving(numbers, seconds))

    def screen(self, job: Job, start: Config, made: Mapping[Config, Made]) -> dict[Config, float | Failed]:
        """The time of each config by a few calls, relative to `start`, which is validated. The others are not, so a
        fast one may be wrong. The process that ran them is not reused."""
        self.build(job, [])  # its validation
        found: dict[Config, float | Failed] = {}
        compared_to: int | None = None
        for config, each in made.items():
            try:
                if compared_to is None:
                    checked = self._check(job, made[start].built, (), None, None)
                    if isinstance(checked, Failed):
                        return {start: checked}
                    compared_to = self._numbers
                assert isinstance(each.built, Built)
                reply = self._ask(QuickTiming(each.built, compared_to), None, None)
                assert isinstance(reply, Raced | Failed)
                found[config] = reply.times[0][0] if isinstance(reply, Raced) else reply
            except Dead as death:
                found[config], compared_to = Failed.of(death), None
        self._end_timer()
        return found


class Builds:
    """A file for each task and for each version of LLVM and of our sources: what others have built is not found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._version = fingerprint(sources(), generator("cpu").toolchain(host()))

    def of(self, name: str, configs: Sequence[Config]) -> dict[Config, Made | Failed]:
        """What is there of these configs. The end of a file that was cut off is as if it were not there."""
        wanted = set(configs)
        return {kept.config: kept.made for kept in self._read(name)[0] if kept.config in wanted}

    def complete(self, plan: Sequence[Planned], runner: ManyRunner) -> None:
        """Build what is not there yet, the first task first. Each is kept as soon as it is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = {each.job: each.name for each in plan}
        missing: list[tuple[TaskJob, Config]] = []
        for each in plan:
            kept, end = self._read(each.name)
            if self._path(each.name).exists():
                with self._path(each.name).open("r+b") as file:
                    file.truncate(end)  # what is cut off would spoil what comes behind it
            there = {one.config for one in kept}
            missing += [(each.job, config) for config in each.configs if config not in there]
        count, left, said = sum(len(each.configs) for each in plan), len(missing), time.monotonic()

        def keep(job: Job, config: Config, made: Made | Failed) -> None:
            nonlocal left, said
            assert isinstance(job, TaskJob)
            encoded = msgspec.msgpack.encode(Kept(config, made))
            with self._path(names[job]).open("ab") as file:
                file.write(_LENGTH.pack(len(encoded)) + encoded)
            left -= 1
            if left == 0 or time.monotonic() - said > SAID_SECONDS:
                said = time.monotonic()
                print(f"{left} of {count} configs to build", flush=True)

        runner.build_all(missing, keep)

    def _read(self, name: str) -> tuple[list[Kept], int]:
        """All that is whole, and where it ends."""
        path = self._path(name)
        data = memoryview(path.read_bytes() if path.exists() else b"")
        found: list[Kept] = []
        begin = 0
        while begin + _LENGTH.size <= len(data):
            (length,) = _LENGTH.unpack_from(data, begin)
            end = begin + _LENGTH.size + length
            if end > len(data):
                break
            found.append(msgspec.msgpack.decode(data[begin + _LENGTH.size : end], type=Kept))
            begin = end
        return found, begin

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.{self._version}.builds"


def write_plan(plan: Sequence[Planned], path: Path) -> None:
    path.write_bytes(msgspec.msgpack.encode(plan))


def read_plan(path: Path) -> list[Planned]:
    return msgspec.msgpack.decode(path.read_bytes(), type=list[Planned])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--builds", type=Path, required=True)
    parser.add_argument("--builders", type=int, default=None, help="processes; as many as there are cores")
    options = parser.parse_args()
    plan = read_plan(options.plan)
    with ManyRunner(plan[0].job.threads, builders=options.builders) as runner:
        Builds(options.builds).complete(plan, runner)
    return 0


if __name__ == "__main__":
    sys.exit(main())
