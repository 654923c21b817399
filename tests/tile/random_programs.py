"""Random tile programs, compiled for this processor, against NumPy: `python -m tests.tile.random_programs 2000`."""

from __future__ import annotations

import sys

import numpy as np

from tests.tile.generator import generate
from tilewright.tile.executors import Facts, executor_for
from tilewright.tile.kernel import _tensor


def check(seed: int) -> None:
    made = generate(seed)
    executor = executor_for("cpu")
    assert executor is not None
    launchable = executor.compile(made.program, Facts(disjoint=bool(seed % 2)), {"threads": 1})
    assert launchable is not None
    addresses = {name: _tensor(name, array).address for name, array in made.arrays.items()}
    launchable((1, 1, 1), [addresses[param.name] for param in made.program.params])
    for name, wanted in made.wanted.items():
        np.testing.assert_array_equal(made.arrays[name], wanted, err_msg=f"seed {seed}\n{made.program}")


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for number in range(count):
        check(number)
    print(f"{count} random tile programs, compiled: no mismatch")
