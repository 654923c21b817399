"""`advise`: measure variations of a model's layers, and say which would be faster.

The layers with the most time are looked at first, each task once. Every number is measured on this machine, by the
candidate that a compilation with `effort="none"` would use (the tuned one where the database has it), checked against
the oracle as in tuning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tilewright import frontend
from tilewright.advice import variants
from tilewright.advice.variants import VariedLayer, layer_of, why_not_varied
from tilewright.errors import OptionError, TilewrightError
from tilewright.graph.task import Partition, Task
from tilewright.hw import Machine
from tilewright.runtime.arguments import joined
from tilewright.space.template import Work
from tilewright.support.layers import fused_name, shared_name
from tilewright.support.trace import Trace
from tilewright.targets.options import CompileOptions, resolve_numerics
from tilewright.targets.resolve import resolve_target
from tilewright.targets.target import Cutting, Target, computed
from tilewright.tune.choose import Choice, choose
from tilewright.tune.effort import parse_duration
from tilewright.tune.known import known_choices
from tilewright.tune.oracle import PredictedCosts
from tilewright.tune.tunable import TunableTask

FREE = 0.02  # a difference below this share is within what timing can tell
CLIFF = 0.05  # more channels in less time by this share: the size falls off a cliff
_MAX_NAMED = 4  # layers in one note
CHEAP = 0.25  # a 1x1 convolution that adds less than this share of the layer's time is nearly free


@dataclass(frozen=True)
class Finding:
    """One variation of a layer. `kind`: "channels", "cliff", "activation" or "pointwise"."""

    kind: str
    change: str  # "46 -> 48 output channels"
    seconds: float
    layer_seconds: float
    advice: str  # "" where it is only a comparison

    @property
    def ratio(self) -> float:
        return self.seconds / self.layer_seconds


@dataclass(frozen=True)
class LayerAdvice:
    layer: str
    operators: str
    output: str
    calls: int
    seconds: float
    gflops: float
    config: str  # of the candidate that was measured
    origin: str  # of this choice: "tuned 2026-11-18", "predicted", ...
    findings: tuple[Finding, ...]
    padded: str = ""  # what `compile` makes of its channels: "46 -> 48 output channels"


@dataclass(frozen=True)
class Advice:
    """The measured variations, the slowest layer first. `notes`: the omitted layers, and why."""

    machine: str
    layers: tuple[LayerAdvice, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.machine]
        for layer in self.layers:
            times = f"{layer.seconds * 1e6:.1f} us, {layer.gflops:.0f} Gflop/s"
            count = f", {layer.calls} times" if layer.calls > 1 else ""
            lines += ["", f"{layer.layer}: {layer.operators} {layer.output}, {times}{count}"]
            if layer.padded:
                lines.append(f"  measured as written; compile pads {layer.padded} by itself")
            for finding in layer.findings:
                change = f"  {finding.change:<34} {finding.seconds * 1e6:9.1f} us {finding.ratio:6.2f}x"
                lines.append(f"{change}  {finding.advice}".rstrip())
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])


def advise(
    model: Any,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    layers: int = 5,
    budget: float | str = "2m",
    numerics: str | None = None,
    threads: int | None = None,
    partition: str = "dynamic",
    db: str | Path | None = None,
    trace: Trace | None = None,
) -> Advice:
    """Measure what would make a model's layers faster on this machine.

        print(tilewright.advise(model, (x,)))

    Layers are measured as the model has them, without the padding of channels that `compile` adds where it is faster.
    For each of its slowest layers: rounder numbers of channels, activations side by side (ReLU, GELU, Hardswish,
    Softplus), and one more 1x1 convolution after a convolution over a window.

    - `layers`: how many layers to look at. `budget`: the maximum time for measuring, in seconds or as text.
    - The other options are those of `compile`: where `db` has a tuned kernel of a layer or a variation, that is the
      one measured. The target must be this machine: advice is measured, not predicted.
    """
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise OptionError(f"layers={layers!r} must be a whole number, 1 at least")
    seconds = parse_duration(budget)
    CompileOptions(numerics=numerics, threads=threads, partition=partition, db=db).check()
    model = frontend.opened(model)
    example_inputs = joined(example_inputs, example_kwargs)
    resolved = resolve_target(target, model, example_inputs)
    if not resolved.is_here:
        raise OptionError(
            "advice is measured, and the target is not this machine",
            remedy="run it where the model will run, or leave `target` out",
        )
    numerics = resolve_numerics(numerics, resolved)
    trace = trace or Trace.off()
    imported = frontend.import_model(model, example_inputs)
    count, database = resolved.threads(threads), None if db is None else Path(db)
    cutting = Cutting(partition, count, database)
    compiled = resolved.partition(imported, numerics, trace, cutting=cutting)
    written = resolved.partition(imported, numerics, trace, cutting=replace(cutting, pads=False))
    with closing(resolved.runner(count)) as runner:
        measure = _Measure(resolved, numerics, count, runner, time.monotonic() + seconds, database)
        return _advice(written, layers, resolved.machine, measure, trace, _padded(written, compiled))


class _OutOfTime(Exception):
    """The budget is spent."""


@dataclass
class _Measure:
    """Measures the times of tasks, each once."""

    target: Target
    numerics: str
    threads: int
    runner: Any
    deadline: float
    db: Path | None

    def __post_init__(self) -> None:
        self._known: dict[str, float | None] = {}
        self.choices: dict[str, Choice] = {}  # what was measured, by task key
        self.failures: dict[str, str] = {}  # by task key: why there is no time

    def work(self, task: Task) -> Work:
        return Work(task, self.target.machine, self.numerics)

    def __call__(self, task: Task) -> float | None:
        """The time of a task; None if no candidate computes it, or if the chosen one fails."""
        if task.key not in self._known:
            if time.monotonic() > self.deadline:
                raise _OutOfTime
            self._known[task.key] = self._measured(task)
        return self._known[task.key]

    def _measured(self, task: Task) -> float | None:
        work = self.work(task)
        try:
            choice = known_choices({task.key: work}, self.threads, self.db).get(task.key) or choose(work)
        except TilewrightError as error:
            self.failures[task.key] = error.message
            return None
        self.choices[task.key] = choice
        job = TunableTask(work, self.threads).job
        found = self.runner.measure(job, [choice.config], deadline=self.deadline)
        if not found:
            raise _OutOfTime
        if found[0].seconds is None:
            self.failures[task.key] = f"{found[0].failure or 'not timed'}: {found[0].message}"
        return found[0].seconds


def _padded(written: Partition, compiled: Partition) -> dict[str, str]:
    """The channels that `compile` pads, by the key of the task as written."""
    widths = {
        call.layers: (layer.inputs, layer.outputs)
        for call in compiled.calls
        if (layer := layer_of(call.task)) is not None
    }
    found = {}
    for call in written.calls:
        layer = layer_of(call.task)
        if layer is None:
            continue
        before = layer.inputs, layer.outputs
        sides = zip(before, widths.get(call.layers, before), ("input", "output"), strict=True)
        changes = [f"{own} -> {padded} {side}" for own, padded, side in sides if own != padded]
        if changes:
            found[call.task.key] = f"{' and '.join(changes)} channels"
    return found


def _advice(
    partition: Partition,
    most: int,
    machine: Machine,
    measure: _Measure,
    trace: Trace,
    padded: Mapping[str, str],
) -> Advice:
    costs = PredictedCosts(machine, measure.numerics)
    named: dict[str, list[str]] = {}
    for call in partition.calls:
        named.setdefault(call.task.key, []).append(fused_name(call.layers) or call.name)
    tasks = computed(partition)
    found = [(layer, calls) for task, calls in tasks.values() if (layer := layer_of(task)) is not None]
    found.sort(key=lambda each: -costs.seconds(each[0].task) * each[1])
    rows: list[LayerAdvice] = []
    notes = _left_out([task for task, _ in tasks.values()], named)
    if len(found) > most:
        notes.append(f"{len(found) - most} more layers take less time and were left out: layers={len(found)}")
    for layer, calls in found[:most]:
        name = shared_name(named[layer.task.key])
        with trace.span("advise", layer=name):
            try:
                row = _layer(layer, calls, name, measure, costs)
            except _OutOfTime:
                notes.append(f"the budget was spent at {name}; a larger one reaches further: budget='5m'")
                break
            if row is None:
                notes.append(f"{name} could not be measured: {measure.failures[layer.task.key]}")
            else:
                rows.append(replace(row, padded=padded.get(layer.task.key, "")))
    if not found:
        notes.append("the model has no layer with a single contraction to vary")
    rows.sort(key=lambda row: -row.seconds * row.calls)
    return Advice(machine.describe(), tuple(rows), tuple(notes))


def _left_out(tasks: Sequence[Task], named: Mapping[str, Sequence[str]]) -> list[str]:
    """A note for each reason for which tasks with contractions are not varied."""
    reasons: dict[str, list[str]] = {}
    for task in tasks:
        reason = why_not_varied(task)
        if reason is not None:
            reasons.setdefault(reason, []).append(shared_name(named[task.key]))
    notes = []
    for reason, names in reasons.items():
        more = f", and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        notes.append(f"left out, because {reason}: {', '.join(names[:_MAX_NAMED])}{more}")
    return notes


def _layer(
    layer: VariedLayer, calls: int, name: str, measure: _Measure, costs: PredictedCosts
) -> LayerAdvice | None:
    base = measure(layer.task)
    if base is None:
        return None
    findings: list[Finding] = []
    try:
        for part in (_channels, _activations, _pointwise):
            findings += part(layer, base, measure, costs)
    except _OutOfTime:
        if not findings:
            raise
    task = layer.task
    choice = measure.choices[task.key]
    return LayerAdvice(
        name,
        task.label,
        repr(task.output.type),
        calls,
        base,
        task.flops / base / 1e9,
        str(choice.config),
        str(choice.origin),
        tuple(findings),
    )


def _channels(layer: VariedLayer, base: float, measure: _Measure, costs: PredictedCosts) -> list[Finding]:
    found = []
    for inputs, outputs in variants.alternatives(layer):
        task = variants.with_channels(layer, inputs, outputs)
        seconds = None if task is None else measure(task)
        if seconds is None:
            continue
        side, before, after = (
            ("output", layer.outputs, outputs) if inputs == layer.inputs else ("input", layer.inputs, inputs)
        )
        change = f"{before} -> {after} {side} channels"
        kind, advice = "channels", ""
        if seconds < (1 - CLIFF) * base:
            kind = "cliff"
            advice = f"{before} falls off a cliff: {after} channels take {1 - seconds / base:.0%} less time"
        elif seconds <= (1 + FREE) * base:
            advice = f"{after - before} more channels cost nothing"
        found.append(Finding(kind, change, seconds, base, advice))
    return found


def _activations(layer: VariedLayer, base: float, measure: _Measure, costs: PredictedCosts) -> list[Finding]:
    own = variants.activation_of(layer)
    plain = measure(variants.with_activation(layer, None))
    if plain is None:
        return []
    times: dict[str, float] = {}
    for op in variants.COMPARED:
        seconds = measure(variants.with_activation(layer, op))
        if seconds is not None:
            times[op] = seconds
    if not times:
        return []
    found = [Finding("activation", "no activation", plain, base, "")]
    for op, seconds in times.items():
        used = " (its own)" if own is not None and own.op == op else ""
        cost = f"its epilogue costs {max(0.0, seconds - plain) * 1e6:.1f} us"
        cheapest = min(times, key=times.__getitem__)
        if used and seconds > (1 + FREE) * times[cheapest]:
            cost += f"; {cheapest} would save {(seconds - times[cheapest]) * 1e6:.1f} us"
        found.append(Finding("activation", f"{op}{used}", seconds, base, cost))
    return found


def _pointwise(layer: VariedLayer, base: float, measure: _Measure, costs: PredictedCosts) -> list[Finding]:
    made = variants.pointwise_after(layer)
    if made is None:
        return []
    both, alone = made
    one = measure(both) if costs.can_compute(both) else None
    separate = measure(alone)
    if one is None and separate is None:
        return []
    fused = one is not None and (separate is None or one < base + separate)
    total = one if fused and one is not None else base + (separate or 0.0)
    how = "in the same kernel" if fused else "as a kernel of its own: no kernel computes both faster"
    added = total / base - 1
    advice = f"adds {added:.0%}, {how}"
    if added < CHEAP:
        advice = f"nearly free: {advice}"
    return [Finding("pointwise", f"one more 1x1 convolution of {layer.outputs}", total, base, advice)]
