"""The object cache: whole entries or none, bounded, private, shared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.codegen.cache import ObjectCache
from tilewright.errors import CacheError


def key(number: int) -> str:
    return f"{number:032x}"


def test_what_is_put_comes_back(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 1 << 20)
    assert cache.get(key(1)) is None
    cache.put(key(1), b"code")
    assert ObjectCache(tmp_path, 1 << 20).get(key(1)) == b"code"


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d[:10], lambda d: b"", lambda d: d[:-1] + b"!"]
)
def test_a_damaged_entry_is_a_miss_and_goes(tmp_path: Path, damage) -> None:
    cache = ObjectCache(tmp_path, 1 << 20)
    cache.put(key(1), b"some object code")
    (path,) = (tmp_path / "objects").glob("*/*.o")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(key(1)) is None
    assert not path.exists()


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 4000)
    for number in range(10):
        cache.put(key(number), bytes(500))
        (path,) = (tmp_path / "objects").glob(f"*/{key(number)}.o")
        os.utime(path, (number, number))
    assert cache.get(key(0)) is not None  # a use renews it
    cache.shrink()
    assert cache.size_bytes() <= 4000
    assert cache.get(key(0)) is not None
    assert cache.get(key(1)) is None
    assert cache.get(key(9)) is not None


def test_leftovers_of_interrupted_writers_are_removed(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 1 << 20)
    cache.put(key(1), b"x")
    (entry,) = (tmp_path / "objects").glob("*/*.o")
    leftover = entry.parent / ".writing-abc"
    leftover.write_bytes(b"half")
    os.utime(leftover, (0, 0))
    cache.shrink()
    assert not leftover.exists() and entry.exists()


def test_folder_is_private(tmp_path: Path) -> None:
    ObjectCache(tmp_path / "new", 1 << 20)
    assert (tmp_path / "new" / "objects").stat().st_mode & 0o077 == 0


def test_a_folder_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects").chmod(0o777)
    with pytest.raises(CacheError, match="somebody else"):
        ObjectCache(tmp_path, 1 << 20)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot make"):
        ObjectCache(tmp_path / "file", 1 << 20)


def test_many_processes_write_the_same_keys(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tilewright.codegen.cache import ObjectCache\n"
        "cache = ObjectCache(Path(sys.argv[1]), 1 << 30)\n"
        "for number in range(100):\n"
        "    key = f'{number:032x}'\n"
        "    payload = bytes([number]) * 5000\n"
        "    found = cache.get(key)\n"
        "    assert found is None or found == payload\n"
        "    cache.put(key, payload)\n"
    )
    workers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(4)]
    assert [worker.wait(timeout=60) for worker in workers] == [0] * 4
    cache = ObjectCache(tmp_path, 1 << 30)
    assert all(cache.get(key(n)) == bytes([n]) * 5000 for n in range(100))
