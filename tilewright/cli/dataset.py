"""`tilewright dataset`: collect measured configs, and train a cost model on them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.group import App, show_help
from tilewright.cli.options import JSON, BuildOptions, check_output, parse_seconds
from tilewright.cli.output import console, print_json, print_table
from tilewright.errors import OptionError

app = App()


@app.callback()
def root(context: typer.Context) -> None:
    """Data sets of measured configs: collect, merge, stats, and train a cost model."""
    show_help(context)


FILES = Annotated[list[Path], typer.Argument(metavar="FILE...", help="data sets: .jsonl or .jsonl.xz")]


@app.command()
def collect(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the file that grows; what it has is not measured again")
    ],
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="what compile takes; default: a list of common layers"),
    ] = None,
    target: Annotated[str, typer.Option(help="cpu, cuda or cuda:1: what is here")] = "cpu",
    configs: Annotated[int, typer.Option(min=1, help="of each task")] = 100,
    seconds: Annotated[
        float, typer.Option("--budget", parser=parse_seconds, metavar="SECONDS", help="such as 120s or 5m")
    ] = 300.0,
    tasks: Annotated[int | None, typer.Option(min=1, help="only so many tasks, the first ones")] = None,
    threads: Annotated[int, typer.Option(min=1, help="of a call on a processor")] = 1,
    seed: Annotated[int, typer.Option(help="of the choice of configs")] = 0,
    json: JSON = False,
) -> None:
    """Measure configs of tasks on this machine into a file of records. It goes on where it was interrupted."""
    from tilewright.cli.models import load_source
    from tilewright.dataset.collect import collect as collected
    from tilewright.dataset.models import model_sources
    from tilewright.dataset.tasks import SUITES
    from tilewright.targets.resolve import resolve_target

    if output.suffix != ".jsonl":
        raise OptionError(
            f"{output} grows line by line, and must end in .jsonl", remedy="compress it with merge"
        )
    resolved = resolve_target(target)
    if not resolved.is_here or resolved.machine.kind not in SUITES:
        raise OptionError(f"a data set is measured on a processor or a GPU that is here, got {target}")
    if models:
        loaded = [load_source(model, BuildOptions(target=target)) for model in models]
        sources = model_sources([(each.name, each.model, each.examples) for each in loaded], resolved)
    else:
        sources = SUITES[resolved.machine.kind]()
    done = collected(
        output,
        sources[:tasks],
        resolved.machine,
        configs=configs,
        seconds=seconds,
        threads=threads,
        seed=seed,
        say=lambda line: None if json else console.print(line, markup=False),
    )
    if json:
        print_json(asdict(done))
        return
    without = f"; no configs were chosen for {done.unsampled} tasks" if done.unsampled else ""
    console.print(
        f"{done.added} records added, {done.failed} of them failures; {done.left} left{without}", markup=False
    )


@app.command()
def merge(
    files: FILES,
    output: Annotated[Path, typer.Option("--output", "-o", help="a .jsonl or .jsonl.xz file")],
    json: JSON = False,
) -> None:
    """Merge data sets into one file; a record that several have is in it once."""
    from tilewright.dataset.store import merge as merged

    check_output(output)
    found = merged(files, output)
    result = {"records": len(found.records), "damaged": found.damaged, "bytes": output.stat().st_size}
    if json:
        print_json(result)
        return
    console.print(
        f"{result['records']} records in {result['bytes']} bytes; {result['damaged']} damaged lines left out",
        markup=False,
    )


@app.command()
def stats(files: FILES, json: JSON = False) -> None:
    """Say what data sets have: machines, tasks, records and failures."""
    from tilewright.dataset.stats import stats as counted
    from tilewright.dataset.store import read

    found = read(*files)
    machines = counted(found.records)
    if json:
        print_json({"damaged": found.damaged, "machines": [asdict(machine) for machine in machines]})
        return
    rows = [
        (
            machine.machine + (f", {machine.threads} thread(s)" if machine.threads else ""),
            str(machine.tasks),
            str(machine.records),
            ", ".join(f"{count} {kind}" for kind, count in machine.failures) or "none",
            " to ".join(dict.fromkeys(machine.days)),
        )
        for machine in machines
    ]
    print_table(
        "", ("machine", "tasks", "records", "failures", "measured"), rows, left=(0, 3, 4), clipped=(0,)
    )
    if found.damaged:
        console.print(f"{found.damaged} damaged lines were left out", markup=False)


@app.command()
def train(
    files: FILES,
    output: Annotated[Path, typer.Option("--output", "-o", help="the weights: a .safetensors file")],
    start: Annotated[
        Path | None, typer.Option(help="weights to go on from; `shipped`: those of this version")
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    seed: Annotated[int, typer.Option(help="of the weights and of the order of the data")] = 0,
    device: Annotated[str, typer.Option(help="of PyTorch: cpu, cuda")] = "cpu",
    json: JSON = False,
) -> None:
    """Train the attention cost model on data sets: `compile(cost_model="attention")` uses its weights."""
    from tilewright.cost import weights
    from tilewright.dataset.store import read
    from tilewright.dataset.tables import tables_of
    from tilewright.dataset.train import TrainingSettings, about, tasks_of
    from tilewright.dataset.train import train as trained

    check_output(output)
    before = None
    if start is not None:
        before = weights.load(weights.SHIPPED if str(start) == "shipped" else start).tensors
    found = read(*files)
    tables, left = tables_of(found.records)
    say = (lambda line: None) if json else (lambda line: console.print(line, markup=False))
    for reason, count in left.counts:
        say(f"{count} records {reason} are left out")
    tensors = trained(tables, TrainingSettings(steps=steps, seed=seed), start=before, device=device, say=say)
    weights.save(output, tensors, about(tables, files, steps, seed))
    records = sum(len(table.configs) for table in tables)
    result = {
        "tasks": tasks_of(tables),
        "tables": len(tables),
        "records": records,
        "bytes": output.stat().st_size,
    }
    if json:
        print_json(result)
        return
    say(
        f"trained on {records} configs of {result['tasks']} tasks in {len(tables)} tables; "
        f"{output} has {result['bytes']} bytes"
    )
    say(f"to use it: TILEWRIGHT_COST_WEIGHTS={output} tilewright tune MODEL --cost-model attention")
