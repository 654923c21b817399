"""Attention in one kernel against its oracle: every mask, odd sizes, operands in any order, any number of threads."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.space.checked import same_on_two_threads
from tilewright.dtypes import DType
from tilewright.graph.attention import fits_one_kernel
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.lower import lower_graph
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.verify import verify_program
from tilewright.measure.single import SingleKernel
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu.attention import Attention
from tilewright.te.interpret import interpret

MASKS = ("none", "bool", "key bool", "added", "added by key", "lowest", "blind")


@dataclass(frozen=True)
class Problem:
    heads: int
    shared: int  # heads of queries that share one of keys and values
    queries: int
    keys: int
    width: int
    values: int
    causal: bool
    mask: str
    order: str  # of the operands' axes: heads first, tokens first, or cut out of one tensor
    dtype: DType = DType.F32

    def operand(self, index: int, heads: int, length: int, width: int) -> tuple[list[Node], Node]:
        if self.order == "heads":
            x = input_node(index, TensorType((1, heads, length, width), self.dtype))
            return [x], x
        stored = heads * width + (5 if self.order == "cut" else 0)
        x = input_node(index, TensorType((1, length, stored), self.dtype))
        part = x
        if self.order == "cut":
            part = apply("slice", x, starts=(0, 0, 3), stops=(1, length, stored - 2), steps=(1, 1, 1))
        split = apply("reshape", part, shape=(1, length, heads, width))
        return [x], apply("permute", split, axes=(0, 2, 1, 3))

    def repeated(self, x: Node) -> Node:
        _, heads, length, width = x.shape
        wide = apply("reshape", x, shape=(1, heads, 1, length, width))
        wide = apply("broadcast_to", wide, shape=(1, heads, self.shared, length, width))
        return apply("reshape", wide, shape=(1, heads * self.shared, length, width))

    def task(self) -> Task:
        own = self.heads * self.shared
        shapes = [
            (own, self.queries, self.width),
            (self.heads, self.keys, self.width),
            (self.heads, self.keys, self.values),
        ]
        inputs, operands = [], []
        for index, shape in enumerate(shapes):
            more, operand = self.operand(index, *shape)
            inputs += more
            operands.append(self.repeated(operand) if index and self.shared > 1 else operand)
        if self.mask != "none":
            by_key = "key" in self.mask
            shape = (1, 1, 1 if by_key else self.queries, self.keys)
            kind = DType.BOOL if "bool" in self.mask or self.mask == "blind" else self.dtype
            inputs.append(input_node(3, TensorType(shape, kind)))
            operands.append(inputs[-1])
        result = apply("attention", *operands, causal=self.causal, scale=0.3)
        if self.order != "heads":
            result = apply("permute", result, axes=(0, 2, 1, 3))
        return Task(Graph(tuple(inputs), (result,)))

    def arrays(self, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        arrays: list[np.ndarray] = [rng.standard_normal(x.shape) * 2 for x in self.task().graph.inputs]
        if self.mask in ("bool", "key bool"):
            arrays[3] = arrays[3] > -1
        elif self.mask == "blind":
            arrays[3] = np.broadcast_to(rng.random((self.queries, 1)) > 0.5, arrays[3].shape)
        elif self.mask == "lowest":
            arrays[3] = np.where(arrays[3] > 0, 0, float(np.finfo(np.float32).min))
        elif self.mask == "added":
            arrays[3] = np.where(arrays[3] > 3, -np.inf, arrays[3])
        inputs = self.task().graph.inputs
        return [array.astype(x.dtype.numpy) for array, x in zip(arrays, inputs, strict=True)]


SMALL_CACHES = replace(host(), caches=replace(host().caches, l1=3 << 10, l2=8 << 10, l2_cores=1))


def applied(task: Task, machine: CpuMachine | None = None, numerics: str = "relaxed") -> Applied:
    found = Attention().apply(Work(task, machine or host(), numerics))
    assert found is not None
    return found


def run(
    problem: Problem, seed: int, *, changed: Any = None, machine: CpuMachine | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(what the kernel of some config gives, the oracle's result)"""
    task, arrays = problem.task(), problem.arrays(seed)
    if changed is not None:
        changed(arrays)
    choices = applied(task, machine)
    config = random.Random(seed).choice(list(choices.space.configs()))
    program = choices.program(config)
    verify_program(program)
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    (expected,) = evaluate(task.graph, arrays)
    return same_on_two_threads(program, flat).reshape(expected.shape), expected


def error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - expected) / max(np.linalg.norm(expected), 1e-30))


problems = st.builds(
    Problem,
    heads=st.integers(1, 3),
    shared=st.integers(1, 2),
    queries=st.integers(1, 70),
    keys=st.integers(1, 130),
    width=st.integers(1, 40),
    values=st.integers(1, 70),
    causal=st.booleans(),
    mask=st.sampled_from(MASKS),
    order=st.sampled_from(("heads", "tokens", "cut")),
)


@settings(max_examples=6, deadline=None)
@given(problems, st.integers(0, 1000), st.sampled_from((host(), SMALL_CACHES)))
def test_it_is_what_the_oracle_says(problem: Problem, seed: int, machine: CpuMachine) -> None:
    """Where caches are small, values are summed in blocks."""
    got, expected = run(problem, seed, machine=machine)
    assert np.isfinite(got).all()
    assert error(got, expected) < 2e-6


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("mask", ["none", "added"])
def test_halves_are_computed_in_f32(dtype: DType, mask: str) -> None:
    got, expected = run(Problem(2, 1, 33, 50, 24, 20, False, mask, "tokens", dtype), 1)
    assert error(got, expected) < (6e-4 if dtype is DType.F16 else 5e-3)


