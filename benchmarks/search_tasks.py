"""Tasks whose spaces are small enough to be measured entirely, and the tables of what was measured.

The spaces that the tuner searches have up to millions of configs. A task here has a part of its space: of each knob
some values, evenly spread, so that about as many configs are legal as are wanted. It is a space like any other, and
its best config is known once all are measured.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from builds import Builds, ManyRunner
from many_timing import undisturbed
from nondominated import Narrowed
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.measure.building import Made
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, Work

POINTS = 1080  # configs that a task's space is to have
MIN_POINTS = 1000
ROUND_SECONDS = 36.0  # for all configs of a task together

# -- the tasks --------------------------------------------------------------------------------------------------------


class Operands:
    """The inputs of a task; those that are weights."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: set[int] = set()

    def __call__(self, *shape: int, constant: bool = False) -> Node:
        if constant:
            self.constants.add(len(self.nodes))
        self.nodes.append(input_node(len(self.nodes), TensorType(shape, DType.F32)))
        return self.nodes[-1]

    def task(self, output: Node) -> Task:
        return Task(Graph(tuple(self.nodes), (output,)), frozenset(self.constants))


def product(m: int, n: int, k: int, *, constant: bool = True, relu: bool = False) -> Task:
    x = Operands()
    y = apply("matmul", x(m, k), x(k, n, constant=constant))
    if relu:
        y = apply("relu", apply("add", y, x(n, constant=True)))
    return x.task(y)


def convolution(size: int, channels: tuple[int, int], window: int, stride: int = 1) -> Task:
    x = Operands()
    y = _convolved(x(1, size, size, channels[0]), x(window, window, *channels, constant=True), window, stride)
    return x.task(apply("relu", apply("add", y, x(channels[1], constant=True))))


def depthwise(size: int, channels: int, outputs: int | None = None) -> Task:
    """A depthwise convolution; with `outputs`, a pointwise one after it."""
    x = Operands()
    weight = x(1, size, size, channels), x(3, 3, 1, channels, constant=True)
    y = _convolved(*weight, 3, 1, groups=channels)
    y = apply("clamp", apply("add", y, x(channels, constant=True)), min=0.0, max=6.0)
    if outputs is not None:
        y = _convolved(y, x(1, 1, channels, outputs, constant=True), 1, 1)
        y = apply("add", y, x(outputs, constant=True))
    return x.task(y)


