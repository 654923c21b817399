"""Gemmini's functional simulator against its RTL: random programs, every byte of DRAM compared.

python benchmarks/gemmini_rtl.py --programs 10000
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from tilewright.codegen.gemmini.rtl import Rtl
from tilewright.hw.gemmini import GemminiMachine
from tilewright.runtime.gemmini import Functional
from tilewright.testing.gemmini import random_program

MACHINE = GemminiMachine(dim=4, scratchpad=512, accumulator=1024)
_AT_ONCE = 500


def mismatches(rtl: Rtl, seeds: range) -> list[int]:
    """The seeds of the programs whose memories differ."""
    programs = [random_program(np.random.default_rng(seed), rtl.machine) for seed in seeds]
    wrong = []
    for seed, (program, dram), result in zip(seeds, programs, rtl.run_all(programs), strict=True):
        expected = dram.copy()
        Functional(rtl.machine, expected).run(program)
        if not np.array_equal(expected, result.dram):
            wrong.append(seed)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="keeps what Verilator builds")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rtl = Rtl(MACHINE, given.folder or Path(folder))
        wrong: list[int] = []
        for first in range(0, given.programs, _AT_ONCE):
            wrong += mismatches(rtl, range(first, min(first + _AT_ONCE, given.programs)))
    print(f"{given.programs} random programs, {len(wrong)} mismatches", *wrong[:10])
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
