"""Every goal of co-design that needs no RTL: the goal, the measured value, and whether it is met.

`codesign.py --all` and `codesign.py --rows` run this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from codesign_measured import FIRESIM_DIM, LeftOut
from codesign_networks import DOSA, LIBRARY, SMALL, THIS, Terms, median, networks, runs_of
from tilewright.codesign.bound import least_edp
from tilewright.codesign.calls import Calls
from tilewright.codesign.correction import TARGET, Correction, shipped
from tilewright.codesign.data import Points, read_points, spearman
from tilewright.codesign.exact import EDP, LATENCY, best_mapping
from tilewright.codesign.mapping import check
from tilewright.codesign.model import Model
from tilewright.codesign.network import Evaluator, Network
from tilewright.hw.gemmini import GemminiMachine

TIMELOOP = "timeloop_dataset-dataset.csv.tar.gz"


class Goal(NamedTuple):
    what: str
    asked: str
    measured: str
    met: bool

    def __str__(self) -> str:
        return f"| {self.what} | {self.asked} | {self.measured} | {'yes' if self.met else 'no'} |"


HEAD = ["| goal | asked | measured | met |", "| --- | --- | --- | --- |"]


def _most(what: str, most: float, value: float, form: str = ".2%") -> Goal:
    return Goal(what, f"at most {most:{form}}", f"{value:{form}}", value <= most)


def _least(what: str, least: float, value: float, form: str = ".3f") -> Goal:
    return Goal(what, f"at least {least:g}", f"{value:{form}}", value >= least)


def _error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.abs(predicted / measured - 1.0).mean())


# -- agreement --------------------------------------------------------------------------------------------------------


def timeloop_goals(folder: Path) -> Iterator[Goal]:
    points = read_points(folder / TIMELOOP, ["cycle", "energy"])
    check(points.nests, points.mappings, points.hardware)
    found = Model().estimate(points.nests, points.mappings, points.hardware)
    name = f"{len(points):,} points of Timeloop: mean error of"
    yield _most(f"{name} latency", 0.001, _error(found.cycles.value, points.targets["cycle"]), ".4%")
    yield _most(f"{name} energy", 0.01, _error(found.microjoules.value, points.targets["energy"]), ".4%")


def firesim_goals(left_out: LeftOut) -> Iterator[Goal]:
    for points, mapped, name, rank, most in (
        (left_out.found, "found", "test rows of FireSim", 0.99, 0.10),
        (left_out.random, "random", "training rows of FireSim", 0.95, 0.25),
    ):
        _, predicted = left_out.cycles(points, mapped)
        measured = points.targets[TARGET]
        label = f"{len(points):,} {name}, whole layers left out:"
        yield _least(f"{label} Spearman", rank, spearman(predicted, measured), ".4f")
        yield _most(f"{label} mean error", most, _error(predicted, measured), ".1%")


# -- mappings ---------------------------------------------------------------------------------------------------------


def machine_of(points: Points, row: int) -> GemminiMachine:
    dim, scratchpad, accumulator = (int(column[row]) for column in points.hardware)
    return GemminiMachine(
        dim=dim, scratchpad=scratchpad, accumulator=GemminiMachine.ACCUMULATOR_BYTES * accumulator
    )


def mapping_goals(left_out: LeftOut) -> Iterator[Goal]:
    points = left_out.found
    above, slower, used = [], [], []
    for row, layer in enumerate(points.layers()):
        machine = machine_of(points, row)
        best = best_mapping(layer, machine, EDP)
        above.append(best.value / best.bound - 1.0)
        learned = left_out.by_layer[layer.extents, layer.stride]
        _, cycles, _ = Evaluator(Network((layer,)), machine, learned).best_mapping(layer, machine, LATENCY)
        slower.append(cycles > left_out.automatic.targets[TARGET][row])
        used.append(layer.macs / (machine.pes * cycles))
    yield _most("mappings: EDP above the proven optimum, mean", 0.01, float(np.mean(above)))
    yield _most(
        "mappings: predicted slower than the library's measured tiling, share",
        0.05,
        float(np.mean(slower)),
        ".1%",
    )
    yield _least("mappings: utilisation by predicted cycles, mean", 0.70, float(np.mean(used)))


# -- designs ----------------------------------------------------------------------------------------------------------


def network_goals(name: str, network: Network, terms: Terms) -> Iterator[Goal]:
    runs = runs_of(network, terms)
    ours, theirs = median(runs[THIS]), median(runs[DOSA])
    gain = theirs.edp / ours.edp
    bound = least_edp(network, GemminiMachine(), cells=terms.cells)
    closed = (theirs.edp - ours.edp) / (theirs.edp - bound.edp)
    yield Goal(
        f"{name}: EDP of DOSA's design over this search's, equal evaluations",
        "at least 1.2, or 90% of the gap to the bound",
        f"{gain:.3f}; {closed:.1%} of the gap",
        gain >= 1.2 or closed >= 0.9,
    )
    yield _least(
        f"{name}: EDP of random search's design over this search's",
        3.5,
        median(runs["random"]).edp / ours.edp,
        ".2f",
    )
    yield _least(
        f"{name}: EDP of the default Gemmini with its library's tiling over this search's, at no more area",
        3.0,
        median(runs[LIBRARY]).edp / median(runs[SMALL]).edp,
        ".2f",
    )
    yield _most(f"{name}: minutes of CPU time", 10.0, ours.seconds / 60.0, ".1f")


def all_goals(folder: Path, names: Sequence[str], terms: Terms) -> Iterator[Goal]:
    yield from timeloop_goals(folder)
    left_out = LeftOut.of(folder)
    yield from firesim_goals(left_out)
    yield from mapping_goals(left_out)
    known = networks(folder)
    for name in names:
        yield from network_goals(name, known[name], terms)


# -- rows of one's own ------------------------------------------------------------------------------------------------


def row_lines(path: Path, learned: Correction | None = None) -> list[str]:
    """Lines of Markdown: a file of measured mappings, predicted by the correction that Tilewright ships."""
    learned = learned or shipped()
    points = read_points(path, [TARGET])
    runnable = np.maximum(points.mappings.rows, points.mappings.columns) <= FIRESIM_DIM
    points = points.take(runnable)
    if not len(points):
        return [
            f"{path.name}: no row has spatial factors of at most {FIRESIM_DIM}, the array that was measured."
        ]
    hardware = points.hardware._replace(dim=np.full(len(points), float(FIRESIM_DIM)))
    given, measured = (points.nests, points.mappings, hardware), points.targets[TARGET]
    columns = {
        "analytical model": Model().estimate(*given).cycles.value,
        "counted calls": Calls.of(*given).cycles(learned.fitted),
        "counted calls and what was learned": learned.cycles(*given),
    }
    lines = [
        f"{path.name}: {len(points):,} rows of {len(set(points.layers()))} layers; {(~runnable).sum()} others use more"
        f" than {FIRESIM_DIM} rows or columns of PEs. The shipped correction was trained on the two FireSim files of"
        " the DOSA repository: for their rows this is no test.",
        "",
        "| cycles by | Spearman | mean error | median |",
        "| --- | --- | --- | --- |",
    ]
    for name, cycles in columns.items():
        errors = np.abs(cycles / measured - 1.0)
        lines.append(
            f"| {name} | {spearman(cycles, measured):.4f} | {errors.mean():.1%} | {np.median(errors):.1%} |"
        )
    predicted = columns["counted calls and what was learned"]
    goals = (
        _least("Spearman", 0.99, spearman(predicted, measured), ".4f"),
        _most("mean error", 0.10, _error(predicted, measured), ".1%"),
    )
    return [*lines, "", *HEAD, *map(str, goals), ""]
