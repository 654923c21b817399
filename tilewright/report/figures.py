"""The drawings of a report as geometry: where lines and points are, and what stands at the axes. The template draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.report.data import Report, TaskReport

_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 12, 40
_MOST_POINTS = 3000  # of a cloud; of more, an even sample


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    radius: float
    kind: str  # what it is drawn as
    title: str


@dataclass(frozen=True)
class Line:
    points: str
    kind: str
    title: str = ""


@dataclass(frozen=True)
class Label:
    x: float
    y: float
    text: str
    anchor: str = "start"


@dataclass(frozen=True)
class Figure:
    width: int
    height: int
    x_title: str
    y_title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...] = ()
    points: tuple[Point, ...] = ()
    labels: tuple[Label, ...] = ()

    @property
    def left(self) -> int:
        return _LEFT

    @property
    def right(self) -> int:
        return self.width - _RIGHT

    @property
    def top(self) -> int:
        return _TOP

    @property
    def bottom(self) -> int:
        return self.height - _BOTTOM


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` over pixels from `begin` to `end`, in a logarithmic scale or a linear one."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = True

    def __call__(self, value: float) -> float:
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _round_step((self.high - self.low) / 4)
            return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        decades = math.log10(self.high / self.low)
        factors = (1, 2, 5) if decades < 2 else (1,)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [factor * 10.0**power for power in powers for factor in factors]
        return [value for value in found if self.low <= value <= self.high]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def around(values: Iterable[float], begin: float, end: float, *, margin: float = 1.25) -> Scale:
    """A logarithmic scale that holds all values."""
    found = list(values)
    return Scale(min(found) / margin, max(found) * margin, begin, end)


# -- words for figures ------------------------------------------------------------------------------------------------


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def rate_text(count: float, seconds: float | None, unit: str) -> str:
    return "–" if not seconds or not count else f"{_digits(count / seconds / 1e9)} {unit}"


def count_text(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{_digits(count / size)} {unit}"
    return f"{count:.0f} "


def _digits(value: float) -> str:
    """Three significant ones, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _short(value: float) -> str:
    return f"{value:g}"


# -- the drawings -----------------------------------------------------------------------------------------------------


def tuning_curve(task: TaskReport, width: int = 330, height: int = 190) -> Figure | None:
    """Each trial, and the best so far; failures stand on the axis."""
    right = [trial.seconds for trial in task.trials if trial.seconds is not None]
    if not right:
        return None
    references = [task.before] if task.before else []
    y = around([*right, *references], height - _BOTTOM - 6, _TOP)
    x = Scale(0, max(len(task.trials), 2), _LEFT, width - _RIGHT, log=False)
    points: list[Point] = []
    path: list[tuple[float, float]] = []
    best = math.inf
    for number, trial in enumerate(task.trials, start=1):
        if trial.seconds is None:
            title = f"trial {number}: {trial.failure} {trial.message}\n{trial.config}"
            points.append(Point(x(number), height - _BOTTOM, 2.5, "failed", title))
            continue
        title = f"trial {number}: {seconds_text(trial.seconds)}\n{trial.config}"
        points.append(Point(x(number), y(trial.seconds), 2.5, "trial", title))
        if trial.seconds < best:
            path += [(x(number), y(best))] if path else []
            best = trial.seconds
            path.append((x(number), y(best)))
    path.append((x(len(task.trials)), y(best)))
    lines = [Line(_path(path), "best", "best so far")]
    labels = []
    if task.before:
        lines.append(Line(_path([(x.begin, y(task.before)), (x.end, y(task.before))]), "before", "not tuned"))
        labels.append(Label(width - _RIGHT, y(task.before) - 4, "not tuned", "end"))
    whole = [Tick(x(tick), _short(tick)) for tick in x.ticks() if tick == int(tick)]
    return Figure(
        width, height, "trials", "", tuple(whole), _time_ticks(y), tuple(lines), tuple(points), tuple(labels)
    )


