"""`tilewright db`: the database of tuning records."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright import knobs
from tilewright.cli.group import App, show_help
from tilewright.cli.models import (
    TRUSTED,
    is_artifact,
    load_artifact,
    load_source,
    refuse_trusted,
    sizes_wanted,
)
from tilewright.cli.options import JSON, MODEL, BuildOptions, check_output, compiling
from tilewright.cli.output import console, print_json, print_table
from tilewright.errors import DatabaseFileError, OptionError
from tilewright.numerics import mode_of

if TYPE_CHECKING:
    from tilewright.db.exchange import Imported
    from tilewright.db.record import Decision, Key, Record
    from tilewright.runtime.plan import Plan

app = App()


@app.callback()
def root(context: typer.Context) -> None:
    """The tuning database: list, export, import, merge, explain, verify, gc."""
    show_help(context)


DATABASE = Annotated[
    Path | None, typer.Option("--db", help="the database; default: tuning.sqlite in the cache folder")
]


@app.command()
def ls(
    db: DATABASE = None,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="also the key of each task and the config that was chosen")
    ] = False,
    json: JSON = False,
) -> None:
    """List the tasks in the database, one line each, grouped by machine."""
    from tilewright.db.database import Database

    with Database.open(db) as database:
        found: dict[Key, list[Record]] = {}
        for record in database.records():
            found.setdefault(record.key, []).append(record)
        decisions = {key: database.decision(key) for key in found}
        path = database.path
    rows = [_task_row(key, records, decisions[key]) for key, records in found.items()]
    if json:
        print_json(rows)
        return
    console.print(f"{path}: {sum(row['records'] for row in rows)} records of {len(rows)} tasks", markup=False)
    groups: dict[tuple[str, str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["machine"], row["cpu"], row["threads"], row["numerics"]), []).append(row)
    for (_, cpu, threads, numerics), tasks in groups.items():
        count = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
        where = f"{cpu or 'a GPU'}{count}, numerics {mode_of(numerics)}"
        console.print()
        _print_tasks(where, sorted(tasks, key=lambda row: -(row["best_seconds"] or 0.0)), long)


def _task_row(key: Key, records: list[Record], decision: Decision | None) -> dict[str, Any]:
    import msgspec

    return {
        **msgspec.to_builtins(key),
        "label": records[-1].label,
        "cpu": str(records[-1].machine.get("cpu", "") or records[-1].machine.get("name", "")),
        "records": len(records),
        "failures": sum(bool(record.failure) for record in records),
        "best_seconds": min((r.seconds for r in records if r.seconds is not None), default=None),
        "decided": None if decision is None else str(decision.config),
        "last": max(record.when for record in records),
    }


def _print_tasks(where: str, tasks: list[Mapping[str, Any]], long: bool) -> None:
    """Print the slowest tasks first. A terminal cuts a label short instead of wrapping it; a pipe shows all of it."""
    columns = ["task", "trials", "failed", "best us", "tuned", "last"]
    rows = []
    for task in tasks:
        best = task["best_seconds"]
        cells = [
            task["label"],
            str(task["records"]),
            str(task["failures"] or ""),
            "-" if best is None else f"{best * 1e6:.1f}",
            "yes" if task["decided"] else "",
            time.strftime("%Y-%m-%d", time.localtime(task["last"])),
        ]
        rows.append([*cells, task["task"][:12], task["decided"] or ""] if long else cells)
    if long:
        columns += ["key", "config"]
    print_table(where, columns, rows, left=(0, 6, 7), clipped=(0, 7) if long else (0,))


@app.command()
def export(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="a file; default: standard output")
    ] = None,
    task: Annotated[str, typer.Option(help="only tasks whose key begins with this")] = "",
    db: DATABASE = None,
) -> None:
    """Write the records as JSON lines."""
    from tilewright.db.database import Database
    from tilewright.db.exchange import export_lines

    if output is not None:
        check_output(output)
    with Database.open(db) as database:
        lines = list(export_lines(database, task))
    if output is None:
        sys.stdout.buffer.write(b"".join(lines))
        return
    try:
        output.write_bytes(b"".join(lines))
    except OSError as error:
        raise DatabaseFileError(
            f"cannot write {output}: {error.strerror}", remedy="name a file that you can write"
        ) from None
    console.print(f"{len(lines)} lines in {output}")


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(help="what `tilewright db export` wrote")],
    db: DATABASE = None,
    json: JSON = False,
) -> None:
    """Add exported records; records that are already known are skipped."""
    _take_in(files, db, json)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="other databases, also damaged ones")],
    db: DATABASE = None,
    json: JSON = False,
) -> None:
    """Add the records of other databases."""
    _take_in(files, db, json)


def _take_in(files: list[Path], db: Path | None, json: bool) -> None:
    from tilewright.db.database import Database
    from tilewright.db.exchange import import_file

    found: dict[str, Imported] = {}
    with Database.open(db) as database:
        for file in files:
            found[str(file)] = import_file(database, file)
    if json:
        print_json({name: one._asdict() for name, one in found.items()})
        return
    for name, one in found.items():
        console.print(
            f"{name}: {one.added} rows added, {one.known} known already, {len(one.damaged)} damaged"
        )
        for damage in one.damaged[:10]:
            console.print(f"  {damage}", markup=False)


@app.command()
@compiling
def explain(model: MODEL, build: BuildOptions, trusted: TRUSTED = None, json: JSON = False) -> None:
    """Show what the database knows about each task of a model, or how the nearest records differ."""
    import msgspec

    from tilewright.db.database import Database
    from tilewright.db.explain import explain as explain_key
    from tilewright.db.record import Key
    from tilewright.hw import host
    from tilewright.hw.machine import description

    refuse_trusted(model, trusted)
    plans = _plans(model, build, trusted)
    machine = host()
    count = build.threads or knobs.get("threads")
    with Database.open(build.db) as database:
        found = []
        for plan in plans:
            for task, info in plan.tasks.items():
                key = Key.of_task(task, machine, plan.numerics, count)
                found.append(explain_key(database, key, info.label, info.text, description(machine)))
    if json:
        print_json(msgspec.to_builtins(found))
        return
    for one in found:
        console.print(str(one), markup=False, soft_wrap=True)


def _plans(model: str, build: BuildOptions, trusted: list[Path] | None) -> list[Plan]:
    import tilewright

    if is_artifact(model):
        build.check_loaded(model, also=("db",))
        loaded = load_artifact(model, trusted=trusted)
        variants = (loaded,) if isinstance(loaded, tilewright.CompiledModel) else loaded.variants
        plans = [variant.plan for variant in variants]
    else:
        source = load_source(model, build)
        with sizes_wanted():
            plans = [tilewright.compile(source.model, source.examples, **build.compiling).plan]
    if any(step.launch is not None or step.vendor is not None for plan in plans for step in plan.steps):
        raise OptionError(
            f"{model} is compiled for a GPU, and `db explain` compares the records of processors",
            remedy="use `tilewright explain`, which says of each kernel where its choice came from",
        )
    return plans


@app.command()
def verify(db: DATABASE = None, json: JSON = False) -> None:
    """Check every row and the file; the exit code is 1 if something is damaged."""
    from tilewright.db.database import Database
    from tilewright.db.maintain import verify as verify_database

    with Database.open(db) as database:
        found = verify_database(database)
    if json:
        print_json({**found._asdict(), "ok": found.ok})
    else:
        console.print("OK: " if found.ok else "", end="")
        console.print(", ".join(f"{count} {kind}" for kind, count in found.rows.items()) + " sound")
        for line in (*found.damaged, *found.structure):
            console.print(f"damaged: {line}", markup=False)
        for path in found.set_aside:
            console.print(f"set aside earlier: {path}", markup=False, soft_wrap=True)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def gc(
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", metavar="DAYS", min=0, help="also remove records older than this"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    db: DATABASE = None,
    json: JSON = False,
) -> None:
    """Remove damaged rows and superseded decisions, and shrink the file."""
    from tilewright.db.database import Database
    from tilewright.db.maintain import collect

    with Database.open(db) as database:
        found = collect(database, older_than_days=older_than, dry_run=dry_run)
    if json:
        print_json(found._asdict())
        return
    console.print(
        f"{'would go' if dry_run else 'removed'}: {found.damaged} damaged, {found.old} old, "
        f"{found.superseded} decisions that were replaced, {found.facts} facts without records; "
        f"{found.bytes / 2**20:.1f} MiB"
    )
