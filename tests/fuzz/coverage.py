"""What the compiler did to random networks, counted from its own trace, and what it must have done at least once."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.rewrites.oracles import Dice
from tilewright.dtypes import DType
from tilewright.graph.ops import layouts
from tilewright.hw import CpuMachine
from tilewright.rewrites import decompose, simplify
from tilewright.rewrites.pipeline import Abilities, passes
from tilewright.runtime.model import CompiledModel
from tilewright.support.trace import Trace

ENOUGH = 1000  # networks after which everything must have been taken

# What `partition` puts into one kernel.
GROUPS = (
    *("chain", "attention", "contraction", "contraction + consumers", "border + contraction"),
    *("border + contraction + consumers", "reduction", "reduction + consumers", "producers + reduction"),
    *("producers + reduction + consumers", "elementwise", "movement", "elementwise + movement"),
)
# Whose kernels `partition` calls by one name: one of them would hide that the others are never chosen.
TEMPLATES = ("separable", "row_block_chain")
# Operators that the layout pass moves, and in which orders: with made-up times all must come.
WINDOWS = ("conv", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
IN_ANY_ORDER = (
    "concat",
    "pad",
    "slice",
    "resize",
    "flip",
    "relu",
    "add",
    "mul",
    "mean",
    "reshape",
    "permute",
    "softmax",
)


def counted(trace: Trace, source: str) -> Counter[str]:
    """`source`: "compiled" for this machine, or with made-up times."""
    taken: Counter[str] = Counter()
    for event in trace.events:
        if not event.name.startswith("rewrites."):
            continue
        name, notes = event.name.removeprefix("rewrites."), event.notes
        taken[f"pass {name}, {source}"] += bool(notes.get("changed", name == "partition"))
        for rule, times in notes.get("rules", {}).items():
            taken[f"{name}: {rule}"] += times
        for kind, times in notes.get("groups", {}).items():
            taken[f"kernel: {kind}"] += times
        for order, times in notes.get("orders", {}).items():
            taken[f"order {order}, {source}"] += times
        if notes.get("parts"):
            taken["view: a part of a value"] += notes["parts"]
        if (notes.get("fusion") or {}).get("changed"):
            taken[f"partition: groups that greedy fusion does not make, {source}"] += notes["fusion"][
                "changed"
            ]
        if notes.get("detours"):
            taken["order: by way of whole channels"] += notes["detours"]
    return +taken


def templates_of(model: CompiledModel) -> Counter[str]:
    """How many kernels each template or sketch made."""
    programs = (info.program for info in model.plan.tasks.values())
    return Counter(f"template {program.partition(':')[0].partition(' ')[0]}" for program in programs)


def expected(machine: CpuMachine | None) -> Iterator[str]:
    """The names of everything that must be taken. `machine`: the one that networks are compiled for, if they are."""
    listed = [
        each.name
        for numerics in ("fast", "strict")
        for abilities in (Abilities(), Abilities(libraries=True))
        for each in passes(numerics, Dice(0), abilities)
    ]
    yield from (f"pass {name}, priced" for name in dict.fromkeys(listed))
    yield from (f"simplify: {name}" for name in simplify.rule_names())
    yield from (f"decompose: {name}" for name in sorted(decompose.EXPANSIONS))
    yield from (f"kernel: {kind}" for kind in GROUPS)
    yield "order: by way of whole channels"
    yield "view: a part of a value"
    yield "partition: groups that greedy fusion does not make, priced"
    for op in WINDOWS:
        yield from (f"order {op}, {layout}, priced" for layout in (layouts.FIRST, layouts.LAST, "blocks"))
    for op in IN_ANY_ORDER:
        yield from (f"order {op}, {order}, priced" for order in ("as written", "channels last", "blocks"))
    if machine is not None:
        yield from (f"template {name}" for name in TEMPLATES)
        if machine.independent_adds:
            yield "template paired"
        lanes = machine.lanes(DType.F32)
        for layout in (
            layouts.FIRST,
            layouts.LAST,
            layouts.by(lanes),
            layouts.by(lanes // 2),
            "all in one block",
        ):
            yield f"order conv, {layout}, compiled"


def missing(taken: Mapping[str, int], machine: CpuMachine | None) -> list[str]:
    known = _together(taken, machine)
    return [name for name in expected(machine) if not known[name]]


def added(taken: Mapping[str, int], path: Path) -> Counter[str]:
    """With what earlier parts of the same campaign took, which the file has; it has both afterwards."""
    together = Counter(json.loads(path.read_text()) if path.exists() else {}) + Counter(taken)
    path.write_text(json.dumps(together, indent=1, sort_keys=True))
    return together


def _together(taken: Mapping[str, int], machine: CpuMachine | None) -> Counter[str]:
    """The same with blocks of any size counted together, and those that hold all channels of a convolution."""
    lanes = 0 if machine is None else machine.lanes(DType.F32)
    usual = (layouts.by(lanes), layouts.by(lanes // 2))
    result = Counter(taken)
    for name, times in taken.items():
        result[re.sub(r"(blocks of [\d and]+|channels_by_\d+), ", "blocks, ", name)] += times
        if lanes and name.startswith("order conv, channels_by_") and name.split(", ")[1] not in usual:
            result[f"order conv, all in one block, {name.split(', ')[-1]}"] += times
    return result


def table(taken: Mapping[str, int]) -> str:
    width = max(map(len, taken), default=0)
    return "\n".join(f"{name:<{width}} {taken[name]:>8}" for name in sorted(taken))
