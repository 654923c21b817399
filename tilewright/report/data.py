"""The contents of a report as plain data; `html.py` renders it and `--json` prints it.

A report is about a compiled model, the tuning database, or both: the model gives the current time of each task, the
database its trials.
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
from tilewright.runtime.plan import FusionReport
from tilewright.support.layers import shared_name
from tilewright.support.version import VERSION


@dataclass(frozen=True)
class TrialPoint:
    config: str
    seconds: float | None  # None: the trial failed
    predicted: float | None
    failure: str
    message: str
    when: float
    took: float  # seconds, including the build


@dataclass(frozen=True)
class ConfigBelief:
    """What the attention model believes about one config. Seconds: by the analytical model; with what its network has
    learned from other tasks; with the trials of this task. `spread`: the deviation of the logarithm of the last."""

    config: str
    role: str  # "chosen", "untuned" or both; "": a trial
    analytical: float
    network: float
    predicted: float
    spread: float
    valid: float  # the probability to build, run and be correct
    measured: float | None

    @property
    def factor(self) -> float:
        """The typical factor by which `predicted` may be off."""
        return math.exp(self.spread)


@dataclass(frozen=True)
class TaskBeliefs:
    """`attention`: how much the other tokens attend to each token of the chosen config, by its name; together 1."""

    trials: int
    configs: tuple[ConfigBelief, ...]
    attention: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class TaskReport:
    key: str
    label: str  # its operators: "conv+add+relu"
    text: str
    output: str  # type and shape of its result
    calls: int  # in one call of the model; 1 without a model
    flops: int
    bytes: int
    schedule: str  # the schedule's decisions
    seconds: float | None  # of one call, in the model, now
    error: float | None  # relative, against the oracle
    before: float | None  # in the model, of the unmeasured choice; interleaved with `after`
    after: float | None  # in the model, of the winner
    effort: str  # of the search that decided; "": none
    limit: float | None  # the machine's lower bound in seconds
    trials: tuple[TrialPoint, ...]
    code: Code | None
    origin: str = ""  # where the choice came from: "tuned 2026-11-18"; "": unknown
    layers: tuple[str, ...] = ()  # the layers that each of its calls computes: "layer1.0.conv1 + bn1 + relu"
    default: str = ""  # the config of the unmeasured choice
    winner: str = ""  # the config that won
    beliefs: TaskBeliefs | None = None  # of the attention model, if the tuning run used it

    @property
    def name(self) -> str:
        """The name that the user knows: its layer, if there is a model."""
        return shared_name(self.layers) or self.label

    @property
    def baseline(self) -> float | None:
        """Seconds of the unmeasured choice, timed alone like every trial. (`before` is a time inside the model, where
        another kernel produces the inputs; it cannot be compared with a trial's.)"""
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
        """Whether it is faster than its counted operations and bytes allow."""
        return self.efficiency is not None and self.efficiency > 1.0

    @property
    def typical(self) -> float | None:
        """Seconds of one call: in the model if known, otherwise alone."""
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
        """The achieved share of the machine's limit."""
        return self.limit / self.typical if self.limit and self.typical else None


@dataclass(frozen=True)
class Baseline:
    """Another system that ran the same model, interleaved with Tilewright."""

    name: str
    seconds: float  # per call
    tilewright: float  # the same for Tilewright

    @property
    def speedup(self) -> float:
        return self.seconds / self.tilewright


@dataclass(frozen=True)
class StepReport:
    """A kernel call, in execution order."""

    layer: str
    task: str  # key
    seconds: float
    reads: tuple[int, ...]  # the steps whose results it reads; -1: an input of the model
    alive: int  # bytes of live intermediate results while it runs


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
    fusion: FusionReport | None = None  # the groups that kernels compute, and what others would have cost


@dataclass(frozen=True)
class MachineSummary:
    """`is_gpu`: its peak is the data sheet's for 16-bit operands, measured or not, and `threads` is 0."""

    name: str
    measured: bool  # measured or nominal
    threads: int
    flops: float  # per second
    bandwidths: dict[str, float]  # bytes per second, by level of memory
    cached: int  # bytes of the last-level cache
    is_gpu: bool = False


@dataclass(frozen=True)
class DeviceReport:
    """The use of one device of a pool in the tuning run. `share`: of the run in which it was busy."""

    name: str
    trials: int
    seconds: float
    share: float | None


@dataclass(frozen=True)
class Report:
    title: str
    made: str
    tilewright: str
    toolchain: str
    machine: MachineSummary
    model: ModelReport | None
    tasks: tuple[TaskReport, ...]  # the slowest first
    trace: list[dict[str, Any]] = field(default_factory=list)  # in the Trace Event Format
    devices: tuple[DeviceReport, ...] = ()  # of a pool that the model was tuned on
    aside: Mapping[str, str] = field(default_factory=dict)  # workers of it that were left out, and why

    @property
    def seconds(self) -> float:
        """The sum over all tasks."""
        return sum(task.total for task in self.tasks)

    @property
    def untuned(self) -> float | None:
        """The same with the unmeasured choices: each task's time times the gain of its search."""
        if all(task.gain is None for task in self.tasks):
            return None
        return sum(task.total * (task.gain or 1.0) for task in self.tasks)

    @property
    def trials(self) -> list[TrialPoint]:
        return [trial for task in self.tasks for trial in task.trials]

    @property
    def failures(self) -> dict[str, Counter[str]]:
        """The number of failures by kind, then by template."""
        found: dict[str, Counter[str]] = {}
        for trial in self.trials:
            if trial.failure:
                found.setdefault(trial.failure, Counter())[trial.config.split(":")[0]] += 1
        return dict(sorted(found.items(), key=lambda item: -item[1].total()))

    @property
    def misprediction(self) -> float | None:
        """The typical factor of error of a prediction."""
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
    """`events`: from a trace of the tuning run."""
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
        *_devices(events),
    )


def _devices(events: Sequence[dict[str, Any]]) -> tuple[tuple[DeviceReport, ...], dict[str, str]]:
    """The use of a pool's devices, and who was left out: from the last event about them."""
    ends = [event for event in events if event["name"] == "pool.end"]
    if not ends:
        return (), {}
    begin = min((event["ts"] for event in events if event["name"] == "tune.begin"), default=0.0)
    seconds = (ends[-1]["ts"] - begin) / 1e6
    notes = ends[-1]["args"]
    return tuple(
        DeviceReport(
            name, int(use["trials"]), use["seconds"], use["seconds"] / seconds if seconds > 0 else None
        )
        for name, use in sorted(notes["use"].items())
    ), dict(notes["aside"])


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
    """`machine` has its measured rates if `measured`."""
    return MachineSummary(
        f"{machine.name} ({machine.capability})",
        measured,
        0,
        machine.peak_tensor_flops,
        {"L2": machine.l2_bytes_clock * machine.clock_mhz * 1e6, "memory": machine.memory_bytes_per_second},
        machine.l2,
        is_gpu=True,
    )


def limit(flops: int, bytes: int, machine: MachineSummary) -> float:
    """The minimum seconds of a task: for its arithmetic, and to read and write each of its tensors once, from the
    last-level cache if all of them fit."""
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
    """The spans of a call: one per kernel, in execution order."""
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
    """The times at which trials ran, one row per task."""
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
