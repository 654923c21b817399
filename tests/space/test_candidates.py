"""All ways to compute a task behind one interface: legal, and each a program that is right."""

from __future__ import annotations

from random import Random

import pytest

from tests.space.checked import Inputs, error
from tilewright.errors import InternalError, SpaceError
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.default import DEFAULT


def product() -> Candidates:
    x = Inputs()
    task = x.task(apply("matmul", x(20, 24), x(24, 48, constant=True)))
    return Candidates.of(Work(task, host()), sketches=False)


def test_the_default_program_is_one_of_them() -> None:
    candidates = product()
    names = [applied.space.template for applied in candidates.applied]
    assert names == ["contraction", "default"]
    assert candidates.is_legal(DEFAULT) and list(candidates.of_config(DEFAULT).space.configs()) == [DEFAULT]
    assert error(candidates.program(DEFAULT), candidates.work.task) < 1e-5


def test_without_templates_and_sketches_the_default_program_is_left() -> None:
    work = product().work
    assert list(Candidates.of(work, templates=False, sketches=False).configs()) == [DEFAULT]


def test_samples_are_distinct_and_legal_and_of_every_template() -> None:
    candidates = product()
    found = candidates.sample(Random(0), 50)
    assert len(set(found)) == len(found) == 50
    assert all(candidates.is_legal(config) for config in found)
    assert {config.template for config in found} == {"contraction", "default"}


def test_a_sample_of_more_than_there_are_is_all_there_are() -> None:
    x = Inputs()
    work = Work(x.task(apply("softmax", x(4, 8), axis=1)), host())
    assert Candidates.of(work, sketches=False).sample(Random(0), 5) == [DEFAULT]


def test_what_is_made_of_configs_is_legal_and_right() -> None:
    candidates = product()
    rng = Random(1)
    a, b = candidates.sample(rng, 2)
    made = [candidates.mutate(a, rng), candidates.crossover(a, b, rng), candidates.crossover(a, DEFAULT, rng)]
    made += [candidates.mutate(DEFAULT, rng), *candidates.neighbours(a)[:1]]
    assert all(candidates.is_legal(config) for config in made)
    assert all(error(candidates.program(config), candidates.work.task) < 1e-5 for config in made)


def test_codes_are_of_one_length_for_each_template() -> None:
    candidates = product()
    lengths: dict[str, set[int]] = {}
    for config in candidates.sample(Random(0), 60):
        lengths.setdefault(config.template, set()).add(len(candidates.encode(config)))
    assert all(len(found) == 1 for found in lengths.values())
    assert lengths["default"] == {0}


def test_a_config_of_no_template_is_told_so() -> None:
    candidates = product()
    strange = Config("frobnicate", ())
    assert not candidates.is_legal(strange)
    with pytest.raises(InternalError, match="no template called 'frobnicate' computes matmul"):
        candidates.program(strange)


def test_one_config_is_made_a_program_without_asking_all_templates() -> None:
    candidates = product()
    config = Candidates.of(candidates.work, sketches=False).sample(Random(0), 1)[0]
    assert candidates.is_legal(config)
    assert "applied" not in candidates.__dict__


def test_a_task_that_nothing_computes_is_an_error() -> None:
    """Attention has no default program; without its template nothing is left."""
    x = Inputs()
    task = x.task(apply("attention", *(x(1, 2, 8, 16) for _ in range(3)), causal=False, scale=0.25))
    candidates = Candidates.of(Work(task, host()), templates=False, sketches=False)
    with pytest.raises(SpaceError, match="no template and no sketch computes attention"):
        list(candidates.configs())
