from __future__ import annotations

import numpy as np
import pytest

from tilewright import te
from tilewright.dtypes import DType
from tilewright.te.interpret import interpret

F32, F16, BF16, I64, I32, I8, BOOL = (
    DType.F32,
    DType.F16,
    DType.BF16,
    DType.I64,
    DType.I32,
    DType.I8,
    DType.BOOL,
)


def tensor(array: np.ndarray, name: str = "x") -> te.Tensor:
    return te.Tensor(name, array.shape, DType.of(array))


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_matrix_product() -> None:
    a, b = floats(3, 4), floats(4, 5)
    x, y = tensor(a), tensor(b)

    def formula(i: te.Var, j: te.Var) -> te.Expr:
        (k,) = te.reduce_axes([4])
        return te.reduce_over("sum", x[i, k] * y[k, j], [k])

    np.testing.assert_array_equal(interpret(te.compute("c", (3, 5), F32, formula), {x: a, y: b}), a @ b)


def test_stages_run_in_order_and_rank_0_is_a_shape() -> None:
    a = floats(6)
    x = tensor(a)
    (r,) = te.reduce_axes([6])
    total = te.compute("total", (), F32, lambda: te.reduce_over("sum", x[r], [r]))
    scaled = te.compute("scaled", (6,), F32, lambda i: x[i] / total[()])
    result = interpret(scaled, {x: a})
    np.testing.assert_allclose(result, a / a.sum(), rtol=1e-6)
    assert interpret(total, {x: a}).shape == ()


def test_an_input_is_its_own_value() -> None:
    a = floats(2)
    x = tensor(a)
    assert interpret(x, {x: a}) is a


@pytest.mark.parametrize(
    ("kind", "expected"), [("sum", 10), ("prod", 24), ("max", 4), ("min", 1), ("any", True), ("all", False)]
)
def test_reductions(kind: str, expected: float) -> None:
    a = np.array([True, False]) if kind in ("any", "all") else np.array([3, 1, 4, 2], dtype=np.float32)
    x = tensor(a)
    (r,) = te.reduce_axes(a.shape)
    result = interpret(te.compute("r", (), x.dtype, lambda: te.reduce_over(kind, x[r], [r])), {x: a})
    assert result == expected


@pytest.mark.parametrize(("kind", "identity"), [("sum", 0), ("prod", 1), ("max", -np.inf), ("min", np.inf)])
def test_a_reduction_of_nothing_is_the_identity(kind: str, identity: float) -> None:
    a = floats(2, 0)
    x = tensor(a)
    (r,) = te.reduce_axes([0])
    stage = te.compute("r", (2,), F32, lambda i: te.reduce_over(kind, x[i, r], [r]))
    np.testing.assert_array_equal(interpret(stage, {x: a}), [identity, identity])


def test_a_reduction_of_a_constant_counts_its_elements() -> None:
    axes = te.reduce_axes([3, 4])
    stage = te.compute("n", (2,), F32, lambda i: te.reduce_over("sum", te.const(1, F32), axes))
    np.testing.assert_array_equal(interpret(stage, {}), [12, 12])


def test_extremes_propagate_nan() -> None:
    a = np.array([1, np.nan, 2], dtype=np.float32)
    x = tensor(a)
    (r,) = te.reduce_axes([3])
    for kind in ("max", "min"):
        assert np.isnan(interpret(te.compute("m", (), F32, lambda: te.reduce_over(kind, x[r], [r])), {x: a}))  # noqa: B023


def test_integers_wrap_around() -> None:
    a = np.full(3, 100, dtype=np.int8)
    x = tensor(a)
    (r,) = te.reduce_axes([3])
    total = te.compute("s", (), I8, lambda: te.reduce_over("sum", x[r], [r]))
    assert interpret(total, {x: a}) == 300 - 256
    doubled = te.compute("d", (3,), I8, lambda i: x[i] + x[i])
    np.testing.assert_array_equal(interpret(doubled, {x: a}), [200 - 256] * 3)


