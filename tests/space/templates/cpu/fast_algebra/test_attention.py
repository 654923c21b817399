"""Attention whose products are taken in pairs, against its oracle: whatever the sizes of its operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machines import ZEN_4
from tests.space.checked import same_on_two_threads
from tests.space.templates.cpu.test_attention import MASKS, Problem, applied, error
from tilewright.dtypes import DType
from tilewright.graph.attention import attention_in
from tilewright.graph.oracle import evaluate
from tilewright.hw import CpuMachine, host
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.measure.single import SingleKernel
from tilewright.measure.validation import make_validation
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.attention import Operands
from tilewright.space.templates.cpu.attention_nest import AttentionTiling
from tilewright.space.templates.cpu.fast_algebra.attention import PairedAttention
from tilewright.space.templates.cpu.fast_algebra.attention_nest import PairedAttentionNest

LANES = host().lanes(DType.F32)
Change = Callable[[list[np.ndarray]], None]


def program_of(problem: Problem, vectors: int = 2, together: int = 1) -> Program:
    graph = problem.task().graph
    node = attention_in(graph)
    assert node is not None
    shape = AttentionTiling(vectors, problem.keys, problem.dtype.is_half, together)
    program = PairedAttentionNest(Operands(graph, node), host(), shape).program(Config.of("attention", {}))
    verify_program(program)
    return program


def paired(
    problem: Problem, arrays: list[np.ndarray], vectors: int = 2, together: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """(what the kernel gives, the oracle's result)"""
    program = program_of(problem, vectors, together)
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    (expected,) = evaluate(problem.task().graph, arrays)
    return same_on_two_threads(program, flat).reshape(expected.shape), expected


problems = st.builds(
    Problem,
    heads=st.integers(1, 3),
    shared=st.integers(1, 2),
    queries=st.integers(1, 70),
    keys=st.integers(LANES, 130),
    width=st.sampled_from((2 * LANES, 4 * LANES)),
    values=st.sampled_from((LANES, 3 * LANES)),
    causal=st.booleans(),
    mask=st.sampled_from(MASKS),
    order=st.sampled_from(("heads", "tokens", "cut")),
)


@settings(max_examples=10, deadline=None)
@given(problems, st.integers(1, 5), st.sampled_from((1, 2, 4)), st.integers(0, 1000))
def test_it_is_what_the_oracle_says(problem: Problem, vectors: int, together: int, seed: int) -> None:
    got, expected = paired(problem, problem.arrays(seed), vectors, together)
    assert np.isfinite(got).all()
    assert error(got, expected) < 2e-6


PROBLEM = Problem(2, 1, 45, 75, 4 * LANES, 2 * LANES, False, "none", "heads")


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_halves_are_computed_in_f32(dtype: DType) -> None:
    problem = replace(PROBLEM, mask="added", order="tokens", dtype=dtype)
    got, expected = paired(problem, problem.arrays(1))
    assert error(got, expected) < (6e-4 if dtype is DType.F16 else 5e-3)


def of_any_size(array: int) -> Change:
    """Rows of very different size; queries and keys are small enough for scores that are not rounded to nothing."""

    def change(arrays: list[np.ndarray]) -> None:
        rows = arrays[array]
        largest = 3 if array == 2 else 0
        rows *= 10.0 ** np.random.default_rng(3).uniform(-6, largest, (*rows.shape[:-1], 1))

    return change


def with_means(arrays: list[np.ndarray]) -> None:
    for array in arrays[:3]:
        array += np.float32(2)
    arrays[0] *= np.float32(0.1)


@pytest.mark.parametrize("change", [of_any_size(0), of_any_size(1), of_any_size(2), with_means])
def test_sizes_and_means_cost_no_digits(change: Change) -> None:
    arrays = [array.astype(np.float32) for array in PROBLEM.arrays(2)]
    change(arrays)
    got, expected = paired(PROBLEM, arrays)
    assert error(got, expected) < 3e-6


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e12])
def test_values_of_any_size(scale: float) -> None:
    arrays = PROBLEM.arrays(2)
    arrays[2] = (arrays[2] * scale).astype(np.float32)
    got, expected = paired(PROBLEM, arrays)
    assert error(got, expected) < 2e-6


