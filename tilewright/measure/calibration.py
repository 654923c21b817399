"""The calibration record of a machine: its maximum rates, measured by `calibrate.py` on an idle machine and stored;
nominal until then.

One JSON file per machine description is under `calibration/` in the cache folder. A file that is unreadable, of
another version or implausible counts as absent.
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

VERSION = 3  # of the record and of the measuring method

_MEMORY_BANDWIDTH = 10e9  # of one core, if not measured
_CORES_FILL_MEMORY = 4  # cores that saturate memory


class Speeds(msgspec.Struct, frozen=True):
    """Rates of all `threads` together: fp32 operations per second (an FMA counts as two), and bytes per second read
    from each level of memory; `copy`: read plus written bytes, for arrays larger than the last-level cache."""

    threads: int
    flops: float
    l1: float
    l2: float
    l3: float
    memory: float
    copy: float

    @property
    def sensible(self) -> bool:
        rates = (self.flops, self.l1, self.l2, self.l3, self.memory, self.copy)
        return self.threads > 0 and all(math.isfinite(rate) and rate > 0 for rate in rates)


class Capacities(msgspec.Struct, frozen=True):
    """Bytes of each level that one thread can use; `l3` is 0 if there is none."""

    l1: int
    l2: int
    l3: int


class Calibration(msgspec.Struct, frozen=True):
    version: int
    machine: str  # the `machine_key` of its machine
    measured: bool
    capacities: Capacities
    one: Speeds
    all: Speeds
    share: float = 1.0  # of the processor that was available while measuring

    @property
    def sensible(self) -> bool:
        sizes = self.capacities
        ordered = 0 < sizes.l1 <= sizes.l2 and sizes.l3 >= 0
        return ordered and self.one.sensible and self.all.sensible and self.one.threads == 1


def calibration_for(machine: CpuMachine) -> Calibration:
    """The stored calibration of a machine, or nominal rates. Measures nothing."""
    return stored(machine) or nominal(machine)


def nominal(machine: CpuMachine) -> Calibration:
    """The expected rates of such a machine."""
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
    """The key of a machine of any kind, calibrated or not."""
    return fingerprint("machine", asdict(machine))  # type: ignore[call-overload]


# -- on disk ----------------------------------------------------------------------------------------------------------


_Record = TypeVar("_Record", bound=msgspec.Struct)


def _file(key: str) -> Path:
    return knobs.get("cache_dir") / "calibration" / f"{key}.json"


def stored(machine: CpuMachine) -> Calibration | None:
    found = kept_at(machine_key(machine), Calibration)
    return found if found is not None and is_of(found, machine) else None


def is_of(found: Calibration, machine: CpuMachine) -> bool:
    """Whether it was measured on such a machine, by this version, and is plausible."""
    current = found.version == VERSION and found.machine == machine_key(machine) and found.measured
    return current and found.sensible


def keep(machine: CpuMachine, calibration: Calibration) -> None:
    keep_at(machine_key(machine), calibration)


def kept_at(key: str, kind: type[_Record]) -> _Record | None:
    """The record of that key; None if there is none, or it is unreadable."""
    try:
        return msgspec.json.decode(_file(key).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def keep_at(key: str, record: msgspec.Struct) -> None:
    """Write the file atomically. A failure to store it is ignored."""
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
