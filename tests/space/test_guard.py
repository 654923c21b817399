"""A user's template may answer anything: what it costs is its own candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.testing.extensions import Plain, PlainApplied
from tilewright.cost.analytical import Analytical
from tilewright.cost.encoding import Encoder
from tilewright.errors import SpaceError, TilewrightWarning
from tilewright.extend import register_template, unregister_template
from tilewright.hw import host
from tilewright.measure.building import Build, BuildServer, Made
from tilewright.measure.failed import Failed
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.catalog import catalog
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, Batched, CpuWork, Explaining, Featured, Terms, Work
from tilewright.testing import softmax_rows
from tilewright.tune.choose import choose


@dataclass(frozen=True)
class Template(Plain):
    """The plain template of the tests, with what it answers replaced."""

    made: Callable[[CpuWork], Applied]

    def apply(self, work: CpuWork) -> Applied | None:
        return None if work.formula is None else self.made(work)


@dataclass(frozen=True)
class Answering(PlainApplied):
    legal: Callable[[Mapping[str, Any]], Any] = lambda values: True
    knobs: Any = (Knob("choice", (1, 2, 4)),)
    counted: Any = field(default_factory=lambda: Terms(arithmetic=1.0))
    body: Any = None
    options: Any = ()

    @property
    def space(self) -> Space:
        return Space("plain", self.knobs, self.legal, **dict(self.options))

    def terms(self, config: Config) -> Any:
        return self.counted

    def program(self, config: Config) -> Any:
        return super().program(config) if self.body is None else self.body


WORK = Work(softmax_rows(), host())


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    def add(made: Callable[[CpuWork], Applied]) -> None:
        register_template(Template(made), module="tests.testing.extensions")

    yield add
    unregister_template("plain")


def names() -> set[str]:
    return {applied.space.template for applied in Candidates.of(WORK).applied}


def raises(values: object) -> bool:
    raise KeyError("x")


def test_a_constraint_that_raises_admits_nothing(registered: Callable[..., None]) -> None:
    registered(lambda work: Answering(work, legal=raises))
    with pytest.warns(
        TilewrightWarning, match="'plain' cannot say which configs are legal for softmax.*KeyError"
    ) as told:
        assert choose(WORK).config.template != "plain"
        assert "plain" not in names()
    assert len(told) <= 2 * 2  # once for each time that the template is applied


def test_a_constraint_that_admits_nothing_ends(registered: Callable[..., None]) -> None:
    knobs = tuple(Knob(f"k{number}", tuple(range(10))) for number in range(12))
    registered(lambda work: Answering(work, legal=lambda values: False, knobs=knobs))
    assert choose(WORK).config.template != "plain"
    assert "plain" not in names()


def test_a_constraint_that_admits_almost_nothing_ends() -> None:
    """A search lists what is left when it draws nothing new."""
    knobs = tuple(Knob(f"k{number}", tuple(range(10))) for number in range(12))
    space = Space("plain", knobs, lambda values: all(value == 0 for value in values.values()))
    assert [set(dict(config.values).values()) for config in space.configs()] == [{0}]
    batched = replace(space, legal=lambda values: sum(values.values()) == 0, batched=True)
    assert list(batched.configs()) == list(space.configs())


WRONG_SPACES = {
    "no choices that can be stored": ({"knobs": (Knob("x", (0.5,)),)}, "an int, a str or a bool"),  # type: ignore[arg-type]
    "a list of choices": ({"knobs": (Knob("x", [1, 2]),)}, "a tuple of choices"),  # type: ignore[arg-type]
    "two of a name": ({"knobs": (Knob("x", (1,)), Knob("x", (2,)))}, "the same name"),
    "no knob of the name": ({"options": {"together": (("y",),)}.items()}, "KeyError"),
}


@pytest.mark.parametrize("answers, says", WRONG_SPACES.values(), ids=WRONG_SPACES)
def test_a_space_that_is_none_is_left_out(answers: Any, says: str, registered: Callable[..., None]) -> None:
    registered(lambda work: Answering(work, **answers))
    with pytest.warns(TilewrightWarning, match=f"template 'plain' cannot be asked about softmax.*{says}"):
        assert "plain" not in names()


def test_its_space_is_asked_for_once(registered: Callable[..., None]) -> None:
    class Forgetful(Answering):
        asked: list[int] = []

        @property
        def space(self) -> Space:
            self.asked.append(0)
            assert len(self.asked) == 1
            return super().space

    registered(Forgetful)
    (template,) = catalog("cpu").registered
    applied = template.apply(WORK)
    assert applied is not None and applied.space is applied.space


WRONG_TERMS = [
    "cheap", (Terms(1.0),), Terms(float("nan")), Terms(-1.0), Terms("1"), Terms(1.0, iterations=0),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize("counted", WRONG_TERMS, ids=str)
def test_a_cost_that_is_none_makes_its_configs_illegal(counted: Any, registered: Callable[..., None]) -> None:
    registered(lambda work: Answering(work, counted=counted))
    assert choose(WORK).config.template != "plain"
    config = Config.of("plain", {"choice": 2})
    candidates = Candidates.of(WORK)
    assert Analytical(candidates, 2).seconds(config) == float("inf")
    with pytest.raises(SpaceError, match="terms"):
        candidates.of_config(config).terms(config)


@pytest.mark.parametrize("body", ["no program", 7, object])
def test_a_program_that_is_none_is_not_chosen(body: Any, registered: Callable[..., None]) -> None:
    registered(lambda work: Answering(work, body=body))  # and it seems to be the fastest
    assert choose(WORK).config.template != "plain"
    with pytest.raises(SpaceError, match="must be a loop program or a library call"):
        Candidates.of(WORK).implementation(Config.of("plain", {"choice": 2}))


# -- what it may have besides ------------------------------------------------------------------------------------------


class WithFeatures(Answering):
    def features(self, config: Config) -> dict[str, float]:
        return {"the number": float(config.int("choice"))}


class WithWrongFeatures(Answering):
    def features(self, config: Config) -> dict[str, float]:
        raise KeyError("x")


class ManyAtOnce(Answering):
    def terms_of(self, values: Mapping[str, Any]) -> Terms:
        return Terms(arithmetic=1e6 / values["choice"])


class WronglyAtOnce(Answering):
    def terms_of(self, values: Mapping[str, Any]) -> Terms:
        return Terms(arithmetic=np.zeros(17))  # type: ignore[arg-type]


class Refusing(Template):
    def refusal(self, work: Work) -> str | None:
        return "it is Monday"


def guarded(made: Callable[[CpuWork], Applied]) -> Applied:
    (template,) = catalog("cpu").registered
    applied = template.apply(WORK)
    assert applied is not None
    return applied


def test_features_reach_the_learned_model(registered: Callable[..., None]) -> None:
    registered(WithFeatures)
    candidates, encoder = Candidates.of(WORK), Encoder()
    assert isinstance(guarded(WithFeatures), Featured)
    rows = encoder.matrix(Analytical(candidates, 2), [Config.of("plain", {"choice": n}) for n in (1, 4)])
    assert rows[:, encoder.columns["the number"]].tolist() == [1.0, 4.0]


def test_features_that_raise_are_left_out(registered: Callable[..., None]) -> None:
    registered(WithWrongFeatures)
    with pytest.warns(TilewrightWarning, match="'plain' cannot tell the features of plain: choice=1"):
        found = Encoder().matrix(Analytical(Candidates.of(WORK), 2), [Config.of("plain", {"choice": 1})])
    assert found.shape[0] == 1


def test_costs_of_many_configs_at_once_are_used(registered: Callable[..., None]) -> None:
    options = {"batched": True}.items()
    registered(lambda work: ManyAtOnce(work, options=options, counted=Terms(arithmetic=1e9)))
    applied = guarded(ManyAtOnce)
    assert isinstance(applied, Batched) and not isinstance(applied, Featured)
    assert choose(WORK).config == Config.of("plain", {"choice": 4})
    terms = applied.terms_of({"choice": np.array([1, 2, 4])})
    assert isinstance(terms, Terms) and list(np.asarray(terms.arithmetic)) == [1e6, 5e5, 2.5e5]


def test_wrong_costs_of_many_configs_at_once_do_no_harm(registered: Callable[..., None]) -> None:
    registered(lambda work: WronglyAtOnce(work, options={"batched": True}.items()))
    assert choose(WORK).config == Config.of("plain", {"choice": 1})  # by its own cost, one at a time
    unregister_template("plain")
    registered(lambda work: WronglyAtOnce(work, legal=raises, options={"batched": True}.items()))
    with pytest.warns(TilewrightWarning, match="cannot say which configs are legal"):
        assert choose(WORK).config.template != "plain"


def test_it_may_say_why_it_does_not_apply(registered: Callable[..., None]) -> None:
    register_template(Refusing(Answering))
    (template,) = catalog("cpu").registered
    assert isinstance(template, Explaining) and template.refusal(WORK) == "it is Monday"


def test_samples_of_a_guarded_space_are_legal(registered: Callable[..., None]) -> None:
    registered(lambda work: Answering(work, legal=lambda values: values["choice"] != 2))
    space = guarded(Answering).space
    assert {config["choice"] for _ in range(20) if (config := space.sample(Random(0))) is not None} <= {1, 4}


# -- in the processes that build --------------------------------------------------------------------------------------


def test_a_module_that_cannot_be_imported_costs_its_own_configs() -> None:
    server, job = BuildServer(), TaskJob.of(WORK, 2)
    config = Config("default", ())
    modules = ("tests.testing.no_such_module",)
    assert isinstance(server.answer(Build(job, config, modules), []), Made)
    found = server.answer(Build(job, Config.of("plain", {"choice": 1}), modules), [])
    assert isinstance(found, Failed) and found.kind == "illegal"
    assert (
        "'tests.testing.no_such_module', which registers extensions, cannot be imported here" in found.message
    )
