"""`tilewright pool`: machines that tune together."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.group import App, show_help
from tilewright.cli.options import JSON
from tilewright.cli.output import console, print_json, print_table
from tilewright.errors import OptionError

if TYPE_CHECKING:
    from tilewright.measure.pool.cluster import Device

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


@app.command()
def up(
    listen: Annotated[
        str,
        typer.Option(
            help="the address of this machine that other machines reach; default: this machine alone"
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="the port to listen on")] = 6379,
    builders: BUILDERS = None,
    device: DEVICES = None,
    token_file: TOKEN = None,
    json: JSON = False,
) -> None:
    """Start a pool, with this machine as its first node."""
    from tilewright.measure.pool import cluster

    cluster.need_ray()
    found = _devices(device)
    with console.status("starting the pool"):
        address = cluster.up(listen=listen, port=port, builders=builders, devices=found, token=token_file)
    token = cluster.token_file(address)
    if json:
        print_json({"address": address, "token_file": str(token), "devices": [each.label for each in found]})
        return
    labels = ", ".join(each.label for each in found) or "no device"
    console.print(f"the pool is at {address}, with {labels}", markup=False, soft_wrap=True)
    console.print(
        f"its token is in {token}: whoever has it can run code on its nodes", markup=False, soft_wrap=True
    )
    console.print(f"try: tilewright tune resnet18 --pool {address}", markup=False)


@app.command()
def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT, as `pool up` printed it")],
    listen: Annotated[
        str | None, typer.Option(help="the address of this machine that the others reach; default: found out")
    ] = None,
    builders: BUILDERS = None,
    device: DEVICES = None,
    token_file: TOKEN = None,
    json: JSON = False,
) -> None:
    """Let this machine join a pool."""
    from tilewright.measure.pool import cluster

    cluster.need_ray()
    found = _devices(device)
    with console.status(f"joining {address}"):
        cluster.join(address, listen=listen, builders=builders, devices=found, token=token_file)
    if json:
        print_json({"address": address, "devices": [each.label for each in found]})
        return
    labels = ", ".join(each.label for each in found) or "no device"
    console.print(f"joined {address}, with {labels}", markup=False, soft_wrap=True)


@app.command()
def ls(address: ADDRESS = None, token_file: TOKEN = None, json: JSON = False) -> None:
    """List a pool's builders and devices."""
    from tilewright.measure.pool import cluster

    cluster.need_ray()
    found = cluster.rows(address or cluster.current_address(), token_file)
    if json:
        print_json([asdict(row) for row in found])
        return
    groups: dict[tuple[str, str, str, str, str], int] = {}
    for row in found:
        what = "timer" if row.device else "builder"
        key = (row.node, row.host, what, f"{row.device}#{row.variant}" if row.device else "", row.state)
        groups[key] = groups.get(key, 0) + 1
    rows = [(*key[:3], str(count), *key[3:]) for key, count in groups.items()]
    print_table(
        "", ("node", "host", "kind", "count", "device", "state"), rows, left=(0, 1, 2, 4, 5), clipped=(5,)
    )


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
    console.print(f"stopped {', '.join(stopped)}" if stopped else "no node was started here", markup=False)


def _devices(names: list[str] | None) -> tuple[Device, ...]:
    from tilewright.measure.pool import cluster

    if names == ["none"]:
        return ()
    if names and "none" in names:
        raise OptionError("--device none goes alone", remedy="leave it out, or leave the others out")
    return tuple(cluster.device_here(name) for name in names or ["cpu"])
