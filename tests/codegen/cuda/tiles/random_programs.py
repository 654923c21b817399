"""Random tile programs as CUDA text on the emulated GPU, against NumPy; on a card where there is one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.codegen.cuda.tiles.cases import Case, matmul_case
from tests.codegen.cuda.tiles.emulated import Launch, run
from tests.tile.generator import Generated, generate

_AT_ONCE = 40  # programs of one binary


def launch_of(made: Generated, seed: int) -> Launch:
    """With facts, warps and stages that vary."""
    given = {**made.arrays, **made.numbers}
    facts, warps = made.facts(seed), (4, 1, 2, 8)[seed % 4]
    return Launch(made.program, given, made.grid, facts, warps, stages=1 + seed // 4 % 3)


def check(seeds: Iterable[int], folder: Path) -> None:
    made = [(seed, generate(seed)) for seed in seeds]
    results = run([launch_of(each, seed) for seed, each in made], folder)
    for (seed, each), found in zip(made, results, strict=True):
        each.check(found, f"seed {seed}")


def random_matmul(seed: int) -> tuple[Case, int]:
    """A matmul that warpgroups compute, its operands in boxes or copied by all threads, and a number of stages."""
    choose = random.Random(seed).choice
    sizes = (choose((64, 96, 150)), choose((16, 40, 136)), choose((16, 72, 200)))
    blocked = (choose((64, 128)), choose((16, 32, 64, 128)), choose((16, 32, 64, 128)))
    warps = 4 * (1 + (blocked[0] == 128 and choose((True, False))))
    dtype = choose((np.float16, ml_dtypes.bfloat16))
    return matmul_case(*sizes, dtype, blocked, warps), choose((1, 2, 3, 4))


def check_matmuls(seeds: Iterable[int], folder: Path) -> None:
    made = [random_matmul(seed) for seed in seeds]
    launches = [case.launch(stages) for case, stages in made]
    for launch in launches:
        assert all(each.startswith("wgmma") for each in launch.source().dots)
    for descending in (False, True):
        for (case, _), found in zip(made, run(launches, folder, descending=descending), strict=True):
            case.check(found[case.result])


def check_many(count: int, folder: Path) -> None:
    for first in range(0, count, _AT_ONCE):
        check(range(first, min(first + _AT_ONCE, count)), folder)
        check_matmuls(range(first // 10, min(first + _AT_ONCE, count) // 10), folder)
