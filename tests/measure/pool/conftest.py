from __future__ import annotations

from random import Random

import pytest

from tests.faults.candidates import product
from tilewright.hw import host
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)


@pytest.fixture(scope="module")
def job() -> TaskJob:
    return TaskJob.of(Work(product(32, 48, 40), host()), 1)


@pytest.fixture(scope="module")
def configs(job: TaskJob) -> list[Config]:
    sampled = Candidates.of(job.work(), sketches=False).sample(Random(0), 24)
    return list(dict.fromkeys(sampled))[:8]