def _convolved(image: Node, weight: Node, window: int, stride: int, groups: int = 1) -> Node:
    border = (0, window // 2, window // 2, 0)
    if window > 1:
        image = apply("pad", image, low=border, high=border, interior=(0, 0, 0, 0), value=0.0)
    return apply(
        "conv",
        image,
        weight,
        stride=(stride, stride),
        padding=((0, 0), (0, 0)),
        dilation=(1, 1),
        groups=groups,
        layout="channels_last",
    )


def attention(heads: int, length: int, width: int) -> Task:
    x = Operands()
    shape = (1, heads, length, width)
    return x.task(apply("attention", x(*shape), x(*shape), x(*shape), causal=False, scale=width**-0.5))


def product_softmax(m: int, n: int, k: int) -> Task:
    x = Operands()
    return x.task(apply("softmax", apply("matmul", x(m, k), x(k, n, constant=True)), axis=1))


class Source(NamedTuple):
    """A task, and where its configs come from."""

    task: Callable[[], Task]
    templates: bool = True
    sketches: bool = False


# A reduction of its own has some ten configs, and nothing to search: those here are of what a product computes. The
# kinds alternate, so that a part of the list has something of everything.
TASKS: dict[str, Source] = {
    "conv_1x1": Source(lambda: convolution(28, (128, 96), 1)),
    "gemm_square": Source(lambda: product(256, 256, 256)),
    "product_softmax": Source(lambda: product_softmax(256, 128, 96), sketches=True),
    "depthwise": Source(lambda: depthwise(28, 96), sketches=True),
    "attention": Source(lambda: attention(4, 96, 64), sketches=True),
    "conv_3x3": Source(lambda: convolution(14, (64, 64), 3)),
    "gemm_sketch": Source(lambda: product(192, 256, 192), templates=False, sketches=True),
    "separable": Source(lambda: depthwise(14, 128, 64)),
    "gemm_skinny": Source(lambda: product(16, 768, 384)),
    "product_softmax_wide": Source(lambda: product_softmax(96, 320, 64), sketches=True),
    "gemm_tall": Source(lambda: product(512, 64, 192)),
    "conv_stride": Source(lambda: convolution(28, (32, 64), 3, 2)),
    "gemm_relu": Source(lambda: product(128, 256, 256, relu=True)),
    "gemm_free": Source(lambda: product(128, 160, 160, constant=False)),
    "conv_3x3_deep": Source(lambda: convolution(7, (128, 128), 3)),
    "separable_deep": Source(lambda: depthwise(14, 192, 96)),
    "gemm_small": Source(lambda: product(64, 96, 128)),
}


# -- a part of a space ------------------------------------------------------------------------------------------------

_COUNTED, _DRAWN, _LISTED = 3000, 256, 50_000


def part_of(applied: Applied, points: int) -> Applied:
    """About so many legal configs; all of it where it has no more than that. The first two knobs, which for most
    templates say what is in registers, keep their values longest: without the good ones there is nothing to find."""
    space = applied.space
    whole = {knob.name: knob for knob in space.knobs}
    least = {knob.name: 3 if len(knob.choices) >= 5 else 2 for knob in space.knobs}
    while _count(space, 2 * points) > 1.25 * points:
        first, later = (
            space.knobs[:2],
            [knob for knob in space.knobs[2:] if len(knob.choices) > least[knob.name]],
        )
        longest_first = sorted(later or first, key=lambda knob: -len(knob.choices))
        thinner = [_thinner(space, knob, whole[knob.name]) for knob in longest_first if len(knob.choices) > 2]
        if not thinner:
            break
        enough = (one for one in thinner if _count(one, 2 * points) >= 0.85 * points)
        space = next(enough, None) or max(thinner, key=lambda one: _count(one, 2 * points))
    return Narrowed(applied, space)


def _thinner(space: Space, thinned: Knob, whole: Knob) -> Space:
    """With fewer values of one knob: one less, of many several."""
    count = len(thinned.choices) - max(1, len(thinned.choices) // 4)
    knobs = tuple(_thinned(whole, count) if knob is thinned else knob for knob in space.knobs)
    return Space(space.template, knobs, space.legal, space.together)


def _thinned(knob: Knob, count: int) -> Knob:
    last = len(knob.choices) - 1
    kept = tuple(dict.fromkeys(knob.choices[round(n * last / (count - 1))] for n in range(count)))
    return Knob(knob.name, kept, None, knob.ordered)


def _count(space: Space, most: int) -> int:
    """Legal configs, up to `most`; of a large space estimated, and not so few that they are hardly ever drawn."""
    if space.size > _COUNTED:
        rng = Random(0)
        drawn = [{knob.name: rng.choice(knob.choices) for knob in space.knobs} for _ in range(_DRAWN)]
        legal = sum(map(space.legal, drawn))
        if legal >= _DRAWN // 32 or space.size > _LISTED:
            return min(most, space.size * legal // _DRAWN)
    return sum(1 for _ in itertools.islice(space.configs(), most))


def part_candidates(source: Source, points: int = POINTS, machine: CpuMachine | None = None) -> Candidates:
    """About so many configs, from all that computes the task: small spaces whole, the rest shared by the others."""
    whole = Candidates.of(Work(source.task(), machine or host()), source.templates, source.sketches)
    left, parts = points, []
    by_size = sorted(whole.applied, key=lambda applied: applied.space.size)
    for position, applied in enumerate(by_size):
        part = part_of(applied, max(1, left // (len(by_size) - position)))
        left -= _count(part.space, points)
        parts.append(part)
    return Candidates(whole.work, only=tuple(parts))


# -- what was measured ------------------------------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True):
    """One line of the file: what a config took, interleaved with all others of the task, or the kind of its failure."""

    task: str
    config: Config
    seconds: float | None
    failure: str = ""


class On(msgspec.Struct, frozen=True):
    """One line of the file: the machine that the task is timed on, so that any other can build for it and replay."""

    task: str
    machine: CpuMachine


@dataclass
class Table:
    """The measured times of a task's space, in a file of all tasks that grows by a task at a time."""

    name: str
    path: Path
    points: int
    entries: list[Entry] = field(default_factory=list)
    machine: CpuMachine = field(default_factory=host)

    @classmethod
    def open(cls, name: str, path: Path, points: int = POINTS) -> Table:
        """A line that is damaged, as by a power cut, is one config less."""
        table = cls(name, path, points)
        for line in path.read_bytes().splitlines() if path.exists() else []:
            with contextlib.suppress(msgspec.MsgspecError):
                entry = msgspec.json.decode(line, type=Entry)
                if entry.task == name:
                    table.entries.append(entry)
                continue
            with contextlib.suppress(msgspec.MsgspecError):
                on = msgspec.json.decode(line, type=On)
                if on.task == name:
                    table.machine = on.machine
        return table

    @cached_property
    def listed(self) -> dict[Config, None]:
        """In an order that has nothing to do with the knobs: of two that are predicted alike, either comes first."""
        configs = list(self.candidates.configs())
        Random(0).shuffle(configs)
        return dict.fromkeys(configs)

    @cached_property
    def candidates(self) -> Candidates:
        return part_candidates(TASKS[self.name], self.points, self.machine)

    def begin(self) -> None:
        """Say which machine it is about."""
        self._write([On(self.name, self.machine)])

    def add(self, entries: Sequence[Entry]) -> None:
        self.entries += entries
        self._write(entries)

    def _write(self, lines: Sequence[Entry | On]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)

    @property
    def complete(self) -> bool:
        known = {entry.config for entry in self.entries}
        return all(config in known for config in self.listed)

    def outcomes(self) -> dict[Config, Outcome]:
        """Of every config."""
        known = {entry.config: Outcome(entry.config, entry.seconds, entry.failure) for entry in self.entries}
        return {config: known[config] for config in self.listed if config in known}


def measure(table: Table, runner: ManyRunner, builds: Builds, seconds: float = ROUND_SECONDS) -> str:
    """All configs that were built, interleaved. A machine that is slow for a while is slow for all, and those near the
    best have the most turns, so that none of them is best by luck."""
    job = TaskJob.of(table.candidates.work, runner.threads)
    built = builds.of(table.name, list(table.listed))
    made = {config: each for config, each in built.items() if isinstance(each, Made)}
    times = runner.successive_halving(job, made, seconds)
    table.begin()
    for config, each in built.items():
        if config in times:
            entry = Entry(table.name, config, undisturbed(times[config]))
        else:
            failure = runner.trial(job, config, each).failure if isinstance(each, Made) else each.kind
            entry = Entry(table.name, config, None, failure)
        table.add([entry])
    return f"{table.name}: {len(times)} of {len(table.listed)} configs have taken turns"


def best_seconds(outcomes: dict[Config, Outcome]) -> float:
    return min((o.seconds for o in outcomes.values() if o.seconds is not None), default=math.inf)
