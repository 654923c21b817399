"""Child processes that misbehave: each kind of failure to answer is recognised, and none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilewright
from tilewright.errors import MeasurementError
from tilewright.support.process import Channel, Child, Dead, import_folders

MEMORY = 1 << 30


def serve(channel: Channel) -> None:
    """In the process: does what the message says."""
    while True:
        message, descriptors = channel.receive()
        word, _, rest = message.decode().partition(" ")
        if word == "write":
            os.write(descriptors[0], rest.encode())
            os.close(descriptors[0])
        elif word == "sleep":
            time.sleep(float(rest))
        elif word == "eat":
            try:
                bytearray(int(rest))
            except MemoryError:
                message = b"starved"
        elif word == "throw":
            raise RuntimeError("on purpose")
        elif word == "die":
            os.kill(os.getpid(), int(rest))
        channel.send(message)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child("tests.support.test_process:serve", MEMORY)
    yield child
    child.close()


def ask(child: Child, message: str, seconds: float = 30.0, descriptors: tuple[int, ...] = ()) -> str:
    child.send(message.encode(), descriptors)
    return child.receive(seconds).decode()


def test_questions_and_answers(child: Child) -> None:
    assert ask(child, "hello") == "hello"
    large = "x" * 3_000_000
    assert ask(child, large) == large


def test_memory_is_shared(child: Child) -> None:
    descriptor = os.memfd_create("shared")
    assert ask(child, "write here", descriptors=(descriptor,)).startswith("write")
    assert os.pread(descriptor, 10, 0) == b"here"
    os.close(descriptor)


def test_memory_is_limited(child: Child) -> None:
    assert ask(child, f"eat {MEMORY // 4}").startswith("eat")
    assert ask(child, f"eat {2 * MEMORY}") == "starved"


@pytest.mark.parametrize(
    ("message", "kind", "said"),
    [
        ("throw it", "crash", "on purpose"),
        (f"die {signal.SIGSEGV}", "crash", "SIGSEGV"),
        (f"die {signal.SIGKILL}", "memory", "memory"),
        ("sleep 60", "timeout", "too long"),
    ],
)
def test_a_death_has_a_kind_and_the_next_question_an_answer(
    child: Child, message: str, kind: str, said: str
) -> None:
    ask(child, "hello")
    with pytest.raises(Dead, match=said) as death:
        ask(child, message, seconds=0.3 if kind == "timeout" else 30)
    assert death.value.kind == kind
    assert ask(child, "hello") == "hello"


def test_the_current_folder_comes_after_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "array", "socket", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    for path in ([*sys.path], ["", *sys.path], [str(tmp_path), *sys.path]):
        monkeypatch.setattr(sys, "path", path)
        child = Child("tests.support.test_process:serve", MEMORY)
        assert ask(child, "hello") == "hello"
        child.close()
        assert not (tmp_path / "executed").exists()


def test_what_is_imported_from() -> None:
    folders = import_folders()
    assert str(Path(tilewright.__file__).parents[1]) in folders
    assert "" not in folders and len(set(folders)) == len(folders)
    assert set(folders) >= {os.path.abspath(folder) for folder in sys.path}


def test_a_current_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", "here", *sys.path])
    assert all(os.path.isabs(folder) for folder in import_folders())


def test_one_that_does_not_start_is_no_candidates_fault() -> None:
    child = Child("tilewright.no_such_module:serve", MEMORY)
    with pytest.raises(MeasurementError, match=r"does not start.*no_such_module") as error:
        ask(child, "hello")
    assert "effort" in error.value.remedy


def test_without_an_interpreter_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(MeasurementError, match=r"cannot start a worker process.*No such file"):
        Child("tests.support.test_process:serve", MEMORY).start()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(MeasurementError, match="embeds Python"):
        Child("tests.support.test_process:serve", MEMORY).start()


def test_a_busy_one_ends_with_the_one_who_asked() -> None:
    script = (
        "import os, time\n"
        "from tilewright.support.process import Child\n"
        f"child = Child('tests.support.test_process:serve', {MEMORY})\n"
        "child.start(); child.greet(); child.send(b'sleep 600'); time.sleep(0.2)\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": "."}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    pid = int(ran.stdout)
    for _ in range(100):
        if not runs(pid):
            return
        time.sleep(0.05)
    pytest.fail("it still runs")


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
