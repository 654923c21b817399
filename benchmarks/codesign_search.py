#!/usr/bin/env python3
r"""How good mappings and designs are: against proven optima, measured tilings, and other searches.

    python benchmarks/codesign_search.py --mappings --data FOLDER [--markdown FILE]
    python benchmarks/codesign_search.py --networks bert resnet50 unet retinanet --data FOLDER --evaluations 3000 \
        --seeds 3 --equal-seconds
    python benchmarks/codesign_search.py --descents bert resnet50 unet retinanet --data FOLDER --evaluations 3000
    python benchmarks/codesign_search.py --ablations bert resnet50 --data FOLDER --evaluations 600
    python benchmarks/codesign_search.py --correction --data FOLDER [--write tilewright/codesign/correction.json]

FOLDER holds the data of the DOSA repository (BSD 2-Clause, copyright 2022 Charles Hong): `workloads.json`, the layers
of networks; `firesim_test_data-analytical.csv`, 74 mappings of 71 layers with cycles of Gemmini's RTL in FireSim, also
of the tiling that Gemmini's library chooses; and `firesim_training_data-firesim_results.csv`, random mappings.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from codesign_measured import FIRESIM_DIM, TEST, LeftOut
from codesign_networks import DEFAULT, Terms, ablation_lines, descent_lines, network_lines, networks
from tilewright.codesign.baselines import randomly_mapped
from tilewright.codesign.bound import least_cycles
from tilewright.codesign.correction import TARGET, Correction
from tilewright.codesign.data import Points, read_points, spearman
from tilewright.codesign.exact import EDP, LATENCY, best_mapping
from tilewright.codesign.library import library_mapping
from tilewright.codesign.mapping import Hardware, check
from tilewright.codesign.model import Model
from tilewright.codesign.network import Evaluator, Network
from tilewright.codesign.problem import Nests
from tilewright.codesign.search import Budget
from tilewright.errors import MeasuredDataError, TilewrightError
from tilewright.hw.gemmini import GemminiMachine

# -- mappings of single layers ----------------------------------------------------------------------------------------


def machines(points: Points) -> list[GemminiMachine]:
    return [
        GemminiMachine(dim=int(dim), scratchpad=int(scratchpad), accumulator=4 * int(accumulator))
        for dim, scratchpad, accumulator in zip(*points.hardware, strict=True)
    ]


def mappings(folder: Path, left_out: LeftOut) -> list[str]:
    points = read_points(folder / TEST, ["gemmini_cycle", "gemmini_auto_cycle"])
    measured, automatic = points.targets["gemmini_cycle"], points.targets["gemmini_auto_cycle"]
    theirs = Model().estimate(points.nests, points.mappings, points.hardware)
    rng = np.random.default_rng(0)
    gaps: dict[str, list[float]] = {
        "exact mapper": [],
        "DOSA's mapping in the data": [],
        "library's tiling, on the default machine": [],
        "best of 100 random mappings": [],
        "best of 1,000 random mappings": [],
    }
    afterwards: list[float] = []
    predicted, corrected, bounds, used, best_used, visited, seconds = [], [], [], [], [], [], []
    proven = 0
    for row, (layer, machine) in enumerate(zip(points.layers(), machines(points), strict=True)):
        began = time.process_time()
        best = best_mapping(layer, machine, EDP)
        seconds.append(time.process_time() - began)
        visited.append(best.visited)
        proven += best.proven
        gaps["exact mapper"].append(best.value / best.bound)
        gaps["DOSA's mapping in the data"].append(float(theirs.edp.value[row]) / best.value)
        for count in (100, 1000):
            drawn = randomly_mapped(Evaluator(Network((layer,)), machine), machine, rng, count)
            name = f"best of {count:,} random mappings"
            gaps[name].append(np.inf if drawn is None else drawn.edp / best.value)
        library = Model.of(DEFAULT).estimate(
            Nests.of([layer]), library_mapping(layer, DEFAULT), Hardware.of([DEFAULT])
        )
        on_default = best_mapping(layer, DEFAULT, EDP)
        gaps["library's tiling, on the default machine"].append(
            float(library.edp.value[0]) / on_default.value
        )
        fastest = best_mapping(layer, machine, LATENCY)
        predicted.append(fastest.cycles)
        here = Nests.of([layer]), Hardware.of([machine])
        learned = left_out.by_layer[layer.extents, layer.stride]
        afterwards.append(
            min(float(learned.cycles(here[0], one.mapping, here[1])[0]) for one in (best, fastest))
        )
        chosen, cycles, _ = Evaluator(Network((layer,)), machine, learned).best_mapping(
            layer, machine, LATENCY
        )
        check(here[0], chosen, here[1])
        corrected.append(cycles)
        used.append(layer.macs / (machine.pes * fastest.cycles))
        bounds.append(layer.macs / (machine.pes * least_cycles(layer, machine)))
        best_used.append(layer.macs / (machine.pes * min(measured[row], automatic[row])))
    lines = [
        "## Mappings",
        "",
        f"{len(points)} rows, {len(set(points.layers()))} layers, each on its row's hardware. The exact mapper proved"
        f" {proven} of {len(points)} optima, in {np.mean(seconds):.2f} s of CPU time on average (largest"
        f" {max(seconds):.2f} s), with {np.mean(visited):,.0f} partial and complete mappings bounded.",
        "",
        "| mapping | EDP above the proven optimum: mean | median | largest |",
        "| --- | --- | --- | --- |",
    ]
    for name, ratios in gaps.items():
        above = np.array(ratios) - 1.0
        finite = above[np.isfinite(above)]
        lines.append(f"| {name} | {finite.mean():.2%} | {np.median(finite):.2%} | {finite.max():.1%} |")
    _, of_theirs = left_out.cycles(points)
    slower, faster, later, calibration = (
        np.array(each) > automatic for each in (predicted, corrected, afterwards, of_theirs)
    )
    macs = np.array([layer.macs for layer in points.layers()]) / np.array(
        [each.pes for each in machines(points)]
    )
    least = np.minimum(measured, automatic)
    lines += [
        "",
        "| mapping of each layer | cycles by | slower than the library's measured tiling | utilisation, mean |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {model} | {each.sum()} of {len(points)} ({each.mean():.1%}) | {np.mean(macs / cycles):.3f} |"
            for name, model, each, cycles in (
                ("least latency by the model", "analytical model", slower, np.array(predicted)),
                (
                    "best of least EDP and least latency by the model",
                    "correction",
                    later,
                    np.array(afterwards),
                ),
                ("chosen by the correction in the exact mapper", "correction", faster, np.array(corrected)),
                ("DOSA's, in the data: calibration", "correction", calibration, of_theirs),
                ("DOSA's, in the data", "measured", measured > automatic, measured),
                ("better of DOSA's and the library's", "measured", np.zeros(len(points), bool), least),
            )
        ),
        "",
        "Corrections are trained without the rows of the layer. None of Tilewright's mappings ran on that RTL, and a"
        " choice by predicted cycles favours those that are predicted too fast. The calibration row shows how far the"
        " correction is off in this count for mappings that did run, without such a choice."
        " Channels and compulsory traffic bound utilisation"
        " to"
        f" {np.mean(bounds):.3f} on average.",
        "",
        "| layer | array | utilisation, analytical | with the correction | bound | measured, better of two |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    expected = macs / np.array(corrected)
    columns = (points.layers(), machines(points), used, expected, bounds, best_used)
    for layer, machine, mine, rtl, bound, best in zip(*columns, strict=True):
        lines.append(f"| {layer} | {machine.dim} | {mine:.3f} | {rtl:.3f} | {bound:.3f} | {best:.3f} |")
    return [*lines, ""]


# -- the learned correction -------------------------------------------------------------------------------------------


def correction(folder: Path, write: Path | None, left_out: LeftOut) -> list[str]:
    """Each layer's rows predicted by what was trained on the rows of all other layers."""
    if write is not None:
        trained = Correction.fit(left_out.found, left_out.random, automatic=left_out.automatic)
        write.write_text(trained.to_json() + "\n")
    lines = [
        "## Cycles of Gemmini's RTL in FireSim",
        "",
        "Each row is predicted by what was trained on the rows of all other layers, of all three kinds. Constants:"
        " eight for convolutions and eight for matmuls (`codesign/calls.py`), always fitted to random mappings alone.",
        "",
        "| rows | cycles by | Spearman | mean error | median |",
        "| --- | --- | --- | --- | --- |",
    ]
    random = left_out.random
    array = Hardware(np.full(len(random), float(FIRESIM_DIM)), *random.hardware[1:])
    for mapped, name, points, hardware in (
        ("random", f"{len(random):,} random mappings", random, array),
        (
            "automatic",
            f"{len(left_out.automatic)} mappings of the library",
            left_out.automatic,
            left_out.automatic.hardware,
        ),
        (
            "found",
            f"{len(left_out.found)} mappings that a search found",
            left_out.found,
            left_out.found.hardware,
        ),
    ):
        analytical = Model().estimate(points.nests, points.mappings, hardware).cycles.value
        counted, learned = left_out.cycles(points, mapped)
        for model, cycles in (
            ("analytical model", analytical),
            ("counted calls", counted),
            ("counted calls and what was learned", learned),
        ):
            errors = np.abs(cycles / points.targets[TARGET] - 1.0)
            rank = spearman(cycles, points.targets[TARGET])
            lines.append(f"| {name} | {model} | {rank:.4f} | {errors.mean():.1%} | {np.median(errors):.1%} |")
    return [
        *lines,
        "",
        "Protocol: length, noise, distances of the kinds, features and the largest share of what is learned were chosen"
        " by the mean error on random mappings and on those of the library, with whole layers left out. The rules of"
        " `codesign/calls.py` were read off residuals of random mappings; off those of the library's too, that stores"
        " are a part of their own and that the last tile ends with the layer's channels. The 74 rows that a search"
        " found were looked at more than once, so that they are no clean test: they gave the idea of a cost for each"
        " word of weights (its size is fitted to random mappings), and another one for each word of inputs and outputs"
        " was dropped when they contradicted it, though the training rows favoured it. Errors of random mappings have"
        " a tail: of convolutions with a 4x4, 6x6 or 7x7 kernel cut into parts, about a dozen rows took 10 to 200 times"
        " as long as is counted.",
        "",
    ]


