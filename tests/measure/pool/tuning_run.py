"""A tuning run on a pool in a process of its own, for tests that stop the pool meanwhile.

    python -m tests.measure.pool.tuning_run ADDRESS DATABASE SECONDS

It prints the records that it found at the start, and then either "done" or the error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import tilewright
from tilewright.db.database import Database
from tilewright.measure.pool.cluster import Device

SLOW = Device("cpu:pseudo", timing="tilewright.testing.pool:serve_slowly")


def records(path: Path) -> int:
    """The number of measured configs."""
    if not path.exists():
        return 0
    with Database.open(path) as database:
        return sum(bool(record.times) for record in database.records())


def main() -> None:
    address, path, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    print(records(path), flush=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).eval()
    where = tilewright.Pool(address, SLOW.label)
    try:
        tilewright.compile(
            model, (torch.randn(16, 48),), effort="full", budget=f"{seconds}s", pool=where, db=path
        )
    except tilewright.PoolError as error:
        print(f"PoolError: {error}", flush=True)
        sys.exit(1)
    print("done", flush=True)


if __name__ == "__main__":
    main()
