"""Recovers the intact rows of a damaged database file.

First it reads what SQLite can read; then it scans the file for complete bodies that are preceded by their digest.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tilewright.db.rows import DECISION, FACTS, TRIAL, Damaged, Row, digest_of, key_of
from tilewright.db.schema import (
    MAX_BODY_BYTES,
    Deadline,
    bounded,
    bytes_of,
    check_schema,
    guarded_connection,
    require_files,
)
from tilewright.errors import DatabaseFileError
from tilewright.support.files import require_regular

_BODY = re.compile(r'\{"(?:key|type)":')
_BEFORE = 512  # maximum bytes between the start of a row and its body
_DIGEST = re.compile("[0-9a-f]{32}")
_PART_BYTES = 32 << 20
_FIRST_WINDOW = 16384
_MAX_WORK = 100  # maximum characters examined per byte of a file: rows may be a hundredth of a window
_decode = json.JSONDecoder().raw_decode


def salvage(path: Path) -> list[Row]:
    """The valid rows, each once. The file is not changed."""
    found: dict[str, Row] = {}
    for row in (*_selected(path), *_scanned(path)):
        with contextlib.suppress(Damaged):
            key_of(row)
            found.setdefault(row.digest, row)
    return sorted(found.values(), key=lambda row: row.kind != FACTS)


def _selected(path: Path) -> Iterator[Row]:
    """Read rows with SQLite, if the file has exactly Tilewright's schema."""
    with (
        contextlib.suppress(sqlite3.Error, DatabaseFileError, OverflowError, OSError),
        contextlib.closing(_opened(path)) as connection,
    ):
        check_schema(connection)
        Deadline(connection, path)
        connection.text_factory = bytes
        rows = connection.execute("SELECT kind, digest, body FROM rows ORDER BY id")
        for kind, digest, body in bounded(rows, bytes_of(path)):
            if isinstance(kind, bytes) and isinstance(digest, bytes) and isinstance(body, bytes):
                yield Row(kind.decode("latin-1"), digest.decode("latin-1"), msgspec.Raw(body))


def _opened(path: Path) -> sqlite3.Connection:
    require_files(path)
    return guarded_connection(f"{path.absolute().as_uri()}?mode=ro")


def _scanned(path: Path) -> Iterator[Row]:
    """Find rows by their byte pattern anywhere in the file. Gives up on files made to be slow: a false start of a row
    is rare, and rows do not overlap."""
    for part in (path, path.with_name(f"{path.name}-wal")):
        work = _MAX_WORK * (part.stat().st_size + (1 << 20)) if part.is_file() else 0
        for text, last in _windows(part):
            for match in _BODY.finditer(text):
                begin = match.start()
                if begin >= last or work < 0:
                    break
                before = text[max(0, begin - _BEFORE) : begin]
                if _DIGEST.search(before) is None:
                    continue
                body, cost = _object_at(text, begin)
                work -= cost
                for kind in (FACTS, TRIAL, DECISION):
                    digest = digest_of(kind, body)
                    if digest in before:
                        yield Row(kind, digest, msgspec.Raw(body))


def _object_at(text: str, begin: int) -> tuple[bytes, int]:
    """The JSON object that begins there, empty if there is none, and the characters examined. It works in windows,
    because an error takes time proportional to the text."""
    cost, size = 0, _FIRST_WINDOW
    while True:
        window = text[begin : begin + size]
        cost += len(window)
        try:
            _, end = _decode(window)
            return window[:end].encode("latin-1"), cost
        except RecursionError:
            return b"", cost
        except ValueError:  # it may continue after the window
            if len(window) < size or size >= MAX_BODY_BYTES:
                return b"", cost
            size *= 16


def _windows(path: Path) -> Iterator[tuple[str, int]]:
    """The file in parts, one character per byte, each overlapping the next by the maximum length of a row; and the
    end of this part's row starts."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            text = file.read(_PART_BYTES + MAX_BODY_BYTES).decode("latin-1")
            while text:
                more = file.read(_PART_BYTES).decode("latin-1")
                yield text, _PART_BYTES if more else len(text)
                # The bytes before a row are examined too, so the end of the last part is kept.
                text = text[_PART_BYTES - _BEFORE :] + more if more else ""
    except OSError:
        return
