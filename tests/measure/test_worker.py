"""A candidate that is wrong, hangs or crashes costs one trial; the worker lives on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.measure.trial import Bench, TaskJob, TimedKernel, WrongResult
from tilewright.measure.worker import Question, Worker
from tilewright.space.realise import program_for
from tilewright.space.space import Config
from tilewright.space.template import Work


def work_of(op: str, *types: TensorType, constants: frozenset[int] = frozenset()) -> Work:
    nodes = [input_node(index, type) for index, type in enumerate(types)]
    return Work(Task(Graph(tuple(nodes), (apply(op, *nodes),)), constants), host())


@pytest.fixture(scope="module")
def product() -> TaskJob:
    types = TensorType((9, 20), DType.F32), TensorType((20, 33), DType.F32)
    return TaskJob.of(work_of("matmul", *types, constants=frozenset({1})), threads=1)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def ask(worker: Worker, job: TaskJob, *configs: Config | None, seconds: float = 0.01, timeout: float = 60):
    return worker.ask(Question(job, configs, seconds), timeout)


def test_a_task_survives_the_journey(product: TaskJob) -> None:
    assert TaskJob.of(product.work(), product.threads) == product


def test_times_and_errors(worker: Worker, product: TaskJob) -> None:
    answer = ask(worker, product, None)
    assert answer.failed is None and answer.errors[0] < 1e-6
    assert len(answer.times[0]) >= 5 and all(0 < seconds < 1 for seconds in answer.times[0])
    again = ask(worker, product, None)
    assert again.errors == () and again.failed is None  # it is there already


def test_a_config_that_does_not_exist(worker: Worker, product: TaskJob) -> None:
    answer = ask(worker, product, None, Config("nothing", ()))
    assert (answer.failed, answer.kind) == (1, "illegal") and "nothing" in answer.message


def test_death_and_hanging(worker: Worker, product: TaskJob) -> None:
    assert ask(worker, product, None).failed is None
    assert worker._process is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    assert ask(worker, product, None).kind == "crash"
    assert ask(worker, product, None).failed is None
    assert ask(worker, product, None, seconds=600, timeout=0.3).kind == "timeout"
    assert ask(worker, product, None).failed is None


def test_a_wrong_result_is_found(product: TaskJob) -> None:
    bench = Bench(product)
    kernel = TimedKernel(program_for(bench.work, None), product, bench.inputs)
    assert kernel.checked(bench.reference) < 1e-6
    for place in (0, -1):
        wrong = bench.reference.copy().reshape(-1)
        wrong[place] += 1e-2
        with pytest.raises(WrongResult, match="relative error"):
            kernel.checked(wrong)


def test_what_is_not_written_is_found(product: TaskJob) -> None:
    """The output is NaN before: a kernel that leaves an element alone has it there."""
    bench = Bench(product)
    kernel = TimedKernel(program_for(bench.work, None), product, bench.inputs)
    kernel._kernel.executor.run = lambda inputs, outputs: None  # type: ignore[method-assign]
    with pytest.raises(WrongResult):
        kernel.checked(bench.reference)


def test_weights_go_round(product: TaskJob) -> None:
    bench = Bench(product)
    kernel = TimedKernel(program_for(bench.work, None), product, bench.inputs)
    weights = {arrays[1].ctypes.data for arrays in kernel._sets}
    data = {arrays[0].ctypes.data for arrays in kernel._sets}
    assert len(weights) > 8 and len(data) == 1
    assert all(np.array_equal(arrays[1], kernel._sets[0][1]) for arrays in kernel._sets)


def test_inputs_are_drawn_so_that_the_result_is_a_number() -> None:
    bench = Bench(TaskJob.of(work_of("log", TensorType((50,), DType.F32)), threads=1))
    assert np.isfinite(bench.reference).all()
    assert bench.check(None) < 1e-5


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.I8, DType.I32])
def test_types(dtype: DType) -> None:
    bench = Bench(TaskJob.of(work_of("add", *[TensorType((5, 7), dtype)] * 2), threads=1))
    assert bench.check(None) < 2e-2
