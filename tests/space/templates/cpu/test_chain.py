"""Chains by blocks of rows are right for random sizes, ends and configs, and what they cannot compute has a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from tests.programs import AVX2
from tests.space.chains import POINTWISE, After, Case, NormCase, random_case, random_norms
from tests.space.checked import Inputs, error
from tests.space.templates.cpu.chains import Chain
from tilewright.dtypes import DType
from tilewright.graph import chain as graph_chain
from tilewright.graph.chain import chain_of
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.verify import verify_program
from tilewright.space.chain import subtasks_of
from tilewright.space.template import Terms, Work
from tilewright.space.templates.cpu.chain import AppliedRowBlockChain, RowBlockChain
from tilewright.tune.choose import choose, descend
from tilewright.tune.oracle import PredictedCosts

F32 = DType.F32
NONE = After(bias=False, activation="none")


def applied_to(task: Task, machine: CpuMachine | None = None) -> AppliedRowBlockChain:
    found = RowBlockChain().apply(Work(task, machine or host()))
    assert isinstance(found, AppliedRowBlockChain)
    return found


def checked(seed: int) -> bool:
    """Whether a random chain with a random config is taken; it is right if it is. Every third one has a norm."""
    rng = Random(seed)
    case: Case | NormCase = (
        random_norms(rng, dtypes=(F32,)) if seed % 3 == 2 else random_case(rng, dtypes=(F32,))
    )
    machine = host() if seed % 3 else replace(host(), vector_bytes=32, vector_registers=16)
    work = Work(case.task(), machine)
    applied = RowBlockChain().apply(work)
    if applied is None:
        assert isinstance(case, Case), RowBlockChain().refusal(work)
        assert 1 in case.widths or case.rows == 1, RowBlockChain().refusal(work)
        return False
    config = applied.space.sample(rng)
    assert config is not None, case.name
    assert error(applied.program(config), work.task) < 1e-5, (case.name, str(config))
    terms = applied.terms(config)
    assert isinstance(terms, Terms) and terms.arithmetic > 0 and terms.iterations > 0
    return True


def test_random_chains_are_right() -> None:
    assert sum(map(checked, range(1000, 1005))) >= 4


@pytest.mark.slow
def test_many_random_chains_are_right() -> None:
    assert sum(map(checked, range(2000, 2200))) >= 180


CASES: list[Case | NormCase] = [
    NormCase(130, 96, 80, "layer_norm", "", After(activation="gelu"), dtype=F32),
    NormCase(65, 40, 72, "", "rms_norm", After(activation="none", residual=True), dtype=F32),
    NormCase(40, 35, 33, "softmax", "softmax", kind="matmul", more=True, dtype=F32),
    Case(512, (96, 256, 96), (After(activation="gelu"), After(activation="none", residual=True)), dtype=F32),
    Case(0, (3, 48, 48), image=(56, 56), stride=2, dtype=F32),
    Case(130, (65, 33, 17), (After(residual=True),) * 2, "matmul", dtype=F32),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_config_of_the_model_is_right(case: Case | NormCase) -> None:
    applied = applied_to(case.task())
    if isinstance(case, Case):
        assert applied.chain.widths == case.widths[1:]
    else:
        assert len(applied.chain.gemms) == 1 < len(applied.chain.parts)
    found = descend(applied, applied.work)
    assert found is not None
    assert error(applied.program(found[1]), applied.work.task) < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_a_narrower_machine_has_configs_for_its_registers(seed: int) -> None:
    applied = applied_to(CASES[seed].task(), AVX2)
    rng = Random(0)
    for _ in range(5):
        config = applied.space.sample(rng)
        assert config is not None
        verify_program(applied.program(config))


def test_it_is_the_only_template_of_two_linear_layers() -> None:
    work = Work(CASES[3].task(), host())
    assert choose(work).config.template == "row_block_chain"
    assert PredictedCosts(host()).can_compute(work.task)


def test_a_norm_after_a_narrow_gemm_is_predicted_to_gain_and_one_before_it_not() -> None:
    costs = PredictedCosts(AVX2)

    def ratio(case: NormCase) -> float:
        chain = chain_of(case.task())
        assert isinstance(chain, graph_chain.Chain)
        separate = sum(costs.seconds(sub.task) for sub in subtasks_of(chain))
        return separate / costs.seconds(case.task())

    assert ratio(NormCase(3136, 96, 96, "", "layer_norm", After(residual=True), dtype=F32)) > 1.0
    assert ratio(NormCase(16384, 64, 64, dtype=F32)) < 1.0
    assert ratio(NormCase(128, 768, 2304, dtype=F32)) < 1.0


# -- refusals ---------------------------------------------------------------------------------------------------------


def with_a_window_after_the_first() -> Task:
    x = Inputs()
    first = apply("conv", x(1, 5, 5, 8), x(1, 1, 8, 8, constant=True), **POINTWISE)
    return x.task(apply("conv", first, x(3, 3, 8, 8, constant=True), **POINTWISE))


def with_a_stride_after_the_first() -> Task:
    x = Inputs()
    first = apply("conv", x(1, 6, 6, 8), x(1, 1, 8, 8, constant=True), **POINTWISE)
    return x.task(apply("conv", first, x(1, 1, 8, 8, constant=True), **{**POINTWISE, "stride": (2, 2)}))


def with_another_weight() -> Task:
    x = Inputs()
    first = apply("relu", apply("matmul", x(16, 8), x(8, 24, constant=True)))
    return x.task(apply("matmul", first, x(24, 8)))


def with_one_weight_twice() -> Task:
    x = Inputs()
    weight = x(16, 16, constant=True)
    return x.task(apply("matmul", apply("relu", apply("matmul", x(8, 16), weight)), weight))


def with_an_intermediate_that_is_read_twice() -> Task:
    x = Inputs()
    first = apply("relu", apply("matmul", x(16, 8), x(8, 8, constant=True)))
    return x.task(apply("add", apply("matmul", first, x(8, 8, constant=True)), first))


def with_steps_that_leave_gaps() -> Task:
    x = Inputs()
    apart = {**POINTWISE, "stride": (2, 2), "dilation": (3, 3)}
    first = apply("conv", apply("relu", x(1, 25, 25, 8)), x(3, 3, 8, 8, constant=True), **apart)
    return x.task(apply("conv", first, x(1, 1, 8, 8, constant=True), **POINTWISE))


def with_a_norm_of_columns() -> Task:
    x = Inputs()
    return x.task(apply("matmul", apply("softmax", x(16, 8), axis=0), x(8, 8, constant=True)))


def with_a_norm_of_heads() -> Task:
    x = Inputs()
    heads = apply("softmax", x(16, 2, 8), axis=2)
    return x.task(apply("linear", apply("reshape", heads, shape=(16, 16)), x(8, 16, constant=True)))


def batched() -> Task:
    x = Inputs()
    first = apply("relu", apply("matmul", x(3, 8, 16), x(3, 16, 8, constant=True)))
    return x.task(apply("matmul", first, x(3, 8, 8, constant=True)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Case(64, (32, 32, 32)).task, "32-bit floats"),
        (with_a_window_after_the_first, "reads other rows than the block computes"),
        (with_a_stride_after_the_first, "reads other rows than the block computes"),
        (with_another_weight, "not constant"),
        (with_one_weight_twice, "read elsewhere too"),
        (with_an_intermediate_that_is_read_twice, "the result of matmul 1 is read twice"),
        (batched, "batched"),
        (with_steps_that_leave_gaps, "the operand of relu+conv cannot be copied by blocks"),
        (
            Chain(1, 8, 8, 8, 32, 16).task,
            "pad+conv+add+clamp is not a GEMM or a convolution with a constant weight",
        ),
        (Case(64, (32, 32), dtype=F32).task, "fewer than two contractions"),
        (NormCase(64, 32, 32).task, "32-bit floats"),
        (with_a_norm_of_columns, "the norm"),
        (with_a_norm_of_heads, "reads other rows than the block computes"),
        (Case(64, (8, 40_000, 8), dtype=F32).task, "take at least 2560000 bytes for a block, of the"),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_reason(make: Callable[[], Task], reason: str) -> None:
    task = make()
    found = RowBlockChain().refusal(Work(task, AVX2))
    assert found is not None and reason in found
    applied = RowBlockChain().apply(Work(task, AVX2))
    assert applied is None or next(iter(applied.space.configs()), None) is None
    assert PredictedCosts(AVX2).refusal(task) == found
