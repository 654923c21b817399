"""Random tile programs, compiled for this processor, against NumPy: `python -m tests.tile.random_programs 2000`.

With `--target cuda` as CUDA text on the emulated GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.tile.generator import generate
from tilewright.tile.executors import Facts, executor_for
from tilewright.tile.kernel import tensor_argument


def check(seed: int) -> None:
    made = generate(seed)
    executor = executor_for("cpu")
    assert executor is not None
    launchable = executor.compile(made.program, Facts(disjoint=bool(seed % 2)), {"threads": 1 + seed % 2})
    assert launchable is not None
    addresses = {name: tensor_argument(name, array).address for name, array in made.arrays.items()}
    launchable(made.grid, made.values(addresses))
    made.check(made.arrays, f"seed {seed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.target == "cuda":
        from tests.codegen.cuda.tiles.random_programs import check_many

        with tempfile.TemporaryDirectory() as folder:
            check_many(options.count, Path(folder))
    else:
        for number in range(options.count):
            check(number)
    print(f"{options.count} random tile programs, compiled for {options.target}: no mismatch")


if __name__ == "__main__":
    main()