@pytest.mark.parametrize("array", [1, 2])
@pytest.mark.parametrize("mask", ["key bool", "added by key"])
def test_what_a_masked_key_holds_is_nothing_to_others(array: int, mask: str) -> None:
    problem = replace(PROBLEM, mask=mask)
    arrays = problem.arrays(5)
    hidden = np.arange(problem.keys) % 3 == 1
    seen = ~hidden if mask == "key bool" else np.where(hidden, -np.inf, 0.0).astype(np.float32)
    arrays[3] = np.broadcast_to(seen, arrays[3].shape).copy()
    plain, expected = paired(problem, arrays)
    arrays[array][:, :, hidden] = np.float32(1e10)
    got, _ = paired(problem, arrays)
    assert error(plain, expected) < 2e-6
    assert error(got, expected) < 2e-6


@pytest.mark.parametrize("array", [0, 1, 2])
def test_nan_reaches_what_it_should(array: int) -> None:
    arrays = PROBLEM.arrays(3)
    arrays[array][0, 0, 7, 5] = np.nan
    got, expected = paired(PROBLEM, arrays)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    seen = np.isfinite(expected)
    assert error(got[seen], expected[seen]) < 2e-6


@pytest.mark.parametrize("array", [0, 1, 2])
def test_rows_of_zeros(array: int) -> None:
    arrays = PROBLEM.arrays(3)
    arrays[array][0, :, 3:9] = 0
    got, expected = paired(PROBLEM, arrays)
    assert error(got, expected) < 2e-6


@pytest.mark.parametrize("shift", [-1000.0, -80.0, 80.0, 1000.0])
def test_what_all_scores_share_is_nothing(shift: float) -> None:
    problem = replace(PROBLEM, mask="added by key")
    arrays = problem.arrays(4)
    (expected,) = evaluate(problem.task().graph, arrays)
    arrays[3] += np.float32(shift)
    got, _ = paired(problem, arrays)
    assert error(got, expected) < 2e-6 + 1e-6 * abs(shift)


def test_scores_of_any_size_do_not_overflow() -> None:
    arrays = PROBLEM.arrays(5)
    arrays[0] *= np.float32(100)
    arrays[1] *= np.float32(100)
    got, expected = paired(PROBLEM, arrays)
    assert error(got, expected) < 1e-4  # scores of thousands are rounded to thousandths


@pytest.mark.parametrize(
    "problem",
    [PROBLEM, replace(PROBLEM, queries=70, keys=197, order="tokens"), replace(PROBLEM, mask="added by key")],
)
def test_it_passes_its_validation(problem: Problem) -> None:
    """As it is drawn when candidates are measured: what fails there is never chosen."""
    task = problem.task()
    kernel = SingleKernel(program_of(problem), host())
    for seed in range(2):
        for case in make_validation(task, "relaxed", seed).cases:
            case.error(kernel([array.reshape(-1) for array in case.inputs]))


def test_only_where_adders_are_free_and_digits_may_be_lost_is_it_a_choice() -> None:
    def choices(machine: CpuMachine, numerics: str = "relaxed") -> set[object]:
        found = PairedAttention().apply(Work(PROBLEM.task(), machine, numerics))
        assert found is not None
        return {config["paired"] for config in found.space.configs()}

    assert choices(replace(host(), cpu="nobody-knows")) == {False}
    assert choices(ZEN_4, "fast") == {False}
    assert choices(host()) == ({False, True} if host().independent_adds else {False})


def test_without_pairs_it_is_the_plain_template() -> None:
    task = PROBLEM.task()
    plain, found = applied(task, ZEN_4), PairedAttention().apply(Work(task, ZEN_4, "relaxed"))
    assert found is not None and found.space.template == plain.space.template
    configs = [config for config in found.space.configs() if not config["paired"]]
    same = [Config.of(config.template, dict(config.values[:-1])) for config in configs]
    assert same == list(plain.space.configs())
    assert found.program(configs[0]).body == plain.program(same[0]).body
    assert found.terms(configs[0]) == plain.terms(same[0])
