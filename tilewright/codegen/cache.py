"""Object code on disk, shared by every process of a user.

One file per key under `objects/` of the cache folder. A file is written aside and renamed into place, so a reader sees
all of it or none; two processes that write the same key write the same thing. Each file begins with the digest of the
rest: what a crash or a failing disk left behind is a miss, and is removed. When the files outgrow the limit, those not
used for longest go first.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path

from tilewright import knobs
from tilewright.errors import CacheError

_DIGEST_BYTES = 32
_CHECK_SIZE_EVERY = 64  # insertions
_FRESH_SECONDS = 3600  # a use is noted at most once an hour


class ObjectCache:
    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder / "objects"
        self.limit_bytes = limit_bytes
        self._insertions = 0
        try:
            # Object code is executed, so other users must not write here.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(
                f"cannot make the cache folder {self.folder}: {error.strerror or error}"
            ) from None
        status = self.folder.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            raise CacheError(f"the cache folder {self.folder} belongs to or can be written by somebody else")

    @classmethod
    def default(cls) -> ObjectCache:
        return cls(knobs.get("cache_dir"), knobs.get("cache_limit"))

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.o"

    def get(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            path.unlink(missing_ok=True)
            return None
        self._note_use(path)
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Keep `payload`. Errors are ignored: the caller has its object code."""
        path = self._path(key)
        temporary: str | None = None
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, path)
        except OSError:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            return
        except BaseException:  # interrupted between the two: leave nothing behind
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise
        self._insertions += 1
        if self._insertions % _CHECK_SIZE_EVERY == 1:
            self.shrink()

    @staticmethod
    def _note_use(path: Path) -> None:
        try:
            if time.time() - path.stat().st_mtime > _FRESH_SECONDS:
                os.utime(path)
        except OSError:
            pass

    def _entries(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.folder.glob("*/*"):
            try:
                status = path.stat()
            except OSError:  # removed by another process meanwhile
                continue
            found.append((status.st_mtime, status.st_size, path))
        return found

    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self._entries())

    def shrink(self) -> None:
        """Remove the least recently used until the limit holds, and what interrupted writers left."""
        entries = sorted(self._entries())
        for used, _, path in entries:
            if path.name.startswith(".writing-") and time.time() - used > _FRESH_SECONDS:
                path.unlink(missing_ok=True)
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.limit_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
