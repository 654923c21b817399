"""How many trials a second, and how far their times can be relied on.

    python benchmarks/throughput.py [--trials 48] [--threads 2] [--json FILE]
    python benchmarks/throughput.py --agreement [--rounds 6]

A trial is a config that is built, checked against the oracle on sets of inputs, and timed alone. Trials a second
count all of that, with processes that are warm; starting them, and the oracle, is said apart. With --agreement, the
times that trials of a 512 x 512 x 512 product gave, of the best four of sixteen configs, are compared with those of a
long race between the same kernels: each as the ratio to the first config, so that the clock does not matter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.measure.measurement import typical
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work

_RACE_SECONDS = 1.5


def _input(number: int, *shape: int) -> Node:
    return input_node(number, TensorType(shape, DType.F32))


def _product(m: int, n: int, k: int) -> Task:
    x, w, b = _input(0, m, k), _input(1, k, n), _input(2, n)
    node = apply("relu", apply("add", apply("matmul", x, w), b))
    return Task(Graph((x, w, b), (node,)), frozenset({1, 2}))


def _convolution(size: int, channels: int) -> Task:
    x, w = _input(0, 1, size, size, channels), _input(1, 3, 3, channels, channels)
    border = (0, 1, 1, 0)
    padded = apply("pad", x, low=border, high=border, interior=(0, 0, 0, 0), value=0.0)
    node = apply(
        "conv",
        padded,
        w,
        layout="channels_last",
        stride=(1, 1),
        dilation=(1, 1),
        groups=1,
        padding=((0, 0), (0, 0)),
    )
    return Task(Graph((x, w), (apply("relu", node),)), frozenset({1}))


def _softmax(rows: int, columns: int) -> Task:
    x = _input(0, rows, columns)
    return Task(Graph((x,), (apply("softmax", x, axis=1),)))


TASKS = {
    "product 128 x 256 x 256": _product(128, 256, 256),
    "product 64 x 768 x 768": _product(64, 768, 768),
    "convolution 14 x 14 x 64": _convolution(14, 64),
    "softmax 384 x 384": _softmax(384, 384),
}


def throughput(name: str, task: Task, trials: int, threads: int) -> dict[str, Any]:
    work = Work(task, host())
    configs = Candidates.of(work).sample(Random(0), trials + 1)
    job = TaskJob.of(work, threads)
    with Runner(threads) as runner:
        begin = time.perf_counter()
        runner.measure(job, configs[:1])
        started = time.perf_counter()
        measured = runner.measure(job, configs[1:])
        spent = time.perf_counter() - started
        drift = runner.drift
    times = sorted(one.seconds for one in measured if one.seconds is not None)
    return {
        "task": name,
        "trials": len(measured),
        "trials_per_second": len(measured) / spent,
        "start_seconds": started - begin,
        "build_seconds": statistics.mean(one.build_seconds for one in measured),
        "best_seconds": times[0] if times else None,
        "median_seconds": statistics.median(times) if times else None,
        "failures": dict(Counter(one.failure for one in measured if one.failure)),
        "drift": drift,
    }


def agreement(threads: int, rounds: int) -> dict[str, Any]:
    """How far apart the ratio of two configs' times is, by trials and by a race."""
    work = Work(_product(512, 512, 512), host())
    job = TaskJob.of(work, threads)
    some = Candidates.of(work, sketches=False).sample(Random(3), 16)
    off = []
    with Runner(threads) as runner:
        measured = [one for one in runner.measure(job, some) if one.seconds is not None]
        configs = [one.config for one in sorted(measured, key=lambda one: one.seconds or 0.0)[:4]]
        for _ in range(rounds):
            trials = [one.seconds for one in runner.measure(job, configs)]
            raced = [typical(times) for times in runner.race(job, configs, _RACE_SECONDS)]
            base = trials[0]
            assert base is not None
            for seconds, long in zip(trials[1:], raced[1:], strict=True):
                assert seconds is not None
                off.append(abs((seconds / base) / (long / raced[0]) - 1))
    return {"pairs": len(off), "median": statistics.median(off), "largest": max(off)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), help="some of: " + ", ".join(TASKS))
    parser.add_argument("--agreement", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    results: Any
    if chosen.agreement:
        results = agreement(chosen.threads, chosen.rounds)
        print(
            f"trials and races disagree by {results['median']:.1%} (median of {results['pairs']} pairs), "
            f"{results['largest']:.1%} at most"
        )
    else:
        results = []
        for name in chosen.tasks:
            found = throughput(name, TASKS[name], chosen.trials, chosen.threads)
            results.append(found)
            failures = ", ".join(f"{count} {kind}" for kind, count in found["failures"].items()) or "none"
            best = found["best_seconds"]
            print(
                f"{name:28} {found['trials_per_second']:5.1f} trials/s  (build {found['build_seconds'] * 1e3:.0f} ms, "
                f"start {found['start_seconds']:.1f} s, best {0 if best is None else best * 1e6:.0f} us, "
                f"failures: {failures})",
                flush=True,
            )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
