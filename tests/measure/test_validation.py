"""The validation: what is right passes, what is a little wrong does not, and it says so of any task."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.measure.shared_checks import load_validation, share_validation
from tilewright.measure.single import SingleKernel
from tilewright.measure.validation import CheckCase, Validation, WrongResult, make_validation
from tilewright.space.template import Work
from tilewright.tune.choose import choose


def matmul(dtype: DType = DType.F32) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(9, 40, dtype=dtype), x(40, 33, constant=True, dtype=dtype)))


def unary(op: str, *shape: int, dtype: DType = DType.F32, **attrs: object) -> Task:
    x = Inputs()
    return x.task(apply(op, x(*shape, dtype=dtype), **attrs))


def rounded(case: CheckCase, task: Task) -> np.ndarray:
    with np.errstate(all="ignore"):
        return case.reference.astype(task.output.dtype.numpy)


@pytest.mark.parametrize("dtype", [DType.F64, DType.F32, DType.F16, DType.BF16])
def test_the_answer_itself_passes_every_case(dtype: DType) -> None:
    task = matmul(dtype)
    validation = make_validation(task, "fast", seed=1)
    spread = [] if dtype is DType.F64 else ["magnitudes"]
    assert [case.name for case in validation.cases] == ["ordinary", "edges", "special", *spread]
    for case in validation.cases:
        assert case.error(rounded(case, task)) < 5e-3


@given(position=st.integers(0, 9 * 33 - 1), sign=st.sampled_from([-1, 1]))
@settings(max_examples=30)
def test_one_element_that_is_a_little_off_is_found(position: int, sign: int) -> None:
    task = matmul()
    case = make_validation(task, "fast", seed=2).ordinary
    result = rounded(case, task)
    result[position] += sign * 1e-3 * np.abs(case.reference).mean()
    with pytest.raises(WrongResult, match=f"element {position} "):
        case.error(result)


def test_many_that_are_off_by_less_are_found_by_their_norm() -> None:
    task = matmul()
    case = make_validation(task, "fast", seed=2).ordinary
    slightly = rounded(case, task) * np.float32(1 + 3e-6)
    assert 2e-6 < case.error(slightly) < 4e-6
    with pytest.raises(WrongResult):
        case.error(rounded(case, task) * np.float32(1 + 3e-5))


def test_what_was_not_written_is_found() -> None:
    task = matmul()
    case = make_validation(task, "fast", seed=2).ordinary
    result = rounded(case, task)
    result[7] = np.nan
    with pytest.raises(WrongResult, match="element 7 is nan"):
        case.error(result)


def test_edges_are_there() -> None:
    validation = make_validation(unary("exp", 40, 50), "fast", seed=3)
    (values,) = validation.cases[1].inputs
    assert (values == 0).any() and (values == 1000).any() and (values == -1000).any()
    assert (np.abs(values[values != 0]) < 1e-30).any() and (values == 1).sum() > 100
    assert not np.isfinite(validation.cases[2].inputs[0]).all()


def found_wrong(task: Task, compute: Callable[[np.ndarray], np.ndarray]) -> list[str]:
    """The cases that tell a way to compute, in single precision, from the right one."""
    found = []
    for case in make_validation(task, "fast", seed=3).cases:
        try:
            with np.errstate(all="ignore"):
                case.error(compute(case.inputs[0]).astype(np.float32).reshape(-1))
        except WrongResult:
            found.append(case.name)
    return found


def softmax_without(missing: slice) -> Callable[[np.ndarray], np.ndarray]:
    """A softmax whose maximum does not see some places."""

    def compute(x: np.ndarray) -> np.ndarray:
        seen = np.delete(x, missing, axis=1)
        powers = np.exp(x - (seen.max(axis=1, keepdims=True) if seen.size else 0))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    return compute


@pytest.mark.parametrize("rows", [6, 40])
def test_a_softmax_whose_maximum_misses_something_is_found(rows: int) -> None:
    task = unary("softmax", rows, 30, axis=1)
    assert "peaks" not in found_wrong(unary("exp", rows, 30), np.exp)
    assert found_wrong(task, softmax_without(slice(0, 0))) == []
    assert {"rows", "columns", "peaks"} <= set(found_wrong(task, softmax_without(slice(0, 30))))
    for position in (0, 7, 29):
        assert any(
            "peaks" in name for name in found_wrong(task, softmax_without(slice(position, position + 1)))
        )


def positions_of_peaks(task: Task, axis: int) -> dict[int, set[int]]:
    """Of each row along an axis."""
    found: dict[int, set[int]] = {}
    for case in make_validation(task, "fast", seed=3).cases:
        if case.name.startswith("peaks"):
            for row, position in enumerate(np.moveaxis(case.inputs[0], axis, -1).argmax(axis=-1).reshape(-1)):
                found.setdefault(row, set()).add(int(position))
    return found


@given(rows=st.integers(1, 12), positions=st.integers(1, 32), axis=st.integers(0, 1))
@settings(max_examples=10, deadline=None)
def test_in_short_rows_every_position_has_its_peak_in_every_row(rows: int, positions: int, axis: int) -> None:
    shape = (rows, positions) if axis == 1 else (positions, rows)
    found = positions_of_peaks(unary("softmax", *shape, axis=axis), axis)
    assert len(found) == rows and all(each == set(range(positions)) for each in found.values())


@pytest.mark.parametrize(("rows", "positions"), [(1, 1000), (5, 197), (3, 33)])
def test_in_long_rows_the_ends_and_every_lane_have_theirs(rows: int, positions: int) -> None:
    found = positions_of_peaks(unary("softmax", rows, positions, axis=1), 1)
    every = set().union(*found.values())
    assert {0, positions - 1} <= every and {position % 16 for position in every} == set(range(16))


def test_of_many_rows_each_of_those_at_once_has_every_position() -> None:
    found = positions_of_peaks(unary("softmax", 4000, 40, axis=1), 1)
    for first in range(4):
        assert set().union(*(found[row] for row in range(first, 4000, 4))) == set(range(40))


def attention_of(case: CheckCase, shape: tuple[int, ...], scale: float, keys: int) -> np.ndarray:
    """In single precision, of the first so many keys."""
    query, key, value = (array.reshape(shape) for array in case.inputs)
    with np.errstate(all="ignore"):
        scores = (query @ key[..., :keys, :].swapaxes(-1, -2)) * np.float32(scale)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result: np.ndarray = (weights @ value[..., :keys, :]) / weights.sum(axis=-1, keepdims=True)
    return result.reshape(-1)


@pytest.mark.parametrize("shape", [(4, 96, 64), (1, 197, 64)])
@pytest.mark.parametrize("seed", [1, 2])
def test_attention_is_held_to_what_single_precision_allows(shape: tuple[int, ...], seed: int) -> None:
    """Scores of thousands have lost the digits that decide between keys that are nearly alike."""
    x = Inputs()
    scale = shape[-1] ** -0.5
    task = x.task(apply("attention", x(*shape), x(*shape), x(*shape), causal=False, scale=scale))
    validation = make_validation(task, "fast", seed)
    for case in validation.cases:
        case.error(attention_of(case, shape, scale, shape[1]))
    found = []
    for case in validation.cases:
        try:
            case.error(attention_of(case, shape, scale, shape[1] - 1))
        except WrongResult:
            found.append(case.name)
    assert {"ordinary", "rows"} <= set(found)


@pytest.mark.parametrize("seed", [100, 102, 107])
def test_weights_of_products_are_held_to_what_single_precision_allows(seed: int) -> None:
    """Two scores that change alike leave the weights as they are, but two that are rounded do not."""
    x = Inputs()
    task = x.task(apply("softmax", apply("matmul", x(256, 96), x(96, 128, constant=True)), axis=1))
    for case in make_validation(task, "fast", seed).cases:
        data, weight = case.inputs
        with np.errstate(all="ignore"):
            scores = data.reshape(256, 96) @ weight.reshape(96, 128)
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            case.error((powers / powers.sum(axis=1, keepdims=True)).reshape(-1))


def test_a_variance_that_is_never_small_is_found() -> None:
    def normalised(x: np.ndarray, least: float) -> np.ndarray:
        apart = x - x.mean(axis=1, keepdims=True)
        return np.asarray(apart / np.sqrt(np.maximum((apart**2).mean(axis=1, keepdims=True), least) + 1e-5))

    task = unary("layer_norm", 8, 64, dims=1, eps=1e-5)
    assert found_wrong(task, lambda x: normalised(x, 0.0)) == []
    assert found_wrong(task, lambda x: normalised(x, 1e-4)) == ["rows"]


@pytest.mark.parametrize("shape", [(4, 19), (9, 64)])
@pytest.mark.parametrize("share", [-1.0, 0.99])
def test_a_variance_whose_digits_cancel_is_found(shape: tuple[int, int], share: float) -> None:
    def normalised(x: np.ndarray, share: float) -> np.ndarray:
        mean = x.mean(axis=1, keepdims=True)
        other = x - np.float32(share) * mean  # the same for any share, if nothing were rounded
        variance = (other * (x - mean)).mean(axis=1, keepdims=True)
        return np.asarray((x - mean) / np.sqrt(variance + np.float32(1e-5)))

    task = unary("layer_norm", *shape, dims=1, eps=1e-5)
    assert found_wrong(task, lambda x: normalised(x, 1.0)) == []
    assert any(name.startswith("far") for name in found_wrong(task, lambda x: normalised(x, share)))


def normalised_sum(dtype: DType) -> Task:
    x = Inputs()
    return x.task(
        apply("layer_norm", apply("add", x(9, 64, dtype=dtype), x(9, 64, dtype=dtype)), dims=1, eps=1e-5)
    )


def chosen_kernel(task: Task, numerics: str) -> Callable[[CheckCase], np.ndarray]:
    program = choose(Work(task, host(), numerics)).program
    kernel = SingleKernel(program, host(), numerics=numerics, threads=1)
    return lambda case: kernel([array.reshape(-1) for array in case.inputs])


# In the last there are sums of 1000 and others, whose rounding to 8 bits moves the mean of their row.
@pytest.mark.parametrize("seed", [1, 2, 3827132642])
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_strict_kernels_are_held_to_what_lies_between_operators_rounded(dtype: DType, seed: int) -> None:
    task = normalised_sum(dtype)
    validation = make_validation(task, "strict", seed)
    strict, fast = (chosen_kernel(task, numerics) for numerics in ("strict", "fast"))
    for case in validation.cases:
        case.error(strict(case))
    with pytest.raises(WrongResult, match="relative error"):
        validation.ordinary.error(fast(validation.ordinary))


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_a_rounding_that_strict_numerics_do_not_have_is_found(dtype: DType) -> None:
    task = normalised_sum(dtype)
    case = make_validation(task, "strict", seed=1).ordinary
    total = sum(array.reshape(9, 64).astype(np.float32) for array in case.inputs).astype(dtype.numpy)

    def normalised(apart_as: np.dtype) -> np.ndarray:
        wide = total.astype(np.float32)
        apart = (wide - wide.mean(axis=1, keepdims=True)).astype(apart_as).astype(np.float32)
        result = apart / np.sqrt((apart**2).mean(axis=1, keepdims=True) + np.float32(1e-5))
        return np.asarray(result.astype(dtype.numpy).reshape(-1))

    case.error(normalised(np.dtype(np.float32)))
    with pytest.raises(WrongResult, match="relative error"):
        case.error(normalised(dtype.numpy))


@pytest.mark.parametrize(
    ("between", "result"), [(DType.F16, DType.F32), (DType.BF16, DType.F32), (DType.BF16, DType.F16)]
)
def test_a_step_of_what_lies_between_is_no_error_in_a_finer_result(between: DType, result: DType) -> None:
    """Of so long sums some are so near the middle between two numbers of 16 bits that their order decides."""
    x = Inputs()
    product = apply("matmul", x(16, 1024, dtype=between), x(1024, 16, dtype=between))
    task = x.task(apply("cast", product, dtype=result))
    validation = make_validation(task, "strict", seed=1)
    strict, fast = (chosen_kernel(task, numerics) for numerics in ("strict", "fast"))
    for case in validation.cases:
        case.error(strict(case))
    with pytest.raises(WrongResult, match="relative error"):
        validation.ordinary.error(fast(validation.ordinary))


def test_what_is_linear_is_asked_no_more_than_it_needs() -> None:
    assert [case.name for case in make_validation(matmul(), "fast", seed=1).cases] == [
        "ordinary",
        "edges",
        "special",
        "magnitudes",
    ]


def test_nan_and_infinity_must_stand_where_the_oracle_has_them() -> None:
    task = unary("relu", 300)
    case = make_validation(task, "fast", seed=4).cases[2]
    result = rounded(case, task)
    (nan,) = np.nonzero(np.isnan(result))
    case.error(result)
    for value in (0.0, np.inf):
        wrong = result.copy()
        wrong[nan[0]] = value
        with pytest.raises(WrongResult):
            case.error(wrong)


def convolution() -> Task:
    x = Inputs()
    plain = {"stride": (1, 1), "dilation": (1, 1), "groups": 1, "padding": ((0, 0), (0, 0))}
    node = apply("conv", x(1, 9, 9, 4), x(3, 3, 4, 8, constant=True), layout="channels_last", **plain)
    return x.task(node)


@pytest.mark.parametrize("numerics", ["fast", "relaxed"])
def test_nan_of_a_convolution_may_spread_with_relaxed_numerics_alone(numerics: str) -> None:
    task = convolution()
    case = make_validation(task, numerics, seed=4).cases[2]
    result = rounded(case, task)
    spread, vanished = result.copy(), result.copy()
    (numbers,), (others,) = np.nonzero(np.isfinite(result)), np.nonzero(~np.isfinite(result))
    spread[numbers[:3]] = np.nan
    vanished[others[0]] = 0.0
    case.error(result)
    with pytest.raises(WrongResult):
        case.error(vanished)
    if numerics == "relaxed":
        case.error(spread)
    else:
        with pytest.raises(WrongResult):
            case.error(spread)


@pytest.mark.parametrize("task", [matmul(), convolution()])
def test_each_element_is_held_to_the_bound_of_its_own_products(task: Task) -> None:
    """An error that is small compared with the whole tensor, and large compared with the products of its element, is
    found."""
    case = make_validation(task, "fast", seed=6).cases[-1]
    assert case.name == "magnitudes"
    sizes = np.abs(case.reference)
    small = int(np.argmin(np.where(sizes > 0, sizes, np.inf)))
    result = rounded(case, task)
    case.error(result)
    result[small] += 1e-6 * sizes.max()
    with pytest.raises(WrongResult, match=f"element {small} "):
        case.error(result)
    data, weight = case.inputs
    for array in (data, weight):
        nonzero = np.abs(array[array != 0])
        assert nonzero.max() / nonzero.min() > 1e9 and (array == 0).any()


def test_an_activation_may_be_off_by_the_rounding_of_what_it_is_given() -> None:
    """A GELU of a small sum and a large negative bias: its factor 1 + erf cancels, as PyTorch's does."""
    x = Inputs()
    biased = apply("add", apply("matmul", x(64, 32), x(32, 4096, constant=True)), x(4096, constant=True))
    task = x.task(apply("gelu", biased, approximate="none"))
    case = make_validation(task, "fast", seed=3).cases[-1]
    assert case.name == "magnitudes"
    data, weight, bias = case.inputs
    operand = (data.astype(np.float64) @ weight + bias).astype(np.float32)
    kept = np.float32(1) + np.vectorize(math.erf)(operand / math.sqrt(2)).astype(np.float32)
    result = (np.float32(0.5) * operand * kept).reshape(-1)
    result = np.where(np.isfinite(result), result, case.reference.astype(np.float32))
    case.error(result)
    small = np.abs(case.reference) < 1e-3
    far = (operand.reshape(-1) < -2) & small & (case.reference != 0)
    assert far.any()
    wrong = result.copy()
    wrong[np.flatnonzero(far)[0]] += 1e-4
    with pytest.raises(WrongResult):
        case.error(wrong)


