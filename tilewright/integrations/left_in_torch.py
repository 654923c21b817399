"""The warning about operators that stay in PyTorch: which ones, where, and their share of the model's time.

The share is an estimate. The operations and bytes of each operator and each compiled kernel are counted from the
shapes and converted to the minimum time at the machine's nominal rates (`cost.bounds`); PyTorch operators also have a
call overhead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilewright.cost.bounds import least_seconds
from tilewright.frontend.torch.left import Left
from tilewright.runtime.plan import Plan
from tilewright.targets.resolve import resolve_target

_CALL = 5e-6  # seconds of overhead per PyTorch operator
_NAMED = 6  # maximum operators that a message names


def share_left(left: Sequence[Left], plans: Iterable[Plan], target: str) -> float:
    """The share of a graph's predicted time that runs in PyTorch."""
    machine = resolve_target(target).machine
    theirs = sum(least_seconds(each.flops, each.bytes, machine) + _CALL for each in left)
    steps = [
        (plan.tasks[step.task].flops, plan.tasks[step.task].bytes) for plan in plans for step in plan.steps
    ]
    ours = sum(least_seconds(flops, moved, machine) for flops, moved in steps)
    return theirs / (theirs + ours)


def left_message(left: Sequence[Left], operators: int, share: float) -> str:
    """The text of the warning. `operators`: the number of operators in the graph."""
    rows: dict[tuple[str, str], list[str]] = {}
    for each in left:
        rows.setdefault((each.operator, each.reason), []).append(each.location)
    lines = [_row(*key, locations) for key, locations in rows.items()]
    if len(lines) > _NAMED:
        lines = [*lines[:_NAMED], f"  and {len(lines) - _NAMED} other operators"]
    listed = "\n".join(lines)
    return (
        f"{len(left)} of the {operators} operators of a graph stay in PyTorch, with an estimated {share:.0%} of its"
        f" time:\n{listed}\n"
        "The estimate is the least time for the operations and bytes of each operator at this machine's nominal"
        " rates. To have what stays behind as an error, pass"
        ' options={"fallback": False}; to follow each graph, options={"observe": print}.'
    )


def _row(operator: str, reason: str, locations: Sequence[str]) -> str:
    known = [location for location in dict.fromkeys(locations) if location]
    times = f" x{len(locations)}" if len(locations) > 1 else ""
    more = f" and {len(known) - 1} more places" if len(known) > 1 else ""
    return f"  {operator}{times} ({reason})" + (f" at {known[0]}{more}" if known else "")
