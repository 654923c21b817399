"""Object code of configs in files: made in one go or on another machine, and timed when this one is quiet."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tilewright.measure.building import Made
from tilewright.measure.process import Failed
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config

BATCH = 64
_LENGTH = struct.Struct("<Q")


class Kept(msgspec.Struct, frozen=True):
    """One line of a file, so to speak: a config, and what came of building it."""

    config: Config
    made: Made | Failed


class Builds:
    """A file for each task. What was built holds for the version of the templates and of LLVM that built it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, name: str, configs: Sequence[Config]) -> dict[Config, Made | Failed]:
        """What is there of these configs. The end of a file that was cut off is as if it were not there."""
        path, wanted = self._path(name), set(configs)
        data = memoryview(path.read_bytes() if path.exists() else b"")
        found: dict[Config, Made | Failed] = {}
        at = 0
        while at + _LENGTH.size <= len(data):
            (length,) = _LENGTH.unpack_from(data, at)
            begin, at = at + _LENGTH.size, at + _LENGTH.size + length
            if at > len(data):
                break
            kept = msgspec.msgpack.decode(data[begin:at], type=Kept)
            if kept.config in wanted:
                found[kept.config] = kept.made
        return found

    def add(self, name: str, kept: Sequence[Kept]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._path(name).open("ab") as file:
            for each in kept:
                encoded = msgspec.msgpack.encode(each)
                file.write(_LENGTH.pack(len(encoded)) + encoded)

    def complete(self, name: str, job: TaskJob, configs: Sequence[Config], runner: Runner) -> Iterator[str]:
        """Build what is not there yet; a line of progress for each batch."""
        there = self.of(name, configs)
        missing = [config for config in configs if config not in there]
        for begin in range(0, len(missing), BATCH):
            some = missing[begin : begin + BATCH]
            made = runner.build(job, some)
            self.add(name, [Kept(config, each) for config, each in zip(some, made, strict=True)])
            yield f"{name}: {len(missing) - begin - len(some)} of {len(configs)} configs to build"

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.builds"
