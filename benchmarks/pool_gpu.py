"""Trials a minute on one GPU, with one builder and with many: what builders of a pool are worth to a device.

    python benchmarks/pool_gpu.py [--builders 16] [--seconds 30] [--json FILE]

Builders and the timer are the local runner's processes, which answer the requests that a pool's builders and timers
pass on to theirs. Every candidate is built, checked and timed; both runs measure the same candidates in the same order,
with caches of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work

_SHAPES = ((512, 768, 768), (1024, 1024, 1024), (256, 3072, 768), (2048, 512, 512))
_ROUND = 16


def product(m: int, n: int, k: int) -> Task:
    x = Inputs()
    node = apply("matmul", x(m, k, dtype=DType.F16), x(k, n, dtype=DType.F16, constant=True))
    return x.task(apply("relu", node))


def work(machine: GpuMachine, rounds: int) -> list[tuple[TaskJob, list[Config]]]:
    """Rounds of candidates of several tasks, as the tuner asks for them."""
    jobs = []
    for shape in _SHAPES:
        job = TaskJob.of(Work(product(*shape), machine), 0)
        sampled = dict.fromkeys(Candidates.of(job.work()).sample(Random(0), 4 * _ROUND * rounds))
        jobs.append((job, list(sampled)))
    return [
        (job, configs[start : start + _ROUND])
        for start in range(0, _ROUND * rounds, _ROUND)
        for job, configs in jobs
        if configs[start : start + _ROUND]
    ]


def trials_a_minute(
    rounds: list[tuple[TaskJob, list[Config]]], builders: int, seconds: float
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder
        with Runner(0, builders=builders, seed=1, device=0) as runner:
            runner.measure(rounds[0][0], rounds[0][1][:1])  # the processes have started
            begin = time.monotonic()
            deadline, count, right = begin + seconds, 0, 0
            for number, (job, configs) in enumerate(rounds):
                for ahead in rounds[number : number + 1 + runner.ahead]:
                    runner.prepare(*ahead)
                found = runner.measure(job, configs, deadline=deadline)
                count += len(found)
                right += sum(each.seconds is not None for each in found)
                if time.monotonic() > deadline:
                    break
            taken = time.monotonic() - begin
    return {
        "builders": builders,
        "trials": count,
        "right": right,
        "seconds": taken,
        "rate": 60 * count / taken,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--builders", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    machine = detect(0)
    rounds = work(machine, 24)
    print(f"{machine.name}; {sum(len(configs) for _, configs in rounds)} candidates of {len(_SHAPES)} tasks")
    print(
        "| builders | trials | right | s | trials a minute | times |\n| --- | --- | --- | --- | --- | --- |"
    )
    results = []
    for builders in (1, given.builders):
        found = trials_a_minute(rounds, builders, given.seconds)
        results.append(found)
        times = found["rate"] / results[0]["rate"]
        print(
            f"| {builders} | {found['trials']:.0f} | {found['right']:.0f} | {found['seconds']:.1f} |"
            f" {found['rate']:.0f} | {times:.2f} |",
            flush=True,
        )
        if given.json is not None:
            given.json.write_text(json.dumps({"device": machine.name, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
