"""What the fault campaigns of processors and GPUs share: faults one after another, mutants until there are enough.

A fault must come back as its kind, and what is measured after it must be as good as ever. A mutant is a candidate with
one mistake: one that passes the check must be equivalent to the original.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

F = TypeVar("F")

EQUIVALENT, PASSED = "equivalent", "passed"
_SAID = 100  # mutants between two lines of progress


# -- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Survived:
    """What a fault came to. `others_lost`: sound candidates that failed after it; `recovery`: seconds until the next
    sound one was measured."""

    fault: str
    kind: str
    expected: str
    others_lost: int = 0
    message: str = ""
    recovery: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.kind == self.expected and not self.others_lost


def run_faults(faults: Iterable[F], attempt: Callable[[F], Survived]) -> list[Survived]:
    """Each in turn; those that were not caught, typed and survived are said at once."""
    outcomes = []
    for fault in faults:
        outcome = attempt(fault)
        outcomes.append(outcome)
        if not outcome.is_right:
            print(f"  {described(outcome)}", flush=True)
    return outcomes


def described(outcome: Survived) -> str:
    return (
        f"{outcome.fault}: {outcome.kind or 'not noticed'} instead of {outcome.expected},"
        f" {outcome.others_lost} others lost ({outcome.message})"
    )


def report(outcomes: Sequence[Survived], seconds: float) -> str:
    tally = Counter((outcome.fault, outcome.kind or "not noticed") for outcome in outcomes)
    right = sum(outcome.is_right for outcome in outcomes)
    lines = [f"  {times:4} x {name}: {kind}" for (name, kind), times in sorted(tally.items())]
    slowest = max((outcome.recovery for outcome in outcomes), default=0.0)
    lines.append(
        f"{right} of {len(outcomes)} faults caught, typed and survived, in {seconds:.0f} s;"
        f" the next candidate was measured within {slowest:.1f} s"
    )
    return "\n".join(lines)


# -- mutants ----------------------------------------------------------------------------------------------------------


class Edited(Protocol):
    @property
    def kind(self) -> str:
        """Of mistake."""

    @property
    def where(self) -> str: ...


class Mutable(Protocol):
    """A candidate whose mutants are tried."""

    @property
    def name(self) -> str:
        """Its task and config, for people."""

    @property
    def edits(self) -> Sequence[Any]:
        """Every mistake that can be made in it (Edited), always in the same order."""

    def legal_edits(self, rng: Random) -> Iterator[int]:
        """Numbers of edits that get as far as a check."""


@dataclass(frozen=True)
class PassedMutant:
    """A wrong mutant that passed its check, with what makes it again: the seed's candidate, and the edit in it."""

    candidate: str
    edit: int
    kind: str
    where: str


M = TypeVar("M", bound=Mutable)


def run_mutants(
    count: int,
    seed: int,
    fault_targets: Sequence[M],
    outcomes_of: Callable[[M, Sequence[int]], Sequence[str]],
    batch: int,
    seconds: float = math.inf,
) -> list[PassedMutant]:
    """Those of `count` wrong ones, or of as many as `seconds` allow, that passed the check. `outcomes_of`: of each edit
    of a subject the kind of failure, or EQUIVALENT, or PASSED: wrong and not noticed."""
    rng = Random(seed)
    tried = [(fault_target, fault_target.legal_edits(rng)) for fault_target in fault_targets]
    tally: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    passed: list[PassedMutant] = []
    begin = time.monotonic()
    while tried and tally.total() - tally[EQUIVALENT] < count and time.monotonic() - begin < seconds:
        chosen = rng.choice(tried)
        fault_target, source = chosen
        left = count - tally.total() + tally[EQUIVALENT]
        numbers = list(itertools.islice(source, min(batch, left)))
        if not numbers:
            tried.remove(chosen)
        for number, outcome in zip(numbers, outcomes_of(fault_target, numbers), strict=True):
            edit: Edited = fault_target.edits[number]
            tally[outcome] += 1
            kinds[edit.kind] += outcome != EQUIVALENT
            if outcome == PASSED:
                passed.append(PassedMutant(fault_target.name, number, edit.kind, edit.where))
                print(f"passed: edit {number}, {edit.kind} ({edit.where}) of {fault_target.name}", flush=True)
        wrong = tally.total() - tally[EQUIVALENT]
        if sys.stderr.isatty() or wrong % _SAID < len(numbers):
            spent = time.monotonic() - begin
            print(f"  {wrong} wrong ones, {tally[EQUIVALENT]} equivalent, {spent:.0f} s", flush=True)
    print("  " + ", ".join(f"{times} {kind}" for kind, times in kinds.most_common()))
    print("  " + ", ".join(f"{times} {kind}" for kind, times in tally.most_common()))
    wrong = tally.total() - tally[EQUIVALENT]
    print(f"{len(passed)} of {wrong} mutants passed the check, in {time.monotonic() - begin:.0f} s")
    return passed
