"""Running plans: results, memory, several callers, and looking inside."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.runtime import toys
from tilewright.errors import ArtifactMachineError, CodegenError, OptionError, VerificationError
from tilewright.runtime.executor import _KEPT_FRAMES, Executor, aligned_copy, aligned_empty


def x_of(rows: int = 16, width: int = 32, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)


def test_results_are_right() -> None:
    x = x_of()
    executor = toys.chain(7).executor
    (out,) = executor.new_outputs()
    executor.run([x], [out])
    np.testing.assert_array_equal(out, toys.chain_reference(x, 7))


@pytest.mark.parametrize("size", [1, 63, 1000, 5 << 20])
def test_memory_is_aligned(size: int) -> None:
    memory = aligned_empty(size)
    assert memory.nbytes == size
    assert memory.ctypes.data % 64 == 0
    memory[:] = 7  # writable


def test_aligned_copy() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6).T
    copy = aligned_copy(array)
    np.testing.assert_array_equal(copy, array)
    assert copy.flags.c_contiguous
    assert aligned_copy(np.float32(3).reshape(())).shape == ()


def test_aligned_constants_are_not_copied() -> None:
    aligned = aligned_copy(toys.chain_constant(0, 16, 32))
    slack = np.empty(16 * 32 + 1, np.float32)
    shifted = slack[1:].reshape(16, 32) if slack.ctypes.data % 64 == 0 else slack[:-1].reshape(16, 32)
    shifted[:] = 1
    toy = toys.Toy()
    x = toy.input("x", (16, 32))
    first = toy.apply("add", x, toy.constant("aligned", aligned))
    out = toy.apply("add", first, toy.constant("shifted", shifted))
    plan, data, objects = toy.finish([out])
    executor = Executor(plan, data, objects)
    assert executor.constants[0] is aligned
    assert executor.constants[1].ctypes.data % 64 == 0
    np.testing.assert_array_equal(executor.constants[1], shifted)


def test_constants_must_fit() -> None:
    executor = toys.chain(3).executor
    plan, data = executor.plan, [np.zeros(3, np.float32)]
    with pytest.raises(VerificationError, match="constants for a plan with 2"):
        Executor(plan, data, executor.objects)
    with pytest.raises(VerificationError, match="constant 0"):
        Executor(plan, data * 2, executor.objects)
    with pytest.raises(CodegenError, match="was not given"):
        Executor(plan, [toys.chain_constant(0, 16, 32)] * 2, {})


def test_wrong_machine_is_found_before_loading() -> None:
    toy = toys.Toy()
    x = toy.input("x", (4,))
    parts = toy.finish([toy.apply("copy", x)], features=["avx1024"])
    with pytest.raises(ArtifactMachineError, match="avx1024"):
        Executor(*parts)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64])
def test_any_number_of_threads(threads: int, rows: int) -> None:
    x = x_of(rows, 3)
    executor = toys.chain(5, rows, 3, threads=threads).executor
    (out,) = executor.new_outputs()
    for _ in range(20):
        out.fill(np.nan)
        executor.run([x], [out])
        np.testing.assert_array_equal(out, toys.chain_reference(x))


def test_threads_are_checked() -> None:
    executor = toys.chain(1).executor
    executor.threads = 3
    assert executor.threads == 3
    executor.threads = None
    assert executor.threads >= 1
    for wrong in (-1, 5000, 2.5, True):
        with pytest.raises(OptionError):
            executor.threads = wrong  # type: ignore[assignment]


def test_trace_shows_every_step() -> None:
    x = x_of()
    executor = toys.chain(4).executor
    seen = []
    for step, inputs, output in executor.trace([x]):
        operation = step.kernel.split("_")[1]
        expected = inputs[0] + inputs[1] if operation == "add" else inputs[0] * inputs[1]
        np.testing.assert_array_equal(output, expected)
        seen.append((step.name, output.copy()))
    assert [name for name, _ in seen] == ["step0", "step1", "step2", "step3"]
    np.testing.assert_array_equal(seen[-1][1], toys.chain_reference(x, 4))


def test_trace_that_is_left_early_gives_its_memory_back() -> None:
    executor = toys.chain(4).executor
    steps = executor.trace([x_of()])
    next(steps)
    assert len(executor._free) == 0
    steps.close()  # type: ignore[attr-defined]
    assert len(executor._free) == 1


def test_time_per_step() -> None:
    executor = toys.chain(4).executor
    times = executor.time_steps([x_of()], repeats=3)
    assert len(times) == 4
    assert all(0 < seconds < 1 for seconds in times)


def test_arrays_are_checked() -> None:
    executor = toys.chain(2).executor
    outputs = executor.new_outputs()
    with pytest.raises(VerificationError, match="not contiguous"):
        executor.run([np.zeros((32, 16), np.float32).T], outputs)
    with pytest.raises(VerificationError, match="input 0"):
        executor.run([np.zeros((16, 32))], outputs)


def test_a_tensor_without_elements() -> None:
    model = toys.identity((0, 4), extent=0)
    assert model(np.zeros((0, 4), np.float32)).shape == (0, 4)


def test_many_callers_at_once() -> None:
    executor = toys.chain(9, 8, 64, threads=2).executor
    wrong: list[int] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        x = x_of(8, 64, seed)
        expected = toys.chain_reference(x, 9)
        (out,) = executor.new_outputs()
        start.wait()
        for _ in range(100):
            executor.run([x], [out])
            if not np.array_equal(out, expected):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not wrong
    assert 1 <= len(executor._free) <= _KEPT_FRAMES
