"""Charts as geometry: scales with ticks, lines, points and labels, and number formats. The template draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 40
_MIN_TICKS = 3
_CHARACTER, _LINE = 6.2, 13.0  # pixels of a label's text
_FAR = 16  # distance in pixels beyond which a leader line connects a point with its name
# Within each power of ten, coarse first.
_LOG_STEPS: tuple[tuple[float, ...], ...] = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    tuple(range(1, 10)),
)


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    radius: float
    kind: str  # drawing style
    title: str
    shape: str = "circle"  # or "square", "diamond": not distinguished by colour alone


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
    description: str = ""  # a text alternative for screen readers

    @property
    def left(self) -> int:
        return LEFT

    @property
    def right(self) -> int:
        return self.width - RIGHT

    @property
    def top(self) -> int:
        return TOP

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to pixels from `begin` to `end`, logarithmically or linearly."""

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
        """Round values, at least three if the scale has an extent, so that it can be read."""
        if not self.log:
            return self._even(4)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in _LOG_STEPS:
            found = [factor * 10.0**power for power in powers for factor in factors]
            inside = [value for value in found if self.low <= value <= self.high]
            if len(inside) >= _MIN_TICKS:
                return inside
        for parts in (4, 8, 16):  # less than a factor of two: nearly linear
            if len(inside := self._even(parts)) >= _MIN_TICKS:
                break
        return inside

    def _even(self, parts: int) -> list[float]:
        step = _round_step((self.high - self.low) / parts)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def around(values: Iterable[float], begin: float, end: float, *, margin: float = 1.25) -> Scale:
    """A logarithmic scale that holds all values."""
    found = list(values)
    return Scale(min(found) / margin, max(found) * margin, begin, end)


# -- number formats
# ---------------------------------------------------------------------------------------------------


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{digits(seconds / size)} {unit}"
    return f"{digits(seconds / 1e-9)} ns"


def rate_text(count: float, seconds: float | None, unit: str) -> str:
    return "–" if not seconds or not count else f"{digits(count / seconds / 1e9)} {unit}"


def count_text(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{digits(count / size)} {unit}"
    return f"{count:.0f} "


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def short(value: float) -> str:
    return f"{value:g}"


def bytes_text(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{digits(count / size)} {unit}"
    return f"{count:.0f} bytes"


def clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def time_ticks(scale: Scale) -> tuple[Tick, ...]:
    return tuple(Tick(scale(tick), _round_seconds(tick)) for tick in scale.ticks())


def _round_seconds(seconds: float) -> str:
    number, unit = seconds_text(seconds * 1.0000001).split()
    return f"{float(number):g} {unit}"


def path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


# -- label placement
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelBox:
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: LabelBox) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def within(self, other: LabelBox) -> bool:
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.top <= self.top
            and self.bottom <= other.bottom
        )


class Labels:
    """Places labels where they overlap no points, lines or other labels. A label without room is omitted."""

    def __init__(self, frame: LabelBox) -> None:
        self._frame = frame
        self._taken: list[LabelBox] = []
        self._names: list[LabelBox] = []
        self.placed: list[Label] = []

    def avoid(self, *boxes: LabelBox) -> None:
        self._taken += boxes

    def avoid_line(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        self._taken += _along(begin, end)

    def put(self, text: str, spots: Iterable[tuple[float, float, str]]) -> bool:
        """Place a label at the first free one of `spots` (anchor position and side); return whether there was one."""
        return self._put(text, spots, None) is not None

    def put_next_to(self, text: str, point: Point) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """Place the name of a point as near as possible; return a leader line if it is far."""
        label = self._put(text, _around(point), point)
        if label is None or not _leads(point, label.x, label.y):
            return None
        leader = (point.x, point.y), (label.x, label.y - 4)
        self._taken += _along(*leader)
        return leader

    def _put(self, text: str, spots: Iterable[tuple[float, float, str]], point: Point | None) -> Label | None:
        for x, y, anchor in spots:
            width = _CHARACTER * len(text)
            left = x - (width if anchor == "end" else width / 2 if anchor == "middle" else 0)
            box = LabelBox(left, y - _LINE + 3, left + width, y + 3)
            if not box.within(self._frame) or any(box.meets(other) for other in self._taken):
                continue
            if point is not None and _leads(point, x, y) and self._crosses((point.x, point.y), (x, y - 4)):
                continue
            self._taken.append(box)
            self._names.append(box)
            self.placed.append(Label(round(x, 1), round(y, 1), text, anchor))
            return self.placed[-1]
        return None

    def _crosses(self, begin: tuple[float, float], end: tuple[float, float]) -> bool:
        """Whether a line would cross another label."""
        return any(part.meets(name) for part in _along(begin, end) for name in self._names)


def _along(begin: tuple[float, float], end: tuple[float, float]) -> list[LabelBox]:
    (x0, y0), (x1, y1) = begin, end
    count = max(1, int(math.hypot(x1 - x0, y1 - y0) / 4))
    steps = [n / count for n in range(count + 1)]
    middles = [(x0 + (x1 - x0) * step, y0 + (y1 - y0) * step) for step in steps]
    return [LabelBox(x - 2, y - 2, x + 2, y + 2) for x, y in middles]


def _leads(point: Point, x: float, y: float) -> bool:
    return math.hypot(x - point.x, y - point.y) > point.radius + _FAR


def _around(point: Point) -> list[tuple[float, float, str]]:
    """Candidate positions for the name of a point: beside, above or below it, the nearest first."""
    spots = []
    for distance in (4, 20, 36, 54, 74):
        offset = point.radius + distance
        spots += [
            (point.x + offset, point.y + 4, "start"),
            (point.x - offset, point.y + 4, "end"),
            (point.x, point.y - offset, "middle"),
            (point.x, point.y + offset + 8, "middle"),
            (point.x + offset, point.y - offset, "start"),
            (point.x - offset, point.y - offset, "end"),
            (point.x + offset, point.y + offset, "start"),
            (point.x - offset, point.y + offset + 8, "end"),
        ]
    return spots
