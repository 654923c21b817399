"""Templates that count the terms of many configs at once say of each what they say of it alone."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.programs import AVX2, ZEN4
from tests.space.templates.cpu.test_contraction import conv_task, matmul_task
from tests.space.templates.cpu.test_contraction_int8 import matmul_task as int8_task
from tilewright.cost.predictor import nominal
from tilewright.dtypes import DType
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine
from tilewright.space.catalog import catalog
from tilewright.space.space import Config, Space, combinations
from tilewright.space.template import Applied, Batched, Work
from tilewright.tune.choose import _OneByOne, descend

TASKS = {
    "wide": matmul_task(49, 512, 1024),
    "odd": matmul_task(37, 66, 401),
    "one row": matmul_task(1, 1001, 640),
    "not constant": matmul_task(64, 96, 300, (2,), constant=False),
    "window": conv_task((14, 15), (32, 100), (3, 3), 1, 1, ((1, 1), (1, 1))),
    "1x1": conv_task((28, 28), (64, 256), (1, 1), 1, 1, ((0, 0), (0, 0))),
    "int8": int8_task(40, 96, 256, DType.U8, DType.I8),
}


def batched(task: Task, machine: CpuMachine) -> list[Applied]:
    found = catalog("cpu").trusted(Work(task, machine))
    return [applied for applied in found if isinstance(applied, Batched) and applied.space.batched]


@pytest.mark.parametrize("machine", [ZEN4, AVX2], ids=["AVX-512", "AVX2"])
@pytest.mark.parametrize("name", TASKS)
def test_many_at_once_are_as_each_alone(name: str, machine: CpuMachine) -> None:
    rng, predictor = Random(7), nominal(machine)
    some = batched(TASKS[name], machine)
    assert some
    for applied in some:
        assert isinstance(applied, Batched)
        space, compared = applied.space, 0
        base = space.default()
        for group in space.groups():
            columns = combinations(group)
            values = {**dict(base.values), **columns}
            count = len(next(iter(columns.values())))
            legal = np.broadcast_to(space.legal(values), (count,))
            seconds = np.broadcast_to(predictor(applied.terms_of(values)), (count,))
            for at in rng.sample(range(count), min(count, 12)):
                own = {key: column[at].item() for key, column in columns.items()}
                alone = {**dict(base.values), **own}
                assert bool(space.legal(alone)) == legal[at]
                if legal[at]:
                    config = Config.of(space.template, alone)
                    expected = predictor(applied.terms(config))  # type: ignore[attr-defined]
                    assert seconds[at] == pytest.approx(expected, rel=1e-12)
                    compared += 1
        assert compared


def test_paired_and_winograd_are_among_them() -> None:
    names = {applied.space.template for task in TASKS.values() for applied in batched(task, ZEN4)}
    assert {"contraction", "contraction_int8", "paired", "winograd"} <= names


@pytest.mark.parametrize("name", ["odd", "1x1", "window"])
def test_a_descent_finds_the_same_config_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(TASKS[name], ZEN4)
    for applied in batched(TASKS[name], ZEN4):
        fast = descend(applied, work)
        with monkeypatch.context() as patched:
            patched.setattr(
                "tilewright.tune.choose._AllAtOnce",
                lambda applied, predictor: _OneByOne(applied, work, predictor),
            )
            slow = descend(applied, work)
        assert fast is not None and slow is not None
        assert fast[1] == slow[1] and fast[0] == pytest.approx(slow[0], rel=1e-12)


def test_the_configs_of_a_batched_space_are_those_of_any_other() -> None:
    (applied,) = [a for a in batched(TASKS["1x1"], ZEN4) if a.space.template == "paired"]
    space = applied.space
    plain = Space(space.template, space.knobs, space.legal, space.together)
    assert space.batched and list(space.configs()) == list(plain.configs()) != []
