"""The warning about what stays in PyTorch: which operators, where, and their share of the model's time.

The share is an estimate. Of each operator, and of each compiled kernel, the operations and the bytes are counted from
the shapes, and the least time for both at the machine's nominal rates is taken (`cost.bounds`); an operator of PyTorch
has the cost of its call alongside that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilewright.cost.bounds import least_seconds
from tilewright.frontend.torch.left import Left
from tilewright.runtime.plan import Plan
from tilewright.targets.resolve import resolve_target

_CALL = 5e-6  # seconds from one operator of PyTorch to the next, whatever it computes
_NAMED = 6  # operators that a message names


def share_left(left: Sequence[Left], plans: Iterable[Plan], target: str) -> float:
    """Of the predicted time of a graph, the part that PyTorch runs."""
    machine = resolve_target(target).machine
    theirs = sum(least_seconds(each.flops, each.bytes, machine) + _CALL for each in left)
    steps = [
        (plan.tasks[step.task].flops, plan.tasks[step.task].bytes) for plan in plans for step in plan.steps
    ]
    ours = sum(least_seconds(flops, moved, machine) for flops, moved in steps)
    return theirs / (theirs + ours)


def left_message(left: Sequence[Left], operators: int, share: float) -> str:
    """What the warning says. `operators`: how many the graph has."""
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
