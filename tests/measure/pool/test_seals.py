"""What a timer refuses to load, without Ray: object code and tensors that were changed, or that it should not have."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

import tilewright
import tilewright.tile as tl
from tests.faults.candidates import product
from tests.measure.pool.threads import TestBuilder, TestTimer
from tilewright.errors import PoolError
from tilewright.hw import host
from tilewright.measure.building import Made
from tilewright.measure.kernel_job import KernelJob
from tilewright.measure.pool.wire import (
    BuildAnswer,
    BuildRequest,
    Candidate,
    PoolJob,
    RaceAnswer,
    RaceRequest,
    TrialAnswer,
    TrialRequest,
    encode,
    pool_job,
    seal,
    seal_key,
)
from tilewright.measure.single import Built
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work

_TOKEN = "0123456789abcdef" * 4
_CODE = "the object code is not what a builder of this pool made"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", _TOKEN)


@pytest.fixture
def timer() -> TestTimer:
    return TestTimer("node")


@pytest.fixture(scope="module")
def task() -> TaskJob:
    return TaskJob.of(Work(product(32, 48, 40), host()), 1)


@pytest.fixture(scope="module")
def configs(task: TaskJob) -> list[Config]:
    sampled = Candidates.of(task.work(), sketches=False).sample(Random(0), 8)
    return list(dict.fromkeys(sampled))[:2]


def built(job: PoolJob, config: Config) -> tuple[bytes, bytes]:
    """(the seal, the object code) of a builder of the pool."""
    builder = TestBuilder("node", Made(Built((), (), (), ()), 0.0))
    answer, code = builder.build(encode(BuildRequest("build", "tester", job, config)))
    return msgspec.msgpack.decode(answer, type=BuildAnswer).seal, code


def trouble(
    timer: TestTimer, job: PoolJob, config: Config, sealed: bytes, code: bytes, data: bytes = b""
) -> str:
    request = encode(TrialRequest("0123abcd", "tester", job, Candidate(config, sealed), 7))
    answer = msgspec.msgpack.decode(timer.trial(request, code, data), type=TrialAnswer)
    assert bool(answer.trouble) == (not timer.measured)  # what is refused does not run
    return answer.trouble


def test_code_of_a_builder_of_the_pool_is_measured(
    timer: TestTimer, task: TaskJob, configs: list[Config]
) -> None:
    assert trouble(timer, pool_job(task), configs[0], *built(pool_job(task), configs[0])) == ""


@pytest.mark.parametrize("position", [0, 1, -1])
def test_changed_code(timer: TestTimer, task: TaskJob, configs: list[Config], position: int) -> None:
    sealed, code = built(pool_job(task), configs[0])
    changed = bytearray(code)
    changed[position] ^= 1
    assert trouble(timer, pool_job(task), configs[0], sealed, bytes(changed)) == _CODE


def test_code_of_another_config(timer: TestTimer, task: TaskJob, configs: list[Config]) -> None:
    assert trouble(timer, pool_job(task), configs[1], *built(pool_job(task), configs[0])) == _CODE


def test_code_of_another_task(timer: TestTimer, task: TaskJob, configs: list[Config]) -> None:
    other = pool_job(TaskJob.of(Work(product(16, 24, 40), host()), 1))
    assert trouble(timer, other, configs[0], *built(pool_job(task), configs[0])) == _CODE


def test_code_of_another_pool(timer: TestTimer, task: TaskJob, configs: list[Config]) -> None:
    job = pool_job(task)
    _, code = built(job, configs[0])
    foreign = seal(seal_key("another token"), job, configs[0], code)
    assert trouble(timer, job, configs[0], foreign, code) == _CODE
    assert trouble(timer, job, configs[0], b"", code) == _CODE


def test_a_job_for_another_machine(timer: TestTimer, task: TaskJob, configs: list[Config]) -> None:
    job = pool_job(msgspec.structs.replace(task, described=task.described + " "))
    refused = trouble(timer, job, configs[0], *built(job, configs[0]))
    assert refused == "the device is not the machine that the job is for"


def test_a_race_with_one_changed_candidate(timer: TestTimer, task: TaskJob, configs: list[Config]) -> None:
    job = pool_job(task)
    (first, code), (second, other) = (built(job, config) for config in configs)
    candidates = (Candidate(configs[0], first), Candidate(configs[1], second))
    request = encode(RaceRequest("race", "tester", job, candidates, 7, 0.1))
    answer = msgspec.msgpack.decode(timer.race(request, b"", code, other + b"\x00"), type=RaceAnswer)
    assert answer.trouble == _CODE and not answer.times


@tilewright.kernel
def scale(x, out, n, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=inside) * factor, mask=inside)


def test_changed_tensors_of_a_kernels_launch(timer: TestTimer) -> None:
    """Their digest is part of the job, which the seal covers."""
    tuned = tilewright.autotune({"BLOCK": (64,)}, key=["n"])(scale)
    x = np.zeros(64, np.float32)
    call = tuned._call((1,), tuned._bound((x, x, 64, 1.0), {}))
    kernel = call.tunable().job
    assert isinstance(kernel, KernelJob)
    data = Path(kernel.spec.data).read_bytes()
    call.close()
    job, config = pool_job(kernel, data), Config(kernel.spec.start.template, kernel.spec.start.values)
    sealed, code = built(job, config)
    refused = trouble(timer, job, config, sealed, code, data[:-1] + b"\x01")
    assert refused == "the tensors are not those that the job names"
    assert trouble(timer, job, config, sealed, code, data) == ""


def test_a_node_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    with pytest.raises(PoolError, match="without a token"):
        TestTimer("node")
