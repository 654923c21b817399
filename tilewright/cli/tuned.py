"""The result of a tuning run: for people, and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tilewright.cli.output import console, print_table

if TYPE_CHECKING:
    from tilewright.tune.progress import Progress


def show_tuned(progress: Progress) -> None:
    rows = [
        (
            task["layer"] or task["label"],
            str(task["calls"]),
            str(task["trials"]),
            f"{task['before'] * 1e6:.1f}",
            f"{task['best'] * 1e6:.1f}",
            f"{task['before'] / task['best']:.2f}x" if task["best"] else "",
            task["state"],
        )
        for task in tuned(progress)["tasks"]
    ]
    print_table("", ("layer", "calls", "trials", "before us", "best us", "speed", ""), rows)
    show_devices(progress)


def show_devices(progress: Progress) -> None:
    """Print the trials and busy time of each device of a pool."""
    if not progress.devices:
        return
    rows = [
        (
            device,
            f"{use['trials']:.0f}",
            f"{use['seconds']:.1f}",
            f"{use['seconds'] / progress.seconds:.0%}" if progress.seconds else "",
        )
        for device, use in progress.devices.items()
    ]
    print_table("", ("device", "trials", "busy s", "busy"), rows)
    if progress.given_again:
        console.print(f"given to another node: {progress.given_again}", markup=False)
    for name, reason in progress.aside.items():
        console.print(f"left out: {name}: {reason}", markup=False, soft_wrap=True)


def tuned(progress: Progress) -> dict[str, Any]:
    """The slowest tasks first."""
    tasks = sorted(progress.tasks.values(), key=lambda task: -task.seconds)
    return {
        "ended": progress.ended,
        "trials": progress.trials,
        "failures": dict(progress.failures),
        "devices": dict(progress.devices),
        "given_again": progress.given_again,
        "aside": dict(progress.aside),
        "before": progress.before,
        "best": progress.best,
        "tasks": [asdict(task) for task in tasks],
    }
