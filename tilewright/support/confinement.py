"""Confines a process before it runs code that others sent: without network, new privileges or large files.

Memory and time are limited for every child process (`process.py`); this is what a pool's nodes add. It needs no
privileges and nothing but the C library: on Linux the process enters a network namespace of its own, in which there is
no interface, inside a user namespace where it may not do so directly. Where the system has no namespaces, or forbids
them, the network stays, and `confine` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import resource
import subprocess
import sys

_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000  # of unshare(2)
_NO_NEW_PRIVILEGES = 38  # of prctl(2)
SECRETS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # variables that a confined process does not get


def confine(file_bytes: int) -> bool:
    """Confine this process, which must not have started threads yet: whether it has no network now.

    It cannot gain privileges by executing a file, and writes no file larger than `file_bytes`."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = file_bytes if hard == resource.RLIM_INFINITY else min(file_bytes, hard)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return any(library.unshare(how) == 0 for how in (_NEW_NETWORK, _NEW_NETWORK | _NEW_USER))


@functools.cache
def can_remove_network() -> bool:
    """Whether a confined process has no network on this system: tried in a process."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import confine; sys.exit(not confine(1 << 20))"
    tried = subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL)
    return tried.returncode == 0
