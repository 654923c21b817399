"""A pool in which one trial in ten goes wrong, whose builders, driver and second node are killed, and of whose devices
one becomes slower: what is lost, and what counts twice?

    python benchmarks/pool_faults.py [--trials 2000] [--minutes 60] [--kills 2]

Two nodes have pseudo-devices whose times follow from the object code, so that a run can be repeated exactly. Every
candidate is measured on steady devices and on faulty ones (`tilewright.testing.pool`); both have a tuning database of
their own. The driver is a process of its own; a new one takes up what the databases lack. What was written is noted in
a file after the database has it, and compared with the database at the end. After `--minutes` the run ends with what
it has; best configs are compared among the candidates that both databases have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from pool_nodes import QUICK, jobs, pool
from tilewright.db.database import Database
from tilewright.db.record import Key, Record
from tilewright.measure.measurement import Measurement
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Device, Share
from tilewright.measure.pool.driver import PoolRunner
from tilewright.measure.pool.workers import Workers
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config
from tilewright.testing.pool import FAULTS, fault_log, note_fault

FAULTY = Device(
    "cpu:faulty", timing="tilewright.testing.pool:serve", actor="tilewright.testing.pool:FaultyTimer"
)
SLOWING = replace(FAULTY, actor="tilewright.testing.pool:SlowingTimer")
# Seconds of work on a trial, and for a worker to say what it works on. A pseudo-device works for milliseconds; a worker
# that is only starved for longer than this is started anew, which costs time alone.
PATIENCE, REPLY = 4.0, 10.0
_BUILDER_EVERY = 15  # faults of timers, after which a builder is killed
_IN_A_ROUND = 5  # faults since the last record, which say that a round is under way
_OTHERS = ("slowing", "builder", "node")
_ROUND = 250
_KINDS = {"steady": QUICK.label, "faulty": FAULTY.label}


def rounds(trials: int) -> list[tuple[TaskJob, list[Config]]]:
    return [
        (job, configs[start : start + _ROUND])
        for job, configs in jobs(trials)
        for start in range(0, len(configs), _ROUND)
    ]


# -- the driver --------------------------------------------------------------------------------------------------------


def drive(address: str, folder: Path, trials: int) -> None:
    """Measure what the databases lack."""
    warnings.simplefilter("ignore")
    work = rounds(trials)
    with (
        Database.open(folder / "steady") as steady,
        Database.open(folder / "faulty") as faulty,
        cluster.connected(address, cluster.read_token(address)),
        open(folder / "notes", "a") as notes,
    ):
        workers = Workers()
        workers.refresh()
        said = open(folder / "notes of the driver", "a", buffering=1)  # noqa: SIM115 - open as long as the process
        runner = PoolRunner(
            workers,
            1,
            user="bench",
            seed=1,
            note=lambda message: print(message, file=said),
            patience=PATIENCE,
            reply=REPLY,
        )
        seconds = dict.fromkeys(_KINDS, 0.0)
        databases = {"steady": steady, "faulty": faulty}
        for number, (job, configs) in (*enumerate(work), *enumerate(work)):  # what was given up, once more
            for kind, database in databases.items():
                known = {record.config for record in database.records(key_of(job))}
                wanted = [config for config in configs if config not in known]
                if not wanted:
                    continue
                workers.choose(_KINDS[kind])
                runner.build(job, wanted)
                if kind == "faulty" and number + 1 < len(work):
                    runner.build(*work[number + 1], deadline=0.0)  # meanwhile
                begin = time.monotonic()
                found = runner.measure(job, wanted)
                seconds[kind] += time.monotonic() - begin
                records = [record_of(job, each) for each in found]
                database.add(records)
                acknowledged = [record.config for record in records]
                note = {
                    "pid": os.getpid(),
                    "kind": kind,
                    "number": number,
                    "acknowledged": len(acknowledged),
                    "configs": [str(config) for config in acknowledged],
                    "given_again": runner.given_again,
                    "seconds": seconds,
                }
                notes.write(json.dumps(note) + "\n")
                notes.flush()
                os.fsync(notes.fileno())
                runner.acknowledge(job, found)


def record_of(job: TaskJob, found: Measurement) -> Record:
    return Record.of(job.work(), job.threads, found.config, times=found.times, failure=found.failure)


def key_of(job: TaskJob) -> Key:
    return Key.of(job.work(), job.threads)


# -- the run -----------------------------------------------------------------------------------------------------------


def notes_of(folder: Path) -> list[dict]:
    path = folder / "notes"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def faults_so_far() -> Counter[str]:
    return Counter(fault_log().read_text().split()) if fault_log().exists() else Counter()


def faults(trials: int, minutes: float = 60.0, kills: int = 2) -> None:
    fault_log().unlink(missing_ok=True)
    begin = time.monotonic()
    nodes = [(2, (QUICK, SLOWING, *(FAULTY,) * 4)), (0, (QUICK, *(FAULTY,) * 4))]
    with pool(nodes) as (address, folder):
        print(f"the pool is up after {time.monotonic() - begin:.0f} s", flush=True)
        second = max(cluster.nodes_here().items(), key=lambda each: each[1]["pid"])[0]
        begin, killed, builders, joined, ended = time.monotonic(), 0, 0, False, False
        while not ended and time.monotonic() - begin < 60 * minutes:
            command = [sys.executable, __file__, "--drive", address, str(folder), "--trials", str(trials)]
            with subprocess.Popen(command, start_new_session=True) as driver, ended_with_us(driver):
                shown, seen = -1, 0
                while (code := driver.poll()) is None:
                    time.sleep(1.0)
                    notes = [note for note in notes_of(folder) if note["kind"] == "faulty"]
                    done, count = sum(note["acknowledged"] for note in notes), sum(faults_so_far().values())
                    if done != shown:
                        after, shown, seen = time.monotonic() - begin, done, count
                        print(f"{done} of {trials} trials, {count} faults, {after:.0f} s", flush=True)
                    in_a_round = count >= seen + _IN_A_ROUND
                    if count >= (builders + 1) * _BUILDER_EVERY:
                        builders += 1
                        kill_a_builder(builders)
                    if not joined and in_a_round and done >= trials / 2:
                        kill_a_node(address, second, nodes[1])
                        joined = True
                    elif killed < kills and in_a_round and done >= (killed + 1) * trials / (kills + 1):
                        driver.send_signal(signal.SIGKILL)
                        killed += 1
                        print("the driver is killed", flush=True)
                    elif time.monotonic() - begin > 60 * minutes:
                        driver.send_signal(signal.SIGKILL)
                driver.wait()
            if code not in (0, -signal.SIGKILL):
                print(f"the driver ended with {code}", flush=True)
                break
            ended = code == 0
        report(folder, trials, killed, ended)


def kill_a_builder(number: int) -> None:
    nodes = [psutil.Process(node["pid"]) for node in cluster.nodes_here().values()]
    builders = []
    for process in (each for node in nodes for each in node.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Builder"):
                builders.append(process)
    if builders:
        with contextlib.suppress(psutil.Error):
            builders[number % len(builders)].kill()
            note_fault("builder")


def kill_a_node(address: str, name: str, share: tuple[int, tuple[Device, ...]]) -> None:
    """Kill the processes of a node, and let another one join."""
    node = psutil.Process(cluster.nodes_here()[name]["pid"])
    for process in (node, *node.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            process.kill()
    note_fault("node")
    print("a node is killed", flush=True)
    cluster.join(Share(*share), address)
    print("another node has joined", flush=True)


@contextlib.contextmanager
def ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


def report(folder: Path, trials: int, killed: int, ended: bool) -> None:
    notes = notes_of(folder)
    kinds = faults_so_far()
    with Database.open(folder / "steady") as steady, Database.open(folder / "faulty") as faulty:
        found = {"steady": steady.records(), "faulty": faulty.records()}
    counts = Counter((record.key, str(record.config)) for record in found["faulty"])
    work = rounds(trials)
    lost = sum(
        (key_of(work[note["number"]][0]), config) not in counts
        for note in notes
        if note["kind"] == "faulty"
        for config in note["configs"]
    )
    twice = sum(count - 1 for count in counts.values())
    both = [record for record in found["steady"] if (record.key, str(record.config)) in counts]
    best = {"steady": best_of(both), "faulty": best_of(found["faulty"])}
    same = sum(best["faulty"][key] == best["steady"].get(key) for key in best["faulty"])
    times = {(record.key, str(record.config)): record.times for record in found["steady"]}
    other = sum(
        record.times != times.get((record.key, str(record.config)), record.times)
        for record in found["faulty"]
    )
    last = {(note["pid"]): note for note in notes}.values()  # of each driver
    again = sum(note["given_again"] for note in last)
    seconds = {kind: sum(note["seconds"][kind] for note in last) for kind in _KINDS}
    acknowledged = sum(note["acknowledged"] for note in notes if note["kind"] == "faulty")
    print(
        "\n| trials | recorded | faults | drivers killed | given again | acknowledged and lost | counted twice |"
        " same best configs | other times | s | s without faults | ended |"
    )
    print("|" + " --- |" * 12)
    print(
        f"| {trials} | {len(counts)} | {sum(kinds.values())} | {killed} | {again} | {lost} of {acknowledged} |"
        f" {twice} | {same} of {len(best['faulty'])} | {other} | {seconds['faulty']:.0f} | {seconds['steady']:.0f} |"
        f" {'yes' if ended else 'no: out of time'} |"
    )
    print("\nFaults: " + ", ".join(f"{kinds[fault]} {fault}" for fault in (*FAULTS, *_OTHERS)), flush=True)


def best_of(records: list[Record]) -> dict[object, tuple[float, str]]:
    best: dict[object, tuple[float, str]] = {}
    for record in records:
        if record.times:
            mine = (min(record.times), str(record.config))
            best[record.key] = min(best.get(record.key, mine), mine)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--drive", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        drive(given.drive[0], Path(given.drive[1]), given.trials)
    else:
        faults(given.trials, given.minutes, given.kills)


if __name__ == "__main__":
    main()
