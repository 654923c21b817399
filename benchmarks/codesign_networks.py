"""Tables of designs for networks: this search against others on equal terms, and without its parts.

Every search runs once for each seed. A table shows the median design and the spread; seconds are CPU time, so that they
mean the same on a busy machine. `codesign_search.py` runs this.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tilewright.codesign.baselines import descended, dosa, two_loops
from tilewright.codesign.bound import EDPBound, least_edp
from tilewright.codesign.correction import shipped
from tilewright.codesign.exact import EDP, best_mapping
from tilewright.codesign.library import library_mapping
from tilewright.codesign.mapping import Mappings
from tilewright.codesign.network import Design, Evaluator, Limits, Network
from tilewright.codesign.problem import Layer
from tilewright.codesign.search import Budget, explore
from tilewright.errors import MeasuredDataError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.testing.mappings import judged

DEFAULT = GemminiMachine()
THIS, SMALL, KNOWN = "this search", "this search, area of the default Gemmini", "best known"
DOSA, DOSA_SECONDS = "DOSA, re-implemented", "DOSA, the CPU time of this search"
LIBRARY, EXACT = "default Gemmini, library's tiling", "default Gemmini, exact mapper"


def networks(folder: Path) -> dict[str, Network]:
    try:
        found = json.loads((folder / "workloads.json").read_text())
    except (OSError, ValueError) as error:
        raise MeasuredDataError(f"{folder / 'workloads.json'} cannot be read: {error}") from None
    return {
        name: Network.of(
            Layer(tuple(sizes[:7]), tuple(sizes[7:9]), tuple(sizes[9:11]), count) for sizes, count in layers
        )
        for name, layers in found.items()
    }


@dataclass(frozen=True)
class Run:
    design: Design | None  # None: nothing within the limits
    evaluations: int
    bounded: int  # partial mappings that the exact mapper has bounded
    seconds: float  # of CPU time

    @property
    def edp(self) -> float:
        return math.inf if self.design is None else self.design.edp


def timed(search: Callable[[], tuple[Design | None, int, int]]) -> Run:
    began = time.process_time()
    return Run(*search(), time.process_time() - began)


def explored(network: Network, budget: Budget, seed: int, limits: Limits, **options: object) -> Run:
    def search() -> tuple[Design | None, int, int]:
        found = explore(network, budget, limits=limits, seed=seed, **options)  # type: ignore[arg-type]
        return found.best, found.evaluations, found.bounded

    return timed(search)


def compared(network: Network, search: Callable[[Evaluator], Design | None]) -> Run:
    """A baseline's run."""
    evaluator = Evaluator(network, DEFAULT)
    return timed(lambda: (search(evaluator), evaluator.evaluations, evaluator.bounded))


