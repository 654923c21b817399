"""Read tensor data outside the model file safely.

A location must be the path of a plain file inside the model's own folder. Refused, each with its own message, are an
absolute path, a path with "..", a symbolic link anywhere on the path, a file with a second name (a hard link may
reach outside the folder), anything but a plain file, and offsets or lengths outside the file. The file is opened
once, without following links, and checked after opening: what was checked is what is read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PureWindowsPath

import numpy as np
import onnx

from tilewright.errors import ExternalDataError
from tilewright.support.budget import Budget


class ExternalData:
    """Reads the external tensors of a model in `folder` (None: the model has no file)."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        # Tensors that share bytes of a file (tied weights) share the array too.
        self._known: dict[tuple[str, int, int], np.ndarray] = {}

    def read(self, tensor: onnx.TensorProto, size: int, budget: Budget) -> np.ndarray:
        """The `size` bytes of `tensor`, copied, because a mapped file could still shrink."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        where = f"the data of {tensor.name!r}"
        if self.folder is None:
            raise ExternalDataError(
                f"{where} is in another file, and the model was given without a place on disk",
                remedy="pass the path of the .onnx file, or load the model with its external data",
            )
        offset = _number(entries.get("offset", "0"), "offset", where)
        length = _number(entries.get("length", str(size)), "length", where)
        if length != size:
            raise ExternalDataError(f"{where} has {length} bytes, and its shape and type need {size}")
        if size == 0:
            return np.empty(0, np.uint8)
        key = (entries.get("location", ""), offset, length)
        if key not in self._known:
            self._known[key] = self._read(key, where, budget)
        return self._known[key]

    def _read(self, key: tuple[str, int, int], where: str, budget: Budget) -> np.ndarray:
        location, offset, length = key
        descriptor = self._open(location, where)
        with os.fdopen(descriptor, "rb") as file:
            available = os.fstat(descriptor).st_size
            if offset + length > available:
                raise ExternalDataError(
                    f"{where} is bytes {offset} to {offset + length} of {location!r}, which has {available}"
                )
            budget.data(length, length, where)
            found = np.fromfile(file, np.uint8, count=length, offset=offset)
            if found.size != length:
                raise ExternalDataError(f"{where} could not be read to its end: {location!r} was cut short")
            return found

    def _open(self, location: str, where: str) -> int:
        """Open the file; raises ExternalDataError for anything but a plain file in the model's folder."""
        assert self.folder is not None
        parts = Path(location).parts
        said = f"{where} is in {location!r}"
        if not parts or "\0" in location:
            raise ExternalDataError(f"{where} names no file")
        if Path(location).is_absolute() or PureWindowsPath(location).is_absolute():
            raise ExternalDataError(f"{said}, an absolute path")
        if ".." in parts or ".." in PureWindowsPath(location).parts:
            raise ExternalDataError(f"{said}, outside the model's folder")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts[:-1]:
                inner = _open_at(part, flags | os.O_DIRECTORY, folder, said)
                os.close(folder)
                folder = inner
            descriptor = _open_at(parts[-1], flags | os.O_NONBLOCK, folder, said)
        finally:
            os.close(folder)
        status = os.fstat(descriptor)
        problem = None
        if not stat.S_ISREG(status.st_mode):
            problem = "which is not a plain file"
        elif status.st_nlink > 1:
            problem = "which has other names (hard links)"
        if problem is not None:
            os.close(descriptor)
            raise ExternalDataError(f"{said}, {problem}")
        return descriptor


def _open_at(name: str, flags: int, folder: int, said: str) -> int:
    try:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise ExternalDataError(f"{said}, which is a symbolic link")
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        raise ExternalDataError(f"{said}, which does not exist") from None
    except OSError as error:
        raise ExternalDataError(f"{said}, which cannot be opened: {error.strerror}") from None


def _number(text: str, what: str, where: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ExternalDataError(f"{where} has the {what} {text!r}")
    return int(text)
