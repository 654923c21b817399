"""Tune a model with a small budget, write a lock file, and build the same kernels again without measuring.

    python examples/tune_and_lock.py --budget 10s

A tuning run measures candidates on this machine. The winners go to a database, which every later compilation uses, and
to a lock file, which can be kept beside the model: a build with it has exactly these kernels, or fails.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import nn

import tilewright
from tilewright.support.trace import Trace
from tilewright.tune.progress import Progress


def trials_of(progress: Progress) -> str:
    return f"{progress.trials} measurements"


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune a small model and lock its kernels.")
    parser.add_argument("--budget", default="10s", help="time for measuring")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)).eval().requires_grad_(False)
    x = torch.randn(32, 256)

    with tempfile.TemporaryDirectory() as folder:
        database, lock = Path(folder) / "tuning.sqlite", Path(folder) / "model.lock"

        # 1. Tune. `Progress` listens to the events of the run; the library itself prints nothing.
        progress = Progress()
        tuned = tilewright.compile(
            model,
            (x,),
            effort="quick",
            budget=options.budget,
            db=database,
            lock=lock,
            trace=Trace(listener=progress),
        )
        print(f"tuned: {trials_of(progress)}")

        # 2. What was chosen, as text that can be reviewed and committed.
        for task in json.loads(lock.read_text())["tasks"].values():
            values = " ".join(f"{knob}={value}" for knob, value in task["values"].items())
            print(f"  {task['label']}: {task['template']} {values}")

        # 3. The database alone: a plain compilation uses the winners and measures nothing.
        progress = Progress()
        again = tilewright.compile(model, (x,), db=database, trace=Trace(listener=progress))
        same = again.plan.kernels == tuned.plan.kernels
        print(f"from the database: {trials_of(progress)}, the same kernels: {same}")

        # 4. The lock file alone, with an empty database, as on a build machine.
        progress = Progress()
        empty = Path(folder) / "empty.sqlite"
        locked = tilewright.compile(model, (x,), db=empty, lock=lock, trace=Trace(listener=progress))
        same = locked.plan.kernels == tuned.plan.kernels
        print(f"from the lock file: {trials_of(progress)}, the same kernels: {same}")
        print(f"right: {torch.allclose(locked(x), model(x), atol=1e-4)}")


if __name__ == "__main__":
    main()
