"""What is sound in a database file of which the rest is not.

First as far as SQLite can read it; then, whatever is broken, every body that lies in the file as a whole with its
digest in front of it.
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

_BODY = re.compile(r'\{"(?:key|type)":')
_BEFORE = 512  # bytes between the beginning of a row and that of its body, at most


def salvage(path: Path) -> list[Row]:
    """Sound rows, each once. The file is not changed."""
    found: dict[str, Row] = {}
    for row in (*_selected(path), *_scanned(path)):
        with contextlib.suppress(Damaged):
            key_of(row)
            found.setdefault(row.digest, row)
    return sorted(found.values(), key=lambda row: row.kind != FACTS)


def _selected(path: Path) -> Iterator[Row]:
    with (
        contextlib.suppress(sqlite3.Error, OverflowError),
        contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection,
    ):
        connection.text_factory = bytes
        for kind, digest, body in connection.execute("SELECT kind, digest, body FROM rows ORDER BY id"):
            if isinstance(kind, bytes) and isinstance(digest, bytes) and isinstance(body, bytes):
                yield Row(kind.decode("latin-1"), digest.decode("latin-1"), msgspec.Raw(body))


def _scanned(path: Path) -> Iterator[Row]:
    decoder = json.JSONDecoder()
    for part in (path, path.with_name(f"{path.name}-wal")):
        try:
            text = part.read_bytes().decode("latin-1")  # a character for each byte
        except OSError:
            continue
        for match in _BODY.finditer(text):
            begin = match.start()
            try:
                _, end = decoder.raw_decode(text, begin)
            except (ValueError, RecursionError):
                continue
            body = text[begin:end].encode("latin-1")
            before = text[max(0, begin - _BEFORE) : begin]
            for kind in (FACTS, TRIAL, DECISION):
                digest = digest_of(kind, body)
                if digest in before:
                    yield Row(kind, digest, msgspec.Raw(body))
