"""A candidate as tokens: true for programs of every kind, the same for the same, padded and masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.machines import ICE_LAKE
from tests.programs import AVX2
from tilewright.cost import vocabulary
from tilewright.cost.accesses import statements_of
from tilewright.cost.analytical import Analytical
from tilewright.cost.features import FEATURES, GPU_FEATURES, statement_tokens
from tilewright.cost.instructions import ASSIGNMENT, COMPUTATION, MOVEMENT, NONE, of_knobs
from tilewright.cost.tokens import (
    MACHINE,
    MAX_STATEMENTS,
    TASK,
    TERMS,
    VERSION,
    Tokeniser,
    category,
    joined,
    knob_features,
    knobs_of,
    machine_numbers,
    task_features,
    terms_features,
)
from tilewright.dataset.tasks import F16, F32, attention, conv, depthwise, gemm, reduction, softmax
from tilewright.dtypes import DType
from tilewright.errors import InternalError
from tilewright.hw import Machine
from tilewright.hw.gpu import A100, H200
from tilewright.loops.ir import Program, Warp, walk_stmts
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.space.template import Work
from tilewright.space.terms import Counted, GpuTerms, Roofline, Terms


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
    for config, program in programs(*on_gpu, "sketch:tensorised", 2):
        warps = [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Warp)]
        instruction = next(warp.instruction for warp in warps if "mma" in warp.instruction.name)
        result, left, right = instruction.fragments
        said = of_knobs(config.template, dict(config.values), DType.F16)
        assert said.tensor_instruction and said.depth == left.tensor.shape[-1]
        assert (said.left_fragment, said.right_fragment) == (left.size, right.size)
        assert said.result_fragment == result.size
        assert said.matrix_loads == any("ldmatrix" in warp.instruction.name for warp in warps)


def test_what_has_no_tensor_instruction_is_assigned_to_none() -> None:
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
    assert not tokens.statement_mask.any()
    lowered = Tokeniser(model, statements=True).tokens(configs[:3])
    assert lowered.statement_mask.any(axis=1).all()
    both = joined([tokens, tokens[slice(0, 3)]])
    assert len(both) == len(configs) + 3
    np.testing.assert_array_equal(both.knobs[: len(configs)], tokens.knobs)


def described() -> list[tuple[str, Candidates, list[Config]]]:
    on_cpu = replace(AVX2, cores=2)
    on_gpu = replace(H200, libraries=())
    cases = (
        ("gemm as for AVX2", gemm(64, 96, 128, "relu", F32), on_cpu),
        ("convolution as for AVX2", conv(1, 14, 32, 32, 3, 1, F32), on_cpu),
        ("depthwise as for AVX2", depthwise(1, 14, 32, 3, 1, F32), on_cpu),
        ("attention as for AVX2", attention(1, 2, 64, 32, False, F32), on_cpu),
        ("softmax as for AVX2", softmax(64, 128, F32), on_cpu),
        ("gemm as for an H200", gemm(512, 768, 256, "relu", F16), on_gpu),
        ("convolution as for an H200", conv(1, 14, 32, 32, 3, 1, F16), on_gpu),
        ("attention as for an H200", attention(1, 2, 128, 64, False, F16), on_gpu),
        ("sum as for an H200", reduction("sum", 512, 768, 1, F32), on_gpu),
    )
    return [(name, *of(task, machine, 60)) for name, task, machine in cases]


def test_no_two_tokens_of_a_config_have_the_same_number() -> None:
    known = len(vocabulary.TEMPLATES) + len(vocabulary.KNOBS)
    assert known == len({*vocabulary.TEMPLATES}) + len({*vocabulary.KNOBS})
    seen = set()
    for _, candidates, configs in described():
        for config in configs:
            numbers, _ = knobs_of(candidates.of_config(config).space, config)
            assert len(set(numbers)) == len(numbers) and max(numbers) < vocabulary.BUCKETS
            names = {name for name, _ in config.values}
            seen |= names
            assert names <= {
                *vocabulary.KNOBS,
                *vocabulary.UNTRAINED,
            }  # no other knob of Tilewright is hashed
    assert {"bk", "mapping", "bn", "rows", "vectors", *vocabulary.UNTRAINED} <= seen
    assert not {*vocabulary.UNTRAINED} & {*vocabulary.KNOBS}


def test_knobs_of_others_have_numbers_of_their_own() -> None:
    names = [f"BLOCK_{at}" for at in range(vocabulary.OTHER_KNOBS)]
    numbers = vocabulary.of_knobs([*names, "bm", "bn"])
    assert len(set(numbers)) == len(numbers)
    assert vocabulary.of_knobs(names[:3]) == numbers[:3]
    assert max(vocabulary.of_knobs([*names, "one more"])) < vocabulary.BUCKETS


def test_what_a_value_says_does_not_depend_on_its_place() -> None:
    flags, reversed_flags = Knob("fused", (False, True), ordered=False), Knob("fused", (True, False))
    for value in (False, True):
        found = knob_features(flags, value)
        np.testing.assert_array_equal(found, knob_features(reversed_flags, value))
        assert (found[0], found[4]) == (value, value)
    tiles = Knob("tile0", ("", "4x2", "6x2"), ordered=False)
    empty, small, large = (knob_features(tiles, value) for value in tiles.choices)
    assert (empty[4], small[4], large[4]) == (0, 1, 1) and 0 == empty[2] < small[2] < large[2]
    assert knob_features(Knob("bm", (16, 64)), 64)[5] == 1


SPACES: tuple[tuple[Space, dict[str, Value]], ...] = tuple(
    (Space(template, tuple(Knob(name, choices) for name, choices in knobs), lambda values: True), values)
    for template, knobs, values in (
        (
            "sketch:tensorised",
            (("mapping", (0, 1)), ("bm", (16, 64)), ("bk", (32, 64)), ("fused", (True, False))),
            {"mapping": 1, "bm": 64, "bk": 32, "fused": False},
        ),
        ("separable", (("expand", ("",)), ("project", ("4x2", "6x2"))), {"expand": "", "project": "6x2"}),
        (
            "a kernel of another project",
            (("BLOCK_M", (32, 96)), ("BLOCK_N", (8, 9, 10)), ("layout", ("rows", "columns"))),
            {"BLOCK_M": 96, "BLOCK_N": 9, "layout": "columns"},
        ),
    )
)
COUNTED: tuple[tuple[Counted, Machine], ...] = (
    (Terms(1e6, 2e5, 3e4, 4e3, 5e5, 6e4, 7e3, 8e2, iterations=9, scalar=10.0), AVX2),
    (GpuTerms(300, 128, 96, 49152, 24, 3, 4e6, 5e3, 6e2, 7e5, 8e4, 9e6, 1e3, 2e6, 3e3, cluster=2), H200),
    (Roofline(1e9, 2e6, busy=0.5, is_call=True, launches=2), H200),
)


def test_features_change_only_with_their_version(golden: Callable[[str, str], None]) -> None:
    """If this fails, raise `tokens.VERSION`, train anew, and update the golden file: the shipped weights are made for
    exactly these features."""
    lines = [f"version {VERSION}, {vocabulary.BUCKETS} numbers of names", *vocabulary.TEMPLATES]
    lines.append(" ".join(vocabulary.KNOBS))
    for space, values in SPACES:
        config = Config.of(space.template, values)
        numbers, knobs = knobs_of(space, config)
        lines += [
            str(config),
            *(f"  {number}: {text(row)}" for number, row in zip(numbers, knobs, strict=True)),
        ]
    for task in (gemm(512, 768, 256, "relu", F16), depthwise(1, 14, 32, 3, 1, F32)):
        lines += [task.label, named(TASK, task_features(task))]
    for machine in (AVX2, H200):
        lines += [machine.describe(), named(MACHINE, machine_numbers(machine, 2).features())]
    for terms, machine in COUNTED:
        lines += [type(terms).__name__, named(TERMS, terms_features(terms, 1e-4, machine, 2))]
    golden("tokens.txt", "\n".join(lines) + "\n")


def text(row: np.ndarray) -> str:
    return " ".join(f"{value:.4g}" for value in row)


def named(names: Sequence[str], row: np.ndarray) -> str:
    return "  " + ", ".join(f"{name} {value:.4g}" for name, value in zip(names, row, strict=True))


def test_a_machine_token_tells_machines_apart_and_follows_the_threads() -> None:
    found = [
        machine_numbers(machine, threads).features()
        for machine, threads in ((ICE_LAKE, 1), (ICE_LAKE, 2), (A100, 0), (H200, 0))
    ]
    for one in range(len(found)):
        for other in range(one):
            assert not np.array_equal(found[one], found[other])
    assert all(len(each) == len(MACHINE) and np.isfinite(each).all() for each in found)
