"""The data caches of this machine, as the operating system describes them.

Under a hypervisor the description may be wrong, or describe a cache that other guests share. `measure/calibrate.py`
measures the real sizes.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tilewright import knobs

_SYSFS = Path("/sys/devices/system/cpu")
_SMALLEST, _LARGEST = 4 << 10, 16 << 30  # values outside are not cache sizes


@dataclass(frozen=True)
class Caches:
    """Bytes of each level. `l2_cores` and `l3_cores` are the cores that share one cache of that level; without a
    third level `l3` is 0.

    The defaults are sizes that nearly every processor with vector units has.
    """

    l1: int = 32 << 10
    l2: int = 512 << 10
    l3: int = 8 << 20
    l2_cores: int = 1
    l3_cores: int = 4

    @cached_property
    def l2_per_core(self) -> int:
        return self.l2 // self.l2_cores

    def keep(self, touched: float) -> bool:
        """Whether L2 still holds this many bytes when a core needs them again, with other data in between."""
        return touched <= 0.75 * self.l2_per_core

    @property
    def last(self) -> int:
        """Bytes of the last-level cache."""
        return self.l3 or self.l2


def detect_caches() -> Caches:
    """The caches of the first processor that this process may use; defaults for unknown values."""
    if platform.system() == "Darwin":
        return caches_from_sysctl(_sysctl())
    try:
        cpu = min(os.sched_getaffinity(0))
    except AttributeError:  # neither Linux nor macOS
        cpu = 0
    return caches_from_sysfs(_SYSFS / f"cpu{cpu}")


def caches_from_sysfs(cpu: Path) -> Caches:
    """`cpu`: a folder such as /sys/devices/system/cpu/cpu0."""
    levels: dict[int, tuple[int, int]] = {}
    siblings = max(1, len(_cpu_list(cpu / "topology" / "thread_siblings_list")))
    for index in sorted((cpu / "cache").glob("index[0-9]*")):
        try:
            level, kind = int((index / "level").read_text()), (index / "type").read_text().strip()
            size = knobs.parse_bytes((index / "size").read_text())
        except (OSError, ValueError):
            continue
        if kind in ("Data", "Unified") and _SMALLEST <= size <= _LARGEST:
            cores = max(1, len(_cpu_list(index / "shared_cpu_list")) // siblings)
            levels[level] = (size, cores)
    return _from_levels(levels)


def caches_from_sysctl(values: Mapping[str, int]) -> Caches:
    """From macOS's values for its performance cores (`perflevel0`), or for all cores if they are alike."""
    levels: dict[int, tuple[int, int]] = {}
    for level, name in ((1, "l1dcachesize"), (2, "l2cachesize"), (3, "l3cachesize")):
        size = values.get(f"hw.perflevel0.{name}") or values.get(f"hw.{name}") or 0
        sharing = values.get(f"hw.perflevel0.cpusperl{level}", 1) if level > 1 else 1
        if _SMALLEST <= size <= _LARGEST:
            levels[level] = (size, max(1, sharing))
    return _from_levels(levels)


def _from_levels(levels: Mapping[int, tuple[int, int]]) -> Caches:
    """Level -> (bytes, cores that share it). Missing middle levels get defaults; a third level is assumed absent only
    if the second is known."""
    usual = Caches()
    l1, _ = levels.get(1, (usual.l1, 1))
    l2, l2_cores = levels.get(2, (usual.l2, usual.l2_cores))
    absent = (0, 1) if 2 in levels else (usual.l3, usual.l3_cores)
    l3, l3_cores = levels.get(3, absent)
    return Caches(l1, max(l1, l2), l3, l2_cores, l3_cores)


def _cpu_list(path: Path) -> list[int]:
    """The numbers in a file such as "0-3,8"; none if the file does not exist."""
    try:
        parts = path.read_text().strip().split(",")
        return [
            cpu
            for first, _, last in (part.partition("-") for part in parts if part)
            for cpu in range(int(first), int(last or first) + 1)
        ]
    except (OSError, ValueError):
        return []


def _sysctl() -> dict[str, int]:
    try:
        text = subprocess.run(
            ["sysctl", "hw"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): int(value) for name, value in pairs if value.strip().isdecimal()}
