"""Files of records: lines as `tilewright db export` writes them, compressed if the name ends in .xz.

A collection appends lines; a line that was cut off, as by a power cut, is one record less.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from tilewright.db.record import Record
from tilewright.db.rows import (
    FACTS,
    TRIAL,
    Damaged,
    Facts,
    Row,
    facts_of,
    record_of,
    rows_of_record,
    trial_of,
)
from tilewright.errors import DatasetError
from tilewright.support.files import require_regular

_MAX_LINE = 1 << 20  # bytes
_MAX_BYTES = 1 << 30  # of a file when it is not compressed any more


class DataSet(msgspec.Struct, frozen=True):
    """The records of several files, and the number of damaged lines."""

    records: tuple[Record, ...]
    damaged: int


def read(*paths: Path) -> DataSet:
    """The records of these files, without duplicates. Raises DatasetError for a file that is not a data set."""
    facts: dict[str, Facts] = {}
    trials: dict[str, Row] = {}
    damaged = 0
    for path in paths:
        lines, intact = 0, 0
        for line in _lines(path):
            lines += 1
            try:
                row = msgspec.json.decode(line, type=Row)
                row = Row(row.kind, row.digest, msgspec.Raw(bytes(row.body)))
                if row.kind == FACTS:
                    facts[row.digest] = facts_of(row)
                elif row.kind == TRIAL:
                    trial_of(row)
                    trials[row.digest] = row
                intact += 1
            except (Damaged, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                damaged += 1
        if lines and not intact:
            raise DatasetError(f"{path} has no line of a data set")
    records = []
    for row in trials.values():
        try:
            records.append(record_of(trial_of(row), lambda digest: _known(facts, digest)))
        except Damaged:
            damaged += 1
    return DataSet(tuple(records), damaged)


def _known(facts: dict[str, Facts], digest: str) -> Facts:
    if digest not in facts:
        raise Damaged(f"the facts {digest[:12]} are missing")
    return facts[digest]


def _lines(path: Path) -> Iterator[bytes]:
    try:
        require_regular(path)
        with _opened(path) as file:
            total = 0
            while line := file.readline(_MAX_LINE):
                total += len(line)
                if total > _MAX_BYTES:
                    raise DatasetError(f"{path} has more than {_MAX_BYTES >> 30} GiB of records")
                if line.strip():
                    yield line
    except (lzma.LZMAError, EOFError) as error:
        raise DatasetError(f"{path} cannot be decompressed: {error}") from None
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}") from None


def _opened(path: Path) -> IO[bytes]:
    return lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb")


class Writer:
    """Appends records to a file. Facts that it has already written are not repeated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: set[str] = set()

    def add(self, records: Iterable[Record]) -> None:
        lines = list(lines_of(records, self._written))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.writelines(lines)
        except OSError as error:
            raise DatasetError(f"cannot write {self._path}: {error.strerror}") from None


def lines_of(records: Iterable[Record], written: set[str]) -> Iterator[bytes]:
    """The rows of records, without duplicates; `written` has the digests of those that are in the file already."""
    for record in records:
        for row in rows_of_record(record):
            if row.digest not in written:
                written.add(row.digest)
                yield msgspec.json.encode(row) + b"\n"


def merge(paths: Iterable[Path], to: Path) -> DataSet:
    """Write the records of several files into one, without duplicates, sorted by machine, task and config."""
    found = read(*paths)
    ordered = sorted(
        found.records, key=lambda r: (r.key.machine, r.key.threads, r.label, r.text, str(r.config), r.when)
    )
    lines = lines_of(ordered, set())
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.suffix == ".xz":
            with lzma.open(to, "wb", preset=9) as file:
                file.writelines(lines)
        else:
            with to.open("wb") as plain:
                plain.writelines(lines)
    except OSError as error:
        raise DatasetError(f"cannot write {to}: {error.strerror}") from None
    return found
