"""Finds the database's folder, and whether it is on a network file system."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from tilewright import knobs

NAME = "tuning.sqlite"
_LOCK_SECONDS = 30.0

# Mount types on which another machine may write.
_NETWORK = re.compile(
    "nfs4?|cifs|smb[23]|smbfs|ncpfs|9p|afs|ceph|coda|glusterfs|lustre|beegfs|gpfs|panfs|orangefs|ocfs2|gfs2"
    r"|fuse\.(sshfs|glusterfs|ceph|s3fs|gcsfuse|rclone|davfs2|curlftpfs|juicefs)"
)


def default_path() -> Path:
    return knobs.get("cache_dir") / NAME


def is_network(folder: Path, mounts: str | None = None) -> bool:
    """Whether `folder` is on a network filesystem. `mounts`: the text of /proc/self/mountinfo; False if the system
    has none."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return False
    return _NETWORK.fullmatch(_kind_of_mount(folder.resolve(), mounts)) is not None


def _kind_of_mount(folder: Path, mounts: str) -> str:
    """The type of the last mount at the longest path that contains the folder."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields, _, after = line.partition(" - ")
        parts = fields.split()
        if len(parts) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), parts[4])
        if folder.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), after.split()[0]
    return kind


def inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock out other processes with a file next to `path`. Raises OSError if the filesystem has no locks, or on a
    timeout."""
    handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)
