from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tilewright.hw import Caches, host
from tilewright.hw.caches import caches_from_sysctl, caches_from_sysfs
from tilewright.support.fingerprint import fingerprint


def sysfs(folder: Path, entries: list[tuple[str, str, str, str]], siblings: str = "0") -> Path:
    """A processor's folder with a cache of (level, type, size, who shares it) for each entry."""
    cpu = folder / "cpu0"
    (cpu / "topology").mkdir(parents=True)
    (cpu / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    for number, values in enumerate(entries):
        index = cpu / "cache" / f"index{number}"
        index.mkdir(parents=True)
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
            (index / name).write_text(value + "\n")
    return cpu


def test_sysfs(tmp_path: Path) -> None:
    entries = [
        ("1", "Data", "48K", "0"),
        ("1", "Instruction", "32K", "0"),
        ("2", "Unified", "1280K", "0"),
        ("3", "Unified", "49152K", "0-1"),
    ]
    found = caches_from_sysfs(sysfs(tmp_path, entries))
    assert found == Caches(48 << 10, 1280 << 10, 48 << 20, l2_cores=1, l3_cores=2)
    assert found.last == 48 << 20


def test_hyperthreads_are_one_core(tmp_path: Path) -> None:
    entries = [("1", "Data", "32K", "0,4"), ("2", "Unified", "1M", "0,4"), ("3", "Unified", "16M", "0-7")]
    found = caches_from_sysfs(sysfs(tmp_path, entries, siblings="0,4"))
    assert (found.l2_cores, found.l3_cores) == (1, 4)


def test_without_a_third_level(tmp_path: Path) -> None:
    found = caches_from_sysfs(sysfs(tmp_path, [("1", "Data", "64K", "0"), ("2", "Unified", "2048K", "0-3")]))
    assert (found.l3, found.last, found.l2_per_core) == (0, 2 << 20, 512 << 10)


@pytest.mark.parametrize("size", ["0K", "lots", "", "1K", "99999G"])
def test_nonsense_gives_defaults(tmp_path: Path, size: str) -> None:
    assert caches_from_sysfs(sysfs(tmp_path, [("1", "Data", size, "0")])) == Caches()


def test_nothing_said(tmp_path: Path) -> None:
    assert caches_from_sysfs(tmp_path / "absent") == Caches()
    assert caches_from_sysctl({}) == Caches()


def test_sysctl_prefers_the_fast_cores() -> None:
    values = {
        "hw.l1dcachesize": 65536,
        "hw.l2cachesize": 4 << 20,
        "hw.perflevel0.l1dcachesize": 131072,
        "hw.perflevel0.l2cachesize": 12 << 20,
        "hw.perflevel0.cpusperl2": 4,
    }
    assert caches_from_sysctl(values) == Caches(128 << 10, 12 << 20, 0, l2_cores=4, l3_cores=1)


@given(
    st.dictionaries(st.sampled_from(["hw.l1dcachesize", "hw.l2cachesize", "hw.l3cachesize"]), st.integers(0))
)
def test_levels_never_shrink_and_are_never_empty(values: dict[str, int]) -> None:
    found = caches_from_sysctl(values)
    assert 0 < found.l1 <= found.l2 and found.l2_per_core > 0 and found.last > 0


def test_of_this_machine() -> None:
    caches = host().caches
    assert 4 << 10 <= caches.l1 <= caches.l2
    assert fingerprint(asdict(host()))
