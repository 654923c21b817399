"""The scores of `cost_models.py`, and their tables in Markdown."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.dataset.tables import Table, label
from tilewright.db.record import Record
from tilewright.hw import CpuMachine

STATEMENTS, UNTRAINED = "statements alone", "without pre-training"
NETWORK_ALONE, TREES_ALONE = "attention: its network alone", "attention: its trees alone"
ABLATION_ROWS = (
    STATEMENTS, "knobs and terms", "+ task", "+ instruction", "+ machine", "+ analytical residual", "+ trees",
    "without ranking loss", UNTRAINED,
)  # fmt: skip
STEPS = ABLATION_ROWS[1:7]  # each adds to the one before
SEARCHES = ("attention", f"attention, {UNTRAINED}", "boosted", "boosted, no prior")
MAX_TRIALS = 64  # of a search


@dataclass(frozen=True)
class Score:
    part: str
    method: str
    fold: int
    seed: int
    table: str
    kind: str
    family: str
    top1: float
    top8: float
    pairs: float
    best: float  # seconds
    first: float
    first8: float
    trials: int = 0
    reached: bool = True  # whether a config within 2% of the best is among them
    thinking: float = 0.0
    building: float = 0.0
    machine: str = ""


def kind_of(table: Table) -> str:
    """The machine, for people: the tables of a kind are averaged."""
    machine, threads = table.job.machine, table.job.threads
    if not isinstance(machine, CpuMachine):
        return "GPU"
    more = f", {threads} threads" if threads > 1 else ""
    return f"{machine.cpu}, {8 * machine.vector_bytes} bit{more}"


def judged(part: str, method: str, fold: int, seed: int, table: Table, scores: np.ndarray) -> Score:
    seconds = np.where(table.known, table.seconds, np.inf)
    best = float(seconds.min())
    order = np.argsort(scores, kind="stable")
    first, first8 = float(seconds[order[0]]), float(seconds[order[:8]].min())
    known = table.known
    t, s = np.log(table.seconds[known]), scores[known]
    distinct = t[:, None] - t[None, :] > 0.02
    right = float((s[:, None] > s[None, :])[distinct].mean()) if distinct.any() else 1.0
    return Score(
        part, method, fold, seed, table.name, kind_of(table), table.family, best / first, best / first8, right, best,
        first, first8, machine=table.machine,
    )  # fmt: skip


def at_random(part: str, fold: int, seed: int, table: Table) -> Score:
    rng = np.random.default_rng(seed)
    seconds = np.where(table.known, table.seconds, np.inf)
    best = float(seconds.min())
    draws = [rng.permutation(len(seconds))[:8] for _ in range(400)]
    tops = [best / seconds[draw[0]] for draw in draws]
    eights = [best / seconds[draw].min() for draw in draws]
    firsts = [min(seconds[draw[0]], 100 * best) for draw in draws]
    return Score(
        part, "random", fold, seed, table.name, kind_of(table), table.family, float(np.mean(tops)),
        float(np.mean(eights)), 0.5, best, float(np.mean(firsts)),
        float(np.mean([seconds[draw].min() for draw in draws])), machine=table.machine,
    )  # fmt: skip


# -- what noise allows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceiling:
    """What half of the times of each record can say about the other half."""

    kind: str
    tables: int
    top1: float
    top8: float
    pairs: float


def ceilings(records: Iterable[Record], tables: Sequence[Table]) -> list[Ceiling]:
    """For each kind of machine whose records have several times each: the configs ranked by the odd-numbered times, and
    judged by the even-numbered ones. No model can be expected to be better, and slow drift is not seen at all."""
    kinds = {table.machine: kind_of(table) for table in tables}
    groups: dict[object, list[Record]] = defaultdict(list)
    for record in records:
        if len(record.times) >= 2:
            groups[record.key].append(record)
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for some in groups.values():
        kind = kinds.get(f"{some[0].key.machine[:12]} {some[0].key.threads}")
        if kind is None or len(some) < 8:
            continue
        odd, even = (np.array([label(record.times[start::2]) for record in some]) for start in (0, 1))
        order, best = np.argsort(odd, kind="stable"), even.min()
        distinct = np.log(even)[:, None] - np.log(even)[None, :] > 0.02
        right = (odd[:, None] > odd[None, :])[distinct]
        found[kind].append(
            (best / even[order[0]], best / even[order[:8]].min(), right.mean() if len(right) else 1.0)
        )
    return [
        Ceiling(kind, len(rows), *(float(mean) for mean in np.mean(rows, axis=0)))
        for kind, rows in sorted(found.items())
    ]


def ceiling_table(found: Sequence[Ceiling]) -> str:
    lines = ["", "## What the noise of the times allows", ""]
    lines += ["| machine | tables | top-1 | best of 8 | pairs |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {each.kind} | {each.tables} | {each.top1:.3f} | {each.top8:.3f} | {each.pairs:.3f} |"
        for each in found
    ]
    return "\n".join(lines)


# -- tables -----------------------------------------------------------------------------------------------------------


def _row(name: str, some: Sequence[Score]) -> str:
    top1, top8 = (np.array([getattr(score, key) for score in some]) for key in ("top1", "top8"))
    pairs = np.mean([score.pairs for score in some])
    sums = [sum(getattr(score, key) for score in some) for key in ("best", "first", "first8")]
    return (
        f"| {name} | {len({score.seed for score in some})} | {top1.mean():.3f} | {np.percentile(top1, 10):.3f} |"
        f" {top1.min():.3f} | {top8.mean():.3f} | {np.percentile(top8, 10):.3f} | {top8.min():.3f} |"
        f" {sums[0] / sums[1]:.3f} | {sums[0] / sums[2]:.3f} | {pairs:.3f} | {sum(top1 == 0)} |"
    )


_HEAD = (
    "| {} | seeds | top-1 | 10th percentile | least | best of 8 | 10th percentile | least | TenSet's top-1 |"
    " TenSet's top-8 | pairs | failed |\n"
    "| --- |" + " --- |" * 11
)


def report(scores: Sequence[Score]) -> str:
    lines: list[str] = []
    kinds = sorted({score.kind for score in scores})
    for part, title in (
        ("held-out", "Tasks held out"),
        ("machine", "A machine held out"),
        ("ablation", "Ablation"),
    ):
        for kind in kinds:
            found = [score for score in scores if score.part == part and score.kind == kind]
            if not found:
                continue
            count = len({(score.table, score.machine) for score in found})
            lines += ["", f"## {title}: {kind}, {count} tables", "", _HEAD.format("model")]
            methods = dict.fromkeys(score.method for score in found)
            order = ABLATION_ROWS if part == "ablation" else sorted(methods)
            lines += [_row(m, [s for s in found if s.method == m]) for m in order if m in methods]
            if part == "ablation":
                lines += ["", *gains(found)]
    searches = [score for score in scores if score.part == "search"]
    if searches:
        lines += [
            "",
            "## Search: tasks of a family held out, trials until 98% of the best",
            "",
            *_searches(searches),
        ]
    return "\n".join(lines)


def _searches(searches: Sequence[Score]) -> list[str]:
    lines = [
        "| machine | family | tables | " + " | ".join(SEARCHES) + " |",
        "| --- | --- | --- |" + " --- |" * len(SEARCHES),
    ]
    rows: list[tuple[str, str]] = sorted({(score.kind, score.family) for score in searches})
    rows += [(kind, "all") for kind in sorted({score.kind for score in searches})]
    rows.append(("all", "all"))
    for kind, family in rows:
        some = [s for s in searches if kind in (s.kind, "all") and family in (s.family, "all")]
        cells = [trials_of([s for s in some if s.method == method]) for method in SEARCHES]
        lines.append(
            f"| {kind} | {family} | {len({(s.table, s.machine) for s in some})} | {' | '.join(cells)} |"
        )
    return lines


def trials_of(some: Sequence[Score]) -> str:
    """The mean of the trials, of the seconds to build them, and of the seconds of thinking. Searches that did not get
    there count with the trials they had, so that their mean is a lower bound."""
    if not some:
        return "-"
    missed = sum(not s.reached for s in some)
    trials, building, thinking = (
        np.mean([getattr(s, key) for s in some]) for key in ("trials", "building", "thinking")
    )
    seconds = f"{building:.1f} + {thinking:.2f} s"
    if not missed:
        return f"{trials:.1f} ({seconds})"
    return f">= {trials:.1f} ({seconds}; {missed} of {len(some)} not within {MAX_TRIALS})"


def gains(found: Sequence[Score]) -> list[str]:
    """The gain of each step in top-1, with the 95% interval over tables; the seeds of a table are averaged, since they
    are not independent."""
    lines = ["| step | gain in top-1 | 95% interval |", "| --- | --- | --- |"]
    pairs = [*itertools.pairwise(STEPS), (UNTRAINED, STEPS[-1])]
    for before, after in pairs:
        a, b = (_by_table([s for s in found if s.method == method]) for method in (before, after))
        differences = np.array([b[key] - a[key] for key in a if key in b])
        if len(differences) > 1:
            half = 1.96 * differences.std(ddof=1) / math.sqrt(len(differences))
            mean, name = differences.mean(), "+ pre-training" if before == UNTRAINED else after
            lines.append(f"| {name} | {mean:+.3f} | {mean - half:+.3f} to {mean + half:+.3f} |")
    return lines


def _by_table(some: Sequence[Score]) -> dict[tuple[str, str], float]:
    """The mean top-1 over the seeds of each table: a task on a machine."""
    found: dict[tuple[str, str], list[float]] = {}
    for score in some:
        found.setdefault((score.table, score.machine), []).append(score.top1)
    return {key: float(np.mean(values)) for key, values in found.items()}


def counted(jobs: Iterable[tuple[str, str]]) -> str:
    """How many jobs of each part and method there are."""
    return ", ".join(f"{part} {method}: {count}" for (part, method), count in sorted(Counter(jobs).items()))
