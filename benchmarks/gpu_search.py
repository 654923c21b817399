"""Searches on a GPU alongside what was measured: the tasks, the file of results, and replays of searches over it.

    python benchmarks/search_quality.py --target cuda --collect FILE [--seconds 1500] [--tasks gemm_gelu,conv3_56]
    python benchmarks/search_quality.py --target cuda --from FILE [--markdown FILE]

A space on a GPU has thousands of configs, each of which takes a second to compile: of each task up to 600 are measured
on the card that is here. These are all library calls, the 150 that the analytical model predicts to be fastest, and
others at random. The file has a line for each task and one for each config, and what is in it is not measured again.
`--from` needs no card: each search is replayed over the measured configs alone, with several seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from tilewright.cost.analytical import Analytical
from tilewright.cost.boosted import Boosted
from tilewright.cost.model import CostModel
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph
from tilewright.hw import Machine
from tilewright.hw.machine import description, machine_of
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.search import SEARCHES
from tilewright.space.candidates import Candidates
from tilewright.space.former_names import current_config
from tilewright.space.implementation import Implementation, Kernel
from tilewright.space.libraries import LIBRARIES
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config, Space, Value
from tilewright.space.template import Applied, Work
from tilewright.space.terms import Counted

MAX = 600  # configs of a task that are measured
PREDICTED = 150  # of these the fastest by prediction
MIN_SPACE = 500  # configs that a task's space must have to count
TOGETHER = 16  # configs that are measured before the file is written
SEEDS = 10
BATCH = 4
EARLY, LATE = 8, 16  # trials after which the best is looked at

F16, F32 = DType.F16, DType.F32

# -- the tasks --------------------------------------------------------------------------------------------------------


class Inputs:
    def __init__(self, dtype: DType = F16) -> None:
        self.nodes: list[Node] = []
        self.constants: set[int] = set()
        self.dtype = dtype

    def __call__(self, *shape: int, constant: bool = False) -> Node:
        if constant:
            self.constants.add(len(self.nodes))
        self.nodes.append(input_node(len(self.nodes), TensorType(shape, self.dtype), f"x{len(self.nodes)}"))
        return self.nodes[-1]

    def task(self, output: Node) -> Task:
        return Task(Graph(tuple(self.nodes), (output,)), frozenset(self.constants))


def gemm(m: int, n: int, k: int, epilogue: str = "relu", dtype: DType = F16) -> Task:
    """epilogue(x w' + b), with a residual added before it, or neither."""
    x = Inputs(dtype)
    total = apply("linear", x(m, k), x(n, k, constant=True))
    if epilogue == "none":
        return x.task(total)
    total = apply("add", total, x(n, constant=True))
    if epilogue == "residual":
        return x.task(apply("relu", apply("add", total, x(m, n))))
    attrs: dict[str, Any] = {"approximate": "none"} if epilogue == "gelu" else {}
    return x.task(apply(epilogue, total, **attrs))


def gated(m: int, n: int, k: int) -> Task:
    x = Inputs()
    both = apply("mul", apply("silu", x(m, k)), x(m, k))
    return x.task(apply("linear", both, x(n, k, constant=True)))


def conv(
    batch: int, size: int, inside: int, outside: int, window: int, stride: int = 1, dtype: DType = F16
) -> Task:
    """relu(conv(x, w) + b), channels last."""
    x = Inputs(dtype)
    image: Node = x(batch, size, size, inside)
    edge = (0, window // 2, window // 2, 0)
    if window > 1:
        image = apply("pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    attrs: dict[str, Any] = {"padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    weight = x(window, window, inside, outside, constant=True)
    total = apply("conv", image, weight, stride=(stride, stride), layout="channels_last", **attrs)
    return x.task(apply("relu", apply("add", total, x(outside, constant=True))))


def attention(batch: int, heads: int, length: int, width: int, causal: bool = False) -> Task:
    x = Inputs()
    operands = [x(batch, heads, length, width) for _ in range(3)]
    return x.task(apply("attention", *operands, scale=width**-0.5, causal=causal))


def reduction(op: str, rows: int, columns: int, dtype: DType = F16) -> Task:
    x = Inputs(dtype)
    return x.task(apply(op, x(rows, columns), axes=(0,), keepdims=False))


@dataclass(frozen=True)
class Source:
    make: Callable[[], Task]
    numerics: str = "fast"


# Attention and some reductions have fewer configs than count; movement has one candidate, and nothing to search.
TASKS: dict[str, Source] = {
    "gemm_gelu": Source(lambda: gemm(512, 3072, 768, "gelu")),
    "gemm_residual": Source(lambda: gemm(512, 768, 3072, "residual")),
    "gemm_square": Source(lambda: gemm(2048, 2048, 2048, "residual")),
    "gemm_skinny": Source(lambda: gemm(16, 4096, 4096)),
    "gemm_odd": Source(lambda: gemm(1023, 1021, 1019)),
    "gemm_tall": Source(lambda: gemm(25088, 512, 128, "residual")),
    "gemm_gated": Source(lambda: gated(4096, 1024, 1024)),
    "gemm_f32": Source(lambda: gemm(1024, 1024, 1024, "relu", F32)),
    "gemm_tf32": Source(lambda: gemm(1024, 1024, 1024, "relu", F32), "tf32"),
    "conv3_56": Source(lambda: conv(8, 56, 64, 64, 3)),
    "conv3_14": Source(lambda: conv(32, 14, 256, 256, 3)),
    "conv3_stride": Source(lambda: conv(32, 56, 128, 128, 3, 2)),
    "conv1_56": Source(lambda: conv(32, 56, 64, 256, 1)),
    "conv7_stem": Source(lambda: conv(8, 224, 3, 64, 7, 2)),
    "conv3_f32": Source(lambda: conv(8, 28, 128, 128, 3, dtype=F32)),
    "sum_columns": Source(lambda: reduction("sum", 65_536, 2_048)),
    "sum_columns_f32": Source(lambda: reduction("sum", 16_384, 512, F32)),
    "attention_512": Source(lambda: attention(8, 12, 512, 64)),
    "attention_causal": Source(lambda: attention(4, 16, 1024, 64, causal=True)),
}


# -- what was measured ------------------------------------------------------------------------------------------------


class Begun(msgspec.Struct, frozen=True, tag="task"):
    """A line of the file: a task, and the machine that it was measured on. `size`: configs of the whole space."""

    name: str
    text: str
    constants: tuple[int, ...]
    numerics: str
    machine: dict[str, Any]
    size: int

    def work(self) -> Work:
        task = Task(parse_graph(self.text, {}), frozenset(self.constants))
        return Work(task, machine_of(self.machine), self.numerics)


class Trial(msgspec.Struct, frozen=True, tag="trial"):
    """A line of the file: the median time of a config, or the kind of its failure."""

    name: str
    config: Config
    seconds: float | None
    failure: str = ""


@dataclass
class Table:
    """What a file has of one task."""

    begun: Begun
    trials: dict[Config, Trial] = field(default_factory=dict)

    @cached_property
    def work(self) -> Work:
        return self.begun.work()

    def outcomes(self) -> dict[Config, Outcome]:
        """By the configs of this version, with its names and its new knobs; without those that are illegal now."""
        whole = Candidates.of(self.work)
        found: dict[Config, Outcome] = {}
        for trial in self.trials.values():
            config = whole.recalled(current_config(trial.config))
            if config is not None:
                found[config] = Outcome(config, trial.seconds, trial.failure)
        return found


def read(path: Path) -> dict[str, Table]:
    """By the name of a task. A line that is damaged, as by a power cut, is one config less."""
    tables: dict[str, Table] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(line, type=Begun | Trial)
            if isinstance(found, Begun):
                tables.setdefault(found.name, Table(found))
            elif found.name in tables:
                tables[found.name].trials[found.config] = found
    return tables


def append(path: Path, lines: Iterable[Begun | Trial]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)


def chosen(candidates: Candidates, most: int = MAX) -> list[Config]:
    """All library calls, then the fastest by prediction, then others at random: the same in every run."""
    configs = list(candidates.configs())
    names = {template.name for template in LIBRARIES}
    calls = [config for config in configs if config.template in names]
    model = Analytical(candidates, 0)
    predicted = sorted(configs, key=lambda config: (model.seconds(config), str(config)))[:PREDICTED]
    others = sorted(configs, key=str)
    Random(0).shuffle(others)
    return list(dict.fromkeys((*calls, *predicted, *others)))[:most]


def collect(
    path: Path, names: Sequence[str], machine: Machine, runner: Runner, seconds: float, most: int = MAX
) -> Iterator[str]:
    """Measures what the file does not have yet, task by task, for so long; says what was done."""
    deadline = time.monotonic() + seconds
    for name in names:
        source = TASKS[name]
        work = Work(source.make(), machine, source.numerics)
        candidates = Candidates.of(work)
        known = read(path).get(name)
        if known is not None and known.work.machine != machine:
            yield f"{name}: measured on {known.work.machine.describe()} already"
            continue
        size = sum(1 for _ in candidates.configs())
        if known is None:
            begun = Begun(
                name,
                work.task.text,
                tuple(sorted(work.task.constants)),
                work.numerics,
                description(machine),
                size,
            )
            append(path, [begun])
        measured = {} if known is None else known.outcomes()
        wanted = [config for config in chosen(candidates, most) if config not in measured]
        best = min((o.seconds for o in measured.values() if o.seconds is not None), default=None)
        job, failures = TaskJob.of(work, 0), 0
        groups = [wanted[begin : begin + TOGETHER] for begin in range(0, len(wanted), TOGETHER)]
        done = 0
        for number, group in enumerate(groups):
            if time.monotonic() >= deadline:
                break
            for ahead in groups[number + 1 : number + 3]:  # compiled while this one is timed
                runner.prepare(job, ahead)
            found = runner.measure(job, group, best=best, deadline=deadline)
            append(path, [Trial(name, each.config, each.seconds, each.failure) for each in found])
            times = [each.seconds for each in found if each.seconds is not None]
            best = min([*times, *([] if best is None else [best])], default=None)
            failures += sum(bool(each.failure) for each in found)
            done += len(found)
        took = "nothing" if best is None else f"{best * 1e6:.1f} us"
        yield f"{name}: {done} of {len(wanted)} measured, {failures} failed, the best takes {took}"
        if time.monotonic() >= deadline:
            return


# -- replays ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed(Space):
    """A space of which only some configs were measured: nothing else is in it."""

    listed: tuple[Config, ...] = ()

    @classmethod
    def of(cls, space: Space, listed: Sequence[Config]) -> Listed:
        known = {frozenset(config.values) for config in listed}

        def is_legal(values: Mapping[str, Value]) -> bool:
            return frozenset(values.items()) in known

        return cls(space.template, space.knobs, is_legal, space.together, listed=tuple(listed))

    @cached_property
    def size(self) -> int:
        return len(self.listed)

    def configs(self) -> Iterator[Config]:
        return iter(self.listed)

    def sample(self, rng: Random) -> Config | None:
        return rng.choice(self.listed)

    def default(self) -> Config:
        return self.listed[0]

    def mutate(self, config: Config, rng: Random) -> Config:
        """Where no neighbour was measured, any config."""
        found = super().mutate(config, rng)
        return found if found != config else rng.choice(self.listed)


@dataclass(frozen=True)
class Part:
    """A template applied to a task, with the measured part of its space."""

    whole: Applied
    space: Space

    def terms(self, config: Config) -> Counted | None:
        return self.whole.terms(config)

    def program(self, config: Config) -> Kernel | Implementation:
        return self.whole.program(config)


def restricted(work: Work, configs: Iterable[Config]) -> Candidates:
    """The measured part of the space."""
    by_template: dict[str, list[Config]] = {}
    for config in configs:
        by_template.setdefault(config.template, []).append(config)
    whole = Candidates.of(work)
    only = [
        Part(applied, Listed.of(applied.space, sorted(some, key=str)))
        for some in by_template.values()
        for applied in [whole.of_config(some[0])]
    ]
    return Candidates(work, only=tuple(only))


Model = Callable[[Candidates, int], CostModel]


def _learning(candidates: Candidates, seed: int) -> CostModel:
    return Boosted(candidates, 0, seed=seed)


def _analytical(candidates: Candidates, seed: int) -> CostModel:
    return Analytical(candidates, 0)


SYSTEMS: dict[str, tuple[str, Model]] = {
    "guided": ("guided", _learning),
    "random": ("random", _analytical),
    "annealing": ("annealing", _learning),
    "evolution": ("evolution", _learning),
}
RANKING = "analytical ranking"


@dataclass(frozen=True)
class Run:
    """One search on one task: shares of the speed of the best measured config."""

    system: str
    task: str
    first: float  # before anything is measured
    early: float
    late: float


def shares(outcomes: Mapping[Config, Outcome]) -> dict[Config, float]:
    best = min((o.seconds for o in outcomes.values() if o.seconds is not None), default=math.inf)
    return {
        config: 0.0 if outcome.seconds is None else best / outcome.seconds
        for config, outcome in outcomes.items()
    }


def replayed(
    name: str, task: str, candidates: Candidates, outcomes: Mapping[Config, Outcome], seed: int
) -> Run:
    """A search over the measured configs, which it is told the times of."""
    search, model = SYSTEMS[name]
    searcher = SEARCHES[search](candidates, model(candidates, seed), seed)
    speed = shares(outcomes)
    found: list[float] = []
    while len(found) < LATE:
        asked = searcher.ask(min(BATCH, LATE - len(found)))
        if not asked:
            break
        searcher.tell([outcomes[config] for config in asked])
        found += [speed[config] for config in asked]
    return Run(name, task, found[0], max(found[:EARLY]), max(found))


def ranking(task: str, candidates: Candidates, outcomes: Mapping[Config, Outcome]) -> Run:
    """The measured configs in the order of their predicted times."""
    model, speed = Analytical(candidates, 0), shares(outcomes)
    found = [speed[config] for config in sorted(outcomes, key=lambda c: (model.seconds(c), str(c)))]
    return Run(RANKING, task, found[0], max(found[:EARLY]), max(found[:LATE]))


def replay(table: Table, seeds: int = SEEDS) -> list[Run]:
    outcomes = table.outcomes()
    candidates = restricted(table.work, outcomes)
    runs = [ranking(table.begun.name, candidates, outcomes)]
    for name in SYSTEMS:
        runs += [replayed(name, table.begun.name, candidates, outcomes, seed) for seed in range(seeds)]
    return runs


def report(tables: Mapping[str, Table], runs: Sequence[Run]) -> str:
    """Means over tasks whose space is large enough, and the tasks one by one."""
    counted = {name for name, table in tables.items() if table.begun.size >= MIN_SPACE} or set(tables)
    names = [RANKING, *SYSTEMS]
    summary = [["search", "without measuring", f"best of {EARLY}", f"best of {LATE}"]]
    for name in names:
        own = [run for run in runs if run.system == name and run.task in counted]
        summary.append([name, *(_percent([getattr(run, each) for run in own]) for each in _COLUMNS)])
    head = ["task", "configs", "measured", "failed", *(f"{name}, {EARLY} / {LATE}" for name in names)]
    by_task = [head]
    for task, table in tables.items():
        cells = []
        for name in names:
            own = [run for run in runs if run.system == name and run.task == task]
            early, late = (_percent([getattr(run, each) for run in own]) for each in _COLUMNS[1:])
            cells.append(f"{early} / {late}")
        failed = sum(trial.seconds is None for trial in table.trials.values())
        by_task.append([task, str(table.begun.size), str(len(table.trials)), str(failed), *cells])
    words = (
        f"{len(counted)} tasks count: a space of at least {MIN_SPACE} configs; {SEEDS} seeds of each search."
    )
    return "\n\n".join([_table(summary), words, _table(by_task)])


_COLUMNS = ("first", "early", "late")


def _percent(values: Sequence[float]) -> str:
    return f"{100 * float(np.mean(values)):.1f}%" if values else "-"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


# -- the command ------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    names = [name for name in (options.tasks or ",".join(TASKS)).split(",") if name]
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        print(f"unknown task {', '.join(unknown)}; use one of {', '.join(TASKS)}", file=sys.stderr)
        return 2
    if options.collect is not None:
        from tilewright.targets.cuda import CudaTarget

        machine = CudaTarget.of_card(0).machine
        with Runner(0, device=0) as runner:
            for line in collect(options.collect, names, machine, runner, options.seconds):
                print(line, flush=True)
        return 0
    tables = {name: table for name, table in read(options.source).items() if name in names and table.trials}
    runs: list[Run] = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as processes:
        for name, found in zip(tables, processes.map(replay, tables.values()), strict=True):
            print(f"replayed {name}", file=sys.stderr, flush=True)
            runs += found
    text = report(tables, runs)
    print(text)
    if options.markdown:
        options.markdown.write_text(f"# Searches on a GPU alongside what was measured\n\n{text}\n")
    return 0
