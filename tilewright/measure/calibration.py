"""What a machine can do at most, as a record: measured by `calibrate.py` while nothing else ran, and kept; nominal
until then.

One JSON file per machine description under `calibration/` of the cache folder. What cannot be read, is of another
version or makes no sense counts as absent, and is measured again when somebody asks for a measurement.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import msgspec

from tilewright import knobs
from tilewright.dtypes import DType
from tilewright.hw import CpuMachine, Machine
from tilewright.support.fingerprint import fingerprint

VERSION = 3  # of the record, and of the way in which it is measured

_MEMORY_BANDWIDTH = 10e9  # of one core, where nobody has measured it
_CORES_FILL_MEMORY = 4  # more cores get no more out of memory


class Speeds(msgspec.Struct, frozen=True):
    """Of all `threads` together: fp32 operations a second (a FMA counts two), and bytes a second read from
    each level of memory while all data lies there; `copy`: read and written bytes together, larger than the last-level
    cache."""

    threads: int
    flops: float
    l1: float
    l2: float
    l3: float
    memory: float
    copy: float

    @property
    def sensible(self) -> bool:
        figures = (self.flops, self.l1, self.l2, self.l3, self.memory, self.copy)
        return self.threads > 0 and all(math.isfinite(figure) and figure > 0 for figure in figures)


class Capacities(msgspec.Struct, frozen=True):
    """Bytes that one thread can use of each level before it reads from the next; `l3` is 0 where there is none."""

    l1: int
    l2: int
    l3: int


class Calibration(msgspec.Struct, frozen=True):
    version: int
    machine: str  # `machine_key` of what it is about
    measured: bool
    capacities: Capacities
    one: Speeds
    all: Speeds
    share: float = 1.0  # of the processor that came to this while it was measured

    @property
    def sensible(self) -> bool:
        sizes = self.capacities
        ordered = 0 < sizes.l1 <= sizes.l2 and sizes.l3 >= 0
        return ordered and self.one.sensible and self.all.sensible and self.one.threads == 1


def calibration_for(machine: CpuMachine) -> Calibration:
    """The figures that are kept of a machine; nominal ones where there are none. Measures nothing."""
    return stored(machine) or nominal(machine)


def nominal(machine: CpuMachine) -> Calibration:
    """What a machine like that should be able to do."""
    caches = machine.caches
    core = machine.throughput
    flops = core.hertz * machine.lanes(DType.F32) * core.fmas * (2 if machine.has_fma else 1)

    def on(threads: int) -> Speeds:
        cycles = threads * core.hertz
        return Speeds(
            threads=threads,
            flops=threads * flops,
            l1=cycles * core.loads * machine.vector_bytes,
            l2=cycles * core.l2,
            l3=cycles * (core.l3 if caches.l3 else core.l2),
            memory=min(threads, _CORES_FILL_MEMORY) * _MEMORY_BANDWIDTH,
            copy=min(threads, _CORES_FILL_MEMORY) * _MEMORY_BANDWIDTH,
        )

    capacities = Capacities(caches.l1, max(caches.l1, caches.l2_per_core), caches.l3)
    return Calibration(VERSION, machine_key(machine), False, capacities, on(1), on(machine.cores))


def machine_key(machine: Machine) -> str:
    """Of a machine of any kind, calibrated or not."""
    return fingerprint("machine", asdict(machine))  # type: ignore[call-overload]


# -- on disk ----------------------------------------------------------------------------------------------------------


_Record = TypeVar("_Record", bound=msgspec.Struct)


def _file(key: str) -> Path:
    return knobs.get("cache_dir") / "calibration" / f"{key}.json"


def stored(machine: CpuMachine) -> Calibration | None:
    found = kept_at(machine_key(machine), Calibration)
    if found is None:
        return None
    current = found.version == VERSION and found.machine == machine_key(machine) and found.measured
    return found if current and found.sensible else None


def keep(machine: CpuMachine, calibration: Calibration) -> None:
    keep_at(machine_key(machine), calibration)


def kept_at(key: str, kind: type[_Record]) -> _Record | None:
    """The record of that key; None where there is none that can be read."""
    try:
        return msgspec.json.decode(_file(key).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def keep_at(key: str, record: msgspec.Struct) -> None:
    """Written aside and renamed, so that a reader sees all of it or none. That it cannot be kept is no failure."""
    path = _file(key)
    temporary: str | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(record)))
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
