"""The launchers: every iteration runs once, whatever the threads, the callers, the nesting and the forks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from tests.runtime import toys
from tilewright.errors import OptionError
from tilewright.runtime import native, threads
from tilewright.runtime.executor import Executor

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@pytest.fixture(params=["pool", "openmp"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "openmp":
        pytest.importorskip("torch")
    monkeypatch.setenv("TILEWRIGHT_THREAD_RUNTIME", request.param)
    threads.choose()
    yield request.param
    monkeypatch.delenv("TILEWRIGHT_THREAD_RUNTIME")
    threads.choose()


def with_python_kernel(executor: Executor, function: Any) -> Any:
    """Have step 0 call `function(arguments, begin, end)`; the result must be kept as long as it may be called."""
    callback = KERNEL(function)
    executor.steps[0].kernel = ctypes.cast(callback, ctypes.c_void_p).value
    return callback


def run(executor: Executor) -> None:
    x = np.zeros(executor.plan.inputs[0].shape, np.float32)
    executor.run([x], executor.new_outputs())


def test_structs_are_laid_out_as_in_the_ir() -> None:
    llvm.initialize_native_target()
    module = llvm.parse_assembly(native.source())
    module.verify()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()
    data = machine.target_data
    types = {kind.name: kind for kind in module.struct_types}
    for name, mirror in native.STRUCTS.items():
        assert data.get_abi_size(types[name]) == ctypes.sizeof(mirror), name
        for index, (field, _) in enumerate(mirror._fields_):  # type: ignore[misc]
            assert data.get_element_offset(types[name], index) == getattr(mirror, field).offset, (name, field)


def test_the_launcher_needs_no_external_symbol() -> None:
    from tilewright.runtime.loader import undefined_symbols

    assert undefined_symbols(toys.compile_ir(native.source())) == frozenset()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("extent", [1, 2, 3, 6, 7, 8, 100, 1003])
def test_every_iteration_runs_once(runtime: str, count: int, extent: int) -> None:
    executor = toys.identity((extent,), threads=count).executor
    ran: list[tuple[int, int]] = []
    keep = with_python_kernel(executor, lambda arguments, begin, end: ran.append((begin, end)))
    run(executor)
    ran.sort()
    assert [begin for begin, _ in ran] == [0, *(end for _, end in ran[:-1])]
    assert ran[-1][1] == extent
    assert keep


@pytest.mark.parametrize("extent", [8, 1000])
def test_what_a_slow_thread_has_left_others_do(runtime: str, extent: int) -> None:
    executor = toys.identity((extent,), threads=2).executor
    done, rest_is_done = [], threading.Event()

    def work(arguments: int, begin: int, end: int) -> None:
        if begin == 0:
            assert rest_is_done.wait(20)
        done.append((begin, end))
        if sum(last - first for first, last in done) >= 0.7 * extent:
            rest_is_done.set()

    keep = with_python_kernel(executor, work)
    run(executor)
    assert rest_is_done.is_set()
    assert sum(last - first for first, last in done) == extent
    assert keep


def test_work_is_shared(runtime: str) -> None:
    """Two parts that wait for each other can only end on two threads."""
    executor = toys.identity((2,), threads=2).executor
    both = threading.Barrier(2)
    seen: set[int] = set()
    broken: list[BaseException] = []

    def work(arguments: int, begin: int, end: int) -> None:
        try:
            both.wait(20)
        except threading.BrokenBarrierError as error:
            broken.append(error)
        seen.add(threading.get_native_id())

    keep = with_python_kernel(executor, work)
    run(executor)
    assert not broken
    assert len(seen) == 2
    assert threading.get_native_id() in seen
    assert keep


def test_a_region_inside_a_region_does_not_deadlock(runtime: str) -> None:
    inner = toys.chain(5, 8, 8, threads=3)
    x = np.ones((8, 8), np.float32)
    expected = toys.chain_reference(x)
    outer = toys.identity((4,), threads=4).executor
    results: list[bool] = []

    def work(arguments: int, begin: int, end: int) -> None:
        results.extend(np.array_equal(inner(x), expected) for _ in range(begin, end))

    keep = with_python_kernel(outer, work)
    for _ in range(20):
        run(outer)
    assert results == [True] * 80
    assert keep


def test_many_callers_with_different_thread_counts(runtime: str) -> None:
    wrong: list[str] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        model = toys.chain(7, 8, 16, threads=1 + seed % 4)
        x = np.random.default_rng(seed).standard_normal((8, 16), dtype=np.float32)
        expected = toys.chain_reference(x, 7)
        start.wait()
        repeats = range(40 if runtime == "openmp" else 150)
        wrong.extend(f"caller {seed}" for _ in repeats if not np.array_equal(model(x), expected))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not wrong


def test_sleeping_workers_wake_up(runtime: str) -> None:
    import time

    model = toys.chain(3, 8, 16, threads=3)
    x = np.ones((8, 16), np.float32)
    for _ in range(20):
        time.sleep(0.002)  # longer than the spinning
        np.testing.assert_array_equal(model(x), toys.chain_reference(x, 3))


def test_describe(runtime: str) -> None:
    described = threads.describe(2)
    assert described["runtime"] == runtime
    assert described["threads"] == 2
    if runtime == "openmp":
        assert Path(described["library"]).exists()
    else:
        assert described["library"] is None


def test_a_thread_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = threads.PoolLauncher()
    monkeypatch.setattr(threads.threading.Thread, "start", _refuse)
    with pytest.warns(RuntimeWarning, match=r"1 thread\(s\) and not more"):
        assert pool.prepare(4) == 1
    assert pool.prepare(4) == 1  # said once


def _refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_THREADS", "5")
    assert threads.resolve(None) == threads.resolve(0) == 5
    assert threads.resolve(3) == 3
    with pytest.raises(OptionError, match="1 to 1024"):
        threads.resolve(-3)


def test_openmp_is_found_only_where_it_is_loaded() -> None:
    code = """
        os.environ["TILEWRIGHT_THREAD_RUNTIME"] = "openmp"
        try:
            threads.choose()
        except tilewright.errors.OptionError as error:
            assert "import torch" in str(error)
        else:
            raise SystemExit("no error")
        assert not any("gomp" in name for name in threads.loaded_libraries())
    """
    _python(code)


def _python(code: str, timeout: float = 60) -> str:
    head = """
        import os, sys, signal
        signal.alarm(50)
        import numpy as np
        import tilewright.errors
        from tests.runtime import toys
        from tilewright.runtime import threads
    """
    lines = [line[8:] for line in (head + code).splitlines()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TILEWRIGHT_THREAD_RUNTIME", None)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FORK = """
        x = np.ones((8, 16), np.float32)
        model = toys.chain(5, 8, 16, threads=2)
        expected = toys.chain_reference(x)
        assert np.array_equal(model(x), expected)
        assert threads.describe()["runtime"] == {runtime!r}, threads.describe()

        def in_child(generations):
            child = os.fork()
            if child == 0:
                try:
                    assert threads.describe()["runtime"] == "pool"
                    assert "fork" in threads.describe()["why"]
                    for _ in range(50):
                        assert np.array_equal(model(x), expected)
                    model.threads = 3
                    assert np.array_equal(model(x), expected)
                    if generations > 1:
                        in_child(generations - 1)
                    os._exit(0)
                except BaseException as error:
                    print(repr(error), file=sys.stderr, flush=True)
                    os._exit(1)
            assert np.array_equal(model(x), expected)
            assert os.waitpid(child, 0)[1] == 0

        in_child(2)
        in_child(1)
        assert np.array_equal(model(x), expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_alive_after_a_fork_with_the_pool() -> None:
    _python(FORK.format(runtime="pool"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_alive_after_a_fork_with_openmp_and_a_late_import_of_torch() -> None:
    pytest.importorskip("torch")
    early = """
        early = toys.chain(3, 8, 16, threads=2)
        early(np.ones((8, 16), np.float32))
        assert threads.describe()["runtime"] == "pool"
        import torch
        torch.ones(300, 300) @ torch.ones(300, 300)
    """
    _python(early + FORK.format(runtime="openmp"))


def test_the_process_ends_while_workers_sleep_or_spin() -> None:
    code = """
        model = toys.chain(5, 8, 16, threads=4)
        for _ in range(50):
            model(np.ones((8, 16), np.float32))
        print("done")
    """
    assert _python(code) == "done\n"
