"""A short run of `python -m tests.space.promise`, and what it is sensitive to."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.space import promise
from tests.space.checked import Inputs, stored_for
from tests.space.promise_bounds import DIRECT, PAIRED, PAIRED_FACTOR, RULES, WINOGRAD_FACTORS, Reference, Rule
from tests.space.promise_tasks import KINDS, drawn
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.measure.single import SingleKernel
from tilewright.runtime.paired import BOUND_FACTOR
from tilewright.runtime.winograd import amplification, guaranteed_factor
from tilewright.space.sketches import RULES as SKETCH_RULES
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu import TEMPLATES
from tilewright.space.templates.cpu.fast_algebra.paired import AppliedPaired
from tilewright.space.templates.cpu.fast_algebra.row_gemm import row_gemm_of
from tilewright.space.templates.cpu.fast_algebra.strassen import Strassen
from tilewright.space.templates.cpu.gemm import gemm_of
from tilewright.tune.choose import descend


def test_no_element_is_beyond_its_bound_and_everything_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    status = promise.main(["--kernels", "80", "--draws", "2", "--emulated", "3", "--jobs", "2"])
    assert status == 0, capsys.readouterr().out


def test_what_is_never_taken_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert promise.main(["--kernels", "1", "--draws", "1", "--emulated", "0"]) == 1
    assert "never taken: winograd on host" in capsys.readouterr().out


def test_every_template_and_rule_has_its_bound_or_a_reason_for_none() -> None:
    assert {template.name for template in TEMPLATES} == {*RULES, *promise.ONLY_RELAXED} - {
        "default",
        "sketch",
    }
    assert {rule.name for rule in SKETCH_RULES} == {
        *promise.CPU_RULES,
        *promise.OTHER_RULES,
        *promise.GPU_RULES,
    }


def test_the_constants_are_those_that_the_compiler_promises() -> None:
    assert PAIRED_FACTOR == BOUND_FACTOR
    for outputs, (factor, others) in WINOGRAD_FACTORS.items():
        assert 2 * factor == pytest.approx(amplification(outputs), rel=1e-3)
        assert 2 * factor * (64 + others) == pytest.approx(guaranteed_factor(outputs, 64), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_oracle_s(kind: str) -> None:
    for seed in range(3):
        task = KINDS[kind](Random(seed))
        arrays = drawn(task, seed)
        (expected,) = evaluate(task.graph, arrays, precise=True)
        found = Reference(task, arrays).result
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 * np.abs(expected).max())


def test_a_tile_s_own_inputs_bound_its_error() -> None:
    x = Inputs()
    attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    image, weight = x(1, 6, 6, 3), x(3, 3, 3, 5, constant=True)
    task = x.task(apply("conv", image, weight, layout="channels_last", **attrs))
    data = np.zeros((1, 6, 6, 3), np.float32)
    data[0, 0, 0, 1] = 7  # in the first tile of 2 x 2 results alone
    small = Reference(task, [data, np.ones((3, 3, 3, 5), np.float32)])
    allowed = small.allowed(Rule(0.0, 0.0, tile=2))
    assert (allowed[0, :2, :2] == allowed[0, 0, 0]).all() and allowed[0, 0, 0, 0] > 0
    assert not allowed[0, 2:].any() and not allowed[0, :, 2:].any()


def _matmul(rows: int, columns: int, k: int) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(rows, k), x(k, columns, constant=True)))


def _worst(task: Task, applied: Applied, config: Config, arrays: list[np.ndarray], rule: Rule) -> float:
    program = applied.program(config)
    reference = Reference(task, arrays)
    result = SingleKernel(program, host())(stored_for(program, arrays)).reshape(reference.result.shape)
    return float((np.abs(result - reference.result) / reference.allowed(rule)).max())


def test_what_has_no_such_bound_is_found() -> None:
    """One level of Strassen, which only relaxed numerics allow."""
    task = _matmul(64, 128, 256)
    work = Work(task, host(), "relaxed")
    applied = Strassen().apply(work)
    assert applied is not None
    found = descend(applied, work)
    assert found is not None
    assert _worst(task, applied, found[1], drawn(task, 0), PAIRED) > 1
    assert Strassen().apply(Work(task, host(), "fast")) is None


@pytest.mark.skipif(host().vector_registers < 32, reason="paired tiles want 32 vectors")
def test_paired_products_without_a_certificate_are_found() -> None:
    task = _matmul(24, 64, 64)
    arrays = drawn(task, 0)
    for numerics, within in (("fast", True), ("relaxed", False)):
        work = Work(task, host(), numerics)
        sums = row_gemm_of(gemm_of(work.formula))
        assert sums is not None
        applied = AppliedPaired(work, sums, max_uncertified=np.inf)
        assert (_worst(task, applied, next(applied.space.configs()), arrays, PAIRED) <= 1) == within


def test_winograd_s_algorithm_is_not_a_direct_convolution() -> None:
    """Its own bound is no excuse for the templates that multiply and add."""
    random = Random(0)
    task = KINDS["conv3"](Random(2))
    applied = promise.offered(task, "host")["winograd"]
    config = next(c for c in applied.space.configs() if c["outputs"] == 6)
    arrays = [random.choice((1.0, 1e6)) * array for array in drawn(task, 1)]
    assert _worst(task, applied, config, arrays, DIRECT) > 1
    assert _worst(task, applied, config, arrays, RULES["winograd"](config)) <= 1
