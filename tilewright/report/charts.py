"""The charts of a report: tuning curves, predictions, the roofline, and memory over the steps of a call."""

from __future__ import annotations

import math

from tilewright.graph.op import Fusion, table
from tilewright.report.data import Report, TaskReport
from tilewright.report.figures import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Figure,
    Label,
    LabelBox,
    Labels,
    Line,
    Point,
    Scale,
    Tick,
    around,
    bytes_text,
    clipped,
    digits,
    path,
    rate_text,
    seconds_text,
    short,
    time_ticks,
)

_MAX_POINTS = 3000  # maximum points of a cloud; more are sampled evenly
_NAMED_POINTS = 10  # labelled points of the roofline: the slowest kernels
_NAME = 30  # characters of a layer's name in a chart
SHAPES = {
    "contraction": "circle",
    "reduction": "square",
    "elementwise": "diamond",
}  # shapes of the roofline's points


def tuning_curve(task: TaskReport, width: int = 330, height: int = 190) -> Figure | None:
    """Each trial, the best so far, and the untuned choice as measured among the trials; failures are on the axis."""
    right = [trial.seconds for trial in task.trials if trial.seconds is not None]
    if not right:
        return None
    y = around(right, height - BOTTOM - 6, TOP)
    x = Scale(0, max(len(task.trials), 2), LEFT, width - RIGHT, log=False)
    points: list[Point] = []
    curve: list[tuple[float, float]] = []
    best = math.inf
    won = False
    for number, trial in enumerate(task.trials, start=1):
        if trial.seconds is None:
            title = f"trial {number}: {trial.failure} {trial.message}\n{trial.config}"
            points.append(Point(x(number), height - BOTTOM, 2.5, "failed", title))
            continue
        is_winner = not won and trial.config == task.winner
        won = won or is_winner
        title = (
            f"trial {number}{' (chosen)' if is_winner else ''}: {seconds_text(trial.seconds)}\n{trial.config}"
        )
        points.append(Point(x(number), y(trial.seconds), 2.5, "trial", title))
        if is_winner:
            points.append(Point(x(number), y(trial.seconds), 5, "winner", title))
        if trial.seconds < best:
            if curve:
                curve.append((x(number), y(best)))
            best = trial.seconds
            curve.append((x(number), y(best)))
    curve.append((x(len(task.trials)), y(best)))
    lines = [Line(path(curve), "best", "best so far")]
    labels = []
    said = f"{len(task.trials)} trials, the best {seconds_text(best)}"
    if (baseline := task.baseline) is not None:
        level = y(baseline)
        lines.append(Line(path([(LEFT, level), (width - RIGHT, level)]), "before", "untuned"))
        below = level < TOP + 16
        labels.append(Label(width - RIGHT, level + 12 if below else level - 4, "untuned", "end"))
        said += f"; the untuned choice, measured alike, {seconds_text(baseline)}"
    failed = len(task.trials) - len(right)
    said += f"; {failed} failed" if failed else ""
    whole = [Tick(x(tick), short(tick)) for tick in x.ticks() if tick == int(tick)]
    return Figure(
        width,
        height,
        "trials",
        "",
        tuple(whole),
        time_ticks(y),
        tuple(lines),
        tuple(points),
        tuple(labels),
        said,
    )


def predictions(report: Report, width: int = 620, height: int = 420) -> Figure | None:
    """Predicted against measured times, for every trial that has both."""
    found = [
        (trial.predicted, trial.seconds, task.name, trial.config)
        for task in report.tasks
        for trial in task.trials
        if trial.predicted and trial.seconds
    ]
    if not found:
        return None
    found = found[:: math.ceil(len(found) / _MAX_POINTS)]
    values = [value for predicted, seconds, _, _ in found for value in (predicted, seconds)]
    x, y = around(values, LEFT, width - RIGHT), around(values, height - BOTTOM, TOP)
    points = [
        Point(
            x(predicted), y(seconds), 2.5, "trial",
            f"{name}: predicted {seconds_text(predicted)}, measured {seconds_text(seconds)}\n{config}",
        )
        for predicted, seconds, name, config in found
    ]  # fmt: skip
    diagonal = Line(path([(x(x.low), y(x.low)), (x(x.high), y(x.high))]), "limit", "as predicted")
    said = f"{len(found)} trials from {seconds_text(min(values))} to {seconds_text(max(values))}"
    return Figure(
        width,
        height,
        "predicted",
        "measured",
        time_ticks(x),
        time_ticks(y),
        (diagonal,),
        tuple(points),
        description=said,
    )


def kind_of(task: TaskReport) -> str:
    """The approximate limit of a kernel's speed: one of SHAPES."""
    known = table()
    fusions = {known[name].fusion for name in task.label.split("+") if name in known}
    if Fusion.COMPLEX in fusions:
        return "contraction"
    return "reduction" if Fusion.REDUCTION in fusions else "elementwise"


