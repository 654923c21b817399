"""The native launcher: `launch.ll`, its struct types mirrored with ctypes, compiled once per process on first use."""

from __future__ import annotations

import ctypes
import platform
import threading
from ctypes import c_char, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from tilewright.errors import TargetError

# The pause instruction of a spin loop, which spares the core's other hyperthread and its power budget.
_RELAX = {
    "x86_64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}
_NO_RELAX = ("; no such instruction", "; no such instruction")

_ENTRY_POINTS = ("tw_run", "tw_relax", "tw_launch_openmp", "tw_launch_pool", "tw_pool_worker")


class NativePlace(ctypes.Structure):
    _fields_ = (("base", c_int64), ("offset", c_int64))


class NativeStep(ctypes.Structure):
    _fields_ = (("kernel", c_void_p), ("extent", c_int64), ("arguments", c_int64), ("places", c_void_p))


class NativeCall(ctypes.Structure):
    _fields_ = (
        ("steps", c_void_p),
        ("bases", c_void_p),
        ("launcher", c_void_p),
        ("threads", c_int64),
        ("most_arguments", c_int64),
        ("times", c_void_p),
        ("clock", c_void_p),
        ("clock_id", c_int64),
    )


class OpenMP(ctypes.Structure):
    _fields_ = (("launch", c_void_p), ("parallel", c_void_p), ("number", c_void_p))


class Pooled(ctypes.Structure):
    _fields_ = (("launch", c_void_p), ("pool", c_void_p))


class Pool(ctypes.Structure):
    _fields_ = (
        ("announced", c_int64),
        ("_0", c_char * 56),
        ("pending", c_int64),
        ("_1", c_char * 56),
        ("kernel", c_void_p),
        ("arguments", c_void_p),
        ("extent", c_int64),
        ("owner", c_int64),
        ("_2", c_char * 32),
        ("lock", c_void_p),
        ("try_lock", c_void_p),
        ("unlock", c_void_p),
        ("wait", c_void_p),
        ("signal", c_void_p),
        ("this_thread", c_void_p),
        ("yield_", c_void_p),
        ("spins", c_int64),
        ("ready", c_int64),
        ("_3", c_char * 56),
        ("mutex", c_char * 128),  # more than any platform's pthread_mutex_t
    )


class Slot(ctypes.Structure):
    _fields_ = (
        ("claimed", c_int64),
        ("share", c_int64),
        ("_0", c_char * 48),
        ("asleep", c_int64),
        ("thread", c_int64),
        ("_1", c_char * 48),
        ("mutex", c_char * 128),
        ("condition", c_char * 128),  # more than any platform's pthread_cond_t
    )


# The struct types of launch.ll, under the same names.
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "place": NativePlace,
    "step": NativeStep,
    "call": NativeCall,
    "openmp": OpenMP,
    "pooled": Pooled,
    "pool": Pool,
    "slot": Slot,
}


class Native:
    """The compiled launcher."""

    def __init__(self) -> None:
        from tilewright.runtime.loader import load_ir

        self._library = load_ir(source(), _ENTRY_POINTS)
        # CFUNCTYPE releases the GIL around the call.
        self.run: Any = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64)(self._library["tw_run"])
        self.relax: Any = ctypes.CFUNCTYPE(None, c_int64)(self._library["tw_relax"])
        self.pool_worker: Any = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64)(
            self._library["tw_pool_worker"]
        )
        self.launch_openmp = self._library["tw_launch_openmp"]
        self.launch_pool = self._library["tw_launch_pool"]
        self.clock = c_function("clock_gettime")
        self.clock_id = 1 if platform.system() == "Linux" else 6  # CLOCK_MONOTONIC on Linux and macOS


def source() -> str:
    """`launch.ll` for this processor."""
    text = Path(__file__).with_name("launch.ll").read_text(encoding="utf-8")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine().lower()
    )
    declare, relax = _RELAX.get(machine, _NO_RELAX)
    return text.replace("@DECLARE_RELAX@", declare).replace("@RELAX@", relax)


def c_function(name: str, library: ctypes.CDLL | None = None) -> int:
    """The address of a function of the C library, or of `library`."""
    try:
        address = ctypes.cast(getattr(library or ctypes.CDLL(None), name), c_void_p).value
    except AttributeError:
        address = None
    if not address:
        raise TargetError(f"this platform has no {name}", remedy="run on Linux or macOS")
    return address


_lock = threading.Lock()
_make_native = cache(Native)


def native() -> Native:
    """The launcher, compiled at the first call."""
    with _lock:
        return _make_native()
