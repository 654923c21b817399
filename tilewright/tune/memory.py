"""What was found out about tasks, kept for the next compilation: one line of JSON for each search.

A line's key is a fingerprint of the task, the machine, the numerics, the number of threads and the sources that decide
what a config means, so a line never needs to be invalidated: after a change it is not found any more. Later lines go
before earlier ones; lines that cannot be read are passed over.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import msgspec

from tilewright import knobs
from tilewright.codegen.llvm import toolchain
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.support.fingerprint import fingerprint

_ROOMS = ("codegen", "loops", "space", "te")


class Found(msgspec.Struct, frozen=True):
    """The fastest config that a search of so much effort has found, within a budget for the whole model; None: the
    default program."""

    key: str
    label: str
    effort: str
    budget: float
    config: Config | None
    seconds: float
    trials: int


class Memory:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "tuned" / "plain.jsonl"
        self._found: dict[str, Found] = {}
        decoder = msgspec.json.Decoder(Found)
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            lines = []
        for line in lines:
            try:
                found = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            self._found[found.key] = found

    @classmethod
    def default(cls) -> Memory:
        return cls(knobs.get("cache_dir"))

    def get(self, key: str) -> Found | None:
        return self._found.get(key)

    def add(self, found: Found) -> None:
        """In one write, so that lines of two processes do not mix. That it cannot be kept is no failure."""
        self._found[found.key] = found
        line = msgspec.json.encode(found) + b"\n"
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError:
            return


def work_key(work: Work, threads: int) -> str:
    return fingerprint("plain", work.task.key, asdict(work.machine), work.numerics, threads, _versions())


@lru_cache(maxsize=1)
def _versions() -> str:
    """Of LLVM, and of every source that decides what a config computes and how."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(path for room in _ROOMS for path in (package / room).rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {toolchain.version()}"