def test_index_division_rounds_down() -> None:
    stage = te.compute("q", (4,), I64, lambda i: (i - 3) // 2)
    np.testing.assert_array_equal(interpret(stage, {}), [-2, -1, -1, 0])


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_halves_are_widened_when_loaded_and_rounded_when_stored(dtype: DType) -> None:
    a = np.array([1.0, 2.0**-9], dtype=dtype.numpy)
    x = tensor(a)
    rounded = te.compute("r", (), dtype, lambda: (x[0] + x[1]) - x[0])
    assert interpret(rounded, {x: a}) == a[1], "the sum in f32 must not lose the small term"
    assert interpret(rounded, {x: a}).dtype == dtype.numpy


def test_halves_that_are_only_moved_are_never_widened() -> None:
    x = te.Tensor("x", (4,), F16)
    index = te.Var("i", 4)
    moved = te.select(te.call("lt", index, te.as_index(2)), te.cast(x[index], F32), te.const(0, F32))
    assert not any(isinstance(node, te.Cast) for node in te.walk(te.cast(moved, F16)))
    computed = te.cast(te.cast(x[index], F32) * te.const(2, F32), F16)
    assert isinstance(computed, te.Cast)


def test_casts() -> None:
    a = np.array([-1.7, 0.0, 2.9, np.nan], dtype=np.float32)
    x = tensor(a)
    truth = te.compute("b", (4,), BOOL, lambda i: x[i])
    np.testing.assert_array_equal(interpret(truth, {x: a}), [True, False, True, True])
    whole = te.compute("i", (3,), I32, lambda i: x[i])
    np.testing.assert_array_equal(interpret(whole, {x: a}), [-1, 0, 2])


def test_a_select_guards_the_loads_of_the_arm_that_is_not_taken() -> None:
    a = floats(3)
    x = tensor(a)

    def formula(i: te.Var) -> te.Expr:
        inside = te.call("and", te.call("le", 1, i), te.call("lt", i, 4))
        return te.select(inside, x[i - 1], -1.0)

    np.testing.assert_array_equal(interpret(te.compute("p", (5,), F32, formula), {x: a}), [-1, 0, 1, 2, -1])


def test_a_nested_select_is_guarded_by_both() -> None:
    a = floats(2)
    x = tensor(a)

    def formula(i: te.Var) -> te.Expr:
        inner = te.select(te.call("lt", i, 4), x[i - 2], 9.0)
        return te.select(te.call("lt", i, 2), x[i], inner)

    np.testing.assert_array_equal(interpret(te.compute("c", (5,), F32, formula), {x: a}), [0, 1, 0, 1, 9])


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_load_out_of_range_is_an_error(shift: int) -> None:
    a = floats(3)
    x = tensor(a)
    stage = te.compute("shifted", (3,), F32, lambda i: x[i + shift])
    with pytest.raises(IndexError, match=r"shifted: load of x\[3\] at index -?\d of axis 0"):
        interpret(stage, {x: a})


def test_the_condition_itself_is_not_guarded() -> None:
    a = floats(3)
    x = tensor(a)
    stage = te.compute("c", (3,), F32, lambda i: te.select(te.call("lt", x[i + 1], 9.0), 1.0, x[i]))
    with pytest.raises(IndexError):
        interpret(stage, {x: a})


def test_a_wrong_guard_is_an_error() -> None:
    a = floats(3)
    x = tensor(a)
    stage = te.compute("p", (5,), F32, lambda i: te.select(te.call("lt", i, 4), x[i], 0.0))
    with pytest.raises(IndexError, match="index 3"):
        interpret(stage, {x: a})


def test_loads_through_loaded_indices() -> None:
    a, indices = floats(4), np.array([3, 0, 3], dtype=np.int64)
    x, y = tensor(a), tensor(indices, "y")
    stage = te.compute("t", (3,), F32, lambda i: x[y[i]])
    np.testing.assert_array_equal(interpret(stage, {x: a, y: indices}), a[indices])
    with pytest.raises(IndexError):
        interpret(stage, {x: a, y: indices + 1})


def test_empty_tensors() -> None:
    a = floats(0)
    x = tensor(a)
    assert interpret(te.compute("e", (0, 3), F32, lambda i, j: x[i]), {x: a}).shape == (0, 3)
    guarded = te.compute("g", (2,), F32, lambda i: te.select(te.call("lt", i, 0), x[i], 7.0))
    np.testing.assert_array_equal(interpret(guarded, {x: a}), [7, 7])
    with pytest.raises(IndexError):
        interpret(te.compute("u", (2,), F32, lambda i: x[i]), {x: a})


def test_inputs_must_fit() -> None:
    x = te.Tensor("x", (3,), F32)
    stage = te.compute("c", (3,), F32, lambda i: x[i])
    with pytest.raises(AssertionError, match="shape"):
        interpret(stage, {x: floats(4)})
    with pytest.raises(AssertionError, match="float64"):
        interpret(stage, {x: floats(3).astype(np.float64)})
