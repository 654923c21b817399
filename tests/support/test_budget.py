"""The budget of an import: each limit, what counts against it, and the option that its error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright import knobs
from tilewright.errors import ModelFileError, ModelSizeError
from tilewright.support.budget import WORK_PER_ELEMENT, Budget, Limits, exhaustion
from tilewright.support.memory import available_memory, cgroup_memory


def small() -> Budget:
    return Budget(Limits(memory=100, nodes=10, work=1000, depth=2))


def test_memory_that_stays_and_memory_for_a_moment() -> None:
    budget = small()
    budget.fits(100, "a table")
    budget.hold(60, "a weight")
    assert budget.has_room(40) and not budget.has_room(41)
    with pytest.raises(
        ModelSizeError, match=r"a table needs 41 bytes alongside the 60 .* limit of 100"
    ) as caught:
        budget.fits(41, "a table")
    assert "TILEWRIGHT_IMPORT_MEMORY" in str(caught.value)
    assert isinstance(caught.value, ModelFileError)
    budget.release(60)
    budget.hold(100, "a weight")


def test_nodes_are_counted_before_they_are_made() -> None:
    budget = small()
    budget.count(10, "nodes")
    with pytest.raises(ModelSizeError, match=r"more than 10 nodes(.|\n)*TILEWRIGHT_IMPORT_NODES"):
        budget.count(1, "one more")


def test_work_grows_with_the_models_own_data() -> None:
    budget = small()
    budget.work(1000, "a value")
    with pytest.raises(ModelSizeError, match=r"1 operations(.|\n)*TILEWRIGHT_IMPORT_WORK"):
        budget.work(1, "a value")
    budget.data(40, 10, "a weight")
    assert budget.held == 40
    budget.work(10 * WORK_PER_ELEMENT, "a value")


def test_nesting() -> None:
    budget = small()
    with budget.nested("graphs"), budget.nested("graphs"):
        with pytest.raises(ModelSizeError, match=r"more than 2 deep(.|\n)*TILEWRIGHT_IMPORT_DEPTH"):
            with budget.nested("graphs"):
                pass
    assert budget.depth == 0


def test_limits_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for option, text in (("memory", "1M"), ("nodes", "2K"), ("work", "3G"), ("depth", "7")):
        monkeypatch.setenv(knobs.variable(f"import_{option}"), text)
    assert Limits.of_options() == Limits(memory=1 << 20, nodes=2000, work=3 * 10**9, depth=7)
    assert Limits.of_options(memory=5).memory == 5


def test_the_default_follows_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_IMPORT_MEMORY", raising=False)
    assert 0 < knobs.get("import_memory") < available_memory()


def test_a_cgroup_counts_what_it_can_drop_as_free(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    group = tmp_path / "v2" / "a"
    group.mkdir(parents=True)
    membership.write_text("0::/a\n")
    assert cgroup_memory(tmp_path / "v2", membership) is None
    (group / "memory.max").write_text("max\n")
    assert cgroup_memory(tmp_path / "v2", membership) is None
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("700\n")
    (group / "memory.stat").write_text("anon 400\ninactive_file 300\n")
    assert cgroup_memory(tmp_path / "v2", membership) == 600

    old = tmp_path / "v1" / "memory" / "b"
    old.mkdir(parents=True)
    membership.write_text("4:memory:/b\n")
    (old / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_memory(tmp_path / "v1", membership) is None
    (old / "memory.limit_in_bytes").write_text("500\n")
    (old / "memory.usage_in_bytes").write_text("100\n")
    (old / "memory.stat").write_text("total_inactive_file 20\n")
    assert cgroup_memory(tmp_path / "v1", membership) == 420


def test_ends_that_no_limit_foresaw_are_the_same_error() -> None:
    def deeper(level: int) -> int:
        return 1 + deeper(level + 1)

    with pytest.raises(ModelSizeError, match=r"compiling it needs a deeper stack(.|\n)*setrecursionlimit"):
        with exhaustion("compiling it"):
            deeper(0)
    with pytest.raises(
        ModelSizeError, match=r"compiling it needs more memory(.|\n)*TILEWRIGHT_IMPORT_MEMORY"
    ):
        with exhaustion("compiling it"):
            raise MemoryError
