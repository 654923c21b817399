"""What a report says, as plain data; `html.py` draws it and `--json` prints it.

A report is about a compiled model, about the tuning database, or both: of a model each task has the time that it takes
now, of the database the trials behind it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.codegen.llvm import toolchain
from tilewright.db.record import Decision, Key, Record
from tilewright.hw import CpuMachine
from tilewright.hw.gpu import GpuMachine
from tilewright.measure.calibration import Calibration, Speeds
from tilewright.report.code import Code
from tilewright.support.layers import shared_name
from tilewright.support.version import VERSION


@dataclass(frozen=True)
class TrialPoint:
    config: str
    seconds: float | None  # None: it failed
    predicted: float | None
    failure: str
    message: str
    when: float
    took: float  # seconds, building included


@dataclass(frozen=True)
class TaskReport:
    key: str
    label: str  # its operators: "conv+add+relu"
    text: str
    output: str  # type and shape of its result
    calls: int  # in one call of the model; 1 where there is no model
    flops: int
    bytes: int
    schedule: str  # what was decided, in words
    seconds: float | None  # of one call, in the model, now
    error: float | None  # relative, against the oracle
    before: (
        float | None
    )  # in the model, of what would run if nothing had been measured; interleaved with `after`
    after: float | None  # in the model, of the winner
    effort: str  # of the search that decided; "": none has
    limit: float | None  # seconds: what the machine could do it in
    trials: tuple[TrialPoint, ...]
    code: Code | None
    origin: str = ""  # where the choice of the kernel came from: "tuned 2026-11-18"; "": not known
    layers: tuple[
        str, ...
    ] = ()  # of the model, that each of its calls computes: "layer1.0.conv1 + bn1 + relu"
    default: str = ""  # the config that would run if nothing had been measured
    winner: str = ""  # the config that the search has decided for

    @property
    def name(self) -> str:
        """What the user knows it by: its layer, where there is a model."""
        return shared_name(self.layers) or self.label

    @property
    def baseline(self) -> float | None:
        """Seconds of what would run if nothing had been measured: alone, as every trial is measured. (`before` is a
        time inside the model, where inputs come from another kernel: it says negligible compared with a trial's.)"""
        return min(
            (
                trial.seconds
                for trial in self.trials
                if trial.config == self.default and trial.seconds is not None
            ),
            default=None,
        )

    @property
    def is_above_roof(self) -> bool:
        """Whether it is faster than arithmetic and memory allow, by the operations that its definition counts."""
        return self.efficiency is not None and self.efficiency > 1.0

    @property
    def typical(self) -> float | None:
        """Seconds of one call: in the model where it is known, otherwise alone."""
        return (
            self.seconds if self.seconds is not None else self.after if self.after is not None else self.best
        )

    @property
    def total(self) -> float:
        return self.calls * (self.typical or 0.0)

    @property
    def best(self) -> float | None:
        return min((trial.seconds for trial in self.trials if trial.seconds is not None), default=None)

    @property
    def gain(self) -> float | None:
        return self.before / self.after if self.before and self.after else None

    @property
    def efficiency(self) -> float | None:
        """The share of what the machine could do."""
        return self.limit / self.typical if self.limit and self.typical else None


@dataclass(frozen=True)
class Baseline:
    """Another system that has run the same model, interleaved with Tilewright."""

    name: str
    seconds: float  # a call
    ours: float  # the same of Tilewright

    @property
    def speedup(self) -> float:
        return self.seconds / self.ours


@dataclass(frozen=True)
class StepReport:
    """A kernel call, in the order in which they run."""

    layer: str
    task: str  # key
    seconds: float
    reads: tuple[int, ...]  # the steps whose results it reads; -1: an input of the model
    alive: int  # bytes of intermediate results while it runs


@dataclass(frozen=True)
class ModelReport:
    name: str
    signature: str
    seconds: float  # of a call, everything included
    threads: str
    numerics: str
    target: str
    arena_bytes: int
    constant_bytes: int
    baseline: Baseline | None = None
    steps: tuple[StepReport, ...] = ()


@dataclass(frozen=True)
class MachineSummary:
    name: str
    measured: bool  # or nominal
    threads: int
    flops: float  # a second
    bandwidths: dict[str, float]  # bytes a second, by level of memory
    cached: int  # bytes that the last cache holds


@dataclass(frozen=True)
class Report:
    title: str
    made: str
    tilewright: str
    toolchain: str
    machine: MachineSummary
    model: ModelReport | None
    tasks: tuple[TaskReport, ...]  # those that take most time first
    trace: list[dict[str, Any]] = field(default_factory=list)  # events of the Trace Event Format

    @property
    def seconds(self) -> float:
        """The sum over all tasks."""
        return sum(task.total for task in self.tasks)

    @property
    def untuned(self) -> float | None:
        """The same if nothing had been measured: each task's time times what its search has gained."""
        if all(task.gain is None for task in self.tasks):
            return None
        return sum(task.total * (task.gain or 1.0) for task in self.tasks)

    @property
    def trials(self) -> list[TrialPoint]:
        return [trial for task in self.tasks for trial in task.trials]

    @property
    def failures(self) -> dict[str, Counter[str]]:
        """By kind, then by template."""
        found: dict[str, Counter[str]] = {}
        for trial in self.trials:
            if trial.failure:
                found.setdefault(trial.failure, Counter())[trial.config.split(":")[0]] += 1
        return dict(sorted(found.items(), key=lambda item: -item[1].total()))

    @property
    def misprediction(self) -> float | None:
        """The factor by which a prediction is typically off."""
        ratios = [
            abs(math.log(trial.predicted / trial.seconds))
            for trial in self.trials
            if trial.seconds and trial.predicted
        ]
        return math.exp(statistics.median(ratios)) if ratios else None


def report(
    title: str,
    machine: MachineSummary,
    tasks: Iterable[TaskReport],
    model: ModelReport | None = None,
    events: Sequence[dict[str, Any]] = (),
) -> Report:
    """`events`: of a trace that was kept meanwhile."""
    ordered = tuple(sorted(tasks, key=lambda task: (-task.total, task.name)))
    made = time.strftime("%Y-%m-%d %H:%M")
    return Report(
        title,
        made,
        VERSION,
        toolchain.version(),
        machine,
        model,
        ordered,
        [*events, *(_call(model, ordered) if model else ()), *_trials(ordered)],
    )


def machine_report(machine: CpuMachine, calibration: Calibration, threads: int) -> MachineSummary:
    speeds: Speeds = calibration.one if threads == 1 else calibration.all
    bandwidths = {"L2": speeds.l2, "L3": speeds.l3, "memory": speeds.memory}
    if not calibration.capacities.l3:
        del bandwidths["L3"]
    return MachineSummary(
        machine.describe(),
        calibration.measured,
        speeds.threads,
        speeds.flops,
        bandwidths,
        machine.caches.last,
    )


def gpu_machine_report(machine: GpuMachine, measured: bool) -> MachineSummary:
    """`machine`: with the rates that were measured of it, if `measured`."""
    clock = machine.clock_mhz * 1e6
    return MachineSummary(
        f"{machine.name} ({machine.capability})",
        measured,
        0,
        machine.tensor_flops_clock * clock * machine.sms,
        {"L2": machine.l2_bytes_clock * clock, "memory": machine.memory_bytes_per_second},
        machine.l2,
    )


def limit(flops: int, bytes: int, machine: MachineSummary) -> float:
    """Seconds that a task takes at least: for its arithmetic, and to read and write each of its tensors once, from and
    to the last cache if all of them fit into it."""
    cached = machine.bandwidths.get("L3", machine.bandwidths["L2"])
    bandwidth = cached if bytes <= machine.cached else machine.bandwidths["memory"]
    return max(flops / machine.flops, bytes / bandwidth)


def trial_of(record: Record) -> TrialPoint:
    return TrialPoint(
        str(record.config),
        record.seconds,
        record.predicted,
        record.failure,
        record.message,
        record.when,
        record.build_seconds + sum(record.times),
    )


def by_key(records: Iterable[Record]) -> dict[Key, list[Record]]:
    found: dict[Key, list[Record]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record)
    return found


def decided(decision: Decision | None) -> Mapping[str, Any]:
    """The fields of a TaskReport that a decision fills."""
    if decision is None:
        return {"before": None, "after": None, "effort": ""}
    return {"before": decision.default_seconds, "after": decision.seconds, "effort": decision.effort}


# -- the trace --------------------------------------------------------------------------------------------------------


def _call(model: ModelReport, tasks: Sequence[TaskReport]) -> list[dict[str, Any]]:
    """Where the time of a call goes: one span for each kernel, in the order in which they run."""
    events = [_name("process_name", 1, 0, "one call of the model, by layer")]
    by_key = {task.key: task for task in tasks}
    now = 0.0
    for step in model.steps:
        task = by_key[step.task]
        args = {"operators": task.label, "schedule": task.schedule, "alive_bytes": step.alive}
        events.append(_span(step.layer, "kernel", 1, 0, now, step.seconds, args))
        now += step.seconds
    return events if len(events) > 1 else []


def _trials(tasks: Sequence[TaskReport]) -> list[dict[str, Any]]:
    """When each trial ran, a row for each task."""
    begin = min((trial.when - trial.took for task in tasks for trial in task.trials), default=0.0)
    events = [_name("process_name", 2, 0, "trials")]
    for number, task in enumerate(task for task in tasks if task.trials):
        events.append(_name("thread_name", 2, number, f"{task.name} {task.key[:8]}"))
        for trial in task.trials:
            args = {"seconds": trial.seconds, "predicted": trial.predicted, "failure": trial.failure}
            start = trial.when - trial.took - begin
            events.append(_span(trial.config, trial.failure or "trial", 2, number, start, trial.took, args))
    return events if len(events) > 1 else []


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _span(
    name: str, kind: str, pid: int, tid: int, begin: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name, "cat": kind, "ph": "X", "ts": begin * 1e6, "dur": seconds * 1e6, "pid": pid, "tid": tid,
        "args": args,
    }  # fmt: skip