@pytest.mark.parametrize("seed", [5, 16, 21, 52, 58, 59])
def test_a_gelu_far_below_zero_may_be_off_in_every_case(seed: int) -> None:
    """Treated rows give sums between -6 and -3, where float32 has only the last digits of 1 + erf. PyTorch's result was
    refused for one draw in ten."""
    x = Inputs()
    data, weight, bias = x(1, 12, 12, 12), x(23, 12, 3, 3, constant=True), x(1, 23, 1, 1, constant=True)
    attrs = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}
    summed = apply("conv", data, weight, layout="channels_first", **attrs)
    task = x.task(apply("gelu", apply("add", summed, bias), approximate="none"))
    cases = {case.name: case for case in make_validation(task, "fast", seed).cases}
    for name in ("ordinary", "rows", "columns"):
        pixels, kernel, shift = map(torch.from_numpy, cases[name].inputs)
        result = torch.nn.functional.conv2d(pixels, kernel, shift.reshape(-1), padding=1)
        factor = 1 + torch.erf(result * math.sqrt(0.5))
        values = (0.5 * result * factor).numpy().reshape(-1)
        assert cases[name].error(values) < 1e-6
        largest = int(np.argmax(np.abs(values)))
        values[largest] *= 1.001
        with pytest.raises(WrongResult):
            cases[name].error(values)


