"""The conformance suites hold for the compiler's own parts, and fail for what breaks a promise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from unittest import SkipTest

import pytest

from tests.hw.declared import ABSENT, FMA, MUL, WRONG, pmaddwd
from tests.testing.extensions import Plain, StripRule, Strips, Tiles2D, outer_product
from tilewright.cost.boosted import Experience
from tilewright.cost.model import CostModel
from tilewright.cost.models import COST_MODELS
from tilewright.dtypes import DType
from tilewright.extend import register_rule, unregister_rule
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.hw.gpu import H200
from tilewright.hw.machine import Machine
from tilewright.measure.validation import WrongResult
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Applied, GpuWork, Work
from tilewright.space.templates.cpu.contraction import Contraction
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.target import Target
from tilewright.testing import (
    CostModelSuite,
    Inputs,
    IntrinsicSuite,
    RuleSuite,
    SearchSuite,
    TargetSuite,
    TemplateSuite,
    gemm,
)
from tilewright.testing.emulator.run import COMPILER

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")


def elements(size: int) -> Task:
    x = Inputs()
    return x.task(apply("tanh", x(size)))


def test_a_rule_for_gpus_is_reached_by_its_kind_alone() -> None:
    """`register_rule` offers its structure for a GPU, not for a processor, and `unregister_rule` takes it back."""

    def names(machine: Machine) -> set[str]:
        return {each.space.template for each in Candidates.of(Work(elements(640), machine)).applied}

    register_rule(StripRule())
    try:
        assert "sketch:by-rule" in names(H200)
        assert "sketch:by-rule" not in names(host())
    finally:
        unregister_rule("by-rule")
    assert "sketch:by-rule" not in names(H200)


class TestContraction(TemplateSuite):
    template = Contraction()

    def tasks(self) -> Sequence[Task]:
        return (gemm(), gemm(7, 130, 65))


class TestPlain(TemplateSuite):
    template = Plain()


class TestTiles2D(RuleSuite):
    rule = Tiles2D()

    def tasks(self) -> Sequence[Task]:
        return (outer_product(30, 50), outer_product(17, 33))


@needs_compiler
class TestStripRule(RuleSuite):
    rule = StripRule()
    machine = H200

    def tasks(self) -> Sequence[Task]:
        return tuple(elements(size) for size in (640, 1000))


class TestFma(IntrinsicSuite):
    intrinsic = FMA


class TestMul(IntrinsicSuite):
    intrinsic = MUL


class TestPairs(IntrinsicSuite):
    intrinsic = pmaddwd()


class TestCpu(TargetSuite):
    def make(self) -> Target:
        return CpuTarget(host())


class TestBoosted(CostModelSuite):
    def make(
        self, candidates: Candidates, threads: int, seed: int, experience: Sequence[Experience]
    ) -> CostModel:
        return COST_MODELS["boosted"](candidates, threads, seed, experience)


class TestAnalytical(CostModelSuite):
    learns = False

    def make(
        self, candidates: Candidates, threads: int, seed: int, experience: Sequence[Experience]
    ) -> CostModel:
        return COST_MODELS["analytical"](candidates, threads, seed, experience)


class _Forgetful:
    """A search that asks for the same again and again."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates

    done, expected_gain = False, None

    def ask(self, count: int) -> list[Config]:
        return list(itertools.islice(self._candidates.configs(), count))

    def tell(self, outcomes: object) -> None:
        pass


class _ForgetfulSuite(SearchSuite):
    def make(self, candidates: Candidates, model: CostModel, seed: int) -> _Forgetful:  # type: ignore[override]
        return _Forgetful(candidates)


class _Subtracts(IntrinsicSuite):
    intrinsic = WRONG


class _OfTomorrow(IntrinsicSuite):
    intrinsic = ABSENT


class _OffByOne(Plain):
    name = "off by one"

    def apply(self, work: Work) -> Applied | None:
        other = Work(gemm(33, 48, 39), work.machine)  # of another task
        return super().apply(other)


class _OffByOneSuite(TemplateSuite):
    template = _OffByOne()

    def tasks(self) -> Sequence[Task]:
        return (gemm(),)


@needs_compiler
class TestTensorCores(TemplateSuite):
    template = TensorCores()
    machine = H200

    def tasks(self) -> Sequence[Task]:
        return (gemm(dtype=DType.F16),)


@needs_compiler
class TestStrips(TemplateSuite):
    template = Strips()
    machine = H200

    def tasks(self) -> Sequence[Task]:
        x = Inputs()
        return (x.task(apply("tanh", x(640))),)


class _NoEpilogue:
    """One for GPUs that forgets what follows the product."""

    name = TensorCores.name

    def apply(self, work: Work) -> Applied | None:
        x = Inputs()
        left, right = x(33, 40, dtype=DType.F16), x(40, 48, constant=True, dtype=DType.F16)
        task = x.task(apply("add", apply("matmul", left, right), x(48, constant=True, dtype=DType.F16)))
        return TensorCores().apply(GpuWork(task, H200))


class _NoEpilogueSuite(TestTensorCores):
    template = _NoEpilogue()  # type: ignore[assignment]


@needs_compiler
def test_a_template_for_gpus_that_is_wrong_fails_without_a_gpu() -> None:
    assert set(failing(_NoEpilogueSuite())) == {"test_every_config_computes_the_task"}
    with pytest.raises(WrongResult):
        _NoEpilogueSuite().test_every_config_computes_the_task()


def failing(suite: object) -> Iterator[str]:
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except Exception:
                yield name


def test_what_breaks_a_promise_fails() -> None:
    assert "test_a_small_space_is_asked_for_entirely_and_then_nothing_more" in set(failing(_ForgetfulSuite()))
    assert {"test_its_space_bears_its_name", "test_every_config_computes_the_task"} <= set(
        failing(_OffByOneSuite())
    )


@pytest.mark.skipif(bool(WRONG.missing(host())), reason="needs AVX2 and FMA")
def test_an_intrinsic_that_computes_something_else_fails() -> None:
    assert set(failing(_Subtracts())) == {"test_it_computes_what_it_is_declared_to"}
    with pytest.raises(AssertionError, match="wrong_8xf32 computes something else than"):
        _Subtracts().test_it_computes_what_it_is_declared_to()


def test_an_intrinsic_that_this_machine_lacks_is_skipped() -> None:
    with pytest.raises(SkipTest, match="lacks a-feature-of-tomorrow"):
        _OfTomorrow().test_it_computes_what_it_is_declared_to()
    assert set(failing(_OfTomorrow())) == {"test_it_computes_what_it_is_declared_to"}


def test_a_suite_says_that_its_template_was_never_asked() -> None:
    class Nothing:
        name = "nothing"

        def apply(self, work: Work) -> None:
            return None

    suite = type("Suite", (TemplateSuite,), {"template": Nothing()})()
    with pytest.raises(AssertionError, match="declines every task of the suite"):
        suite.test_it_applies_to_something()


def test_a_suite_says_that_its_rule_had_no_part_in_anything() -> None:
    suite = type("Suite", (RuleSuite,), {"rule": Tiles2D(), "tasks": lambda self: (gemm(),)})()
    with pytest.raises(AssertionError, match="declines every task of the suite"):
        suite.test_it_applies_to_something()
