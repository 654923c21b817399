"""Files that are handed in: only regular ones, and never more than the caller wants."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilewright.errors import LockError
from tilewright.support.files import SpecialFileError, read_regular, require_regular
from tilewright.tune.lock import read_lock


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert read_regular(path, 5) == read_regular(tmp_path / "link", 100) == b"12345"
    with pytest.raises(OSError, match="larger"):
        read_regular(path, 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothere", 4)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in (
        (tmp_path / "pipe", "a pipe"),
        (tmp_path, "a folder"),
        (Path("/dev/zero"), "a device"),
    ):
        with pytest.raises(SpecialFileError, match=kind):
            require_regular(path)
        with pytest.raises(LockError, match=f"cannot read the lock file .*{kind}"):
            read_lock(path)
