"""A candidate as tokens: true for programs of every kind, the same for the same, padded and masked."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.machines import ICE_LAKE
from tilewright.cost.accesses import statements_of
from tilewright.cost.analytical import Analytical
from tilewright.cost.features import FEATURES, GPU_FEATURES, statement_tokens
from tilewright.cost.instructions import ASSIGNMENT, COMPUTATION, MOVEMENT, NONE, of_kernel, of_knobs
from tilewright.cost.tokens import (
    MACHINE,
    MAX_STATEMENTS,
    TASK,
    TERMS,
    Tokeniser,
    category,
    joined,
    machine_numbers,
)
from tilewright.dataset.tasks import F16, F32, attention, conv, depthwise, gemm, reduction, softmax
from tilewright.dtypes import DType
from tilewright.errors import InternalError
from tilewright.hw.gpu import A100, H200
from tilewright.loops.ir import Program
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work


def of(task: object, machine: object, count: int = 40) -> tuple[Candidates, list[Config]]:
    candidates = Candidates.of(Work(task, machine))  # type: ignore[arg-type]
    return candidates, candidates.sample(Random(0), count)


@pytest.fixture(scope="module")
def on_gpu() -> tuple[Candidates, list[Config]]:
    return of(gemm(512, 768, 256, "relu", F16), replace(H200, libraries=("cublaslt",)))


def programs(
    candidates: Candidates, configs: list[Config], template: str, most: int
) -> list[tuple[Config, Program]]:
    chosen = [config for config in configs if config.template == template][:most]
    found = [(config, candidates.implementation(config).parts[0].body) for config in chosen]
    assert found
    return [(config, body) for config, body in found if isinstance(body, Program)]


def test_there_are_fifteen_features_of_movement_and_five_of_computation() -> None:
    assert (len(MOVEMENT), len(COMPUTATION), len(NONE.features())) == (15, 5, len(ASSIGNMENT))


def test_statements_of_a_gpu_program_are_bound_to_blocks_and_threads(
    on_gpu: tuple[Candidates, list[Config]],
) -> None:
    names = (*FEATURES, *GPU_FEATURES)
    for _, program in programs(*on_gpu, "sketch:tensorised", 2):
        rows = statement_tokens(program, MAX_STATEMENTS)
        assert rows.shape == (MAX_STATEMENTS, len(names)) and np.isfinite(rows).all()
        assert (rows[:, names.index("on_gpu")] == 1).all()
        blocks = 2 ** rows[:, names.index("block_x")] - 1
        assert blocks == pytest.approx(program.parallel_extent)
        assert rows[:, names.index("warp_instruction")].any()


def test_all_operations_of_a_contraction_are_on_tensor_cores(on_gpu: tuple[Candidates, list[Config]]) -> None:
    at = len(FEATURES) + GPU_FEATURES.index("tensor_operations")
    for config, program in programs(*on_gpu, "sketch:tensorised", 2):
        rows = statement_tokens(program, 10_000)
        operations = float((2 ** rows[:, at] - 1).sum())
        m, n = (-(-size // config.int(knob)) * config.int(knob) for size, knob in ((512, "bm"), (768, "bn")))
        assert operations == pytest.approx(2 * m * n * 256, rel=0.01)
        copied = float((2 ** rows[:, len(FEATURES)] - 1).sum())
        assert copied > 0 or config["stages"] == 1


def test_a_gpu_program_is_not_counted_as_one_for_a_processor(on_gpu: tuple[Candidates, list[Config]]) -> None:
    with pytest.raises(InternalError, match="expected a CPU program"):
        for _, program in programs(*on_gpu, "sketch:tensorised", 2):
            statements_of(program)


def test_an_assignment_by_knobs_is_the_kernels_own(on_gpu: tuple[Candidates, list[Config]]) -> None:
    candidates, configs = on_gpu
    same = (
        "left_fragment",
        "right_fragment",
        "result_fragment",
        "rows",
        "columns",
        "depth",
        "tensor_instruction",
    )
    seen = set()
    for config in configs:
        if config.template not in ("sketch:tensorised", "tensor-core-matmul") or len(seen) == 2:
            continue
        seen.add(config.template)
        made = of_kernel(candidates.implementation(config).parts[0].body)
        said = of_knobs(config.template, dict(config.values), DType.F16)
        assert {name: getattr(made, name) for name in same} == {name: getattr(said, name) for name in same}
    assert len(seen) == 2


def test_what_has_no_tensor_instruction_is_assigned_to_none() -> None:
    candidates, configs = of(softmax(64, 128, F32), ICE_LAKE, 2)
    assert of_kernel(candidates.implementation(configs[0]).parts[0].body) == NONE
    assert of_knobs("rows", {"unroll": 4}, DType.F32) == NONE


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (gemm(8, 8, 8, "gelu", F32), "contraction"),
        (conv(1, 8, 8, 8, 3, 1, F32), "convolution"),
        (depthwise(1, 8, 8, 3, 1, F32), "depthwise"),
        (attention(1, 2, 8, 8, False, F32), "attention"),
        (softmax(8, 8, F32), "normalisation"),
        (reduction("sum", 8, 8, 0, F32), "reduction"),
    ],
)
def test_the_category_of_a_task(task: object, name: str) -> None:
    assert category(task) == name  # type: ignore[arg-type]


def test_tokens_of_a_processors_candidates_are_padded_and_masked() -> None:
    candidates, configs = of(depthwise(1, 14, 32, 3, 1, F32), ICE_LAKE)
    model = Analytical(candidates, 2)
    tokeniser = Tokeniser(model)
    tokens = tokeniser.tokens(configs)
    assert tokens.task.shape == (len(configs), len(TASK)) and tokens.machine.shape[1] == len(MACHINE)
    assert tokens.terms.shape[1] == len(TERMS) and np.isfinite(tokens.terms).all()
    for at, config in enumerate(configs):
        assert tokens.knob_mask[at].sum() == 1 + len(config.values)
        assert not tokens.knobs[at][~tokens.knob_mask[at]].any()
    in_programs = [config in model.counted for config in configs]
    assert (tokens.statement_mask.any(axis=1) == in_programs).all() and any(in_programs)
    both = joined([tokens, tokens[slice(0, 3)]])
    assert len(both) == len(configs) + 3
    np.testing.assert_array_equal(both.knobs[: len(configs)], tokens.knobs)


def test_a_machine_token_tells_machines_apart_and_follows_the_threads() -> None:
    found = [
        machine_numbers(machine, threads).features()
        for machine, threads in ((ICE_LAKE, 1), (ICE_LAKE, 2), (A100, 0), (H200, 0))
    ]
    for one in range(len(found)):
        for other in range(one):
            assert not np.array_equal(found[one], found[other])
    assert all(len(each) == len(MACHINE) and np.isfinite(each).all() for each in found)
