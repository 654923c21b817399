"""How good the joint choice of tiles and stages is, on kernels that were measured before: no GPU is needed.

    python benchmarks/pipelining.py --joint [--markdown FILE]

`results/gpu_search.jsonl` has the times of generated kernels (`sketch:tensorised`) of 13 tasks on one H200. The
analytical model ranks them. Beside it: a bottleneck model (ALCOP's baseline: the largest of the times that tensor
cores, shared memory, L2 and memory need), and a separate choice: the tiles that the model ranks first without a
pipeline, then the stages that it ranks first for these tiles.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent / "results" / "gpu_search.jsonl"
SKETCH = "sketch:tensorised"
OF_THE_PIPELINE = ("stages", "prefetch", "fused")


@dataclass(frozen=True)
class Trial:
    config: dict[str, Any]
    seconds: float
    model: float  # predicted seconds
    bottleneck: float

    @property
    def tiles(self) -> tuple[tuple[str, Any], ...]:
        return tuple(
            sorted((name, value) for name, value in self.config.items() if name not in OF_THE_PIPELINE)
        )


def bottleneck(terms: Any, machine: Any) -> float:
    """Clocks of the busiest unit, if all blocks kept it busy all the time."""
    steps = terms.blocks * terms.steps
    return max(
        steps * terms.flops / machine.tensor_flops_clock / machine.sms,
        steps * terms.shared_traffic / machine.rates.shared_bytes_clock / machine.sms,
        steps * terms.loaded / machine.l2_bytes_clock,
        terms.memory / machine.memory_bytes_per_second * machine.clock_mhz * 1e6,
    )


def trials_of(tasks: dict[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, list[Trial]]:
    from tilewright.cost.gpu import seconds
    from tilewright.graph.task import Task
    from tilewright.graph.text import parse_graph
    from tilewright.hw.gpu import H200
    from tilewright.space.sketches.cuda.tensorised import Tensorised
    from tilewright.space.space import Config
    from tilewright.space.template import GpuTerms, GpuWork

    found: dict[str, list[Trial]] = {}
    applied: dict[str, Any] = {}
    for line in lines:
        name = line["name"]
        if name not in applied:
            task = Task(parse_graph(tasks[name]["text"]), frozenset(tasks[name]["constants"]))
            applied[name] = Tensorised().apply(GpuWork(task, H200, tasks[name]["numerics"]))
        config = {"fused": True, **dict(line["config"]["values"])}  # the knob is younger than the file
        terms = applied[name].terms(Config.of(SKETCH, config))
        assert isinstance(terms, GpuTerms)
        made = Trial(config, line["seconds"], seconds(terms, H200), bottleneck(terms, H200))
        found.setdefault(name, []).append(made)
    return found


def separate(trials: Sequence[Trial]) -> tuple[float, int]:
    """The seconds of the separate choice, and how many kernels with its tiles were measured. Tiles count that were
    measured without a pipeline and with one."""
    by_tiles: dict[Any, list[Trial]] = {}
    for each in trials:
        by_tiles.setdefault(each.tiles, []).append(each)
    both = [
        (plain, some)
        for some in by_tiles.values()
        for plain in some
        if plain.config["stages"] == 1 and any(each.config["stages"] > 1 for each in some)
    ]
    _, same = min(both, key=lambda pair: pair[0].model)
    return min(same, key=lambda each: each.model).seconds, len(same)


def joint() -> str:
    tasks: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    for text in DATA.read_text().splitlines():
        line = json.loads(text)
        if line["type"] == "task":
            tasks[line["name"]] = line
        elif not line["failure"] and line["config"]["template"] == SKETCH:
            lines.append(line)
    rankings: list[Callable[[Trial], float]] = [lambda t: t.model, lambda t: t.bottleneck]
    counts = (1, 10, 50)
    shares: list[list[float]] = []
    measured: list[int] = []
    rows = []
    for name, trials in trials_of(tasks, lines).items():
        best = min(each.seconds for each in trials)
        own = []
        for rank in rankings:
            ordered = sorted(trials, key=rank)
            own += [best / min(each.seconds for each in ordered[:count]) for count in counts]
        chosen, same = separate(trials)
        own.append(best / chosen)
        shares.append(own)
        measured.append(same)
        cells = " | ".join(f"{share:.1%}" for share in own)
        rows.append(f"| {name} | {len(trials)} | {cells} | {same} |")
    means = [math.exp(statistics.fmean(map(math.log, column))) for column in zip(*shares, strict=True)]
    return "\n".join(
        [
            "| task | kernels | model: first | best of 10 | best of 50 | bottleneck: first | best of 10 | best of 50 |"
            " tiles, then stages: first | kernels of its tiles |",
            "| --- " * 10 + "|",
            *rows,
            f"| geometric mean | | {' | '.join(f'{each:.1%}' for each in means)} | |",
        ]
    )
