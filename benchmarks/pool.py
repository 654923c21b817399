"""What a pool of machines costs and survives, on one machine with pseudo-devices.

    python benchmarks/pool.py                    # all of it
    python benchmarks/pool.py throughput overhead faults simulation [--trials 2000]

A pseudo-device sleeps where a real one would time a kernel, so that several fit on two cores; builds, messages,
seals and processes are real. The tables are for benchmarks/results/pool.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pool_simulation import Costs, simulated
from tests.faults.candidates import product
from tilewright.hw import host
from tilewright.measure.building import Made
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Device
from tilewright.measure.pool.driver import PoolRunner
from tilewright.measure.pool.workers import Workers
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.testing.pool import FAULTS, fault_log

QUICK = Device("cpu:pseudo", timing="tilewright.testing.pool:serve")
SLOW = Device("cpu:pseudo", timing="tilewright.testing.pool:serve_slowly")
FAULTY = Device(
    "cpu:pseudo",
    timing="tilewright.testing.pool:serve",
    actor="tilewright.testing.pool:FaultyTimer",
)
_SHAPES = (
    (32, 48, 40),
    (64, 64, 64),
    (17, 96, 33),
    (128, 64, 48),
    (48, 48, 96),
    (20, 128, 64),
    (80, 40, 72),
    (96, 96, 96),
)


def jobs(count: int) -> list[tuple[TaskJob, list[Config]]]:
    """So many trials, of eight tasks."""
    found = []
    for shape in _SHAPES:
        job = TaskJob.of(Work(product(*shape), host()), 1)
        wanted = -(-count // len(_SHAPES))
        found.append(
            (
                job,
                list(dict.fromkeys(Candidates.of(job.work(), sketches=False).sample(Random(0), 2 * wanted)))[
                    :wanted
                ],
            )
        )
    return found


@contextlib.contextmanager
def pool(nodes: list[tuple[int, tuple[Device, ...]]]) -> Iterator[Workers]:
    """Nodes with so many builders and these devices; this process is the driver."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        try:
            address = cluster.up(port=port, builders=nodes[0][0], devices=nodes[0][1])
            for builders, devices in nodes[1:]:
                cluster.join(address, builders=builders, devices=devices)
            with cluster.connected(address, cluster.read_token(address)):
                workers = Workers()
                workers.refresh()
                yield workers
        finally:
            cluster.down()


def throughput(trials: int) -> None:
    print("\n| timers | builders | trials/s | of linear |\n| --- | --- | --- | --- |")
    (job, configs), *_ = jobs(8 * min(trials, 96))
    single = 0.0
    for timers in (1, 2, 4):
        with pool([(2, (SLOW,) * timers)]) as workers:
            runner = PoolRunner(workers, 1, user="bench", seed=1)
            runner.prepare(job, configs)
            runner.measure(job, configs[:8])  # everyone has started, and code is built
            runner.build(job, configs)
            begin = time.monotonic()
            found = runner.measure(job, configs[8:])
            rate = len(found) / (time.monotonic() - begin)
        single = single or rate
        print(f"| {timers} | 2 | {rate:.1f} | {rate / single / timers:.2f} |", flush=True)


def overhead(trials: int) -> None:
    (job, configs), *_ = jobs(8 * min(trials, 64))
    with Runner(1, builders=1, seed=1, timing=QUICK.timing) as local:
        made = local.build(job, configs)
        times = []
        for config, each in zip(configs, made, strict=True):
            assert isinstance(each, Made)
            begin = time.perf_counter()
            local.trial(job, config, each)
            times.append(time.perf_counter() - begin)
    with pool([(1, (QUICK,))]) as workers:
        runner = PoolRunner(workers, 1, user="bench", seed=1)
        runner.build(job, configs)
        pooled = []
        for config in configs:
            begin = time.perf_counter()
            runner.measure(job, [config])
            pooled.append(time.perf_counter() - begin)
    here, there = (statistics.median(each[4:]) * 1e3 for each in (times, pooled))
    print("\n| a trial of code that is built | ms |\n| --- | --- |")
    print(
        f"| local runner | {here:.2f} |\n| pool, one node | {there:.2f} |\n| overhead | {there - here:.2f} |"
    )


def faults(trials: int) -> None:
    work = jobs(trials)

    def run(device: Device) -> tuple[dict[TaskJob, tuple[Config, float]], int, int, int]:
        best: dict[TaskJob, tuple[Config, float]] = {}
        count, twice = 0, 0
        with pool([(2, (device, device)), (0, (device, device))]) as workers:
            runner = PoolRunner(workers, 1, user="bench", seed=1, patience=4.0)
            for job, configs in work:
                for start in range(0, len(configs), 16):
                    found = runner.measure(job, configs[start : start + 16])
                    runner.acknowledge(found)
                    print(f"{count} trials", file=sys.stderr, end="\r")
                    twice += len(found) - len({each.config for each in found})
                    for each in found:
                        count += 1
                        if each.seconds is not None and (job not in best or each.seconds < best[job][1]):
                            best[job] = (each.config, each.seconds)
            return best, count, twice, runner.given_again

    expected, total, _, _ = run(QUICK)
    fault_log().unlink(missing_ok=True)
    begin = time.monotonic()
    best, count, twice, again = run(FAULTY)
    kinds = Counter(fault_log().read_text().split())
    print(
        "\n| trials | faults | given again | lost | counted twice | best configs as without faults | seconds |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    same = sum(best.get(job) == expected[job] for job in expected)
    print(
        f"| {total} | {sum(kinds.values())} | {again} | {total - count} | {twice} | {same} of {len(expected)} |"
        f" {time.monotonic() - begin:.0f} |"
    )
    print("\nFaults: " + ", ".join(f"{kinds[fault]} {fault}" for fault in FAULTS))


def simulation(trials: int) -> None:
    costs = Costs()
    print(f"\nSimulated, with {costs}:\n")
    print("| devices | builders | trials/s | of linear | driver busy |\n| --- | --- | --- | --- | --- |")
    for devices in (1, 2, 4, 16, 64, 256, 1000):
        builders = -(-devices * 2)
        result = simulated(devices, builders, trials=max(400, 40 * devices), costs=costs)
        linear = result.rate / devices * costs.trial
        print(f"| {devices} | {builders} | {result.rate:.1f} | {linear:.2f} | {result.driver_busy:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["throughput", "overhead", "faults", "simulation"])
    parser.add_argument("--trials", type=int, default=2000)
    given = parser.parse_args()
    for part in given.parts:
        {"throughput": throughput, "overhead": overhead, "faults": faults, "simulation": simulation}[part](
            given.trials
        )


if __name__ == "__main__":
    main()
