"""Records as tables to learn from: one for each task, machine and number of threads, with tokens and log times.

A record of a config that is no longer legal, of a task or machine that this version does not know, or with times that
are not positive numbers is left out and counted. A failure stays in, without a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from tilewright.cost.analytical import Analytical
from tilewright.cost.tokens import Tokeniser, Tokens, category, stacked
from tilewright.dataset.stats import days_of
from tilewright.db.record import Key, Record
from tilewright.errors import TilewrightError
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.support.process import safe_path

_UNDISTURBED = 0.1  # share of the calls of a config
_MIN_TIMES = 4  # configs with a time that a table must have


@dataclass(frozen=True)
class Table:
    """The candidates of one task on one machine. `seconds` is NaN for configs that failed."""

    name: str
    family: str
    kind: str  # of the machine
    machine: str  # its key and the threads
    flops: float
    job: TaskJob  # the task, as plain data
    configs: tuple[Config, ...]
    tokens: Tokens
    base: np.ndarray  # log of the analytical prediction
    seconds: np.ndarray
    builds: np.ndarray  # seconds that it took to build each; 0 where unknown
    days: tuple[str, str] = ("", "")  # of its oldest and its newest record, if known

    @property
    def known(self) -> np.ndarray:
        return np.isfinite(self.seconds)

    @property
    def residuals(self) -> np.ndarray:
        """The logarithm of measured over predicted seconds; NaN for configs that failed."""
        return np.asarray(np.log(self.seconds) - self.base)


def label(times: Sequence[float]) -> float:
    """The seconds to learn from, of the times of one record: those of an undisturbed call. On a processor with other
    programs the median is up to twice as long."""
    return float(np.quantile(times, _UNDISTURBED))


@dataclass(frozen=True)
class Left:
    """Records that were left out, by reason."""

    counts: tuple[tuple[str, int], ...]


def tables_of(
    records: Iterable[Record], *, statements: bool = False, processes: int = 1
) -> tuple[list[Table], Left]:
    """The tables of all tasks with enough configs, sorted by name."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(record.key, []).append(record)
    jobs = [(some, statements) for some in groups.values()]
    if processes > 1 and len(jobs) > 1:
        with safe_path(), ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            made = list(pool.map(_made, jobs, chunksize=1))
    else:
        made = [_made(job) for job in jobs]
    left: Counter[str] = Counter()
    for _, counts in made:
        left.update(counts)
    tables = [table for table, _ in made if table is not None]
    return sorted(tables, key=lambda table: (table.machine, table.name)), Left(tuple(sorted(left.items())))


def _made(job: tuple[Sequence[Record], bool]) -> tuple[Table | None, Counter[str]]:
    records, statements = job
    left: Counter[str] = Counter()
    work = records[0].work()
    if work is None:
        left["of a task or machine that this version does not know"] += len(records)
        return None, left
    candidates = Candidates.of(work)
    threads = records[0].key.threads
    model = Analytical(candidates, threads)
    tokeniser = Tokeniser(model, statements)
    times: dict[Config, list[float]] = {}
    builds: dict[Config, float] = {}
    for record in records:
        config = candidates.recalled(record.config)
        if config is not None:
            builds[config] = record.build_seconds
        if config is None or not math.isfinite(model.seconds(config)):
            left["of a config that is not legal any more"] += 1
        elif record.failure:
            times.setdefault(config, [])
        elif not record.times or not all(math.isfinite(each) and each > 0 for each in record.times):
            left["with times that are not positive numbers"] += 1
        else:
            times.setdefault(config, []).append(label(record.times))
    configs, rows = [], []
    for config in sorted(times, key=str):
        try:
            rows.append(tokeniser.row(config))
            configs.append(config)
        except TilewrightError:
            left["of a config that is not legal any more"] += 1
    seconds = np.array([np.exp(np.mean(np.log(times[c]))) if times[c] else np.nan for c in configs])
    if np.isfinite(seconds).sum() < _MIN_TIMES:
        left["of a task with fewer than four measured configs"] += len(configs)
        return None, left
    task = work.task
    shapes = " ".join("x".join(map(str, node.type.shape)) for node in task.graph.inputs)
    table = Table(
        name=f"{task.label} {task.graph.inputs[0].dtype.short} {shapes} {work.numerics}",
        family=category(task),
        kind=work.machine.kind,
        machine=f"{records[0].key.machine[:12]} {threads}",
        flops=float(task.flops),
        job=TaskJob.of(work, threads),
        configs=tuple(configs),
        tokens=stacked(rows, tokeniser.task, tokeniser.machine),
        base=np.log([model.seconds(config) for config in configs]),
        seconds=seconds,
        builds=np.array([builds[config] for config in configs]),
        days=days_of(records),
    )
    return table, left
