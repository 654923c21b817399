#!/usr/bin/env python3
"""How good co-design is: every goal that is set for it and needs no RTL, and its parts.

    python benchmarks/codesign.py --all --data FOLDER [--networks bert] [--evaluations 3000] [--seeds 3]
    python benchmarks/codesign.py --rows FILE [FILE ...]
    python benchmarks/codesign.py --agreement --data FOLDER [--markdown benchmarks/results/codesign_agreement.md]

`--all` prints the goal, the measured value and whether it is met, each goal as soon as it is measured. The exit
status is 1 if one is not met. `--rows` predicts rows of files with the columns of the FireSim files below, by the
correction that Tilewright ships.

FOLDER holds the data of the DOSA repository (BSD 2-Clause, copyright 2022 Charles Hong):
`timeloop_dataset-dataset.csv.tar.gz`, 72,700 mappings that Timeloop and Accelergy have evaluated, and two files of
mappings that ran on Gemmini's RTL in FireSim. The RTL had an array of 16x16, so that rows with larger spatial factors
are left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from codesign_goals import HEAD, TIMELOOP, all_goals, row_lines
from codesign_measured import FIRESIM_DIM, TEST, TRAINING
from codesign_networks import Terms
from tilewright.codesign.search import Budget
from tilewright.errors import TilewrightError

FIRESIM = {"training": TRAINING, "test": TEST}
NETWORKS = ("bert", "resnet50", "unet", "retinanet")


def errors_of(predicted: np.ndarray, measured: np.ndarray) -> list[str]:
    """Mean, 99th percentile and largest relative error, and the share of rows within 0.1%."""
    relative = np.abs(predicted / measured - 1.0)
    return [
        f"{relative.mean():.4%}",
        f"{np.quantile(relative, 0.99):.3%}",
        f"{relative.max():.2%}",
        f"{(relative <= 1e-3).mean():.2%}",
    ]


def agreement(folder: Path) -> list[str]:
    """Lines of Markdown: Timeloop's cycles and energy against the model's."""
    from tilewright.codesign.data import read_points
    from tilewright.codesign.mapping import check
    from tilewright.codesign.model import BOUNDS, Model

    points = read_points(folder / TIMELOOP, ["cycle", "energy"])
    check(points.nests, points.mappings, points.hardware)
    measured = {"cycles": points.targets["cycle"], "energy": points.targets["energy"]}
    lines = [
        "## Timeloop",
        "",
        f"{len(points):,} mappings of {len(set(points.layers()))} layers, all of which fit their hardware by the"
        " model's own rules too.",
        "",
        "| model | of | mean error | 99th percentile | largest | within 0.1% |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, model in (
        ("as it is", Model()),
        ("without whole DRAM blocks and whole cycles", Model(rounded=False)),
        ("without overlap of windows", Model(sliding=False)),
        ("smoothed maximum (0.05), not rounded", Model(smoothing=0.05, rounded=False)),
    ):
        began = time.perf_counter()
        found = model.estimate(points.nests, points.mappings, points.hardware)
        seconds = time.perf_counter() - began
        for what, values in (("cycles", found.cycles.value), ("energy", found.microjoules.value)):
            lines.append(f"| {' | '.join([name, what, *errors_of(values, measured[what])])} |")
        if name == "as it is":
            bound, rate = found.bound_by, len(points) / seconds
            exact = found.cycles.value
    lines += ["", "| bound by | mappings | mean error of cycles |", "| --- | --- | --- |"]
    for index, name in enumerate(BOUNDS):
        rows = bound == index
        error = np.abs(exact[rows] / measured["cycles"][rows] - 1.0).mean() if rows.any() else 0.0
        lines.append(f"| {name} | {rows.sum():,} | {error:.4%} |")
    few = points.take(slice(0, 4096))
    began = time.perf_counter()
    Model(smoothing=0.05).estimate(few.nests, few.mappings, few.hardware, gradients=True)
    with_gradients = len(few) / (time.perf_counter() - began)
    lines += [
        "",
        f"Speed: {rate / 1e3:,.0f} thousand mappings a second, {with_gradients / 1e3:,.0f} thousand with their"
        " gradients.",
    ]
    return lines


def firesim(folder: Path) -> list[str]:
    """Lines of Markdown: cycles of Gemmini's RTL in FireSim against the model's, without a learned correction."""
    from tilewright.codesign.data import read_points, spearman
    from tilewright.codesign.model import Model

    lines = [
        "",
        "## FireSim, the analytical model alone",
        "",
        "| rows | mappings | layers | Spearman | mean error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, file in FIRESIM.items():
        points = read_points(folder / file, ["gemmini_cycle"])
        points = points.take(np.maximum(points.mappings.rows, points.mappings.columns) <= FIRESIM_DIM)
        cycles = Model().estimate(points.nests, points.mappings, points.hardware).cycles.value
        measured = points.targets["gemmini_cycle"]
        rank = spearman(cycles, measured)
        error = np.abs(cycles / measured - 1.0).mean()
        lines.append(f"| {name} | {len(points):,} | {len(set(points.layers()))} | {rank:.3f} | {error:.1%} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="every goal: asked, measured, met")
    what.add_argument("--rows", type=Path, nargs="+", metavar="FILE", help="predict measured rows")
    what.add_argument("--agreement", action="store_true", help="compare the model with the data")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="needed but for --rows")
    parser.add_argument("--networks", nargs="*", default=NETWORKS, choices=NETWORKS, metavar="NAME")
    parser.add_argument("--evaluations", type=int, default=3000, help="of a network, for each search")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each search; the median counts")
    parser.add_argument("--markdown", type=Path, help="also write the tables there")
    arguments = parser.parse_args()
    if arguments.data is None and not arguments.rows:
        parser.error("--data is needed: the folder with the data of the DOSA repository")
    lines = [
        "# Co-design: " + ("agreement of the accelerator's model" if arguments.agreement else "goals"),
        "",
        f"`python benchmarks/codesign.py {' '.join(sys.argv[1:])}` on {platform.machine()} with {os.cpu_count()} cores"
        f" (load {os.getloadavg()[0]:.1f} at the start), Python {platform.python_version()}, NumPy {np.__version__}.",
        "",
    ]
    met = True
    try:
        if arguments.agreement:
            lines += agreement(arguments.data) + firesim(arguments.data)
        elif arguments.rows:
            lines += [line for path in arguments.rows for line in row_lines(path)]
        else:
            budget = Budget(evaluations=arguments.evaluations, clock=time.process_time)
            terms = Terms(budget, tuple(range(arguments.seeds)), equal_seconds=False, known=0, cells=64)
            lines += HEAD
            for goal in all_goals(arguments.data, arguments.networks, terms):
                print(goal, file=sys.stderr, flush=True)
                lines.append(str(goal))
                met &= goal.met
    except TilewrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = "\n".join([*lines, ""])
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