def nan_in(array: int) -> Any:
    def change(arrays: list[np.ndarray]) -> None:
        arrays[array].reshape(-1)[7] = np.nan

    return change


@pytest.mark.parametrize("array", [0, 1, 2])
def test_nan_reaches_what_it_should(array: int) -> None:
    got, expected = run(Problem(2, 1, 20, 70, 8, 16, False, "none", "heads"), 3, changed=nan_in(array))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    seen = np.isfinite(expected)
    assert error(got[seen], expected[seen]) < 2e-6


def test_scores_of_any_size_do_not_overflow() -> None:
    def large(arrays: list[np.ndarray]) -> None:
        arrays[0] *= 100
        arrays[1] *= 100

    got, expected = run(Problem(1, 1, 40, 100, 16, 16, False, "none", "heads"), 5, changed=large)
    assert error(got, expected) < 1e-4  # scores of thousands are rounded to thousandths


def in_one_block(problem: Problem, arrays: list[np.ndarray]) -> np.ndarray:
    choices = applied(problem.task())
    knobs: dict[str, Any] = {"vectors": 2, "keys": problem.keys, "stage": False, "shared_blocks": 1}
    program = choices.program(Config.of("attention", knobs))
    verify_program(program)
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
    return same_on_two_threads(program, flat).reshape(1, problem.heads, problem.queries, problem.values)


@pytest.mark.parametrize("shift", [-1000.0, -80.0, -30.0, 30.0, 80.0, 1000.0])
def test_what_all_scores_share_is_nothing(shift: float) -> None:
    """Also where powers of two of the scores themselves would be too large, or too small."""
    problem = Problem(2, 1, 40, 75, 16, 16, False, "added by key", "heads")
    arrays = problem.arrays(4)
    (expected,) = evaluate(problem.task().graph, arrays)
    arrays[3] += np.float32(shift)
    assert error(in_one_block(problem, arrays), expected) < 2e-6 + 1e-6 * abs(shift)


@pytest.mark.parametrize("scale", [0.0, 1e3, np.inf])
def test_a_query_with_other_scores_leaves_those_beside_it_alone(scale: float) -> None:
    problem = Problem(1, 1, 40, 75, 16, 16, False, "none", "heads")
    arrays = problem.arrays(6)
    plain = in_one_block(problem, arrays)
    arrays[0][0, 0, 7] *= np.float32(scale)
    got = in_one_block(problem, arrays)
    beside = np.arange(problem.queries) != 7
    assert error(got[:, :, beside], plain[:, :, beside].astype(np.float64)) < 2e-6
    (expected,) = evaluate(problem.task().graph, arrays)
    assert not np.isfinite(scale) or error(got[:, :, 7], expected[:, :, 7]) < 1e-4


def test_configs_compute_the_same() -> None:
    problem = Problem(1, 1, 50, 70, 20, 24, True, "none", "tokens")
    task, arrays = problem.task(), problem.arrays(0)
    (expected,) = evaluate(task.graph, arrays)
    choices = applied(task)
    for config in random.Random(0).sample(list(choices.space.configs()), 8):
        assert choices.terms(config).arithmetic > 0
        kernel = SingleKernel(choices.program(config), host(), threads=1)
        assert error(kernel([array.reshape(-1) for array in arrays]).reshape(expected.shape), expected) < 2e-6


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16])
def test_blocks_that_share_what_is_staged_give_the_same_bits(dtype: DType) -> None:
    problem = Problem(2, 1, 40, 50, 20, 24, True, "none", "cut", dtype)
    arrays = [array.reshape(-1) for array in problem.arrays(1)]
    choices = applied(problem.task())
    knobs: dict[str, Any] = {"vectors": 1, "keys": 32, "stage": True}
    found = [
        SingleKernel(choices.program(Config.of("attention", {**knobs, "shared_blocks": n})), host())(arrays)
        for n in (1, 2, 4)  # of three blocks
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_only_what_is_staged_is_shared() -> None:
    space = applied(Problem(2, 1, 40, 48, 16, 16, False, "none", "heads").task()).space
    for config in space.configs():
        blocks = -(-40 // (config.int("vectors") * host().lanes(DType.F32)))
        assert config["shared_blocks"] == 1 or (config["stage"] and config.int("shared_blocks") < 2 * blocks)


def test_strict_numerics_and_other_work_are_declined() -> None:
    task = Problem(1, 1, 4, 5, 6, 7, False, "none", "heads").task()
    assert Attention().apply(Work(task, host(), "strict")) is None
    x = input_node(0, TensorType((4, 5), DType.F32))
    assert Attention().apply(Work(Task(Graph((x,), (apply("relu", x),))), host())) is None
    assert not fits_one_kernel(Problem(1, 1, 4, 5, 6, 7, False, "none", "heads", DType.F64).task().output)


def test_its_definition_is_the_oracles() -> None:
    problem = Problem(1, 2, 3, 4, 5, 2, True, "blind", "heads")
    task, arrays = problem.task(), problem.arrays(2)
    output, inputs = lower_graph(task.graph)
    (expected,) = evaluate(task.graph, arrays)
    np.testing.assert_allclose(interpret(output, dict(zip(inputs, arrays, strict=True))), expected, rtol=1e-5)
