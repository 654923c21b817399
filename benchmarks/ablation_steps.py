"""The parts of the compiler added in turn, as Table 3.4 of the GTCO thesis (Bai, 2023) adds those of its system.

    default programs                 what a formula gives by itself: no structure is chosen, nothing is tuned
    + tensor instructions            sketches and templates around an instruction that multiplies tiles or dot products
    + dynamic partition              groups by dynamic programming instead of greedy fusion
    + sketches                       all structures that rules derive from a task
    + task scheduler                 the next round goes where the time of the model falls fastest, not to all in turn
    + register mapping               templates: register tiles over packed panels, and on a GPU library calls

A task that nothing in a step's space computes has the whole space in each step (attention, chains); the table counts
them. On a CPU only products of bytes have instructions of their own, so for float32 that step changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ablation_tables import Raced, Run, Runs, table_of
from tilewright.errors import SpaceError
from tilewright.space.candidates import Candidates
from tilewright.space.catalog import SKETCHED
from tilewright.tune.choose import Choice, best_among
from tilewright.tune.tunable import TunableTask

INSTRUCTIONS = ("tensor", "int8", "mma")  # in the names of what is built around one


@dataclass(frozen=True)
class Step:
    name: str
    partition: str
    allocation: str
    kinds: frozenset[str]  # of what a task may have

    def admits(self, template: str) -> bool:
        return kind_of(template) in self.kinds


def kind_of(template: str) -> str:
    """What a template or a derived structure of this name is a part of."""
    if template == "default":
        return "default"
    if any(word in template for word in INSTRUCTIONS):
        return "instruction"
    return "sketch" if template.startswith(SKETCHED) else "template"


_PLAIN = frozenset({"default"})
_SKETCHES = _PLAIN | {"instruction", "sketch"}

STEPS = (
    Step("default programs", "greedy", "round-robin", _PLAIN),
    Step("+ tensor instructions", "greedy", "round-robin", _PLAIN | {"instruction"}),
    Step("+ dynamic partition", "dynamic", "round-robin", _PLAIN | {"instruction"}),
    Step("+ sketches", "dynamic", "round-robin", _SKETCHES),
    Step("+ task scheduler", "dynamic", "gradient", _SKETCHES),
    Step("+ register mapping", "dynamic", "gradient", _SKETCHES | {"template"}),
)
NAMES = tuple(step.name for step in STEPS)


@dataclass(frozen=True)
class Stepped(TunableTask):
    """A task with the part of its space that a step has; with all of it where that part computes nothing."""

    step: Step = STEPS[-1]

    @cached_property
    def whole(self) -> Candidates:
        return Candidates.of(self.work)

    @cached_property
    def is_whole(self) -> bool:
        return not any(self.step.admits(applied.space.template) for applied in self.whole.applied)

    @cached_property
    def candidates(self) -> Candidates:
        if self.is_whole:
            return self.whole
        some = tuple(each for each in self.whole.applied if self.step.admits(each.space.template))
        return Candidates(self.work, True, True, some)

    @cached_property
    def start(self) -> Choice:
        best = best_among(self.work, self.candidates.applied)
        if best is None:
            raise SpaceError(f"nothing of this space has a predicted time for {self.label}")
        seconds, config, _ = best
        return Choice(self.candidates.implementation(config), config, seconds)


def subject_of(model: str) -> str:
    return f"{model}, steps"


def of_model(runs: Runs, model: str, seed: int) -> tuple[list[Run], Raced] | None:
    """A run for each step and their race; None where one is missing."""
    found: Mapping[str, Run] = {
        run.variant: run for run in runs.found if (run.subject, run.seed) == (subject_of(model), seed)
    }
    if any(name not in found for name in NAMES):
        return None
    race = runs.raced(subject_of(model), seed, found[NAMES[0]].trials, NAMES)
    return None if race is None else ([found[name] for name in NAMES], race)


def total(run: Run, raced: Mapping[str, float]) -> float:
    """The time of a model's tasks, each as often as it is called."""
    return sum(count * raced[key] for key, count in run.calls.items())


def steps_table(model: str, runs: Sequence[Run], race: Raced) -> str:
    lines = [[model, "kernels", "with the whole space", "ms", "to the step before", "to the first", "trials"]]
    first = before = None
    for run, step in zip(runs, STEPS, strict=True):
        time = total(run, race.seconds[run.variant])
        first, before = first or time, before or time
        whole = sum(count for key, count in run.calls.items() if not step.admits(run.chosen[key].template))
        lines.append(
            [
                run.variant,
                str(sum(run.calls.values())),
                str(whole),
                f"{time * 1e3:.3f}",
                f"{before / time:.2f}x",
                f"{first / time:.2f}x",
                str(run.measured),
            ]
        )
        before = time
    return table_of(lines)


def steps_section(runs: Runs, models: Sequence[str], seed: int, trials: int) -> str:
    """Of the document. What is unfinished is said."""
    found = {model: of_model(runs, model, seed) for model in models}
    parts = ["", "## Parts of the compiler, each added in turn", STEPS_TEXT.format(trials=trials)]
    parts += [steps_table(model, *each) for model, each in found.items() if each is not None]
    missing = [model for model, each in found.items() if each is None]
    parts += [f"Unfinished: {', '.join(missing)}."] if missing else []
    return "\n\n".join(parts)[1:] + "\n"


STEPS_TEXT = (
    "Each part of the compiler is added in turn, with {trials} trials for each task on average. Times: the sum over the"
    " tasks, each as often as it is called; the choices of each task are timed interleaved. Whole space: calls of tasks"
    " that nothing in the step's space computes, such as attention and chains."
)
