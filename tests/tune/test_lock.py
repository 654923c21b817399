"""A lock file gives the same kernels again, or says why it cannot."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.space.checked import Inputs
from tilewright.errors import LockError
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.hw.gpu import H200
from tilewright.space.template import Work
from tilewright.tune.choose import choose
from tilewright.tune.lock import Lock, check_lockable, lock_of, locked_choices, read_lock, write_lock


@pytest.fixture(scope="module")
def works() -> dict[str, Work]:
    x, y = Inputs(), Inputs()
    tasks = [
        x.task(apply("matmul", x(8, 32), x(32, 48, constant=True))),
        y.task(apply("softmax", y(7, 19), axis=1)),
    ]
    return {task.key: Work(task, host()) for task in tasks}


@pytest.fixture
def lock(works: dict[str, Work]) -> Lock:
    return lock_of({key: choose(work) for key, work in works.items()}, works, "fast")


def edited(path: Path, lock: Lock, **changes: object) -> Lock:
    """The first task of a lock file changed by hand."""
    write_lock(path, lock)
    data = json.loads(path.read_text())
    key = next(key for key, task in data["tasks"].items() if task["label"] == "matmul")
    data["tasks"][key] |= changes
    path.write_text(json.dumps(data))
    found = read_lock(path)
    assert found is not None
    return found


def test_it_is_readable_and_gives_the_same_choices(
    tmp_path: Path, works: dict[str, Work], lock: Lock
) -> None:
    path = tmp_path / "model.lock"
    write_lock(path, lock)
    assert list(tmp_path.iterdir()) == [path]
    data = json.loads(path.read_text())
    assert {task["label"] for task in data["tasks"].values()} == {"matmul", "softmax"}
    assert path.read_text().count("\n") > 10
    again = read_lock(path)
    assert again == lock
    choices = locked_choices(lock, works, "fast", path)
    for key, work in works.items():
        expected = choose(work)
        assert choices[key].config == expected.config and choices[key].program == expected.program


def test_a_lock_of_more_tasks_serves_a_part_of_them(works: dict[str, Work], lock: Lock) -> None:
    (key, work), *_ = works.items()
    assert list(locked_choices(lock, {key: work}, "fast", Path("x"))) == [key]


def test_no_lock_file(tmp_path: Path) -> None:
    assert read_lock(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"template": "from the future"}, "its config is unknown to this version"),
        ({"values": {"rows": 12345}}, "its config is unknown to this version"),
        ({"kernel": "0" * 32}, "gives another kernel here"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, object], said: str, tmp_path: Path, works: dict[str, Work], lock: Lock
) -> None:
    path = tmp_path / "model.lock"
    with pytest.raises(LockError) as caught:
        locked_choices(edited(path, lock, **changes), works, "fast", path)
    message = str(caught.value)
    assert f"{path} does not fit this build, for 1 of 2 tasks" in message
    assert "matmul" in message and said in message and "try: remove the lock file" in message


def test_another_model_machine_or_numerics(works: dict[str, Work], lock: Lock) -> None:
    x = Inputs()
    strange = Work(x.task(apply("exp", x(3, 5))), host())
    with pytest.raises(LockError, match=r"exp .*the lock has no such task"):
        locked_choices(lock, {strange.task.key: strange}, "fast", Path("x"))
    other = {key: replace(work, machine=replace(host(), cpu="z80")) for key, work in works.items()}
    with pytest.raises(LockError, match="2 of 2 tasks"):
        locked_choices(lock, other, "fast", Path("x"))
    with pytest.raises(LockError, match="numerics='fast', and this one has 'strict'"):
        locked_choices(lock, works, "strict", Path("x"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "is not a lock file"),
        (b"[]", "is not a lock file"),
        (b'{"format": 2}', "is not a lock file"),
        (b'{"format": 2, "numerics": "fast", "tasks": {"a": {"label": 3}}}', "is not a lock file"),
        (b'{"format": 99, "anything": 1}', "has format 99, and this version of Tilewright writes 2"),
    ],
)
def test_a_file_that_is_no_lock(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.lock"
    path.write_bytes(content)
    with pytest.raises(LockError, match=said):
        read_lock(path)


def test_where_no_lock_can_be_written(tmp_path: Path, lock: Lock) -> None:
    with pytest.raises(LockError, match=r"the folder .* does not exist"):
        check_lockable(tmp_path / "absent" / "model.lock")
    folder = tmp_path / "folder"
    (folder / "model.lock").mkdir(parents=True)
    with pytest.raises(LockError, match="cannot read the lock file"):
        read_lock(folder / "model.lock")
    with pytest.raises(LockError, match="cannot write the lock file"):
        write_lock(folder / "model.lock", lock)
    assert [entry.name for entry in folder.iterdir()] == ["model.lock"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LockError, match="read-only"):
        check_lockable(tmp_path / "model.lock")


def test_a_lock_of_another_target(works: dict[str, Work], lock: Lock) -> None:
    assert lock.target == "cpu"
    elsewhere = {key: replace(work, machine=H200) for key, work in works.items()}
    with pytest.raises(
        LockError, match=r"model.lock was built for target='cpu', and this one is for 'cuda'"
    ) as told:
        locked_choices(lock, elsewhere, "fast", Path("model.lock"))
    assert "compile for the target of the lock file" in str(told.value)
    old = msgspec.structs.replace(lock, target="")  # of a version that did not say it
    assert set(locked_choices(old, works, "fast", Path("x"))) == set(works)
