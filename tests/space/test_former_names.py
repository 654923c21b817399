"""What was recorded under a former name of a template or knob is found under today's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec

from tests.db import samples
from tests.space.checked import Inputs
from tilewright.db.database import Database
from tilewright.db.record import Decision
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.hw.gpu import H200
from tilewright.space.candidates import Candidates
from tilewright.space.catalog import catalog
from tilewright.space.former_names import KNOBS, TEMPLATES, current_config
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.tune.choose import choose
from tilewright.tune.lock import lock_of, locked_choices, read_lock, write_lock


def former(config: Config) -> Config:
    """`config` as a version before the renaming would have written it."""
    templates = {new: old for old, new in TEMPLATES.items()}
    knobs = {new: old for old, new in KNOBS.get(config.template, {}).items()}
    values = tuple((knobs.get(name, name), value) for name, value in config.values)
    return Config(templates.get(config.template, config.template), values)


def test_todays_names_are_names_of_templates_and_former_ones_are_not() -> None:
    names = {template.name for kind in ("cpu", "cuda") for template in catalog(kind).all_templates}
    assert {new for new in TEMPLATES.values() if not new.startswith("sketch:")} <= names
    assert not names & set(TEMPLATES)


def test_a_former_config_is_a_candidate_under_its_new_name() -> None:
    x = Inputs()
    task = x.task(apply("matmul", x(128, 512), x(512, 256, constant=True)))
    for machine in (host(), H200):
        candidates = Candidates.of(Work(task, machine))
        for applied in candidates.applied:
            config = applied.space.default()
            assert current_config(former(config)) == config
            assert not set(KNOBS.get(config.template, {})) & {name for name, _ in config.values}
            if former(config) != config:
                assert not candidates.is_legal(former(config))
                assert candidates.is_legal(current_config(former(config)))


def test_a_users_own_template_keeps_its_names() -> None:
    config = Config("own", (("depth", 2), ("pieces", 3)))
    assert current_config(config) is config


def test_a_database_of_before_answers_under_todays_names(tmp_path: Path) -> None:
    now = Config("contraction", (("rows", 4), ("k_block", 64)))
    record = msgspec.structs.replace(samples.record(), config=former(now))
    with Database.open(tmp_path / "db.sqlite") as database:
        database.add([record])
        database.decide(
            Decision(record.key, former(now), 1e-3, "quick", 1.0, 1, 0.0, 2e-3, "", samples.VERSIONS)
        )
        assert [each.config for each in database.records(record.key)] == [now]
        decision = database.decision(record.key)
        assert decision is not None and decision.config == now


def test_a_lock_file_of_before_gives_the_same_choice(tmp_path: Path) -> None:
    x = Inputs()
    task = x.task(apply("matmul", x(128, 512), x(512, 256, constant=True)))
    works = {task.key: Work(task, host())}
    config = next(c for c in Candidates.of(works[task.key]).configs() if c.template == "contraction")
    choice = dataclasses.replace(
        choose(works[task.key]),
        config=config,
        implementation=Candidates.of(works[task.key]).implementation(config),
    )
    path = tmp_path / "model.lock"
    lock = lock_of({task.key: choice}, works, "fast")
    locked = lock.tasks[task.key]
    before = msgspec.structs.replace(locked, values=dict(former(config).values))
    write_lock(path, msgspec.structs.replace(lock, tasks={task.key: before}))
    assert "tap_block" in next(iter(json.loads(path.read_text())["tasks"].values()))["values"]
    found = read_lock(path)
    assert found is not None
    assert locked_choices(found, works, "fast", path)[task.key].config == config
