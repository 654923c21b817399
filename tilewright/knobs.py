"""Every option of Tilewright, typed, and the one reader of the environment.

An option is read when it is used, not at import, so a test or a notebook may change the variable at any time. Values
that a caller passes (`compile(..., numerics="strict")`, `load(path, threads=4)`) override options.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, overload

from tilewright.errors import OptionError
from tilewright.numerics import NUMERICS

MAX_THREADS = 1024
THREAD_RUNTIMES = ("auto", "openmp", "pool")
DEPENDENT_LAUNCHES = ("off", "own", "all")

# Values of TILEWRIGHT_CPU_FEATURES that mean a whole level of x86-64, not one feature.
CPU_LEVELS = ("baseline", "avx2", "avx512")

_SWITCH = {"on": True, "1": True, "yes": True, "off": False, "0": False, "no": False}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


# -- parsers: they return a value, or raise ValueError with the allowed values -------------------------------------


def parse_bytes(text: str) -> int:
    """`"1536M"` -> 1610612736. Suffixes K, M, G, T are powers of 1024; a trailing `B` or `iB` is allowed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError("a number of bytes with an optional suffix K, M, G or T, such as 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_threads(text: str) -> int:
    allowed = f"a whole number from 1 to {MAX_THREADS}, or 0 for the default"
    try:
        count = int(text)
    except ValueError:
        raise ValueError(allowed) from None
    if not 0 <= count <= MAX_THREADS:
        raise ValueError(allowed)
    return count or default_threads()


def parse_count(text: str) -> int:
    """`"100000"` -> 100000; suffixes K, M, G, T are powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)", text.strip(), re.IGNORECASE)
    count = 0 if match is None else int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))
    if count < 1:
        raise ValueError("a number from 1 on with an optional suffix K, M, G or T, such as 200K")
    return count


def parse_processes(text: str) -> int:
    if not text.strip().isdecimal() or int(text) > MAX_THREADS:
        raise ValueError(f"a whole number from 0 to {MAX_THREADS}")
    return int(text)


def parse_cpu_features(text: str) -> tuple[str, ...]:
    """Parse a list (`-avx512f,-avx512vl`) or a level (`avx2`); `runtime.host` interprets it."""
    items = tuple(item.strip().lower() for item in text.split(",") if item.strip())
    for item in items:
        if item not in CPU_LEVELS and not re.fullmatch(r"-[a-z0-9._-]+", item):
            levels = ", ".join(CPU_LEVELS)
            raise ValueError(
                f"features to leave out, such as -avx512f,-avx512vl, or one of the levels {levels}"
            )
    return items


def parse_switch(text: str) -> bool:
    value = text.strip().lower()
    if value not in _SWITCH:
        raise ValueError("on or off")
    return _SWITCH[value]


def _parse_folder(text: str) -> Path:
    return Path(text).expanduser()


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return value

    return parse


# -- defaults ------------------------------------------------------------------------------------------------------


def _default_cache_dir() -> Path:
    """The system's folder for files that a program can make again."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        return Path(local) / "tilewright" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tilewright"
    given = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "tilewright"


def default_threads() -> int:
    """Return OMP_NUM_THREADS if it is set, as other libraries of the process do; otherwise `usable_cores`."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        return min(int(first), MAX_THREADS)
    return usable_cores()


def default_build_processes() -> int:
    """One for each core beyond the first. More than four would wait for the IR, which one process writes."""
    return min(usable_cores() - 1, 4)


def usable_cores() -> int:
    """Count the physical cores that this process may use: its affinity mask, its cgroup's quota, hyperthreads once."""
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        import psutil

        return max(1, min(psutil.cpu_count(logical=False) or os.cpu_count() or 1, MAX_THREADS))
    cores = _physical_cores(tuple(allowed))
    quota = cgroup_cpus()
    if quota is not None:
        cores = min(cores, max(1, math.ceil(quota)))
    return max(1, min(cores, MAX_THREADS))


@lru_cache(maxsize=8)
def _physical_cores(allowed: tuple[int, ...]) -> int:
    siblings = set()
    for cpu in allowed:
        try:
            text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            return len(allowed)
        siblings.add(text.strip())
    return len(siblings)


def cgroup_cpus(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """The smallest CPU quota between this process's cgroup and the root; None without a quota."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "cpu", _quota_v1
        else:
            continue
        # A container often sees its own group mounted at the root, so the path of the host may not exist here.
        parts = Path(path.lstrip("/")).parts
        for length in range(len(parts), -1, -1):
            quota = read(base.joinpath(*parts[:length]))
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _quota_v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _default_import_memory() -> int:
    """Three quarters of the memory that is free now; the rest is for copies that are not counted."""
    from tilewright.support.memory import available_memory

    return available_memory() * 3 // 4


# -- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    name: str
    variable: str
    type: str  # shown to users: "bytes", "folder", ...
    parse: Callable[[str], Any]
    default: Any  # a value, or a function of no arguments that finds it
    doc: str

    def default_value(self) -> Any:
        return self.default() if callable(self.default) else self.default


@dataclass(frozen=True)
class OptionState:
    """One row of `tilewright doctor`."""

    name: str
    variable: str
    type: str
    value: Any
    default: Any
    source: str  # "default", or "environment"
    doc: str


OPTIONS: tuple[Option, ...] = (
    Option(
        "cache_dir",
        "TILEWRIGHT_CACHE_DIR",
        "folder",
        _parse_folder,
        _default_cache_dir,
        "where compiled kernels and tuning records are kept",
    ),
    Option(
        "cache_limit",
        "TILEWRIGHT_CACHE_LIMIT",
        "bytes",
        parse_bytes,
        2 << 30,
        "how large the cache of compiled kernels may grow before its oldest entries go",
    ),
    Option(
        "threads",
        "TILEWRIGHT_THREADS",
        "count",
        parse_threads,
        default_threads,
        "threads of a compiled model; the default is OMP_NUM_THREADS, or the physical cores this process may use",
    ),
    Option(
        "build_processes",
        "TILEWRIGHT_BUILD_PROCESSES",
        "count",
        parse_processes,
        default_build_processes,
        "worker processes that run LLVM while a model with many kernels is compiled; 0: none; the default is one for"
        " each core beyond the first, up to 4",
    ),
    Option(
        "thread_runtime",
        "TILEWRIGHT_THREAD_RUNTIME",
        "choice",
        _one_of(*THREAD_RUNTIMES),
        "auto",
        "openmp (one already loaded in the process, such as torch's), pool (Tilewright's own threads), or auto",
    ),
    Option(
        "numerics",
        "TILEWRIGHT_NUMERICS",
        "choice",
        _one_of(*NUMERICS),
        "fast",
        "fast: fast-math flags, each element of a float32 matmul or convolution within its bound, 16-bit roundings left"
        " out between operators; strict: no flags, all roundings; relaxed: as fast, without bounds for single elements;"
        " tf32: as fast, and float32 matmuls on a GPU round their operands",
    ),
    Option(
        "cpu_features",
        "TILEWRIGHT_CPU_FEATURES",
        "features",
        parse_cpu_features,
        (),
        "processor features to do without (-avx512f,-avx512vl) or a level to keep to (baseline, avx2, avx512)",
    ),
    Option(
        "cost_weights",
        "TILEWRIGHT_COST_WEIGHTS",
        "file",
        str,
        "",
        "weights of the cost model attention, from `tilewright dataset train`; default: the shipped ones",
    ),
    Option(
        "dependent_launch",
        "TILEWRIGHT_DEPENDENT_LAUNCH",
        "choice",
        _one_of(*DEPENDENT_LAUNCHES),
        "own",
        "own: programmatic dependent launch between Tilewright's own kernels, where the GPU has it; all: after a"
        " library's kernels too; off: never",
    ),
    Option(
        "import_memory",
        "TILEWRIGHT_IMPORT_MEMORY",
        "bytes",
        parse_bytes,
        _default_import_memory,
        "memory that importing a model may take, and the largest tensor in it; the default is three quarters of what"
        " this process may still allocate",
    ),
    Option(
        "import_nodes",
        "TILEWRIGHT_IMPORT_NODES",
        "count",
        parse_count,
        100_000,
        "nodes that a model may come to, with loops unrolled and functions expanded",
    ),
    Option(
        "import_work",
        "TILEWRIGHT_IMPORT_WORK",
        "count",
        parse_count,
        4_000_000_000,
        "operations on elements that may be computed while a model is imported, alongside those on its own weights",
    ),
    Option(
        "import_depth",
        "TILEWRIGHT_IMPORT_DEPTH",
        "count",
        parse_count,
        40,
        "how deep subgraphs and functions of a model may be nested",
    ),
    Option(
        "padding",
        "TILEWRIGHT_PADDING",
        "switch",
        parse_switch,
        True,
        "on: channels are padded to a multiple that kernels read in whole vectors, where that is predicted to be"
        " faster; off: never",
    ),
    Option(
        "strict_passes",
        "TILEWRIGHT_STRICT_PASSES",
        "switch",
        parse_switch,
        False,
        "on: an optimising pass that fails also fails the compilation, for those who work on Tilewright; off: it is"
        " skipped with a warning",
    ),
)

_BY_NAME = {option.name: option for option in OPTIONS}


@overload
def get(name: Literal["cache_dir"]) -> Path: ...
@overload
def get(
    name: Literal[
        "cache_limit",
        "threads",
        "build_processes",
        "import_memory",
        "import_nodes",
        "import_work",
        "import_depth",
    ],
) -> int: ...
@overload
def get(name: Literal["thread_runtime", "numerics", "dependent_launch", "cost_weights"]) -> str: ...
@overload
def get(name: Literal["cpu_features"]) -> tuple[str, ...]: ...
@overload
def get(name: Literal["strict_passes", "padding"]) -> bool: ...
def get(name: str) -> Any:
    """The value of an option now: its environment variable if set and not empty, otherwise its default."""
    return _read(_BY_NAME[name])[0]


def variable(name: str) -> str:
    """The environment variable of an option."""
    return _BY_NAME[name].variable


def table() -> tuple[OptionState, ...]:
    """Every option with its value and where it came from."""
    return tuple(map(state, OPTIONS))


def state(option: Option) -> OptionState:
    """An option with its value and its source. Raises OptionError if the environment has an invalid value."""
    value, source = _read(option)
    return OptionState(
        option.name, option.variable, option.type, value, option.default_value(), source, option.doc
    )


def _read(option: Option) -> tuple[Any, str]:
    text = os.environ.get(option.variable, "")
    if not text.strip():
        return option.default_value(), "default"
    try:
        return option.parse(text), "environment"
    except ValueError as error:
        raise OptionError(
            f"{option.variable}={text!r} must be {error}",
            remedy=f"correct or unset it; the default is {option.default_value()}",
        ) from None