def roofline(report: Report, width: int = 760, height: int = 440) -> Figure | None:
    """FLOP/s against operations per byte that must move; the area of a point is its share of the time."""
    tasks = [(task, task.typical) for task in report.tasks if task.flops and task.bytes]
    found = [(task, seconds) for task, seconds in tasks if seconds]
    if not found:
        return None
    machine = report.machine
    intensities = [task.flops / task.bytes for task, _ in found]
    ridge = machine.flops / machine.bandwidths["memory"]
    x = around([*intensities, ridge, 0.1 * ridge], LEFT, width - RIGHT, margin=2)
    rates = [task.flops / seconds for task, seconds in found]
    y = around(
        [*rates, machine.flops, machine.bandwidths["memory"] * x.low], height - BOTTOM, TOP, margin=1.6
    )
    whole = report.seconds or 1.0
    points = [
        Point(
            x(intensity), y(rate), round(3 + 12 * math.sqrt(task.total / whole), 1),
            f"{kind_of(task)} {'above' if task.is_above_roof else ''}".strip(),
            f"{task.name}\n{rate_text(task.flops, seconds, 'GFLOP/s')}, {digits(intensity)} operations per byte, "
            f"{100 * task.total / whole:.0f}% of the time",
            SHAPES[kind_of(task)],
        )
        for (task, seconds), intensity, rate in zip(found, intensities, rates, strict=True)
    ]  # fmt: skip
    roofs = _roofs(report, x, y)
    labels = Labels(LabelBox(LEFT + 2, TOP, width - RIGHT, height - BOTTOM))
    labels.avoid(LabelBox(LEFT, TOP, LEFT + 60, TOP + 16))  # the title of the axis
    labels.avoid(*(LabelBox(p.x - p.radius, p.y - p.radius, p.x + p.radius, p.y + p.radius) for p in points))
    for _, _, begin, end in roofs:
        labels.avoid_line(begin, end)
    for name, _, begin, end in roofs:
        flat = begin[1] == end[1]
        along = [
            (begin[0] + (end[0] - begin[0]) * n / 12, begin[1] + (end[1] - begin[1]) * n / 12)
            for n in range(13)
        ]
        if flat:
            spots = [(at, level - 6, "end") for at, level in reversed(along)]
        else:
            spots = [(at - 6, level - 4, "end") for at, level in along]
            spots += [(at + 8, level + 12, "start") for at, level in along]
        labels.put(name, spots)
    by_weight = sorted(zip(found, points, strict=True), key=lambda pair: -pair[0][0].total)
    lines = [Line(path([begin, end]), kind, name) for name, kind, begin, end in roofs]
    for (task, _), point in by_weight[:_NAMED_POINTS]:
        leader = labels.put_next_to(clipped(task.name, _NAME), point)
        if leader is not None:
            lines.append(Line(path(leader), "leader"))
    above = sum(task.is_above_roof for task, _ in found)
    said = (
        f"{len(found)} kernels from {digits(min(rates) / 1e9)} to {digits(max(rates) / 1e9)} GFLOP/s; "
        + ", ".join(name for name, *_ in roofs)
    )
    said += f"; {above} above the roof" if above else ""
    return Figure(
        width,
        height,
        "operations per byte",
        "GFLOP/s",
        tuple(Tick(x(tick), short(tick)) for tick in x.ticks()),
        tuple(Tick(y(tick), short(tick / 1e9)) for tick in y.ticks()),
        tuple(lines),
        tuple(points),
        tuple(labels.placed),
        said,
    )


def _roofs(
    report: Report, x: Scale, y: Scale
) -> list[tuple[str, str, tuple[float, float], tuple[float, float]]]:
    """(label, drawing style, start, end)."""
    machine = report.machine
    ridge = machine.flops / max(machine.bandwidths.values())
    level = y(machine.flops)
    peak = f"peak {rate_text(machine.flops, 1.0, 'GFLOP/s')}"
    roofs = [(peak, "limit", (x(max(ridge, x.low)), level), (x(x.high), level))]
    for name, bandwidth in machine.bandwidths.items():
        begin, until = max(x.low, y.low / bandwidth), min(machine.flops / bandwidth, x.high)
        if begin < until:
            kind = "limit" if name == "memory" else f"limit near {name.lower()}"
            ends = (x(begin), y(bandwidth * begin)), (x(until), y(bandwidth * until))
            roofs.append((f"{name} {rate_text(bandwidth, 1.0, 'GB/s')}", kind, *ends))
    return roofs


def memory(report: Report, width: int = 760, height: int = 240) -> Figure | None:
    """Bytes of intermediate results that are live while each kernel runs."""
    model = report.model
    if model is None or len(model.steps) < 2 or not model.arena_bytes:
        return None
    count = len(model.steps)
    x = Scale(0, count, LEFT + 12, width - RIGHT, log=False)
    y = Scale(0, 1.15 * model.arena_bytes, height - BOTTOM, TOP, log=False)
    outline = [(x(0), y(0))]
    for number, step in enumerate(model.steps):
        outline += [(x(number), y(step.alive)), (x(number + 1), y(step.alive))]
    outline.append((x(count), y(0)))
    peak = max(range(count), key=lambda number: model.steps[number].alive)
    most = model.steps[peak]
    level = y(model.arena_bytes)
    middle = (x(peak) + x(peak + 1)) / 2
    title = f"{most.layer}: {bytes_text(most.alive)}"
    anchor = "start" if middle < width / 2 else "end"
    named = f"peak: {clipped(most.layer, _NAME)}"
    return Figure(
        width,
        height,
        "kernels, in the order in which they run",
        "",
        tuple(Tick(x(tick), short(tick)) for tick in x.ticks() if tick == int(tick)),
        tuple(Tick(y(tick), bytes_text(tick) if tick else "0") for tick in y.ticks()),
        (
            Line(path(outline), "alive", "alive"),
            Line(path([(LEFT, level), (width - RIGHT, level)]), "limit", "arena"),
        ),
        (Point(middle, y(most.alive), 3.5, "peak", title),),
        (Label(middle + (7 if anchor == "start" else -7), max(level - 6, TOP + 8), named, anchor),),
        f"{count} kernels; at most {bytes_text(most.alive)} alive, while {most.layer} runs; "
        f"the arena has {bytes_text(model.arena_bytes)}",
    )
