"""What a pool of machines costs and survives, on one machine with pseudo-devices.

    python benchmarks/pool.py                    # all of it
    python benchmarks/pool.py scale overhead faults simulation [--trials 2000]

A pseudo-device sleeps where a real one would time a kernel, so that several fit on two cores; builds, messages,
seals and processes are real. `scale` measures pools of 1, 2 and 4 nodes and compares them with the simulation, whose
costs it measures on one node. The tables are for benchmarks/results/pool.md.
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
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pool_simulation import Costs, simulated
from tests.faults.candidates import product
from tilewright.hw import host
from tilewright.measure.building import Made
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Device, Share
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
    "cpu:faulty",
    timing="tilewright.testing.pool:serve",
    actor="tilewright.testing.pool:FaultyTimer",
)
NODES = (1, 2, 4)
PATIENCE = 12.0  # seconds after which a timer is taken to hang: its first trial starts processes
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
            address = cluster.up(Share(*nodes[0]), port)
            for node in nodes[1:]:
                cluster.join(Share(*node), address)
            with cluster.connected(address, cluster.read_token(address)):
                workers = Workers()
                workers.refresh()
                yield workers
        finally:
            cluster.down()


def scale(trials: int) -> None:
    """Pools of 1, 2 and 4 nodes, each with a builder and a sleeping device."""
    (job, configs), *_ = jobs(8 * min(trials, 200))
    print("\n| nodes | trials | trials/s | of linear | simulated | simulated/real | driver busy |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    costs, single = Costs(), 0.0
    for nodes in NODES:
        with pool([(1, (SLOW,))] * nodes) as workers:
            runner = PoolRunner(workers, 1, user="bench", seed=1)
            runner.build(job, configs)
            runner.measure(job, configs[: 4 * nodes])  # everyone has started
            begin, cpu = time.monotonic(), time.process_time()
            found = runner.measure(job, configs[4 * nodes : 4 * nodes + 45 * nodes])
            seconds, spent = time.monotonic() - begin, time.process_time() - cpu
        rate = len(found) / seconds
        if not single:  # the costs of one node predict the others
            single = rate
            costs = Costs(driver=spent / len(found) / 2, node=max(0.0, 1 / rate - Costs.trial))
        expected = simulated(nodes, nodes, len(found), costs, built=len(found)).rate
        cells = (nodes, len(found), f"{rate:.2f}", f"{rate / single / nodes:.3f}", f"{expected:.2f}")
        share = f"{spent / seconds:.2f}"
        print(f"| {' | '.join(map(str, cells))} | {expected / rate:.3f} | {share} |", flush=True)
    print(
        f"\nCosts measured on one node: driver {costs.driver * 1e3:.2f} ms of processor time a message, node"
        f" {costs.node * 1e3:.1f} ms a trial beside the {costs.trial * 1e3:.0f} ms that it sleeps."
    )


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


@dataclass
class Campaign:
    """What came of all trials on one kind of device."""

    best: dict[TaskJob, tuple[Config, float]] = field(default_factory=dict)
    recorded: Counter[tuple[TaskJob, Config]] = field(default_factory=Counter)
    seconds: float = 0.0

    def measure(self, runner: PoolRunner, label: str, job: TaskJob, configs: list[Config]) -> None:
        runner.workers.choose(label)
        begin = time.monotonic()
        found = runner.measure(job, configs)
        self.seconds += time.monotonic() - begin
        for each in found:
            self.recorded[job, each.config] += 1
            if each.seconds is not None and (job not in self.best or each.seconds < self.best[job][1]):
                self.best[job] = (each.config, each.seconds)
        runner.acknowledge(found)


def faults(trials: int) -> None:
    work = jobs(trials)
    fault_log().unlink(missing_ok=True)
    steady, faulty = Campaign(), Campaign()
    nodes: list[tuple[int, tuple[Device, ...]]] = [(2, (QUICK, *(FAULTY,) * 4)), (0, (QUICK, *(FAULTY,) * 4))]
    with pool(nodes) as workers, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = PoolRunner(workers, 1, user="bench", seed=1, patience=PATIENCE)
        for number, (job, configs) in enumerate(work):
            runner.build(job, configs)
            steady.measure(runner, QUICK.label, job, configs)
            before = runner.given_again
            if number + 1 < len(work):
                runner.prepare(*work[number + 1])  # built meanwhile
            faulty.measure(runner, FAULTY.label, job, configs)
            print(
                f"{sum(faulty.recorded.values())} trials, {runner.given_again - before} given again", end="\r"
            )
            sys.stdout.flush()
    kinds = Counter(fault_log().read_text().split())
    total = sum(len(configs) for _, configs in work)
    lost = total - len(faulty.recorded)
    twice = sum(count - 1 for count in faulty.recorded.values())
    same = sum(faulty.best.get(job) == steady.best[job] for job in steady.best)
    print(
        "\n| trials | faults | given again | missing | counted twice | same best configs | s | without faults |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    print(
        f"| {total} | {sum(kinds.values())} | {runner.given_again} | {lost} | {twice} | {same} of {len(work)} |"
        f" {faulty.seconds:.0f} | {steady.seconds:.0f} |"
    )
    print("\nFaults: " + ", ".join(f"{kinds[fault]} {fault}" for fault in FAULTS))


def simulation(trials: int) -> None:
    costs = Costs()
    print(f"\nSimulated, with {costs}:\n")
    print("| devices | builders | trials/s | of linear | driver busy | store busy |")
    print("| --- | --- | --- | --- | --- | --- |")
    for devices in (1, 2, 4, 16, 64, 256, 1000):
        builders = 2 * devices
        result = simulated(devices, builders, trials=max(400, 40 * devices), costs=costs)
        linear = result.rate / devices * (costs.trial + costs.node)
        cells = (devices, builders, f"{result.rate:.1f}", f"{linear:.2f}", f"{result.driver_busy:.2f}")
        print(f"| {' | '.join(map(str, cells))} | {result.store_busy:.2f} |")


PARTS = {"scale": scale, "overhead": overhead, "faults": faults, "simulation": simulation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--trials", type=int, default=2000)
    given = parser.parse_args()
    for part in given.parts:
        PARTS[part](given.trials)


if __name__ == "__main__":
    main()
