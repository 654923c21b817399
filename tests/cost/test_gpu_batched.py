"""The analytical model of GPUs says of many configs at once what it says of each alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import numpy as np
import pytest

from tests.codegen.cuda.tensor_kernels import KERNELS
from tests.loops.gpu.products import Product
from tests.programs import GPU, GPU_SKETCHES, GPU_TEMPLATES
from tests.space.sketches.cuda.tasks import CONVOLUTIONS, product_task
from tilewright.cost.analytical import Analytical
from tilewright.cost.predictor import all_seconds, nominal
from tilewright.dtypes import DType
from tilewright.graph.task import Task
from tilewright.hw.gpu import L4, GpuMachine
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config, Space
from tilewright.space.template import Applied, Batched, GpuWork, Template
from tilewright.tune.choose import _OneByOne, descend

_SOME = 200  # configs of each case


@dataclass(frozen=True)
class Case:
    name: str
    template: Template
    task: Task
    machine: GpuMachine = GPU
    numerics: str = "fast"

    @property
    def applied(self) -> Applied:
        found = self.template.apply(GpuWork(self.task, self.machine, self.numerics))
        assert found is not None
        return found


def sketched() -> list[Case]:
    """Every sketch on products and convolutions of 16 and 32 bits, with one mapping and several."""
    tasks = {
        "f16": product_task(Product(9, 20, 70)),
        "f16-large": product_task(Product(512, 768, 640)),
        "f32": product_task(Product(200, 300, 64, dtype=DType.F32)),
        "f32-batch": product_task(Product(24, 40, 48, batch=3, dtype=DType.F32)),
        "conv-f16": CONVOLUTIONS[0].task(),
        "conv-f32": CONVOLUTIONS[-1].task(),
        "sums-f16": product_task(Product(3, 8, 600, epilogue=False)),
        "sums-f32": product_task(Product(3, 8, 600, epilogue=False, dtype=DType.F32)),
    }
    return [
        Case(f"{name}-{label}", sketch, task, GPU, "tf32" if "f32" in label else "fast")
        for name, sketch in GPU_SKETCHES.items()
        for label, task in tasks.items()
        if sketch.apply(GpuWork(task, GPU, "tf32" if "f32" in label else "fast")) is not None
    ]


CASES = [
    *(
        Case(k.name, GPU_TEMPLATES[k.template], k.task(), replace(GPU, sms=k.sms), k.numerics)
        for k in KERNELS
    ),
    *sketched(),
]


def some_of(applied: Applied) -> list[Config]:
    configs = list(applied.space.configs())
    return Random(0).sample(configs, min(_SOME, len(configs)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_at_once_are_as_each_alone(case: Case) -> None:
    """To the last bit, so that a choice does not depend on how it was made."""
    applied = case.applied
    assert isinstance(applied, Batched) and applied.space.batched
    for machine in (case.machine, L4):
        predictor, configs = nominal(machine), some_of(applied)
        together = all_seconds(applied, configs, predictor)
        assert together is not None
        alone = [predictor(applied.terms(config)) for config in configs]  # type: ignore[attr-defined]
        assert together.tolist() == alone and min(alone) > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_configs_are_those_that_are_legal_one_by_one(case: Case) -> None:
    space = case.applied.space
    rng = Random(1)
    drawn = [{knob.name: rng.choice(knob.choices) for knob in space.knobs} for _ in range(_SOME)]
    drawn += [dict(config.values) for config in some_of(case.applied)[:20]]
    columns = {knob.name: np.array([values[knob.name] for values in drawn]) for knob in space.knobs}
    assert space.legal(columns).tolist() == [bool(space.legal(values)) for values in drawn]
    plain = Space(space.template, space.knobs, space.legal, space.together)
    some = 50
    assert list(islice(space.configs(), some)) == list(islice(plain.configs(), some)) != []


@pytest.mark.parametrize("name", ["tensorised-f16-large", "tiled-f32", "product-split", "chain-shared"])
def test_a_descent_finds_the_same_config_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in CASES if case.name == name)
    applied, work = case.applied, GpuWork(case.task, case.machine, case.numerics)
    fast = descend(applied, work)
    monkeypatch.setattr(
        "tilewright.tune.choose._AllAtOnce", lambda applied, predictor: _OneByOne(applied, work, predictor)
    )
    assert fast is not None and fast == descend(applied, work)


def test_the_analytical_model_predicts_configs_of_several_templates_together() -> None:
    candidates = Candidates(GpuWork(product_task(Product(512, 768, 640)), GPU))
    configs = candidates.sample(Random(0), 100)
    assert len({config.template for config in configs}) > 2
    model = Analytical(candidates, 1)
    alone = [model.seconds(config) for config in configs]
    assert Analytical(candidates, 1).predict(configs).seconds.tolist() == alone
