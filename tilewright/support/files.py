"""Untrusted files: only regular ones are opened, and reading is limited."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
)


class SpecialFileError(OSError):
    """A pipe, a device, a socket or a folder in place of a file: reading it may hang or never end."""


def require_regular(path: Path | str) -> os.stat_result:
    """The status of a regular file, following links. Raises SpecialFileError if it is another kind, OSError if it is
    absent."""
    status = os.stat(path)
    for is_kind, name in _KINDS:
        if is_kind(status.st_mode):
            raise SpecialFileError(0, f"it is {name}, not a file")
    return status


def read_regular(path: Path | str, limit: int) -> bytes:
    """The contents of a regular file of at most `limit` bytes. OSError otherwise, also if it is larger."""
    require_regular(path)
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # replaced in between
            raise SpecialFileError(0, "it is not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(0, f"it is larger than {limit >> 20} MiB")
    return data
