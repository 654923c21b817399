"""Knobs, Configs and Spaces: what they offer is legal, and obeys a few laws."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.errors import SpaceError
from tilewright.space.space import Config, Knob, Space, Value

SPACE = Space(
    "example",
    (Knob("rows", (1, 2, 4)), Knob("vectors", (1, 2)), Knob("stage", (False, True))),
    lambda values: int(values["rows"]) * int(values["vectors"]) <= 4,
    together=(("rows", "vectors"),),
)

CHOICES = st.one_of(
    st.lists(st.integers(0, 64), min_size=1, max_size=5, unique=True),
    st.just([False, True]),
    st.lists(st.sampled_from(["row", "tile", "whole", "none"]), min_size=1, max_size=4, unique=True),
)


@st.composite
def knobs(draw: st.DrawFn, name: str = "knob") -> Knob:
    choices: tuple[Value, ...] = tuple(draw(CHOICES))
    default = draw(st.one_of(st.none(), st.sampled_from(choices)))
    return Knob(name, choices, default, draw(st.booleans()))


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Any space with a legal config: a part of all combinations, chosen by a number."""
    count = draw(st.integers(0, 4))
    own = tuple(draw(knobs(f"k{number}")) for number in range(count))
    salt, modulus = draw(st.integers(0, 99)), draw(st.integers(1, 4))
    positions = [{choice: at for at, choice in enumerate(knob.choices)} for knob in own]

    def legal(values: object) -> bool:
        assert isinstance(values, dict)
        total = sum((at + 1) * positions[at][values[knob.name]] for at, knob in enumerate(own))
        return total == 0 or (total + salt) % modulus == 0  # the first choices are always legal together

    together = (("k0", "k1"),) if count >= 2 and draw(st.booleans()) else ()
    return Space("drawn", own, legal, together)


SEEDS = st.integers(0, 2**32).map(Random)


# -- what there is ------------------------------------------------------------------------------------------------


def test_configs_are_the_legal_combinations() -> None:
    configs = list(SPACE.configs())
    assert len(configs) == len(set(configs)) == 10
    assert all(config.int("rows") * config.int("vectors") <= 4 for config in configs)
    assert Config.of("example", {"rows": 4, "vectors": 2, "stage": True}) not in configs
    assert SPACE.size == 12


def test_knobs_that_belong_together_form_one_group() -> None:
    names = [[knob.name for knob in group] for group in SPACE.groups()]
    assert names == [["rows", "vectors"], ["stage"]]


def test_a_config_is_plain_data_and_says_what_it_is() -> None:
    config = next(iter(SPACE.configs()))
    assert dict(config.values) == {"rows": 1, "vectors": 1, "stage": False}
    assert str(config) == "example: rows=1 vectors=1 stage=False"


def test_a_space_knows_its_own_configs() -> None:
    assert all(config in SPACE for config in SPACE.configs())
    for strange in (
        Config.of("example", {"rows": 4, "vectors": 2, "stage": True}),  # not legal
        Config.of("example", {"rows": 3, "vectors": 1, "stage": True}),  # no such value
        Config.of("example", {"rows": 1, "vectors": 1}),  # a knob is missing
        Config.of("another", {"rows": 1, "vectors": 1, "stage": True}),
    ):
        assert strange not in SPACE


# -- laws of knobs ------------------------------------------------------------------------------------------------


@given(knob=knobs(), data=st.data())
def test_neighbours_are_other_choices_and_mutual(knob: Knob, data: st.DataObject) -> None:
    value = data.draw(st.sampled_from(knob.choices))
    found = knob.neighbours(value)
    assert set(found) <= set(knob.choices) - {value}
    assert all(value in knob.neighbours(other) for other in found)
    assert len(found) == (min(2, len(found)) if knob.ordered else len(knob.choices) - 1)
    assert bool(found) == (len(knob.choices) > 1)


@given(knob=knobs())
def test_codes_are_of_one_length_and_tell_choices_apart(knob: Knob) -> None:
    codes = [knob.encode(choice) for choice in knob.choices]
    assert len({len(code) for code in codes}) == 1
    assert len(set(codes)) == len(codes)
    if knob.ordered:
        assert [code[0] for code in codes] == sorted(code[0] for code in codes)


@given(knob=knobs(), rng=SEEDS, data=st.data())
def test_a_crossing_takes_one_of_the_two_values(knob: Knob, rng: Random, data: st.DataObject) -> None:
    a, b = data.draw(st.sampled_from(knob.choices)), data.draw(st.sampled_from(knob.choices))
    assert knob.crossover(a, b, rng) in (a, b)