@pytest.mark.parametrize("seed", [1, 2, 10])
def test_a_sum_of_sums_may_be_off_by_what_the_first_ones_are(seed: int) -> None:
    """Large products of the first sum cancel to what its clamp lets through: the second has their error, too. Most
    elements have none of that, and are held to their own products."""
    x = Inputs()
    between = apply("clamp", apply("matmul", x(256, 24), x(24, 48, constant=True)), min=0.0, max=6.0)
    task = x.task(apply("matmul", between, x(48, 40, constant=True)))
    case = make_validation(task, "fast", seed).cases[-1]
    assert case.name == "magnitudes"
    data, first, second = case.inputs

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = np.zeros((len(a), b.shape[1]), np.float32)
        for k in range(len(b)):
            total += a[:, k : k + 1] * b[k]
        return total

    result = product(product(data, first).clip(0.0, 6.0), second).reshape(-1)
    case.error(result)
    numbers = np.abs(case.reference) > 0
    assert np.median(case.allowed[numbers] / np.abs(case.reference[numbers])) < 3e-5
    typical = int(np.argsort(np.abs(case.reference))[case.reference.size // 2])
    result[typical] *= 1.01
    with pytest.raises(WrongResult, match=f"element {typical} "):
        case.error(result)


def test_positive_numbers_where_others_have_no_result() -> None:
    case = make_validation(unary("log", 50), "fast", seed=0).ordinary
    assert np.isfinite(case.reference).all()


def test_a_number_at_an_edge_may_be_rounded_either_way() -> None:
    task = unary("round", 2000)
    case = make_validation(task, "fast", seed=5).ordinary
    result = rounded(case, task)
    (values,) = case.inputs
    near = np.abs(np.abs(values - np.floor(values)) - 0.5) < 1e-5
    result[near] = np.floor(values[near]) + (result[near] == np.floor(values[near]))
    case.error(result)
    far = int(np.argmax(np.abs(values - np.round(values)) < 0.1))
    result[far] += 1
    with pytest.raises(WrongResult):
        case.error(result)


def test_integers_are_exact() -> None:
    x = Inputs()
    task = x.task(apply("matmul", x(5, 8, dtype=DType.I8), x(8, 6, constant=True, dtype=DType.I8)))
    for case in make_validation(task, "fast", seed=6).cases:
        result = rounded(case, task)
        assert case.error(result) == 0
        result[3] += 1
        with pytest.raises(WrongResult):
            case.error(result)


def test_positions_are_looked_up_all_over_a_table() -> None:
    x = Inputs()
    task = x.task(apply("take", x(1000, 3), x(400, dtype=DType.I64), axis=0))
    indices = make_validation(task, "fast", seed=7).ordinary.inputs[1]
    assert indices.max() > 900 and indices.min() < -900


def test_the_same_seed_asks_the_same() -> None:
    one, other, third = (make_validation(matmul(), "fast", seed) for seed in (8, 8, 9))
    assert np.array_equal(one.ordinary.inputs[0], other.ordinary.inputs[0])
    assert not np.array_equal(one.ordinary.inputs[0], third.ordinary.inputs[0])


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.I8])
def test_an_validation_in_shared_memory_is_the_same_and_cannot_be_changed(dtype: DType) -> None:
    validation = make_validation(matmul(dtype), "fast", seed=1)
    descriptor = os.memfd_create("exam")
    try:
        loaded: Validation = load_validation(share_validation(validation, descriptor), descriptor)
    finally:
        os.close(descriptor)
    for ours, theirs in zip(validation.cases, loaded.cases, strict=True):
        arrays = (
            (*ours.inputs, ours.reference, ours.allowed),
            (*theirs.inputs, theirs.reference, theirs.allowed),
        )
        for one, other in zip(*arrays, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            assert one.tobytes() == other.tobytes()
        assert (ours.name, ours.nan_spreads, ours.l2_bound) == (
            theirs.name,
            theirs.nan_spreads,
            theirs.l2_bound,
        )
    with pytest.raises(ValueError, match="read-only"):
        loaded.ordinary.reference[0] = 1.0


@pytest.mark.parametrize("rounded", [True, False])
def test_a_gated_operand_may_overflow_float16_or_stay_in_float32(rounded: bool) -> None:
    x = Inputs()
    gate, value = (x(40, 128, dtype=DType.F16) for _ in range(2))
    operand = apply("mul", apply("silu", gate), value)
    task = x.task(apply("linear", operand, x(24, 128, constant=True, dtype=DType.F16)))
    validation = make_validation(task, "fast", 0)
    for case in validation.cases:
        a, b, w = (array.astype(np.float32) for array in case.inputs)
        with np.errstate(all="ignore"):
            gated = a / (1 + np.exp(-a)) * b
            if rounded:
                gated = gated.astype(np.float16).astype(np.float32)
            result = (gated @ w.T).astype(np.float16).reshape(-1)
        case.error(result)
        with pytest.raises(WrongResult):
            case.error(np.zeros_like(result))
