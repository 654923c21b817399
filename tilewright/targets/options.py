"""The options of a compilation: as a caller gives them (`CompileOptions`), and resolved for the pipeline (`Settings`).

`compile`, `compile_all`, the command line and the `torch.compile` backend take the same options. They are checked
here before any work starts, and resolved once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import OptionError
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gpu import GpuMachine
from tilewright.numerics import NUMERICS
from tilewright.rewrites.partition import PARTITIONS
from tilewright.runtime.threads import resolve as resolve_threads
from tilewright.support.suggest import one_of
from tilewright.support.trace import Trace
from tilewright.targets.resolve import resolve_target
from tilewright.targets.target import Cutting, Target
from tilewright.tune.allocate import OBJECTIVES, Combine
from tilewright.tune.effort import KNOWN, Tuning, parse_duration, resolve_tuning

if TYPE_CHECKING:
    from tilewright.measure.pool.connection import Pool, PoolDevice


@dataclass(frozen=True)
class Settings:
    """The settings of the stages after the import. `runner` replaces the target's own runner and measures on another
    machine."""

    target: Target
    numerics: str = "fast"
    threads: int | None = None
    tuning: Tuning = KNOWN
    lock: Path | None = None
    runner: Callable[[int], Any] | None = None
    trace: Trace = field(default_factory=Trace.off)
    partition: str = "dynamic"

    @property
    def cutting(self) -> Cutting:
        """The way the graph is cut into tasks. A lock file names tasks, so they must not depend on measurements."""
        threads = self.target.threads(self.threads)
        measured, explores = self.lock is None, self.tuning.measures
        return Cutting(self.partition, threads, self.tuning.db, measured=measured, explores=explores)


@dataclass(frozen=True)
class CompileOptions:
    """The options that `compile`, `compile_all`, the command line and the `torch.compile` backend share, in the order
    of the signatures."""

    target: str | CpuMachine | GpuMachine | GemminiMachine | None = None
    effort: str = "none"
    budget: float | str | None = None
    seed: int = 0
    search: str = "guided"
    cost_model: str = "boosted"
    allocation: str = "gradient"
    partition: str = "dynamic"
    lock: str | Path | None = None
    db: str | Path | None = None
    numerics: str | None = None
    threads: int | None = None

    @staticmethod
    def among(arguments: Mapping[str, Any]) -> CompileOptions:
        """The options among the arguments of a call, checked. A function that takes options passes its `locals()`, so
        that their names are in its signature only."""
        names = {each.name for each in fields(CompileOptions)}
        options = CompileOptions(**{name: given for name, given in arguments.items() if name in names})
        options.check()
        return options

    def check(self) -> None:
        """Raise OptionError for a value that no compilation can use; callers use it before they start long work."""
        self._tuning()
        for_measuring = ("budget", "seed", "search", "cost_model", "allocation")
        given = {each.name: getattr(self, each.name) != each.default for each in fields(self)}
        check_measures(self.effort, {name: given[name] for name in for_measuring})
        one_of("partition", self.partition, PARTITIONS)
        if self.numerics is not None:
            one_of("numerics", self.numerics, NUMERICS)
        if self.threads is not None:
            resolve_threads(self.threads)

    def _tuning(self) -> Tuning:
        return resolve_tuning(
            self.effort, self.budget, self.seed, self.search, self.db, self.cost_model, self.allocation
        )

    @contextmanager
    def resolved(
        self, *models: Any, pool: Pool | PoolDevice | str | None = None, trace: Trace | None = None
    ) -> Iterator[Settings]:
        """Resolve the options for `models`, which are models and their example inputs. While the context is open,
        `pool` measures for this process; its device is then the target."""
        trace = trace or Trace.off()
        with _measuring(pool, self.target, self.effort, trace) as (machine, runner):
            target = resolve_target(machine, *models)
            if self.threads and target.threads(self.threads) == 0:
                raise OptionError(
                    f"threads={self.threads} is for processors, and the target is a GPU",
                    remedy="leave `threads` out",
                )
            if self.effort != "none" and not target.is_here and runner is None:
                raise OptionError(
                    f'effort={self.effort!r} measures on this machine, and the target is another; use effort="none"'
                )
            yield Settings(
                target,
                numerics=resolve_numerics(self.numerics, target),
                threads=self.threads,
                tuning=self._tuning(),
                lock=None if self.lock is None else Path(self.lock),
                runner=runner,
                trace=trace,
                partition=self.partition,
            )


@contextmanager
def _measuring(
    pool: Pool | PoolDevice | str | None, target: Any, effort: str, trace: Trace
) -> Iterator[tuple[Any, Callable[[int], Any] | None]]:
    """The target and its runner: those of the pool's device if there is a pool, else `target` and None."""
    if pool is None:
        yield target, None
        return
    if target is not None:
        raise OptionError(
            "the device of the pool is the target",
            remedy="leave `target` out, and name the device in the pool",
        )
    if effort == "none":
        raise OptionError('effort="none" measures nothing and needs no pool; use effort="quick" or "full"')
    from tilewright.measure.pool.connection import PoolDevice, device_of

    if isinstance(pool, PoolDevice):  # of a connection that is open
        yield pool.machine, pool.runner
        return
    with device_of(pool, trace) as device:
        yield device.machine, device.runner


def check_measures(effort: str, given: Mapping[str, bool]) -> None:
    """Refuse options that say how to measure where nothing is measured. `given`: whether the caller has set each."""
    idle = [name for name, is_given in given.items() if is_given]
    if effort == "none" and idle:
        raise OptionError(
            f'effort="none" measures nothing and needs no {" or ".join(idle)}; use effort="quick" or "full"'
        )


def resolve_numerics(numerics: str | None, target: Target) -> str:
    return one_of("numerics", numerics or target.default_numerics(), NUMERICS)


def resolve_latency(latency: Sequence[float | str | None] | None, models: int) -> list[float | None]:
    if latency is None:
        return [None] * models
    if len(latency) != models:
        raise OptionError(
            f"{len(latency)} latencies for {models} models",
            remedy="give one for each model, None where there is none",
        )
    return [None if each is None else parse_duration(each, "latency") for each in latency]


def resolve_objective(objective: str | Combine) -> str | Combine:
    if not callable(objective) and objective not in OBJECTIVES:
        known = ", ".join(map(repr, OBJECTIVES))
        raise OptionError(
            f"objective must be one of {known} or a function of the models' times, got {objective!r}"
        )
    return objective


def resolve_task_latency(
    latency: Mapping[str, float | str] | None, tasks: Mapping[str, tuple[Task, int]]
) -> dict[str, float]:
    """Return the target seconds by task key. The caller names tasks by label or by key."""
    found: dict[str, float] = {}
    for name, value in (latency or {}).items():
        keys = [key for key, (task, _) in tasks.items() if name in (key, task.label)]
        if not keys:
            labels = sorted({task.label for task, _ in tasks.values()})
            raise OptionError(f"unknown task {name!r}", remedy=f"use one of these: {', '.join(labels[:8])}")
        found |= dict.fromkeys(keys, parse_duration(value, "task_latency"))
    return found