# -- laws of spaces -----------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(space=spaces(), rng=SEEDS)
def test_whatever_a_space_offers_is_legal(space: Space, rng: Random) -> None:
    start, other = space.sample(rng), space.sample(rng)
    assert start is not None and other is not None
    offered = [space.default(), start, other, *space.neighbours(start)]
    offered += [space.mutate(start, rng), space.crossover(start, other, rng)]
    assert all(config in space for config in offered)
    assert set(offered) <= set(space.configs())


@settings(max_examples=50)
@given(space=spaces(), rng=SEEDS)
def test_neighbours_are_distinct_and_mutual(space: Space, rng: Random) -> None:
    config = space.sample(rng)
    assert config is not None
    found = space.neighbours(config)
    assert len(set(found)) == len(found) and config not in found
    assert all(config in space.neighbours(other) for other in found)


@settings(max_examples=50)
@given(space=spaces(), rng=SEEDS)
def test_a_crossing_has_its_parents_values(space: Space, rng: Random) -> None:
    a, b = space.sample(rng), space.sample(rng)
    assert a is not None and b is not None
    child = space.crossover(a, b, rng)
    assert all(child[knob.name] in (a[knob.name], b[knob.name]) for knob in space.knobs)
    for names in space.together:  # from one of the two, together
        together = [child[name] for name in names]
        assert together in ([a[name] for name in names], [b[name] for name in names])


@settings(max_examples=50)
@given(space=spaces())
def test_all_configs_have_codes_of_one_length_of_their_own(space: Space) -> None:
    configs = list(space.configs())
    codes = [space.encode(config) for config in configs]
    assert len({len(code) for code in codes}) == 1
    assert len(set(codes)) == len(configs)


@settings(max_examples=50)
@given(space=spaces())
def test_the_default_has_the_knobs_defaults_where_these_are_legal(space: Space) -> None:
    wanted = {knob.name: knob.choices[0] if knob.default is None else knob.default for knob in space.knobs}
    if space.legal(wanted):
        assert dict(space.default().values) == wanted


def test_a_mutation_is_another_config_where_there_is_one() -> None:
    rng = Random(0)
    start = SPACE.default()
    reached = {start}
    for _ in range(200):
        mutated = SPACE.mutate(rng.choice(sorted(reached, key=str)), rng)
        reached.add(mutated)
    assert reached == set(SPACE.configs())
    assert all(SPACE.mutate(config, rng) != config for config in SPACE.configs())


# -- spaces without configs ---------------------------------------------------------------------------------------


def test_a_legal_config_is_found_where_few_are() -> None:
    rare = Space(
        "rare",
        tuple(Knob(f"k{number}", tuple(range(10))) for number in range(4)),
        lambda values: sum(int(value) for value in values.values()) == 1,
    )
    assert rare.sample(Random(0)) in rare
    assert rare.default() in rare


def test_a_knob_without_choices_is_an_error() -> None:
    with pytest.raises(
        SpaceError, match=r"knob 'rows' of 'mine' has nothing to choose from(.|\n)*try: give each"
    ):
        Space("mine", (Knob("rows", ()),), lambda values: True)


def test_a_default_that_is_no_choice_is_an_error() -> None:
    with pytest.raises(SpaceError, match="default 3 of knob 'rows' of 'mine' is not one of its choices"):
        Space("mine", (Knob("rows", (1, 2), default=3),), lambda values: True)


def test_knobs_that_have_no_legal_value_are_an_error() -> None:
    nothing = Space("mine", (Knob("rows", (1, 2)), Knob("stage", (True,))), lambda values: False)
    assert nothing.sample(Random(0)) is None
    with pytest.raises(
        SpaceError, match="no values of the knobs 'rows', 'stage' are legal together in 'mine'"
    ):
        nothing.default()


def test_a_config_from_before_a_knob_was_added_has_its_default() -> None:
    old = Config("example", (("vectors", 2), ("rows", 2)))
    assert SPACE.recalled(old) == Config("example", (("rows", 2), ("vectors", 2), ("stage", False)))
    assert SPACE.recalled(SPACE.default()) == SPACE.default()
    assert SPACE.recalled(Config("example", (("rows", 4), ("vectors", 2)))) is None  # not legal
    assert SPACE.recalled(Config("example", (("rows", 2), ("gone", 1)))) is None
    assert SPACE.recalled(Config("other", (("rows", 2),))) is None
