"""A pool in which one trial in ten goes wrong, and whose driver is killed twice: what is lost, and what counts twice?

    python benchmarks/pool_faults.py [--trials 2000] [--minutes 60] [--kills 2]

Two nodes have pseudo-devices whose times follow from the object code, so that a run can be repeated exactly. Every
candidate is measured on steady devices and on faulty ones (`tilewright.testing.pool.FaultyTimer`); both have a tuning
database of their own. The driver is a process of its own; a new one takes up what the databases lack. What was written
is noted in a file after the database has it, and compared with the database at the end. After `--minutes` the run ends
with what it has; best configs are compared among the candidates that both databases have.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pool_nodes import QUICK, jobs, pool
from tilewright.db.database import Database
from tilewright.db.record import Key, Record
from tilewright.measure.measurement import Measurement
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Device
from tilewright.measure.pool.driver import PoolRunner
from tilewright.measure.pool.workers import Workers
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config
from tilewright.testing.pool import FAULTS, fault_log

FAULTY = Device(
    "cpu:faulty", timing="tilewright.testing.pool:serve", actor="tilewright.testing.pool:FaultyTimer"
)
PATIENCE, REPLY = 20.0, 30.0  # seconds of work on a trial; for a worker to say what it works on
_ROUND = 125
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
                    runner.prepare(*work[number + 1])  # built meanwhile
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
    devices = (QUICK, *(FAULTY,) * 4)
    with pool([(2, devices), (0, devices)]) as (address, folder):
        print(f"the pool is up after {time.monotonic() - begin:.0f} s", flush=True)
        begin, killed, ended = time.monotonic(), 0, False
        while not ended and time.monotonic() - begin < 60 * minutes:
            command = [sys.executable, __file__, "--drive", address, str(folder), "--trials", str(trials)]
            with subprocess.Popen(command, start_new_session=True) as driver, ended_with_us(driver):
                shown = -1
                while (code := driver.poll()) is None:
                    time.sleep(1.0)
                    notes = [note for note in notes_of(folder) if note["kind"] == "faulty"]
                    done = sum(note["acknowledged"] for note in notes)
                    if done != shown:
                        shown, count = done, sum(faults_so_far().values())
                        after = time.monotonic() - begin
                        print(f"{done} of {trials} trials, {count} faults, {after:.0f} s", flush=True)
                    if killed < kills and done >= (killed + 1) * trials / (kills + 1):
                        time.sleep(3.0)  # in the middle of a round
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
    last = {(note["pid"]): note for note in notes}.values()  # of each driver
    again = sum(note["given_again"] for note in last)
    seconds = {kind: sum(note["seconds"][kind] for note in last) for kind in _KINDS}
    acknowledged = sum(note["acknowledged"] for note in notes if note["kind"] == "faulty")
    print(
        "\n| trials | recorded | faults | drivers killed | given again | acknowledged and lost | counted twice |"
        " same best configs | s | s without faults | ended |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    print(
        f"| {trials} | {len(counts)} | {sum(kinds.values())} | {killed} | {again} | {lost} of {acknowledged} |"
        f" {twice} | {same} of {len(best['faulty'])} | {seconds['faulty']:.0f} | {seconds['steady']:.0f} |"
        f" {'yes' if ended else 'no: out of time'} |"
    )
    print("\nFaults: " + ", ".join(f"{kinds[fault]} {fault}" for fault in FAULTS), flush=True)


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
