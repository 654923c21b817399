"""`tilewright pool`: machines that tune together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.group import App, show_help
from tilewright.cli.options import JSON, parse_seconds
from tilewright.cli.output import console, print_json, print_table
from tilewright.cli.tuned import show_tuned, tuned
from tilewright.errors import OptionError

if TYPE_CHECKING:
    from tilewright.measure.pool.cluster import Device, Share
    from tilewright.measure.pool.connection import Pool

app = App()


@app.callback()
def root(context: typer.Context) -> None:
    """A pool of machines to tune on: start one, join, list, drain, stop."""
    show_help(context)


ADDRESS = Annotated[
    str | None, typer.Argument(metavar="[ADDRESS]", help="HOST:PORT; default: the pool that was started here")
]
TOKEN = Annotated[
    Path | None,
    typer.Option(
        "--token-file", help="the pool's token; default: the one that this user has for the address"
    ),
]
BUILDERS = Annotated[
    int | None,
    typer.Option(min=0, help="how many candidates this machine builds at once; default: its cores"),
]
DEVICES = Annotated[
    list[str] | None,
    typer.Option("--device", help="a device of this machine that times candidates: cpu, cuda, cuda:1, none"),
]


LISTEN = Annotated[
    str | None,
    typer.Option(help="the address of this machine that the others reach; default: loopback, or found out"),
]


@app.command()
def up(
    listen: LISTEN = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="the port to listen on")] = 6379,
    builders: BUILDERS = None,
    device: DEVICES = None,
    token_file: TOKEN = None,
    json: JSON = False,
) -> None:
    """Start a pool, with this machine as its first node."""
    from tilewright.measure.pool import cluster

    address = _started(lambda share: cluster.up(share, port), listen, builders, device, token_file, json)
    if not json:
        console.print(f"try: tilewright tune resnet18 --pool {address}", markup=False)


@app.command()
def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT, as `pool up` printed it")],
    listen: LISTEN = None,
    builders: BUILDERS = None,
    device: DEVICES = None,
    token_file: TOKEN = None,
    json: JSON = False,
) -> None:
    """Let this machine join a pool."""
    from tilewright.measure.pool import cluster

    _started(lambda share: cluster.join(share, address), listen, builders, device, token_file, json)


def _started(
    start: Callable[[Share], str],
    listen: str | None,
    builders: int | None,
    device: list[str] | None,
    token_file: Path | None,
    json: bool,
) -> str:
    """Start a node of this machine, and say what it is: the pool's address."""
    from tilewright.measure.pool import cluster

    cluster.need_ray()
    devices = _devices(device)
    with console.status("starting a node"):
        address = start(cluster.Share(builders, devices, listen, token_file))
    token = cluster.token_file(address)
    labels = [each.label for each in devices]
    if json:
        print_json({"address": address, "token_file": str(token), "devices": labels})
        return address
    has = ", ".join(labels) or "no device"
    console.print(
        f"the pool is at {address}; this machine has {has} for it\n"
        f"its token is in {token}: whoever has it can run code on its nodes",
        markup=False,
        soft_wrap=True,
    )
    return address


@app.command()
def ls(address: ADDRESS = None, token_file: TOKEN = None, json: JSON = False) -> None:
    """List a pool's builders and devices."""
    from tilewright.measure.pool import cluster

    cluster.need_ray()
    found = cluster.rows(address or cluster.current_address(), token_file)
    if json:
        print_json([asdict(row) for row in found])
        return
    groups: dict[tuple[str, ...], int] = {}
    for row in found:
        what = "timer" if row.device else "builder"
        network = "" if row.network is None else "as the node" if row.network else "none"
        device = f"{row.device}#{row.variant}" if row.device else ""
        key = (row.node, row.host, what, device, network, row.state)
        groups[key] = groups.get(key, 0) + 1
    rows = [(*key[:3], str(count), *key[3:]) for key, count in groups.items()]
    columns = ("node", "host", "kind", "count", "device", "network", "state")
    print_table("", columns, rows, left=(0, 1, 2, 4, 5, 6), clipped=(6,))


@app.command()
def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="a node, as `pool ls` shows it")],
    address: ADDRESS = None,
    token_file: TOKEN = None,
    json: JSON = False,
) -> None:
    """Let a node finish what it has and take no more work: for maintenance."""
    from tilewright.measure.pool import cluster

    cluster.need_ray()
    count = cluster.drain(node, address or cluster.current_address(), token_file)
    if json:
        print_json({"node": node, "workers": count})
        return
    console.print(
        f"{node}: {count} workers take no more work; stop it with: tilewright pool down {node}", markup=False
    )


@app.command()
def down(
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE]...", help="default: all that were started here")
    ] = None,
    json: JSON = False,
) -> None:
    """Stop nodes on this machine."""
    from tilewright.measure.pool import cluster

    stopped = cluster.down(tuple(nodes or ()))
    if json:
        print_json({"stopped": stopped})
        return
    console.print(
        f"stopped {', '.join(stopped)}" if stopped else "no node is running on this machine", markup=False
    )


def _devices(names: list[str] | None) -> tuple[Device, ...]:
    from tilewright.measure.pool import cluster

    if names == ["none"]:
        return ()
    if names and "none" in names:
        raise OptionError(
            "--device none cannot be combined with other devices",
            remedy="leave it out, or leave the others out",
        )
    return tuple(cluster.device_here(name) for name in names or ["cpu"])


# -- tuning on several kinds of device -------------------------------------------------------------------------------


def budgets(devices: list[str] | None) -> dict[str, float | None]:
    """`cpu:znver4=5m` -> {"cpu:znver4": 300.0}"""
    found: dict[str, float | None] = {}
    for each in devices or ():
        label, equals, time = each.partition("=")
        if label in found:
            raise OptionError(f"--device {label} is given twice", remedy="name each device once")
        found[label] = parse_seconds(time) if equals else None
    return found


def tune_devices(
    names: list[str],
    models: list[tuple[Any, Any]],
    pool: Pool,
    devices: dict[str, float | None],
    json: bool,
    **options: Any,
) -> None:
    """Tune models for several kinds of device at once, and show what came of each. Exits with 1 if one failed."""
    import tilewright
    from tilewright.support.trace import Trace
    from tilewright.tune.progress import Progress

    followed = {label: Progress() for label in devices}
    for name in ("target", "lock"):
        if options.pop(name, None) is not None:
            raise OptionError(
                f"--{name} is for one device", remedy=f"leave --{name} out, or name one --device"
            )
    with console.status(f"tuning for {', '.join(devices)}"):
        results = tilewright.compile_for_devices(
            models,
            pool=pool,
            devices=devices,
            traces=lambda label: Trace(listener=followed[label]),
            **options,
        )
    failed = {label: result.error for label, result in results.items() if result.error is not None}
    if json:
        found = {
            label: {**tuned(progress), "error": failed[label].message if label in failed else None}
            for label, progress in followed.items()
        }
        print_json({"models": names, "by_device": found})
    else:
        for label, progress in followed.items():
            console.print(f"\n{label}", style="bold", markup=False)
            if label in failed:
                console.print(f"failed: {failed[label].message}", markup=False, soft_wrap=True)
            show_tuned(progress)
    if failed:
        raise typer.Exit(1)
