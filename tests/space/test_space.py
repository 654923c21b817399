"""Spaces enumerate what is legal, and nothing else."""

from __future__ import annotations

from tilewright.space.space import Config, Knob, Space

SPACE = Space(
    "example",
    (Knob("rows", (1, 2, 4)), Knob("vectors", (1, 2)), Knob("stage", (False, True))),
    lambda values: int(values["rows"]) * int(values["vectors"]) <= 4,
    together=(("rows", "vectors"),),
)


def test_configs_are_the_legal_combinations() -> None:
    configs = list(SPACE.configs())
    assert len(configs) == len(set(configs)) == 10
    assert all(config.int("rows") * config.int("vectors") <= 4 for config in configs)
    assert Config.of("example", {"rows": 4, "vectors": 2, "stage": True}) not in configs


def test_knobs_that_belong_together_form_one_group() -> None:
    names = [[knob.name for knob in group] for group in SPACE.groups()]
    assert names == [["rows", "vectors"], ["stage"]]


def test_a_config_is_plain_data_and_says_what_it_is() -> None:
    config = next(iter(SPACE.configs()))
    assert dict(config.values) == {"rows": 1, "vectors": 1, "stage": False}
    assert str(config) == "example: rows=1 vectors=1 stage=False"