def median(runs: list[Run]) -> Run:
    return sorted(runs, key=lambda run: run.edp)[(len(runs) - 1) // 2]


@dataclass(frozen=True)
class Terms:
    """What all searches of a table have in common."""

    budget: Budget
    seeds: tuple[int, ...]
    equal_seconds: bool  # DOSA also has as much CPU time as this search
    known: int  # times the evaluations, to know a better design; 0: not
    cells: int


def runs_of(network: Network, terms: Terms) -> dict[str, list[Run]]:
    free, small = Limits(), Limits(area=DEFAULT.area)
    equal = Budget(evaluations=terms.budget.evaluations)
    found: dict[str, list[Run]] = {}

    def add(label: str, run: Run) -> Run:
        found.setdefault(label, []).append(run)
        return run

    for seed in terms.seeds:
        ours = add(THIS, explored(network, terms.budget, seed, free))
        add(DOSA, compared(network, partial(dosa, limits=free, budget=equal, seed=seed)))
        if terms.equal_seconds:
            same = Budget(ours.seconds, clock=time.process_time)
            add(DOSA_SECONDS, compared(network, partial(dosa, limits=free, budget=same, seed=seed)))
        for name in ("bayesian", "annealing", "random"):
            search = partial(two_loops, limits=free, budget=equal, search=name, seed=seed)
            add(name, compared(network, search))
    first = terms.seeds[0]
    add(SMALL, explored(network, terms.budget, first, small))
    if terms.known:
        longer = Budget(evaluations=terms.known * terms.budget.evaluations)
        for seed in (first + 101, first + 102):
            add(f"{KNOWN}: {terms.known} times the evaluations", explored(network, longer, seed, free))
    tiles = Mappings.joined([library_mapping(layer, DEFAULT) for layer in network.layers])
    add(LIBRARY, compared(network, lambda evaluator: evaluator.design(DEFAULT, tiles)))
    add(EXACT, compared(network, lambda evaluator: evaluator.mapped(DEFAULT)))
    return found


def network_lines(name: str, network: Network, terms: Terms) -> list[str]:
    runs = runs_of(network, terms)
    ours, bound = median(runs[THIS]), least_edp(network, DEFAULT, cells=terms.cells)
    assert ours.design is not None
    return [
        *_head(name, network),
        *(_row(ours.edp, label, each) for label, each in runs.items()),
        "",
        *_gap_lines(bound, ours.edp, median(runs[DOSA]).edp),
    ]


def above_optimum(design: Design) -> np.ndarray:
    """How far the EDP of each layer's mapping is above the proven optimum on the same hardware: [layers]."""
    ratios = []
    for row, layer in enumerate(design.network.layers):
        known = design.mappings.take(slice(row, row + 1))
        own = design.layer_cycles[row] * design.layer_microjoules[row]
        ratios.append(own / best_mapping(layer, design.machine, EDP, known=known).bound)
    return np.array(ratios) - 1.0


def _row(best: float, label: str, runs: list[Run], distances: bool = True) -> str:
    run = median(runs)
    if run.design is None:
        return f"| {label} | none fits | | | | | | | | {run.evaluations:,} | {run.bounded:,} | {run.seconds:.0f} |"
    design, machine = run.design, run.design.machine
    again = judged(design)
    edps = [each.edp / run.edp for each in runs]
    spread = f"{min(edps):.3f} to {max(edps):.3f}" if len(runs) > 1 else "one run"
    above = above_optimum(design) if distances else None
    cells = (
        label,
        f"{machine.dim}x{machine.dim}, {machine.scratchpad // 1024} + {machine.accumulator // 1024} KiB",
        f"{design.area:.2f}",
        f"{design.edp:.4g}",
        spread,
        f"{again.cycles * again.microjoules:.4g}",
        f"{design.edp / best:.3f}",
        *(("", "") if above is None else (f"{above.mean():.1%}", f"{above.max():.1%}")),
        f"{run.evaluations:,}",
        f"{run.bounded:,}",
        f"{run.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _gap_lines(bound: EDPBound, ours: float, theirs: float) -> list[str]:
    lines = [
        f"No design has an EDP below {bound.edp:.4g}: {bound.cycles:,.0f} cycles of compulsory work, times"
        f" {bound.microjoules:,.1f} µJ, the least energy over all hardware. This search is"
        f" {ours / bound.edp - 1.0:.1%} above it."
    ]
    if math.isfinite(theirs):
        closed = (theirs - ours) / (theirs - bound.edp)
        lines.append(
            f"DOSA's is {theirs / bound.edp:.3f} times the bound, so that no search can be better than it by more;"
            f" this one is better by {theirs / ours:.3f}, and closes {closed:.1%} of the gap."
        )
    return [*lines, ""]


# -- ablations --------------------------------------------------------------------------------------------------------


def ablation_lines(name: str, network: Network, terms: Terms) -> list[str]:
    """The search without one of its parts, with the same number of evaluations: one table. The last two rows are of the
    only array that the learned correction knows, and both are judged by corrected cycles."""
    free, equal = Limits(), Budget(evaluations=terms.budget.evaluations)
    whole: dict[str, dict[str, bool]] = {
        "one loop over hardware and programs": {},
        "without importance of layers": {"importance": False},
        "two loops: random hardware, exact mapper": {"descend": False},
    }
    alone: dict[str, Callable[..., Design | None]] = {
        "two loops: Bayesian hardware, random mappings": partial(two_loops, search="bayesian"),
        "descent and rounding, without the exact mapper": descended,
        "descent and rounding, without importance of layers": partial(descended, importance=False),
    }
    runs = {
        label: [explored(network, terms.budget, seed, free, **options) for seed in terms.seeds]
        for label, options in whole.items()
    }
    for label, search in alone.items():
        runs[label] = [
            compared(network, partial(search, limits=free, budget=equal, seed=seed)) for seed in terms.seeds
        ]
    best = median(next(iter(runs.values()))).edp
    corrected = _correction_runs(network, terms)
    judge = median(next(iter(corrected.values()))).edp
    lines = _head(name, network)
    lines[2] = lines[2].replace("to this search", "to the first row of its kind")
    return [
        *lines,
        *(_row(best, label, each) for label, each in runs.items()),
        *(_row(judge, label, each, distances=False) for label, each in corrected.items()),
        "",
    ]


def descent_lines(name: str, network: Network, terms: Terms) -> list[str]:
    """Descent and rounding without the exact mapper, which hides what they find, with the same number of
    evaluations."""
    free, equal = Limits(), Budget(evaluations=terms.budget.evaluations)
    searches = {
        "descent and rounding alone": partial(descended, limits=free, budget=equal),
        "without importance of layers": partial(descended, limits=free, budget=equal, importance=False),
        "without it, and with three loop orders (DOSA)": partial(dosa, limits=free, budget=equal),
        "two loops: Bayesian hardware, random mappings": partial(
            two_loops, limits=free, budget=equal, search="bayesian"
        ),
    }
    runs = {
        label: [compared(network, partial(search, seed=seed)) for seed in terms.seeds]
        for label, search in searches.items()
    }
    best = median(next(iter(runs.values()))).edp
    lines = _head(name, network)
    lines[2] = lines[2].replace("to this search", "to the first row")
    first, *others = runs
    paired = [f"{label}: {_paired(runs[label], runs[first])}" for label in others]
    return [
        *lines,
        *(_row(best, label, each) for label, each in runs.items()),
        "",
        f"EDP over the first row's, seed by seed ({len(terms.seeds)} of them; geometric mean, with its standard"
        f" error): {'; '.join(paired)}.",
        "",
    ]


def _paired(runs: list[Run], others: list[Run]) -> str:
    logs = np.log([run.edp / other.edp for run, other in zip(runs, others, strict=True)])
    return f"{math.exp(logs.mean()):.3f} ± {logs.std(ddof=min(1, len(logs) - 1)) / math.sqrt(len(logs)):.3f}"


def _correction_runs(network: Network, terms: Terms) -> dict[str, list[Run]]:
    """The search with and without the learned correction, both judged by corrected cycles."""
    learned = shipped()
    limits = Limits(dim=learned.dim, least_dim=learned.dim)
    judge = Evaluator(network, DEFAULT, learned)
    with_it, without = [], []
    for seed in terms.seeds:
        with_it.append(explored(network, terms.budget, seed, limits, correction=learned))
        blind = explored(network, terms.budget, seed, limits)
        assert blind.design is not None
        again = judge.design(blind.design.machine, blind.design.mappings)
        without.append(Run(again, blind.evaluations, blind.bounded, blind.seconds))
    array = f"{learned.dim}x{learned.dim}, by corrected cycles"
    return {
        f"{array}: with the learned correction": with_it,
        f"{array}: without the learned correction": without,
    }


def _head(name: str, network: Network) -> list[str]:
    columns = (
        "search",
        "array, scratchpad + accumulator",
        "mm²",
        "EDP (µJ·cycles)",
        "all seeds to the median",
        "by running the loops",
        "to this search",
        "layers above their optimum, mean",
        "largest",
        "evaluations",
        "bounds",
        "CPU seconds",
    )
    return [
        f"### {name}: {len(network)} layers, {network.macs / 1e9:.2f} GMACs",
        "",
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
    ]
