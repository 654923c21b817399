"""Mutants of GPU kernels checked on the emulated GPU, with the inputs of validation: `gpu_mutants.py --emulated`.

The mistakes and the kernels are the same as on a card. A mutant is caught by a wrong result, or by what only the
emulator sees: a data race, a read of memory or of a register that was never written, an access beyond a buffer, a
result that depends on the order of threads. One that passes is equivalent under the conditions of `gpu_mutants.py`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

import numpy as np

from tests.faults import campaign, gpu_mutants
from tests.faults.campaign import EQUIVALENT, PASSED, PassedMutant
from tests.faults.gpu_edits import Edit
from tests.faults.gpu_mutants import FaultTarget, as_exact, fault_targets, stranger
from tilewright.graph.oracle import evaluate
from tilewright.hw.gpu import H200
from tilewright.measure.validation import CheckCase, WrongResult, make_validation
from tilewright.testing.emulator.run import Complaint, Emulated

_BATCH = 4
_STRANGERS = range(1000, 5000, 1000)  # seeds of the inputs on which a mutant that passed is looked at again
WRONG, COMPLAINT = "wrong", "complaint"


@dataclass(frozen=True)
class EmulatedTarget:
    """A kernel whose mutants are tried, and what its results must be."""

    target: FaultTarget

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def edits(self) -> Sequence[Edit]:
        return self.target.edits

    def legal_edits(self, rng: Random) -> Iterator[int]:
        """Those that compile to other machine code; none if the original does not pass its check."""
        try:
            _ = self.meant
        except (WrongResult, Complaint) as error:
            print(f"left out, since the original does not pass: {self.name}: {error}", flush=True)
        else:
            yield from self.target.legal_edits(rng, ahead=_BATCH)

    @cached_property
    def cases(self) -> Sequence[CheckCase]:
        return make_validation(self.target.work.task, self.target.work.numerics, 0).cases

    @cached_property
    def strangers(self) -> list[list[np.ndarray]]:
        return [stranger(self.target.job, seed) for seed in _STRANGERS]

    @cached_property
    def meant(self) -> list[np.ndarray]:
        """The original's results on other inputs. Raises WrongResult or Complaint if it does not pass its check."""
        with tempfile.TemporaryDirectory() as folder:
            original = Emulated(self.target.source, Path(folder))
            _check(original, self.cases)
            return original(self.strangers)

    def outcome(self, number: int) -> str:
        text = self.edits[number].made(self.target.source.text)
        with tempfile.TemporaryDirectory() as folder:
            try:
                mutant = Emulated(self.target.source, Path(folder), text)
                _check(mutant, self.cases[:1])  # most are wrong already here
                _check(mutant, self.cases)
                found = mutant.in_both_orders(self.strangers)
                other = Emulated(self.target.source, Path(folder), text, unset="zero")
                if [each.tobytes() for each in other(self.strangers)] != [each.tobytes() for each in found]:
                    return COMPLAINT  # it depends on a register that was never written
            except WrongResult:
                return WRONG
            except Complaint:
                return COMPLAINT
        return EQUIVALENT if self._is_equivalent(found) else PASSED

    def _is_equivalent(self, found: Sequence[np.ndarray]) -> bool:
        if all(one.tobytes() == other.tobytes() for one, other in zip(found, self.meant, strict=True)):
            return True
        graph = self.target.work.task.graph
        exact = [evaluate(graph, arrays, precise=True)[0].reshape(-1) for arrays in self.strangers]
        return all(map(as_exact, found, self.meant, exact))


def _check(kernel: Emulated, cases: Sequence[CheckCase]) -> None:
    results = kernel.in_both_orders([case.inputs for case in cases])
    for case, result in zip(cases, results, strict=True):
        case.error(result)


def run_emulated_mutants(
    count: int, seed: int, templates: Collection[str] = (), seconds: float = math.inf
) -> list[PassedMutant]:
    """Those of `count` wrong ones, or of as many as `seconds` allow, that passed the check."""
    chosen = list(map(EmulatedTarget, fault_targets(H200, Random(seed), templates)))

    def outcomes(target: EmulatedTarget, numbers: Sequence[int]) -> list[str]:
        return [target.outcome(number) for number in numbers]

    try:
        return campaign.run_mutants(count, seed, chosen, outcomes, _BATCH, seconds)
    finally:
        gpu_mutants.close_compilers()