def _document_head() -> list[str]:
    return [
        "# Co-design: mappings and designs",
        "",
        f"`python benchmarks/codesign_search.py {' '.join(sys.argv[1:])}` on {platform.machine()} with {os.cpu_count()}"
        f" cores (load {os.getloadavg()[0]:.1f} at the start), Python {platform.python_version()}, NumPy"
        f" {np.__version__}. Costs by the analytical model, where a table says nothing else. Seconds are CPU time of"
        " a machine that may be busy; all else depends on the number of evaluations alone.",
        "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--mappings", action="store_true", help="single layers, against proven optima")
    parser.add_argument("--networks", nargs="*", default=[], metavar="NAME", help="of workloads.json")
    parser.add_argument("--correction", action="store_true", help="the learned correction, layers left out")
    parser.add_argument("--write", type=Path, help="with --correction: write one trained on all rows")
    parser.add_argument("--evaluations", type=int, default=5000, help="of a network, for each search")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of CPU time at most, for each run of this search"
    )
    parser.add_argument("--ablations", nargs="*", default=[], metavar="NAME", help="of workloads.json")
    parser.add_argument(
        "--descents", nargs="*", default=[], metavar="NAME", help="descent without the exact mapper"
    )
    parser.add_argument(
        "--best-known", type=int, default=0, metavar="TIMES", help="also search this many times as long"
    )
    parser.add_argument(
        "--cells", type=int, default=64, help="of memory sizes, for the bound over all hardware"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each search; tables show the median")
    parser.add_argument(
        "--equal-seconds", action="store_true", help="also give DOSA the CPU time of this search"
    )
    parser.add_argument("--markdown", type=Path, help="also write the tables there, one after the other")
    arguments = parser.parse_args()
    sections: list[Callable[[], list[str]]] = []
    left_out = cache(partial(LeftOut.of, arguments.data))
    if arguments.mappings:
        sections.append(lambda: mappings(arguments.data, left_out()))
    if arguments.correction:
        sections.append(lambda: correction(arguments.data, arguments.write, left_out()))
    terms = Terms(
        Budget(arguments.seconds, arguments.evaluations, time.process_time),
        tuple(range(arguments.seed, arguments.seed + arguments.seeds)),
        arguments.equal_seconds,
        arguments.best_known,
        arguments.cells,
    )
    try:
        wanted = [*arguments.networks, *arguments.descents, *arguments.ablations]
        known = networks(arguments.data) if wanted else {}
        if absent := [name for name in wanted if name not in known]:
            raise MeasuredDataError(f"workloads.json has no network {absent[0]!r}; it has {', '.join(known)}")
        sections += [partial(network_lines, name, known[name], terms) for name in arguments.networks]
        sections += [partial(descent_lines, name, known[name], terms) for name in arguments.descents]
        sections += [partial(ablation_lines, name, known[name], terms) for name in arguments.ablations]
        lines = _document_head()
        for section in sections:
            lines += section()
            # What is finished is kept if the rest is ended.
            if arguments.markdown:
                arguments.markdown.write_text("\n".join([*lines, ""]))
            print(f"{len(lines)} lines, {time.process_time():.0f} s of CPU time", file=sys.stderr, flush=True)
    except TilewrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
