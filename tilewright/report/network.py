"""The graph of a model: its kernels in execution order, and which reads whose results.

Every kernel has its own row, so that its name fits on any screen. An edge to the next row is a straight line; other
edges run beside the rows, each in a free lane.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.report.data import Report, TaskReport

ROW = 26  # pixels
_LANE, _MARGIN, _BEND = 9, 10, 8
_MAX_ROWS = 400
_MAX_LANES = 12  # further edges share the last lane


@dataclass(frozen=True)
class NetworkRow:
    name: str
    task: TaskReport
    number: int  # of the task in the report, starting at 1
    seconds: float
    share: float  # relative to the slowest kernel
    reads: str  # the names of the kernels whose results it reads


@dataclass(frozen=True)
class NetworkChart:
    rows: tuple[NetworkRow, ...]
    width: int  # of the edges
    nodes: tuple[tuple[float, float], ...]  # the model's inputs, then each row
    edges: tuple[str, ...]  # SVG paths
    left_out: int = 0  # rows

    @property
    def height(self) -> int:
        return ROW * len(self.nodes)


def network(report: Report) -> NetworkChart | None:
    if report.model is None or not report.model.steps:
        return None
    steps = report.model.steps[:_MAX_ROWS]
    tasks = {task.key: (number, task) for number, task in enumerate(report.tasks, start=1)}
    longest = max(step.seconds for step in steps) or 1.0
    rows = []
    for step in steps:
        number, task = tasks[step.task]
        reads = ", ".join("the input" if index < 0 else steps[index].layer for index in step.reads)
        rows.append(NetworkRow(step.layer, task, number, step.seconds, step.seconds / longest, reads))
    edges = [(index + 1, number + 1) for number, step in enumerate(steps) for index in step.reads]
    lanes = _lanes(edges)
    width = _MARGIN + _LANE * (max(lanes.values(), default=0) + 1) + _MARGIN
    x = width - _MARGIN
    paths = [_path(x, begin, end, lanes.get((begin, end))) for begin, end in edges]
    nodes = tuple((float(x), _middle(number)) for number in range(len(steps) + 1))
    return NetworkChart(tuple(rows), width, nodes, tuple(paths), len(report.model.steps) - len(steps))


def _lanes(edges: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """A lane for each edge that does not go to the next row; short edges are nearest to the rows."""
    found: dict[tuple[int, int], int] = {}
    for begin, end in sorted(
        (edge for edge in edges if edge[1] - edge[0] > 1), key=lambda e: (e[1] - e[0], e)
    ):
        taken = {
            lane for (other, until), lane in found.items() if other < end and begin < until and other != begin
        }
        lane = next(lane for lane in range(len(found) + 1) if lane not in taken)
        found[begin, end] = min(lane, _MAX_LANES - 1)
    return found


def _path(x: int, begin: int, end: int, lane: int | None) -> str:
    top, bottom = _middle(begin), _middle(end)
    if lane is None:
        return f"M{x} {top:g}V{bottom:g}"
    at = x - _LANE * (lane + 1)
    return f"M{x} {top:g}Q{at} {top:g} {at} {top + _BEND:g}V{bottom - _BEND:g}Q{at} {bottom:g} {x} {bottom:g}"


def _middle(row: int) -> float:
    return ROW * (row + 0.5)
