"""Random tile programs as CUDA text on the emulated GPU, against NumPy; on a card where there is one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tests.codegen.cuda.tiles.emulated import Launch, run
from tests.tile.generator import Generated, generate
from tilewright.tile.executors import Facts

_AT_ONCE = 40  # programs of one binary


def launch_of(made: Generated, seed: int) -> Launch:
    """With facts and warps that vary: arrays of the emulator begin at multiples of 16 bytes."""
    divisors = tuple((param.name, 16) for param in made.program.params) if seed % 3 else ()
    facts = Facts(disjoint=bool(seed % 2), divisors=divisors)
    return Launch(made.program, dict(made.arrays), facts=facts, warps=(4, 1, 2, 8)[seed % 4])


def check(seeds: Iterable[int], folder: Path) -> None:
    made = [(seed, generate(seed)) for seed in seeds]
    results = run([launch_of(each, seed) for seed, each in made], folder)
    for (seed, each), found in zip(made, results, strict=True):
        for name, wanted in each.wanted.items():
            np.testing.assert_array_equal(found[name], wanted, err_msg=f"seed {seed}\n{each.program}")


def check_many(count: int, folder: Path) -> None:
    for first in range(0, count, _AT_ONCE):
        check(range(first, min(first + _AT_ONCE, count)), folder)
