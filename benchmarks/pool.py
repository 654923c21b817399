"""What a pool of machines costs and survives, on one machine with pseudo-devices.

    python benchmarks/pool.py                    # all of it
    python benchmarks/pool.py scale overhead faults simulation [--trials 2000]

A pseudo-device sleeps where a real one would time a kernel, so that several fit on two cores; builds, messages,
seals and processes are real. `scale` measures pools of 1, 2 and 4 nodes and compares them with the simulation, with the
costs of the driver and of a node that it measures on the first; `simulation` takes the same, and assumes the others.
`faults` is in pool_faults.py. The tables are for benchmarks/results/pool.md.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pool_faults import faults
from pool_nodes import QUICK, SLOW, jobs, pool
from pool_simulation import Costs, simulated
from tilewright.measure.building import Made
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Device
from tilewright.measure.pool.driver import PoolRunner
from tilewright.measure.pool.workers import Workers
from tilewright.measure.runner import Runner

NODES = (1, 2, 4)


@contextlib.contextmanager
def connected(nodes: list[tuple[int, tuple[Device, ...]]]) -> Iterator[Workers]:
    """A pool of these nodes; this process is the driver."""
    with pool(nodes) as (address, _), cluster.connected(address, cluster.read_token(address)):
        workers = Workers()
        workers.refresh()
        yield workers


def scale(trials: int, sizes: Sequence[int] = NODES) -> Costs:
    """Pools of so many nodes, each with a builder and a sleeping device. Returns the costs that the first showed."""
    (job, configs), *_ = jobs(8 * min(trials, 200))
    print("\n| nodes | trials | trials/s | of linear | simulated | simulated/real | driver busy |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    costs, single = Costs(), 0.0
    for nodes in sizes:
        with connected([(1, (SLOW,))] * nodes) as workers:
            runner = PoolRunner(workers, 1, user="bench", seed=1)
            runner.build(job, configs)
            runner.measure(job, configs[: 4 * nodes])  # everyone has started
            begin, cpu = time.monotonic(), time.process_time()
            found = runner.measure(job, configs[4 * nodes : 4 * nodes + 45 * nodes])
            seconds, spent = time.monotonic() - begin, time.process_time() - cpu
        rate = len(found) / seconds
        if not single:  # the costs of one node predict the others
            single = rate / nodes
            costs = Costs(driver=spent / len(found) / 2, node=max(0.0, 1 / single - Costs.trial))
        expected = simulated(nodes, nodes, len(found), costs, built=len(found)).rate
        cells = (nodes, len(found), f"{rate:.2f}", f"{rate / single / nodes:.3f}", f"{expected:.2f}")
        share = f"{spent / seconds:.2f}"
        print(f"| {' | '.join(map(str, cells))} | {expected / rate:.3f} | {share} |", flush=True)
    print(
        f"\nCosts measured on {sizes[0]} node(s): driver {costs.driver * 1e3:.2f} ms of processor time a message, node"
        f" {costs.node * 1e3:.1f} ms a trial beside the {costs.trial * 1e3:.0f} ms that it sleeps."
    )
    return costs


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
    with connected([(1, (QUICK,))]) as workers:
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


def simulation(costs: Costs) -> None:
    print(
        f"\nSimulated, with the measured {costs.driver * 1e3:.2f} ms of the driver a message and"
        f" {costs.node * 1e3:.1f} ms of a node a trial. Assumed: builds of {costs.build} s, trials of {costs.trial} s,"
        f" {costs.transfer * 1e3:.1f} ms to move a candidate's code.\n"
    )
    print("| devices | builders | trials/s | of linear | driver busy | store busy |")
    print("| --- | --- | --- | --- | --- | --- |")
    for devices in (1, 2, 4, 16, 64, 256, 1000):
        builders = 2 * devices
        result = simulated(devices, builders, trials=max(400, 40 * devices), costs=costs)
        linear = result.rate / devices * (costs.trial + costs.node)
        cells = (devices, builders, f"{result.rate:.1f}", f"{linear:.2f}", f"{result.driver_busy:.2f}")
        print(f"| {' | '.join(map(str, cells))} | {result.store_busy:.2f} |")


PARTS = ("scale", "overhead", "faults", "simulation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES), help="of scale")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"PART must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    costs: Costs | None = None
    for part in given.parts:
        if part == "scale":
            costs = scale(given.trials, given.nodes)
        elif part == "simulation":
            simulation(costs or scale(given.trials, NODES[:1]))
        elif part == "overhead":
            overhead(given.trials)
        else:
            faults(given.trials)


if __name__ == "__main__":
    main()
