"""Faults of the tuning database, injected: what is acknowledged is never lost, what is damaged is never believed.

    python -m tests.faults.database                all three campaigns at full length
    python -m tests.faults.database --kills 200 --writers 8 --flips 1000

kills: a process writes records and says after each that it is kept; it is killed at random moments.
writers: processes write to one database at once.
flips: a bit of a database is flipped, and it is read and written.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from tests.db.samples import key, record, work
from tilewright.db.database import Database
from tilewright.db.maintain import verify
from tilewright.db.record import Decision, Record
from tilewright.errors import DatabaseWarning, TilewrightError

# -- the writing process ----------------------------------------------------------------------------------------------


def write(path: Path, first: int, count: int, network: bool, acknowledge: Connection) -> None:
    """Writes records one by one, and says of each that it is kept."""
    with Database.open(path, network=network) as database:
        for number in range(first, first + count):
            database.add([record(number)])
            acknowledge.send(number)


class Writer:
    """A process that writes. They come from a process that has imported everything, and start within milliseconds."""

    def __init__(self, path: Path, first: int, count: int, *, network: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.db.samples", "tilewright.db.maintain"])
        self._said, said = context.Pipe(duplex=False)
        self.process = context.Process(target=write, args=(path, first, count, network, said), daemon=True)
        self.process.start()
        said.close()

    def next(self) -> int | None:
        """The next record that it says is kept; None at its end."""
        try:
            return int(self._said.recv())
        except (EOFError, OSError, pickle.UnpicklingError):
            return None

    def rest(self) -> list[int]:
        found = list(iter(self.next, None))
        self.process.join()
        return found


# -- campaigns --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lost:
    acknowledged: int
    lost: int


def kills(count: int, folder: Path, seed: int = 0) -> Lost:
    """Processes that write without end to one database, each killed within a moment of its first record."""
    rng = random.Random(seed)
    path = folder / "kills.sqlite"
    acknowledged: list[int] = []
    for number in range(count):
        writer = Writer(path, 1_000_000 * number, 1_000_000)
        first = writer.next()
        time.sleep(rng.expovariate(1 / 0.05))
        writer.process.kill()
        acknowledged += [one for one in (first, *writer.rest()) if one is not None]
    return Lost(len(acknowledged), _missing(path, acknowledged))


def writers(count: int, each: int, folder: Path, *, network: bool = False) -> Lost:
    """All of them find no database at first."""
    path = folder / "writers.sqlite"
    running = [Writer(path, number * each, each, network=network) for number in range(count)]
    acknowledged = [number for writer in running for number in writer.rest()]
    return Lost(len(acknowledged), _missing(path, range(count * each)))


def whole(records: Iterable[Record | Decision]) -> set[bytes]:
    """Everything of each, to be compared."""
    return {msgspec.json.encode(one, order="deterministic") for one in records}


def _missing(path: Path, numbers: Iterable[int]) -> int:
    with Database.open(path) as database:
        kept = whole(database.records())
        assert verify(database).ok
    return len(whole(map(record, numbers)) - kept)


@dataclass
class Flips:
    databases: int = 0
    untouched: int = 0  # all records are there
    passed_over: int = 0  # some rows are missing
    replaced: int = 0  # the file was set aside
    refused: int = 0  # with a TilewrightError
    records: int = 0
    lost: int = 0
    wrong: int = 0  # records or decisions that no process wrote
    crashes: int = 0  # any other exception


def flips(count: int, folder: Path, seed: int = 0) -> Flips:
    """Of half of the databases a bit anywhere, of the others one in the first page or in a header of a page."""
    rng = random.Random(seed)
    records = [record(number, of=work(8 + number % 3)) for number in range(60)]
    winner = record(1).config
    decisions = [Decision(key(work(rows)), winner, 1e-5, "quick", 60.0, 12, 1e9) for rows in (8, 9, 10)]
    original = folder / "original.sqlite"
    with Database.open(original) as database:
        database.add(records)
        for decision in decisions:
            database.decide(decision)
    data = original.read_bytes()
    found = Flips()
    for number in range(count):
        position = rng.randrange(len(data))
        if number % 2:
            position = position // 16384 * 16384 + rng.randrange(120)
        flipped = bytearray(data)
        flipped[position] ^= 1 << rng.randrange(8)
        inside = folder / f"flip{number}"
        inside.mkdir()
        path = inside / "tuning.sqlite"
        path.write_bytes(flipped)
        _examine(path, whole(records), whole(decisions), found)
        shutil.rmtree(inside)
    return found


def _examine(path: Path, originals: set[bytes], decisions: set[bytes], found: Flips) -> None:
    found.databases += 1
    found.records += len(originals)
    fresh = record(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DatabaseWarning)
        try:
            with Database.open(path) as database:
                read = whole([*database.records(), *database.records(key()), *database.similar(key())])
                decided = whole([*database.decisions(), *filter(None, [database.decision(key())])])
                verify(database)
                database.add([fresh])
                assert whole([fresh]) <= whole(database.records(fresh.key))
                replaced = bool(database.set_aside)
        except TilewrightError:
            found.refused += 1
            return
        except Exception as error:
            print(f"crash: {type(error).__name__}: {error}", file=sys.stderr)
            found.crashes += 1
            return
    found.lost += len(originals - read)
    found.wrong += len(read - originals) + len(decided - decisions)
    found.replaced += replaced
    found.passed_over += not replaced and not originals <= read
    found.untouched += not replaced and originals <= read


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--records", type=int, default=100, help="of each writer")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killed = kills(given.kills, folder, given.seed)
        print(
            f"{given.kills} kills: {killed.acknowledged} records acknowledged, {killed.lost} lost", flush=True
        )
        at_once = writers(given.writers, given.records, folder)
        print(
            f"{given.writers} writers at once: {at_once.acknowledged} records, {at_once.lost} lost",
            flush=True,
        )
        damaged = flips(given.flips, folder, given.seed)
        print(f"{given.flips} flipped bits: {damaged}")
    return int(bool(killed.lost or at_once.lost or damaged.wrong or damaged.crashes))


if __name__ == "__main__":
    sys.exit(main())
