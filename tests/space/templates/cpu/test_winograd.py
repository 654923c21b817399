"""Every config of the Winograd template computes the convolution, within the bounds of fp32."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.space.checked import Inputs, error, same_on_two_threads, stored_for
from tests.space.promise_bounds import winograd_factor
from tests.space.spills import spilled_vectors_in_loops
from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.loops.ir import Buffer, Program
from tilewright.loops.verify import verify_program
from tilewright.measure.single import SingleKernel
from tilewright.runtime.winograd import ERROR_FACTORS, amplification, guaranteed_factor, matrices
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu.straight_line import operations, times_vector
from tilewright.space.templates.cpu.winograd import Winograd
from tilewright.te.scalars import SCALARS
from tilewright.tune.choose import choose, descend

QUICK = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BOUND = 1e-5
Padding = tuple[tuple[int, int], tuple[int, int]]
AROUND: Padding = ((1, 1), (1, 1))


def convolution(
    x: Inputs, image: Node, channels: int, outputs: int, pad: Padding, window: int = 3, **attrs: object
) -> Node:
    dtype = image.dtype
    weights = x(window, window, channels, outputs, constant=True, dtype=dtype)
    low, high = (0, pad[0][0], pad[1][0], 0), (0, pad[0][1], pad[1][1], 0)
    if any(low + high):
        image = apply("pad", image, low=low, high=high, interior=(0, 0, 0, 0), value=0.0)
    plain = {"stride": (1, 1), "dilation": (1, 1), "groups": 1}
    return apply(
        "conv", image, weights, padding=((0, 0), (0, 0)), layout="channels_last", **{**plain, **attrs}
    )


def conv_task(
    size: tuple[int, int],
    channels: tuple[int, int],
    pad: Padding = AROUND,
    *,
    batch: int = 1,
    epilogue: str = "bias, residual, relu",
    prologue: str = "",
) -> Task:
    x = Inputs()
    image = x(batch, *size, channels[0])
    node = convolution(x, apply(prologue, image) if prologue else image, *channels, pad)
    if "bias" in epilogue:
        node = apply("add", node, x(channels[1], constant=True))
    if "residual" in epilogue:
        node = apply("add", node, x(*node.shape))
    if "relu" in epilogue:
        node = apply("relu", node)
    return x.task(node)


def applied_to(task: Task) -> Applied:
    applied = Winograd().apply(Work(task, host()))
    assert applied is not None
    return applied


def some_config(data: st.DataObject, applied: Applied, **fixed: int) -> Config:
    configs = [c for c in applied.space.configs() if all(c[name] == value for name, value in fixed.items())]
    return data.draw(st.sampled_from(configs))


@given(
    data=st.data(),
    size=st.tuples(st.integers(4, 17), st.integers(4, 17)),
    channels=st.tuples(st.integers(2, 70), st.integers(2, 70)),
    pad=st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2),
    batch=st.integers(1, 3),
    epilogue=st.sampled_from(["", "relu", "bias", "bias, relu", "bias, residual, relu"]),
    outputs=st.sampled_from([2, 4, 6]),
)
@QUICK
def test_any_config_of_any_convolution(
    data: st.DataObject,
    size: tuple[int, int],
    channels: tuple[int, int],
    pad: Padding,
    batch: int,
    epilogue: str,
    outputs: int,
) -> None:
    task = conv_task(size, channels, pad, batch=batch, epilogue=epilogue)
    applied = applied_to(task)
    config = some_config(data, applied, outputs=outputs)
    assert error(applied.program(config), task) < BOUND
    assert applied.terms(config).arithmetic > 0


@given(data=st.data(), channels=st.sampled_from([64, 96, 128]), panel_groups=st.sampled_from([1, 2]))
@settings(QUICK, max_examples=6)
def test_channels_in_blocks_are_summed_over_all_of_them(
    data: st.DataObject, channels: int, panel_groups: int
) -> None:
    task = conv_task((9, 14), (channels, 64))
    applied = applied_to(task)
    config = some_config(data, applied, channels=32, panel_groups=panel_groups)
    assert error(applied.program(config), task) < BOUND


@pytest.mark.parametrize(
    ("outputs", "channels", "bound"),
    [(2, 64, 5e-7), (4, 64, 3e-6), (6, 64, 5e-6), (2, 768, 2e-6), (4, 768, 8e-6), (6, 768, 8e-6)],
)
def test_the_error_of_each_size_of_tile(outputs: int, channels: int, bound: float) -> None:
    """The first config has the longest sums."""
    task = conv_task((12, 12), (channels, 32), epilogue="")
    applied = applied_to(task)
    config = next(c for c in applied.space.configs() if c["outputs"] == outputs)
    assert error(applied.program(config), task) < bound


def test_many_channels_are_summed_in_blocks() -> None:
    """One chain of sums would exceed the bound."""
    applied = applied_to(conv_task((8, 8), (2048, 16), epilogue=""))
    longest = {
        n: max(c.int("channels") for c in applied.space.configs() if c["outputs"] == n) for n in (2, 4, 6)
    }
    assert longest[2] == 2048 > longest[4] > longest[6]


def default_of(task: Task) -> Program:
    """The program that the analytical model would choose."""
    applied = applied_to(task)
    found = descend(applied, Work(task, host()))
    assert found is not None
    return applied.program(found[1])


def test_a_formula_in_front_is_computed_where_it_is_seen() -> None:
    task = conv_task((11, 10), (20, 24), prologue="relu", epilogue="")
    assert error(default_of(task), task) < BOUND


def test_nan_and_infinity_reach_what_their_windows_see() -> None:
    task = conv_task((12, 12), (16, 16), epilogue="")
    program = default_of(task)
    kernel = SingleKernel(program, host())
    (packing,) = (packing for packing in program.packings if packing is not None)
    weights = packing.pack(np.ones((3, 3, 16, 16), np.float32))
    for value in (np.nan, np.inf):
        image = np.zeros((12, 12, 16), np.float32)
        image[5, 5, 3] = value
        seen = kernel([image.reshape(-1), weights]).reshape(12, 12, 16)[4:7, 4:7]
        assert not np.isfinite(seen).any()


def test_the_large_one_is_chosen_before_the_direct_kernel() -> None:
    choice = choose(Work(conv_task((56, 56), (64, 64)), host()))
    assert choice.config is not None and choice.config.template == "winograd"


@pytest.mark.parametrize(
    "outputs", [2, 6]
)  # between them, the transform's own loop multiplies more than the products'
def test_registers_suffice_for_the_products(outputs: int) -> None:
    task = conv_task((56, 56), (64, 64), epilogue="bias, relu")
    applied = applied_to(task)
    config = next(
        c
        for c in applied.space.configs()
        if (c["outputs"], c["tiles"], c["vectors"], c["panel_groups"]) == (outputs, 24, host_vectors(), 1)
    )
    program = applied.program(config)
    verify_program(program)
    assert spilled_vectors_in_loops(program, host()) == 0


def host_vectors() -> int:
    return 4 if host().vector_registers >= 32 else 2


def declined(output: Node, x: Inputs, numerics: str = "fast") -> bool:
    return Winograd().apply(Work(x.task(output), host(), numerics)) is None


@pytest.mark.parametrize(
    ("window", "attrs"),
    [(3, {"stride": (2, 2)}), (3, {"dilation": (2, 2)}), (3, {"stride": (1, 2)}), (5, {}), (1, {})],
)
def test_other_windows_are_declined(window: int, attrs: dict[str, tuple[int, int]]) -> None:
    x = Inputs()
    assert declined(convolution(x, x(1, 16, 16, 8), 8, 16, AROUND, window, **attrs), x)


def test_groups_are_declined() -> None:
    x = Inputs()
    assert declined(convolution(x, x(1, 16, 16, 8), 4, 16, AROUND, groups=2), x)


def test_strict_numerics_are_declined() -> None:
    x = Inputs()
    assert declined(convolution(x, x(1, 16, 16, 8), 8, 16, AROUND), x, "strict")


def test_weights_of_16_bits_are_declined() -> None:
    x = Inputs()
    assert declined(convolution(x, x(1, 16, 16, 8, dtype=DType.BF16), 8, 16, AROUND), x)


def test_weights_that_change_are_declined() -> None:
    x = Inputs()
    output = convolution(x, x(1, 16, 16, 8), 8, 16, AROUND)
    x.constants.clear()
    assert declined(output, x)


def test_a_padding_that_is_not_zero_is_kept() -> None:
    x = Inputs()
    image = apply(
        "pad", x(1, 9, 9, 16), low=(0, 1, 1, 0), high=(0, 1, 1, 0), interior=(0, 0, 0, 0), value=2.0
    )
    task = x.task(convolution(x, image, 16, 16, ((0, 0), (0, 0))))
    assert error(default_of(task), task) < BOUND


@pytest.mark.parametrize("outputs", [2, 4, 6])
def test_straight_line_products_are_those_of_the_matrix(outputs: int) -> None:
    at, _, bt = matrices(outputs)
    for matrix in (at, bt):
        values = np.random.default_rng(0).standard_normal(len(matrix[0])).astype(np.float32)
        buffer = Buffer("x", DType.F32, len(values))
        loads = [te.Load(buffer, (te.as_index(n),)) for n in range(len(values))]
        products = [run(expr, values) for expr in times_vector(matrix, loads, lambda expr: expr)]
        exact = [
            sum(float(entry) * value for entry, value in zip(row, values, strict=True)) for row in matrix
        ]
        np.testing.assert_allclose(products, exact, rtol=1e-4, atol=1e-5)
        assert operations(matrix) < sum(entry != 0 for row in matrix for entry in row)


def run(expr: te.Expr, values: np.ndarray) -> np.ndarray:
    if isinstance(expr, te.Load):
        (index,) = expr.indices
        assert isinstance(index, te.Const)
        return np.asarray(values[int(index.value)])
    if isinstance(expr, te.Const):
        return np.float32(expr.value)
    assert isinstance(expr, te.Call)
    return np.asarray(SCALARS[expr.op].numpy(*(run(arg, values) for arg in expr.args)))


@pytest.mark.parametrize("outputs", [2, 4, 6])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e37])
def test_what_is_not_finite_stays_where_the_convolution_has_it(outputs: int, value: float) -> None:
    """A tile that a NaN or an infinity is in, or that the transforms overflow in, is computed directly."""
    task = conv_task((17, 19), (20, 40), epilogue="")
    applied = applied_to(task)
    config = next(c for c in applied.space.configs() if c["outputs"] == outputs)
    program = applied.program(config)
    rng = np.random.default_rng(outputs)
    image = rng.standard_normal((1, 17, 19, 20)).astype(np.float32)
    weights = (rng.standard_normal((3, 3, 20, 40)) / 14).astype(np.float32)
    image[0, [2, 9, 16], [0, 11, 18], [3, 19, 7]] = value
    (expected,) = evaluate(task.graph, [image, weights], precise=True)
    result = same_on_two_threads(program, stored_for(program, [image, weights])).reshape(expected.shape)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(result), np.isinf(expected))
    if np.isfinite(value):  # alongside it, errors are small compared with the largest of a tile
        return
    finite = np.isfinite(expected)
    assert 0 < (~finite).sum() < expected.size / 4
    np.testing.assert_allclose(result[finite], expected[finite], atol=1e-4)


@pytest.mark.parametrize("outputs", [2, 4, 6])
@pytest.mark.parametrize("channels", [4, 16, 128])
def test_errors_are_within_the_stated_factor(outputs: int, channels: int) -> None:
    """Of a tile, whatever the sizes of its elements are; half of the factor is left for other data."""
    task = conv_task((outputs * 3, outputs * 3), (channels, 32), ((0, 0), (0, 0)), epilogue="")
    applied = applied_to(task)
    config = next(c for c in applied.space.configs() if c["outputs"] == outputs)
    program = applied.program(config)
    kernel = SingleKernel(program, host())
    worst = 0.0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        image, weights = (rng.standard_normal(node.shape).astype(np.float32) for node in task.graph.inputs)
        if seed % 2:
            image *= 10.0 ** rng.uniform(-3, 3, image.shape)
        (expected,) = evaluate(task.graph, [image, weights], precise=True)
        result = kernel(stored_for(program, [image, weights])).reshape(expected.shape)
        largest = np.abs(image).max(axis=(0, 1, 2)) @ np.abs(weights).sum(axis=(0, 1))
        worst = max(worst, float((np.abs(result - expected) / (2.0**-24 * largest)).max()))
    assert 0 < worst < ERROR_FACTORS[outputs] / 2
    assert ERROR_FACTORS[outputs] < 6 * amplification(outputs)


@pytest.mark.parametrize(("outputs", "expected"), [(2, 16 * 76), (4, 860.4 * 84), (6, 1604.4 * 92)])
def test_what_is_guaranteed(outputs: int, expected: float) -> None:
    """`docs/numerics.md` has these numbers; of 64 channels."""
    assert guaranteed_factor(outputs, 64) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("outputs", [2, 4, 6])
def test_one_large_tap_may_exceed_the_factor_of_random_tiles_and_stays_within_the_guaranteed(
    outputs: int,
) -> None:
    """Weights whose sum is one tap, and a tile of +-1: nothing is averaged."""
    channels = 16
    task = conv_task((outputs + 2, outputs + 2), (channels, 32), ((0, 0), (0, 0)), epilogue="")
    applied = applied_to(task)
    config = next(c for c in applied.space.configs() if c["outputs"] == outputs)
    program = applied.program(config)
    kernel = SingleKernel(program, host())
    worst = 0.0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        image_type, weight_type = task.graph.inputs
        image = rng.choice([-1.0, 1.0], image_type.shape).astype(np.float32)
        weights = (1e-7 * rng.standard_normal(weight_type.shape)).astype(np.float32)
        for column in range(32):
            weights[column % 3, column // 3 % 3, 0, column] = rng.uniform(1, 2)
        (expected,) = evaluate(task.graph, [image, weights], precise=True)
        result = kernel(stored_for(program, [image, weights])).reshape(expected.shape)
        sizes = np.abs(weights).astype(np.float64).sum(axis=(0, 1, 2))
        worst = max(worst, float((np.abs(result - expected) / (2.0**-24 * sizes)).max()))
    assert ERROR_FACTORS[outputs] / 2 < worst < guaranteed_factor(outputs, channels)
    assert worst < winograd_factor(outputs, channels) / 2
