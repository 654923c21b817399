"""Collect a data set: configs of tasks measured on the machine that is here, appended to a file of records.

On a processor, the runner of the tuner builds, validates and times each config. On a GPU, quick trials time it without
validation (`quick.py`). A config that fails is a record too. What the file has is not measured again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright import knobs
from tilewright.dataset.quick import QuickTimes, quick_trials
from tilewright.dataset.sample import sample
from tilewright.dataset.store import Writer, read
from tilewright.dataset.tasks import TaskSource
from tilewright.db.record import Key, Record
from tilewright.hw import CpuMachine, Machine
from tilewright.measure.failed import Failed
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work

_TOGETHER = 8  # configs that are measured before the file is written


@dataclass(frozen=True)
class CollectedRecords:
    """The result of a collection: new records, how many of them failed, the configs that were left for the next one,
    and the tasks whose configs could not be chosen (theirs are left too)."""

    added: int
    failed: int
    left: int
    unsampled: int = 0


Say = Callable[[str], None]


def collect(
    path: Path,
    sources: Sequence[TaskSource],
    machine: Machine,
    *,
    configs: int,
    seconds: float,
    threads: int = 1,
    seed: int = 0,
    say: Say = lambda line: None,
) -> CollectedRecords:
    """Measure `configs` configs of each task into the file, for about this many seconds."""
    records = read(path).records if path.exists() else ()
    known = {(record.key, record.config) for record in records}
    if isinstance(machine, CpuMachine):
        return _on_processor(path, sources, machine, configs, seconds, threads, seed, known, say)
    return _on_gpu(path, sources, machine, configs, seconds, seed, known, say)


def _on_processor(
    path: Path,
    sources: Sequence[TaskSource],
    machine: CpuMachine,
    count: int,
    seconds: float,
    threads: int,
    seed: int,
    known: set[tuple[Key, Config]],
    say: Say,
) -> CollectedRecords:
    writer, deadline = Writer(path), time.monotonic() + seconds
    added, failed, left = 0, 0, 0
    with Runner(threads) as runner:
        for source in sources:
            if time.monotonic() >= deadline:
                left += count
                continue
            work = Work(source.make(), machine, source.numerics)
            key, job = Key.of(work, threads), TaskJob.of(work, threads)
            if sum(other == key for other, _ in known) >= count:
                continue
            chosen = sample(Candidates.of(work), count, seed)
            wanted = [config for config in chosen if (key, config) not in known]
            done = 0
            for begin in range(0, len(wanted), _TOGETHER):
                if time.monotonic() >= deadline:
                    break
                some = wanted[begin : begin + _TOGETHER]
                found = runner.measure(job, some, deadline=deadline)
                writer.add(
                    Record.of(
                        *(work, threads, each.config),
                        times=each.times,
                        error=each.error,
                        failure=each.failure,
                        message=each.message or f"reference kernel: {runner.reference:.4e} s",
                        build_seconds=each.build_seconds,
                    )
                    for each in found
                )
                done += len(found)
                failed += sum(bool(each.failure) for each in found)
            added += done
            left += len(wanted) - done
            if wanted:
                say(f"{source.name}: {done} of {len(wanted)}")
    return CollectedRecords(added, failed, left)


def _on_gpu(
    path: Path,
    sources: Sequence[TaskSource],
    machine: Machine,
    count: int,
    seconds: float,
    seed: int,
    known: set[tuple[Key, Config]],
    say: Say,
) -> CollectedRecords:
    writer, begin = Writer(path), time.monotonic()
    works, names = {}, {}
    for source in sources:
        work = Work(source.make(), machine, source.numerics)
        works[TaskJob.of(work, 0)] = work, Key.of(work, 0)
        names[TaskJob.of(work, 0)] = source.name
    counts = {"added": 0, "failed": 0, "unsampled": 0}

    def is_known(job: TaskJob, config: Config) -> bool:
        return (works[job][1], config) in known

    def found(job: TaskJob, config: Config, reply: QuickTimes | Failed) -> None:
        work = works[job][0]
        if isinstance(reply, Failed):
            record = Record.of(work, 0, config, failure=reply.kind, message=reply.message)
            counts["failed"] += 1
        else:
            record = Record.of(work, 0, config, times=reply.times, build_seconds=reply.build_seconds)
        writer.add([record])
        counts["added"] += 1
        if counts["added"] % 500 == 0:
            say(f"{counts['added']} configs in {time.monotonic() - begin:.0f} s, {counts['failed']} failed")

    def unsampled(job: TaskJob, failure: Failed) -> None:
        counts["unsampled"] += 1
        say(f"{names[job]}: no configs were chosen ({failure.kind}): {failure.message}")

    left = quick_trials(
        *(list(works), count, is_known, found, unsampled),
        seconds=seconds,
        processes=knobs.usable_cores(),
        seed=seed,
    )
    return CollectedRecords(counts["added"], counts["failed"], left, counts["unsampled"])
