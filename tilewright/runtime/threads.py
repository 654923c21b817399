"""The threads that run kernels: an OpenMP runtime that the process has already loaded, or Tilewright's own pool.

Sharing torch's OpenMP threads matters if torch runs in the same process: two sets of threads would compete for the
cores. OpenMP is never loaded for this purpose, because a second copy in one process is a well-known source of
trouble.

After a fork, a child uses a fresh pool: libgomp does not survive a fork, and threads never do.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright import knobs
from tilewright.errors import OptionError
from tilewright.runtime import native
from tilewright.runtime.native import c_function

_SPIN_SECONDS = 50e-6  # how long a waiting thread spins before it sleeps
_START_SECONDS = 10.0  # how long a new thread may take to start before the pool continues without it

_OPENMP_LIBRARIES = ("libgomp", "libomp", "libiomp5")
_OPENMP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num")


@dataclass(frozen=True)
class OpenMPLauncher:
    address: int
    library: str
    keep: Any  # the struct at `address`, and the handle of the library
    runtime: str = "openmp"

    def prepare(self, threads: int) -> int:
        """The number of threads; the OpenMP runtime creates them itself."""
        return threads


class PoolLauncher:
    """A pool whose threads are created when needed and stay; idle ones sleep."""

    runtime = "pool"
    library = ""

    def __init__(self) -> None:
        code = native.native()
        size = ctypes.sizeof(native.Pool) + knobs.MAX_THREADS * ctypes.sizeof(native.Slot)
        # Private, so that a forked child has its own; never freed, because sleeping threads refer to it.
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pool = native.Pool.from_buffer(self._memory)
        pool = self._pool
        pool.lock, pool.try_lock = c_function("pthread_mutex_lock"), c_function("pthread_mutex_trylock")
        pool.unlock, pool.signal = c_function("pthread_mutex_unlock"), c_function("pthread_cond_signal")
        pool.wait, pool.this_thread = c_function("pthread_cond_wait"), c_function("pthread_self")
        pool.yield_ = c_function("sched_yield")
        pool.spins = _spins(code)
        self._c = ctypes.CDLL(None)
        self._c.pthread_mutex_init(ctypes.byref(pool, native.Pool.mutex.offset), None)
        self._slots = (native.Slot * knobs.MAX_THREADS).from_buffer(self._memory, ctypes.sizeof(native.Pool))
        self._launcher = native.Pooled(code.launch_pool, ctypes.addressof(pool))
        self.address = ctypes.addressof(self._launcher)
        self.workers = 0
        self._limit = knobs.MAX_THREADS  # lower once a thread could not be started
        self._lock = threading.Lock()

    def prepare(self, threads: int) -> int:
        """Ensure that `threads` threads, including the caller, can work; return how many can."""
        if self.workers < min(threads, self._limit) - 1:
            with self._lock:
                for index in range(self.workers + 1, min(threads, self._limit)):
                    if not self._start(index):
                        self._limit = index
                        break
                    self.workers = index
        return min(threads, self._limit)

    def _start(self, index: int) -> bool:
        slot = self._slots[index]
        self._c.pthread_mutex_init(ctypes.byref(slot, native.Slot.mutex.offset), None)
        self._c.pthread_cond_init(ctypes.byref(slot, native.Slot.condition.offset), None)
        address, seen = ctypes.addressof(self._pool), self._pool.announced
        worker = threading.Thread(
            target=native.native().pool_worker,
            args=(address, index, seen),
            name=f"tilewright-{index}",
            daemon=True,
        )
        try:
            worker.start()
        except RuntimeError as error:  # the system's limit on threads
            self._warn(index, str(error))
            return False
        deadline = time.monotonic() + _START_SECONDS
        while self._pool.ready < index:
            if time.monotonic() > deadline:
                self._warn(index, "it did not start in time")
                return False
            time.sleep(20e-6)
        return True

    def _warn(self, index: int, why: str) -> None:
        warnings.warn(
            f"Tilewright runs with {index} thread(s) and not more: another could not be started ({why})",
            RuntimeWarning,
            stacklevel=5,
        )


def _spins(code: native.Native) -> int:
    """The number of pause instructions that take `_SPIN_SECONDS` on this processor."""
    count = 500
    best = 1.0
    for _ in range(3):
        began = time.perf_counter()
        code.relax(count)
        best = min(best, time.perf_counter() - began)
    return max(100, int(_SPIN_SECONDS * count / best))


Launcher = OpenMPLauncher | PoolLauncher


# -- the choice ------------------------------------------------------------------------------------------------------


class _State:
    """The choice for this process."""

    def __init__(self, forked: bool = False) -> None:
        self.lock = threading.Lock()
        self.launcher: Launcher | None = None
        self.pool: PoolLauncher | None = None
        # Launchers are never freed: a call in another thread may use one that is no longer the choice.
        self.openmp: dict[str, OpenMPLauncher] = {}
        self.wanted = ""  # the option's value at the time of the choice
        self.settled = False  # whether importing torch could no longer change the choice
        self.forked = forked


_state = _State()


def launcher() -> Launcher:
    """The launcher of this process, chosen at the first call, and again after torch is imported."""
    state = _state
    if state.launcher is not None and (state.settled or "torch" not in sys.modules):
        return state.launcher
    return choose()


def choose() -> Launcher:
    """Choose again: the option or the loaded libraries may have changed."""
    state = _state
    with state.lock:
        state.wanted = knobs.get("thread_runtime")
        found: Launcher | None = None
        if state.wanted != "pool" and not state.forked:
            found = _find_openmp(state.openmp)
        if found is None and state.wanted == "openmp" and not state.forked:
            raise OptionError(
                "TILEWRIGHT_THREAD_RUNTIME=openmp, but no OpenMP runtime is loaded in this process",
                remedy="import torch (which brings one) before the first call, or set it to auto or pool",
            )
        if found is None:
            state.pool = state.pool or PoolLauncher()
            found = state.pool
        # During torch's import, its OpenMP library may not be loaded yet.
        torch_is_loaded = hasattr(sys.modules.get("torch"), "Tensor")
        state.settled = found.runtime == "openmp" or torch_is_loaded or state.forked
        state.launcher = found
        return found


def resolve(threads: int | None) -> int:
    """The number of threads for a caller's `threads`; None or 0 means the option's value."""
    if threads is None or threads == 0:
        return knobs.get("threads")
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= knobs.MAX_THREADS:
        raise OptionError(
            f"threads={threads!r}: must be a whole number from 1 to {knobs.MAX_THREADS}, or None",
            remedy="leave `threads` out for the physical cores that this process may use",
        )
    return threads


def describe(threads: int | None = None) -> dict[str, Any]:
    """A description of what runs kernels in this process, for `doctor` and `explain`."""
    chosen = launcher()
    count = chosen.prepare(resolve(threads))
    if _state.forked:
        why = "a forked process: OpenMP does not survive a fork"
    elif chosen.runtime == "openmp":
        why = "an OpenMP runtime is loaded in this process"
    elif _state.wanted == "pool":
        why = "TILEWRIGHT_THREAD_RUNTIME=pool"
    else:
        why = "no OpenMP runtime is loaded in this process"
    return {
        "runtime": chosen.runtime,
        "library": chosen.library or None,
        "threads": count,
        "usable_cores": knobs.usable_cores(),
        "why": why,
    }


def _after_fork_in_child() -> None:
    # Reset everything, including the lock, which a thread that does not exist here may have held.
    globals()["_state"] = _State(forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# -- finding OpenMP --------------------------------------------------------------------------------------------------


def _find_openmp(known: dict[str, OpenMPLauncher]) -> OpenMPLauncher | None:
    """A launcher on an OpenMP runtime that is already loaded; torch's first if there are several."""
    paths = [path for path in loaded_libraries() if Path(path).name.startswith(_OPENMP_LIBRARIES)]
    for path in sorted(paths, key=lambda path: ("torch" not in path, paths.index(path))):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        if not all(hasattr(library, name) for name in _OPENMP_FUNCTIONS):
            continue  # macOS's libomp has no GOMP_parallel
        functions = (c_function(name, library) for name in _OPENMP_FUNCTIONS)
        if path not in known:
            struct = native.OpenMP(native.native().launch_openmp, *functions)
            known[path] = OpenMPLauncher(ctypes.addressof(struct), path, (struct, library))
        return known[path]
    return None


def loaded_libraries() -> list[str]:
    """The paths of the shared libraries in this process."""
    return list(_dyld_images() if sys.platform == "darwin" else _dl_images())


class _DlPhdrInfo(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))  # and more, not needed


def _dl_images() -> list[str]:
    names: list[str] = []

    def visit(info: Any, size: int, data: Any) -> int:
        name = info.contents.name
        if name:
            names.append(os.fsdecode(name))
        return 0

    # The GIL is held throughout (PYFUNCTYPE, PyDLL): the linker's lock is held while `visit` runs, and another thread
    # may take both in the other order to import an extension module.
    signature = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(_DlPhdrInfo), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.PyDLL(None).dl_iterate_phdr(signature(visit), None)
    return names


def _dyld_images() -> Iterator[str]:
    c = ctypes.CDLL(None)
    c._dyld_get_image_name.restype = ctypes.c_char_p
    for index in range(c._dyld_image_count()):
        yield os.fsdecode(c._dyld_get_image_name(index))
