"""Every option: its default, its parsing, its errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilewright import knobs
from tilewright.errors import OptionError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in knobs.OPTIONS:
        monkeypatch.delenv(knob.variable, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_defaults() -> None:
    assert knobs.get("cache_dir").name == "tilewright"
    assert knobs.get("cache_limit") == 2 << 30
    assert knobs.get("numerics") == "fast"
    assert knobs.get("thread_runtime") == "auto"
    assert knobs.get("cpu_features") == ()
    assert knobs.get("dependent_launch") == "own"
    assert knobs.get("strict_passes") is False
    assert 1 <= knobs.get("threads") <= (os.cpu_count() or 1)


def test_values_are_read_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_THREADS", "3")
    assert knobs.get("threads") == 3
    monkeypatch.setenv("TILEWRIGHT_THREADS", "5")
    assert knobs.get("threads") == 5
    monkeypatch.setenv("TILEWRIGHT_THREADS", "0")
    assert knobs.get("threads") == knobs.usable_cores()
    monkeypatch.setenv("TILEWRIGHT_THREADS", "")
    assert knobs.get("threads") == knobs.usable_cores()


def test_threads_follow_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7,2")
    assert knobs.get("threads") == 7
    monkeypatch.setenv("TILEWRIGHT_THREADS", "2")
    assert knobs.get("threads") == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [("512", 512), ("4K", 4096), ("1.5M", 3 << 19), ("2g", 2 << 30), ("3 GiB", 3 << 30), ("1TB", 1 << 40)],
)
def test_bytes(monkeypatch: pytest.MonkeyPatch, text: str, value: int) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_LIMIT", text)
    assert knobs.get("cache_limit") == value


@pytest.mark.parametrize(("text", "value"), [("on", True), ("1", True), ("Off", False), ("no", False)])
def test_switches(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("TILEWRIGHT_STRICT_PASSES", text)
    assert knobs.get("strict_passes") is value


@pytest.mark.parametrize(
    ("variable", "name", "text", "allowed"),
    [
        ("TILEWRIGHT_CACHE_LIMIT", "cache_limit", "lots", "512M"),
        ("TILEWRIGHT_THREADS", "threads", "-1", "1 to 1024"),
        ("TILEWRIGHT_THREADS", "threads", "many", "1 to 1024"),
        ("TILEWRIGHT_NUMERICS", "numerics", "sloppy", "fast, strict, relaxed, tf32"),
        ("TILEWRIGHT_THREAD_RUNTIME", "thread_runtime", "tbb", "auto, openmp, pool"),
        ("TILEWRIGHT_CPU_FEATURES", "cpu_features", "avx9000", "baseline, avx2, avx512"),
        ("TILEWRIGHT_STRICT_PASSES", "strict_passes", "perhaps", "on or off"),
    ],
)
def test_bad_values_are_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, name: str, text: str, allowed: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError) as caught:
        knobs.get(name)  # type: ignore[call-overload]
    assert variable in str(caught.value)
    assert text in str(caught.value)
    assert allowed in str(caught.value)
    with pytest.raises(OptionError):
        knobs.table()


def test_table_says_where_values_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    rows = {row.name: row for row in knobs.table()}
    assert set(rows) == {knob.name for knob in knobs.OPTIONS}
    assert (rows["cache_dir"].value, rows["cache_dir"].source) == (tmp_path, "environment")
    assert rows["cache_dir"].default != tmp_path
    assert rows["numerics"].source == "default"
    assert all(row.doc for row in rows.values())


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", "~/somewhere")
    assert knobs.get("cache_dir") == Path.home() / "somewhere"


def test_cgroup_quota(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    group = tmp_path / "v2" / "a" / "b"
    group.mkdir(parents=True)
    membership.write_text("0::/a/b\n")
    assert knobs.cgroup_cpus(tmp_path / "v2", membership) is None
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("150000 100000\n")
    assert knobs.cgroup_cpus(tmp_path / "v2", membership) == 1.5

    old = tmp_path / "v1" / "cpu" / "c"
    old.mkdir(parents=True)
    membership.write_text("3:cpu,cpuacct:/c\n1:memory:/c\n")
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert knobs.cgroup_cpus(tmp_path / "v1", membership) is None
    (old / "cpu.cfs_quota_us").write_text("400000\n")
    assert knobs.cgroup_cpus(tmp_path / "v1", membership) == 4
    assert knobs.cgroup_cpus(tmp_path / "v1", tmp_path / "none") is None


def test_affinity_limits_the_cores() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity here")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert knobs.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
