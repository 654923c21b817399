"""`tilewright codesign`: hardware for models, and the mapping of each of their layers on it."""

from __future__ import annotations

import json as json_text
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.models import load_source
from tilewright.cli.options import (
    JSON,
    BuildOptions,
    OutputFileError,
    check_output,
    complete_model,
    parse_seconds,
)
from tilewright.cli.output import console, err, print_json, print_table

if TYPE_CHECKING:
    from tilewright.codesign.search import ExplorationProgress
    from tilewright.graph.ir import Graph

_SPOKEN = 5.0  # seconds between lines of progress
_SHOWN = 12  # layers in the table


def codesign(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="what compile takes; one design serves all of them",
            autocompletion=complete_model,
        ),
    ],
    budget: Annotated[
        float, typer.Option(parser=parse_seconds, metavar="SECONDS", help="of the search, such as 90s or 10m")
    ] = 600.0,
    evaluations: Annotated[
        int | None, typer.Option(min=1, help="of the whole network at most, besides the budget")
    ] = None,
    area: Annotated[float | None, typer.Option(metavar="MM2", help="square millimetres at most")] = None,
    power: Annotated[
        float | None, typer.Option(metavar="WATTS", help="at most, on average, at 1 GHz")
    ] = None,
    dim: Annotated[int, typer.Option(help="rows and columns of PEs at most")] = 128,
    dram: Annotated[
        float, typer.Option(metavar="BYTES", help="that DRAM moves in a cycle, a multiple of 4")
    ] = 8.0,
    batch: Annotated[int, typer.Option(min=1, help="batch size of a zoo model")] = 1,
    small: Annotated[bool, typer.Option("--small", help="the zoo model's small version")] = False,
    correct: Annotated[
        bool,
        typer.Option(
            "--correct",
            help="judge by cycles learned from Gemmini's RTL in FireSim; for arrays of 16x16 only",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="of the search")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="the report, an HTML file")] = Path(
        "codesign.html"
    ),
    parameters: Annotated[
        Path, typer.Option("--parameters", help="the RTL's parameters and the mappings, a JSON file")
    ] = Path("codesign.json"),
    json: JSON = False,
) -> None:
    """Search for an accelerator (Gemmini) and for the mapping of each layer on it, together: least energy times delay.

    Ctrl-C keeps the best so far."""
    from tilewright.codesign.correction import shipped
    from tilewright.codesign.library import library_mapping
    from tilewright.codesign.mapping import Mappings
    from tilewright.codesign.network import Evaluator, Limits, Network
    from tilewright.codesign.problem import layers_of, left_to_host
    from tilewright.codesign.programs import programs_of, total_cycles
    from tilewright.codesign.report import parameters as parameters_of
    from tilewright.codesign.report import render, simulated
    from tilewright.codesign.search import Budget, explore
    from tilewright.hw.gemmini import GemminiMachine

    base = GemminiMachine(dram_bytes_per_cycle=dram)
    _ = base.bus_bytes  # what the RTL cannot have is refused before the search
    correction = shipped() if correct else None
    limits = Limits(area=area, watts=power, dim=dim)
    for path in (output, parameters):
        check_output(path)
    build = BuildOptions(batch=batch, small=small, seed=seed)
    graphs = [_graph(model, build) for model in models]
    network = Network.of(layer for graph in graphs for layer in layers_of(graph))
    left: Counter[str] = Counter()
    for graph in graphs:
        left.update(left_to_host(graph))
    if not json:
        console.print(f"{len(network)} different layers, {network.macs / 1e9:.2f} GMACs")
        for name, macs in left.items():
            share = macs / (network.macs + left.total())
            console.print(
                f"the host computes {name}: {macs / 1e9:.2f} GMACs ({share:.1%}), in no figure below"
            )
    found = explore(
        network,
        Budget(budget, evaluations or 1 << 62),
        base=base,
        limits=limits,
        seed=seed,
        correction=correction,
        progress=_silent if json else _Spoken(),
    )
    best = found.best
    library = Evaluator(network, base, correction).design(
        base, Mappings.joined([library_mapping(layer, base) for layer in network.layers])
    )
    title = f"Co-design of {', '.join(Path(model).stem for model in models)}"
    programs = programs_of(best)
    result = {
        "models": models,
        "interrupted": found.interrupted,
        "macs_left_to_host": dict(left),
        **parameters_of(best, programs),
    }
    for path, text in (
        (output, render(found, title, programs, library)),
        (parameters, json_text.dumps(result, indent=1) + "\n"),
    ):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputFileError(f"cannot write {path}: {error.strerror}") from None
    if json:
        print_json({**result, "evaluations": found.evaluations, "seconds": found.seconds})
        return
    importance = best.importance / 2
    rows = [
        [
            str(network.layers[index]),
            str(network.layers[index].count),
            f"{best.layer_cycles[index]:,.0f}",
            simulated(programs[index]),
            f"{importance[index]:.1%}",
            best.mappings.text(index),
        ]
        for index in sorted(range(len(network)), key=lambda index: -importance[index])[:_SHOWN]
    ]
    print_table(
        "layers by importance", ["layer", "times", "cycles", "simulated", "importance", "mapping"], rows
    )
    console.print(
        f"{best.machine.describe()}; {best.area:.2f} mm2, {best.watts():.2f} W; EDP {best.edp:.4g} uJ cycles,"
        f" {library.edp / best.edp:.1f} times better than the default Gemmini with its library's tiling"
        f" ({library.area:.2f} mm2)"
    )
    cycles = total_cycles(best, programs)
    if cycles is not None:
        console.print(
            f"{best.cycles:,.0f} cycles by the model, {cycles:,.0f} of its programs by the simulator; run them:"
            f" tilewright compile --target gemmini:{parameters} MODEL"
        )
    if found.interrupted:
        console.print("interrupted: this is the best so far")
    console.print(f"report: {output}; parameters: {parameters}")


def _graph(model: str, build: BuildOptions) -> Graph:
    from tilewright import frontend

    source = load_source(model, build)
    return frontend.import_model(source.model, source.examples).graph


def _silent(step: ExplorationProgress) -> None:
    return


class _Spoken:
    """A line when a stage begins, and every few seconds."""

    def __init__(self) -> None:
        self._stage, self._last = "", 0.0

    def __call__(self, step: ExplorationProgress) -> None:
        now = time.monotonic()
        if step.stage == self._stage and now - self._last < _SPOKEN:
            return
        self._stage, self._last = step.stage, now
        err.print(
            f"{step.seconds:6.1f} s  {step.stage}: {step.evaluations:,} evaluations, EDP {step.edp:.4g}"
        )