def predictions(report: Report, width: int = 520, height: int = 420) -> Figure | None:
    """Predicted against measured, of every trial that has both."""
    found = [
        (trial.predicted, trial.seconds, task.label, trial.config)
        for task in report.tasks
        for trial in task.trials
        if trial.predicted and trial.seconds
    ]
    if not found:
        return None
    found = found[:: math.ceil(len(found) / _MOST_POINTS)]
    values = [value for predicted, seconds, _, _ in found for value in (predicted, seconds)]
    x, y = around(values, _LEFT, width - _RIGHT), around(values, height - _BOTTOM, _TOP)
    points = [
        Point(
            x(predicted), y(seconds), 2.5, "trial",
            f"{label}: predicted {seconds_text(predicted)}, measured {seconds_text(seconds)}\n{config}",
        )
        for predicted, seconds, label, config in found
    ]  # fmt: skip
    diagonal = Line(_path([(x(x.low), y(x.low)), (x(x.high), y(x.high))]), "limit", "as predicted")
    return Figure(
        width, height, "predicted", "measured", _time_ticks(x), _time_ticks(y), (diagonal,), tuple(points)
    )


def roofline(report: Report, width: int = 520, height: int = 420) -> Figure | None:
    """Operations a second against operations for each byte that must move; the area of a point is its share of the
    time."""
    tasks = [(task, task.typical) for task in report.tasks if task.flops and task.bytes]
    found = [(task, seconds) for task, seconds in tasks if seconds]
    if not found:
        return None
    machine = report.machine
    intensities = [task.flops / task.bytes for task, _ in found]
    ridge = machine.flops / machine.bandwidths["memory"]
    x = around([*intensities, ridge, 0.1 * ridge], _LEFT, width - _RIGHT, margin=2)
    rates = [task.flops / seconds for task, seconds in found]
    y = around(
        [*rates, machine.flops, machine.bandwidths["memory"] * x.low], height - _BOTTOM, _TOP, margin=1.6
    )
    lines = [Line(_path([(x(x.low), y(machine.flops)), (x(x.high), y(machine.flops))]), "limit", "peak")]
    peak = f"peak {rate_text(machine.flops, 1.0, 'GFLOP/s')}"
    labels = [Label(width - _RIGHT, y(machine.flops) - 5, peak, "end")]
    for name, bandwidth in machine.bandwidths.items():
        until = min(machine.flops / bandwidth, x.high)
        begin = max(x.low, y.low / bandwidth)
        if begin >= until:
            continue
        kind = "limit" if name == "memory" else "limit near"
        lines.append(
            Line(_path([(x(begin), y(bandwidth * begin)), (x(until), y(bandwidth * until))]), kind, name)
        )
        labels.append(Label(x(begin) + 16, y(bandwidth * begin) + 3, name))
    whole = report.seconds or 1.0
    points = [
        Point(
            x(intensity), y(rate), round(3 + 12 * math.sqrt(task.total / whole), 1), "task",
            f"{task.label}\n{rate_text(task.flops, seconds, 'GFLOP/s')}, {_digits(intensity)} operations for a byte, "
            f"{100 * task.total / whole:.0f}% of the time",
        )
        for (task, seconds), intensity, rate in zip(found, intensities, rates, strict=True)
    ]  # fmt: skip
    x_ticks = tuple(Tick(x(tick), _short(tick)) for tick in x.ticks())
    y_ticks = tuple(Tick(y(tick), _short(tick / 1e9)) for tick in y.ticks())
    return Figure(
        width,
        height,
        "operations for each byte",
        "GFLOP/s",
        x_ticks,
        y_ticks,
        tuple(lines),
        tuple(points),
        tuple(labels),
    )


def _time_ticks(scale: Scale) -> tuple[Tick, ...]:
    return tuple(Tick(scale(tick), _round_seconds(tick)) for tick in scale.ticks())


def _round_seconds(seconds: float) -> str:
    number, unit = seconds_text(seconds * 1.0000001).split()
    return f"{float(number):g} {unit}"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)
