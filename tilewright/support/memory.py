"""The memory that this process can still allocate: limited by the machine, its cgroup, and its own limits."""

from __future__ import annotations

from pathlib import Path

import psutil

_UNLIMITED = 1 << 60  # cgroups v1 report a number near 2^63 without a limit


def available_memory() -> int:
    """Bytes that this process can allocate before the system, its cgroup or an rlimit refuses."""
    free = [int(psutil.virtual_memory().available)]
    group = cgroup_memory()
    if group is not None:
        free.append(group)
    free += _rlimits()
    return max(0, min(free))


def _rlimits() -> list[int]:
    try:
        import resource
    except ImportError:  # not on Windows
        return []
    used = psutil.Process().memory_info()
    pairs = ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0)))
    limits = [(resource.getrlimit(kind)[0], taken) for kind, taken in pairs]
    return [limit - taken for limit, taken in limits if limit != resource.RLIM_INFINITY]


def cgroup_memory(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The remaining bytes under the tightest memory limit between this process's cgroup and the root; None without
    one."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        # A container often sees its own group mounted at the root, so the path of the host may not exist here.
        parts = Path(path.lstrip("/")).parts
        for length in range(len(parts), -1, -1):
            found = _left(base.joinpath(*parts[:length]), *names)
            if found is not None:
                left.append(found)
    return min(left, default=None)


def _left(group: Path, limit: str, usage: str, cached: str) -> int | None:
    """Bytes below the limit of one group; the kernel's droppable file cache counts as free."""
    try:
        text = (group / limit).read_text().strip()
        if text == "max" or int(text) >= _UNLIMITED:
            return None
        used = int((group / usage).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(text) - max(0, used - int(statistics.get(cached, 0)))
    except (OSError, ValueError):
        return None
