"""LLVM in worker processes: the same object code as here, whatever happens to a worker."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.support.test_process import runs
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.generator import Builds
from tilewright.codegen.llvm import toolchain
from tilewright.codegen.llvm.workers import Workers, worker_processes
from tilewright.errors import CodegenError
from tilewright.hw import host
from tilewright.support.trace import Trace

VARIABLE = "TILEWRIGHT_BUILD_PROCESSES"
HERE = host()


def module(number: int, length: int = 40) -> str:
    lines = [f"  %x{k + 1} = fadd float %x{k}, {float(1000 * number + k)}" for k in range(length)]
    return f"define float @f{number}(float %x0) {{\n" + "\n".join(lines) + f"\n  ret float %x{length}\n}}\n"


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(1)
    yield made
    made.close()


def in_a_worker(workers: Workers, text: str) -> bytes:
    """With this process's own LLVM taken."""
    own = workers._free.get()
    assert own is None
    try:
        return workers.object_code(text, HERE)
    finally:
        workers._free.put(own)


def test_the_object_code_is_the_same_as_here(workers: Workers) -> None:
    texts = [module(number) for number in range(4)]
    assert [in_a_worker(workers, text) for text in texts] == [toolchain.object_code(t, HERE) for t in texts]
    assert len(workers.pids) == 1


def test_any_number_of_threads_may_ask(workers: Workers) -> None:
    texts = [module(number) for number in range(12)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda text: workers.object_code(text, HERE), texts))
    assert found == [toolchain.object_code(text, HERE) for text in texts]


def test_no_worker_starts_while_this_process_is_free(workers: Workers) -> None:
    for number in range(3):
        workers.object_code(module(number), HERE)
    assert workers.pids == []


def test_one_that_was_killed_between_two_kernels_costs_nothing(workers: Workers) -> None:
    in_a_worker(workers, module(0))
    (pid,) = workers.pids
    os.kill(pid, signal.SIGKILL)
    assert in_a_worker(workers, module(1)) == toolchain.object_code(module(1), HERE)
    assert workers.pids == []  # and it is not started again
    assert workers.object_code(module(2), HERE) == toolchain.object_code(module(2), HERE)


def test_one_that_is_killed_while_it_compiles_costs_nothing(workers: Workers) -> None:
    in_a_worker(workers, module(0))
    (pid,) = workers.pids
    os.kill(pid, signal.SIGSTOP)  # so that it is still at it when it dies
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(in_a_worker, workers, module(1))
        time.sleep(0.1)
        assert not waiting.done()
        os.kill(pid, signal.SIGKILL)
        assert waiting.result(timeout=60) == toolchain.object_code(module(1), HERE)


def test_workers_that_cannot_start_cost_nothing(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert in_a_worker(workers, module(0)) == toolchain.object_code(module(0), HERE)
    assert workers.pids == []


def test_what_llvm_refuses_is_refused_as_here(workers: Workers) -> None:
    with pytest.raises(CodegenError) as here:
        toolchain.object_code("define float @f(", HERE)
    with pytest.raises(CodegenError) as there:
        in_a_worker(workers, "define float @f(")
    assert str(there.value) == str(here.value)


def test_workers_end_with_a_script_that_is_killed(tmp_path: Path) -> None:
    """The script has no `if __name__ == "__main__"`, and its folder a file that bears LLVM's name."""
    (tmp_path / "llvmlite.py").write_text("raise SystemExit('imported from the current folder')\n")
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "sys.path.remove(os.path.dirname(os.path.abspath(__file__)))\n"
        "from tests.codegen.llvm.test_workers import Workers, in_a_worker, module\n"
        "workers = Workers(1)\n"
        "in_a_worker(workers, module(0))\n"
        "print(*workers.pids, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "script.py"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ran.stdout, ran.stderr
    pid = int(ran.stdout)
    for _ in range(100):
        if not runs(pid):
            return
        time.sleep(0.05)
    pytest.fail("it still runs")


# -- whole models -----------------------------------------------------------------------------------------------------


class Widths(nn.Module):
    """Eight layers of different sizes: eight kernels."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16 * (n + 1) for n in range(9)]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> tuple[dict[str, str], Trace]:
    """The digests of the object files in an own cache folder, by name."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(folder))
    monkeypatch.setenv(VARIABLE, str(processes))
    torch.manual_seed(0)
    trace = Trace()
    tilewright.compile(Widths().eval(), (torch.ones(4, 16),), trace=trace, partition="greedy")  # no chains
    files = (folder / "objects").glob("*/*.o")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}, trace


def test_a_model_is_the_same_with_and_without_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, first = compiled(tmp_path / "without", monkeypatch, 0)
    along, second = compiled(tmp_path / "with", monkeypatch, 2)
    again, third = compiled(tmp_path / "with", monkeypatch, 2)
    assert without == along == again and len(along) == 8
    assert [_built(trace) for trace in (first, second, third)] == [8, 8, 0]


def _built(trace: Trace) -> int:
    """Kernels that were not in the cache."""
    return sum(not event.notes["cached"] for event in trace.events if event.name == "kernel")


def test_how_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "3")
    assert [worker_processes(kernels) for kernels in (1, 5, 6, 17, 18, 100)] == [0, 0, 1, 2, 3, 3]
    monkeypatch.setenv(VARIABLE, "0")
    assert worker_processes(100) == 0


def test_a_build_that_is_given_up_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(KeyboardInterrupt), Builds(HERE, "fast", ObjectCache(tmp_path, 1 << 20), 12) as builds:
        assert isinstance(builds.workers, Workers)
        in_a_worker(builds.workers, module(0))
        (pid,) = builds.workers.pids
        raise KeyboardInterrupt
    assert not runs(pid)
