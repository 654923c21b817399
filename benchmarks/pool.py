"""What a pool of machines costs and survives, on one machine with pseudo-devices.

    python benchmarks/pool.py                    # all of it
    python benchmarks/pool.py scale tune overhead faults simulation [--trials 2000]

A pseudo-device sleeps where a real one would time a kernel, so that several fit on two cores; builds, messages,
seals and processes are real. `scale` measures pools of 1, 2 and 4 nodes, builds and trials together, and compares
them with the simulation: its costs are those of the smallest and the largest pool, so those between are the check.
`tune` runs the tuner on the same pools. `simulation` takes the costs of `scale`, and extends it to more devices, and to
devices that fail. `faults` is in pool_faults.py. The tables are for benchmarks/results/pool.md.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pool_faults import faults
from pool_nodes import QUICK, SLOW, jobs, pool
from pool_simulation import Costs, simulated
from tilewright.db.database import Database
from tilewright.measure.building import Made
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Device
from tilewright.measure.pool.driver import PoolRunner
from tilewright.measure.pool.workers import Workers
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config
from tilewright.support.trace import Trace
from tilewright.testing.pool import SLOW_SECONDS
from tilewright.tune.effort import Tuning
from tilewright.tune.tunable import TunableTask
from tilewright.tune.tuner import tune

NODES = (1, 2, 4)
_MESSAGES = 4  # of a trial
_WARM_UP = 12  # candidates for each node
_TUNING_TRIALS = 48  # for each node


@contextlib.contextmanager
def connected(nodes: list[tuple[int, tuple[Device, ...]]]) -> Iterator[Workers]:
    """A pool of these nodes; this process is the driver."""
    with pool(nodes) as (address, _), cluster.connected(address, cluster.read_token(address)):
        workers = Workers()
        workers.refresh()
        yield workers


@dataclass(frozen=True)
class Run:
    """Trials on a pool of so many nodes. `driver`: seconds of its processor time."""

    nodes: int
    trials: int
    seconds: float
    driver: float

    @property
    def rate(self) -> float:
        return self.trials / self.seconds


def scale(seconds: int, sizes: Sequence[int] = NODES) -> Costs:
    """Pools of so many nodes, each with a builder and a sleeping device, for about so many seconds. Returns the costs
    that they showed."""
    (job, configs), *_ = jobs(8 * (seconds + _WARM_UP) * max(sizes))
    runs: list[Run] = []
    build, transfer = 0.0, 0.0
    for nodes in sizes:
        with connected([(1, (SLOW,))] * nodes) as workers:
            runner = PoolRunner(workers, 1, user="bench", seed=1)
            warm_up, rest = configs[: _WARM_UP * nodes], configs[_WARM_UP * nodes :]
            runner.measure(job, warm_up[: 2 * nodes])  # everyone has started
            if not runs:
                begin = time.monotonic()
                runner.build(job, warm_up[2 * nodes :])
                build = (time.monotonic() - begin) * nodes / len(warm_up[2 * nodes :])
                transfer = transfer_seconds(job, warm_up[0])
            begin, cpu = time.monotonic(), time.process_time()
            found = runner.measure(job, rest[: seconds * nodes])
            runs.append(Run(nodes, len(found), time.monotonic() - begin, time.process_time() - cpu))
    small, large = runs[0], runs[-1]
    # the driver's time is a share of all time, and something for each message
    driver = max(0.0, large.driver / large.seconds - small.driver / small.seconds) / (large.rate - small.rate)
    idle = max(0.0, small.driver / small.seconds - driver * small.rate)
    node = max(0.0, small.nodes / small.rate - SLOW_SECONDS)
    costs = Costs(build, SLOW_SECONDS, driver / _MESSAGES, idle, node, transfer)
    print("\n| nodes | trials | trials/s | of linear | simulated | driver busy | simulated |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for run in runs:
        expected = simulated(run.nodes, run.nodes, run.trials, costs)
        linear = run.rate / run.nodes / (small.rate / small.nodes)
        cells = (run.nodes, run.trials, f"{run.rate:.2f}", f"{linear:.3f}", f"{expected.rate:.2f}")
        shares = f"{run.driver / run.seconds:.4f} | {expected.driver_busy:.4f}"
        print(f"| {' | '.join(map(str, cells))} | {shares} |", flush=True)
    print(
        f"\nMeasured: {costs.build:.3f} s a build, {costs.transfer * 1e3:.2f} ms to move a candidate's code through the"
        f" object store, {costs.driver * 1e3:.2f} ms of the driver's processor time a message and {costs.idle:.4f} of"
        f" its time otherwise, {costs.node * 1e3:.1f} ms of a node a trial beside the {SLOW_SECONDS:.0f} s that it"
        " sleeps."
    )
    return costs


def transfer_seconds(job: TaskJob, config: Config) -> float:
    """Of the object store, for the code of a candidate."""
    import ray

    with Runner(1, builders=1, seed=1, timing=QUICK.timing) as local:
        code = msgspec.msgpack.encode(local.build(job, [config])[0])
    seconds = []
    for number in range(50):
        begin = time.perf_counter()
        assert len(ray.get(ray.put(code + bytes([number])))) == len(code) + 1
        seconds.append(time.perf_counter() - begin)
    print(f"\nThe code of a candidate has {len(code)} bytes.")
    return statistics.median(seconds)


def tuning(sizes: Sequence[int] = NODES) -> None:
    """The tuner on pools of so many nodes, each with a builder and a sleeping device."""
    print("\n| nodes | trials | s | trials/s | of linear | devices busy |")
    print("| --- | --- | --- | --- | --- | --- |")
    single = 0.0
    for nodes in sizes:
        with (
            connected([(1, (SLOW,))] * nodes) as workers,
            PoolRunner(workers, 1, user="bench", seed=1) as runner,
            tempfile.TemporaryDirectory() as folder,
        ):
            warm_up, *works = (job for job, _ in jobs(8))
            runner.measure(warm_up, jobs(8 * 2 * nodes)[0][1])  # everyone has started
            for use in runner.use.values():
                use.seconds = 0.0
            options = Tuning("quick", 600.0, db=Path(folder) / "tuning.db", trials=_TUNING_TRIALS * nodes)
            tunables = {str(job.work().task.key): (TunableTask(job.work(), 1), 1) for job in works}
            begin = time.monotonic()
            tune(tunables, options, threads=1, trace=Trace.off(), runner=lambda threads, own=runner: own)  # type: ignore[misc]
            seconds = time.monotonic() - begin
            with Database.open(options.db) as database:
                trials = len(database.records())
            busy = sum(use.seconds for use in runner.use.values()) / nodes / seconds
        rate = trials / seconds
        single = single or rate / nodes
        cells = (
            nodes,
            trials,
            f"{seconds:.0f}",
            f"{rate:.2f}",
            f"{rate / single / nodes:.2f}",
            f"{busy:.2f}",
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


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
    """Two builders for each device; the devices fail never, or now and then, and are away for half a minute."""
    print("\n| devices | a failure every | trials/s | of linear | given again | driver busy | store busy |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for devices in (1, 4, 16, 64, 256, 1000):
        for every in (math.inf, 1000.0, 100.0):
            failing = replace(costs, failures=1 / every, back=30.0)
            result = simulated(devices, 2 * devices, trials=max(1000, 40 * devices), costs=failing)
            linear = result.rate / devices * (costs.trial + costs.node)
            often = "never" if math.isinf(every) else f"{every:.0f} s"
            cells = (devices, often, f"{result.rate:.1f}", f"{linear:.2f}", result.given_again)
            shares = f"{result.driver_busy:.2f} | {result.store_busy:.2f}"
            print(f"| {' | '.join(map(str, cells))} | {shares} |")


PARTS = ("scale", "tune", "overhead", "faults", "simulation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES), help="of scale and tune")
    parser.add_argument("--seconds", type=int, default=45, help="of scale, for each number of nodes")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"PART must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if len(set(given.nodes)) < 2:
        parser.error("--nodes needs two numbers: costs are fitted to the smallest and the largest pool")
    costs: Costs | None = None
    for part in given.parts:
        if part == "scale":
            costs = scale(given.seconds, given.nodes)
        elif part == "tune":
            tuning(given.nodes)
        elif part == "simulation":
            simulation(costs or scale(given.seconds, (NODES[0], NODES[-1])))
        elif part == "overhead":
            overhead(given.trials)
        else:
            faults(given.trials)


if __name__ == "__main__":
    main()
