"""Each rule of simplify on the smallest graph that shows it, and what must not be rewritten."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.rewrites.helpers import (
    assert_same_function,
    conv,
    graph_of,
    ops_of,
    scalar,
    weight,
    x_input,
)
from tilewright.dtypes import DType
from tilewright.graph.ir import Node, constant
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.provenance import Provenance
from tilewright.graph.text import structurally_equal
from tilewright.graph.verify import verify
from tilewright.rewrites.simplify import Simplify
from tilewright.rewrites.simplify_elementwise import lossless

X = x_input(2, 3, 4)
Y = x_input(2, 3, 4, index=1)
I = x_input(2, 3, index=0, dtype=DType.I32)  # noqa: E741


def full(value: float, *shape: int) -> Node:
    return apply("full", value=value, shape=shape, dtype=DType.F32)


def slice_(
    x: Node, starts: tuple[int, ...], stops: tuple[int, ...], steps: tuple[int, ...] | None = None
) -> Node:
    return apply("slice", x, starts=starts, stops=stops, steps=steps or (1,) * len(starts))


def pad(
    x: Node, low: tuple[int, ...], high: tuple[int, ...], interior: tuple[int, ...] | None = None
) -> Node:
    return apply("pad", x, low=low, high=high, interior=interior or (0,) * len(low), value=0.0)


def reshape(x: Node, *shape: int) -> Node:
    return apply("reshape", x, shape=shape)


def permute(x: Node, *axes: int) -> Node:
    return apply("permute", x, axes=axes)


def clamp(x: Node, low: float | None, high: float | None) -> Node:
    return apply("clamp", x, min=low, max=high)


def cast(x: Node, dtype: DType) -> Node:
    return apply("cast", x, dtype=dtype)


def sum_(x: Node, *axes: int, keepdims: bool = False) -> Node:
    return apply("sum", x, axes=axes, keepdims=keepdims)


CASES: list[tuple[str, Node, list[str]]] = [
    ("x + 0", apply("add", X, scalar(0)), []),
    ("0 + x", apply("add", scalar(0), X), []),
    ("x + full 0", apply("add", X, full(0, 3, 4)), []),
    ("integer x + 0", apply("add", I, scalar(0, DType.I32)), []),
    ("x + -y", apply("add", X, apply("neg", Y)), ["sub"]),
    ("-x + y", apply("add", apply("neg", X), Y), ["sub"]),
    ("x - 0", apply("sub", X, scalar(0)), []),
    ("x - -y", apply("sub", X, apply("neg", Y)), ["add"]),
    ("0 - x", apply("sub", scalar(0), X), ["sub"]),
    ("x * 1", apply("mul", X, scalar(1)), []),
    ("1 * x", apply("mul", full(1, 2, 1, 1), X), []),
    ("x * 0 is not 0", apply("mul", X, scalar(0)), ["mul"]),
    ("x / 1", apply("div", X, scalar(1)), []),
    ("1 / x", apply("div", scalar(1), X), ["reciprocal"]),
    ("x / 4", apply("div", X, scalar(4)), ["mul"]),
    ("x / 3", apply("div", X, scalar(3)), ["mul"]),
    ("x / 0", apply("div", X, scalar(0)), ["div"]),
    ("x / vector", apply("div", X, constant(np.array([1, 2, 4, 8], np.float32))), ["mul"]),
    ("1 / sqrt", apply("reciprocal", apply("sqrt", apply("abs", X))), ["abs", "rsqrt"]),
    ("x ** 2", apply("pow", X, scalar(2)), ["square"]),
    ("x ** 1", apply("pow", X, scalar(1)), []),
    ("x ** 3", apply("pow", X, scalar(3)), ["square", "mul"]),
    ("x ** 0.5", apply("pow", apply("abs", X), scalar(0.5)), ["abs", "sqrt"]),
    ("x ** -0.5", apply("pow", apply("abs", X), full(-0.5, 4)), ["abs", "rsqrt"]),
    ("x ** -1", apply("pow", X, scalar(-1)), ["reciprocal"]),
    ("x ** 2.5", apply("pow", apply("abs", X), scalar(2.5)), ["abs", "pow"]),
    ("2 ** x", apply("pow", scalar(2), X), ["pow"]),
    ("--x", apply("neg", apply("neg", X)), []),
    ("relu relu", apply("relu", apply("relu", X)), ["relu"]),
    ("abs abs", apply("abs", apply("abs", X)), ["abs"]),
    ("floor floor", apply("floor", apply("floor", X)), ["floor"]),
    ("maximum(x, 0)", apply("maximum", X, scalar(0)), ["relu"]),
    ("minimum(relu(x), 6)", apply("minimum", apply("relu", X), scalar(6)), ["clamp"]),
    ("maximum(x, nan)", apply("maximum", X, scalar(math.nan)), ["maximum"]),
    ("maximum(x, y)", apply("maximum", X, Y), ["maximum"]),
    ("clamp free", clamp(X, None, None), []),
    ("clamp 0", clamp(X, 0, None), ["relu"]),
    ("clamp clamp", clamp(clamp(X, -1, 1), -0.5, 2), ["clamp"]),
    ("clamp clamp apart", clamp(clamp(X, -1, 0), 0.5, 2), ["clamp"]),
    ("clamp relu", clamp(apply("relu", X), None, 0.7), ["clamp"]),
    ("relu clamp", apply("relu", clamp(X, -1, 0.7)), ["clamp"]),
    ("clamp of a crossed interval", clamp(clamp(X, 1, -1), 0, 2), ["clamp", "clamp"]),
    ("cast to itself", cast(X, DType.F32), []),
    ("cast up and down", cast(cast(X, DType.F64), DType.F32), []),
    ("cast down and up", cast(cast(X, DType.F16), DType.F32), ["cast", "cast"]),
    ("cast through a wider type", cast(cast(I, DType.F64), DType.F32), ["cast"]),
    ("cast through a narrower type", cast(cast(I, DType.F32), DType.F64), ["cast", "cast"]),
    ("select true", apply("select", scalar(1, DType.BOOL), X, Y), []),
    ("select false", apply("select", constant(np.zeros((3, 4), np.bool_)), X, Y), []),
    ("select mixed", apply("select", constant(np.eye(4, dtype=np.bool_)[:3]), X, Y), ["select"]),
    ("select of equals", apply("select", apply("gt", X, Y), X, X), []),
    ("select of a scalar", apply("select", scalar(1, DType.BOOL), scalar(3), X), ["broadcast_to"]),
    ("scalar operand", apply("mul", X, full(2, 2, 3, 4)), ["mul"]),
    ("broadcast operand", apply("add", X, apply("broadcast_to", weight(4), shape=(2, 3, 4))), ["add"]),
    (
        "broadcast operands that are needed",
        apply("add", apply("broadcast_to", weight(4), shape=(3, 4)), full(1, 3, 4)),
        ["full", "add"],
    ),
    ("reshape to the same", reshape(X, 2, 3, 4), []),
    ("reshape reshape", reshape(reshape(X, 24), 4, 6), ["reshape"]),
    ("reshape and back", reshape(reshape(X, 24), 2, 3, 4), []),
    ("permute of nothing", permute(X, 0, 1, 2), []),
    ("permute permute", permute(permute(X, 1, 2, 0), 1, 2, 0), ["permute"]),
    ("permute and back", permute(permute(X, 1, 2, 0), 2, 0, 1), []),
    ("permute of ones", permute(x_input(2, 1, 3, 1), 1, 0, 3, 2), ["reshape"]),
    ("broadcast to the same", apply("broadcast_to", X, shape=(2, 3, 4)), []),
    ("broadcast of ones", apply("broadcast_to", X, shape=(1, 2, 3, 4)), ["reshape"]),
    (
        "broadcast broadcast",
        apply("broadcast_to", apply("broadcast_to", x_input(4), shape=(3, 4)), shape=(2, 3, 4)),
        ["broadcast_to"],
    ),
    ("flip of ones", apply("flip", x_input(1, 3), axes=(0,)), []),
    ("flip and back", apply("flip", apply("flip", X, axes=(0, 2)), axes=(2, 0)), []),
    ("slice of everything", slice_(X, (0, 0, 0), (2, 3, 4)), []),
    ("slice slice", slice_(slice_(x_input(20), (3,), (18,), (2,)), (1,), (6,), (3,)), ["slice"]),
    ("slice concat", slice_(apply("concat", X, Y, axis=1), (0, 4, 1), (2, 6, 3)), ["slice"]),
    ("slice concat whole", slice_(apply("concat", X, Y, axis=1), (0, 3, 0), (2, 6, 4)), []),
    (
        "slice concat over the seam",
        slice_(apply("concat", X, Y, axis=1), (0, 2, 0), (2, 4, 4)),
        ["concat", "slice"],
    ),
    ("slice of full", apply("add", X, slice_(full(1, 5, 4), (1, 0), (4, 4))), ["add"]),
    ("pad of nothing", pad(X, (0, 0, 0), (0, 0, 0)), []),
    ("pad pad", pad(pad(X, (0, 1, 0), (0, 0, 2), (0, 1, 0)), (1, 1, 1), (0, 0, 0)), ["pad"]),
    (
        "pad pad that spreads",
        pad(pad(X, (0, 1, 0), (0, 0, 2)), (0, 0, 0), (0, 0, 0), (0, 1, 0)),
        ["pad", "pad"],
    ),
    ("concat of one", apply("concat", X, axis=0), []),
    ("concat of empty", apply("concat", X, slice_(Y, (0, 0, 0), (2, 0, 4)), axis=1), []),
    ("concat concat", apply("concat", apply("concat", X, Y, axis=1), X, axis=1), ["concat"]),
    ("concat concat of another axis", apply("concat", apply("concat", X, axis=0), X, axis=1), ["concat"]),
    (
        "concat of neighbours",
        apply("concat", slice_(X, (0, 0, 0), (2, 1, 4)), slice_(X, (0, 1, 0), (2, 3, 4)), axis=1),
        [],
    ),
    ("sum of ones", sum_(x_input(2, 1, 3), 1), ["reshape"]),
    ("sum of ones, kept", sum_(x_input(2, 1, 3), 1, keepdims=True), []),
    ("sum of more", sum_(x_input(2, 1, 3), 1, 2), ["sum"]),
    ("log softmax", apply("log", apply("softmax", X, axis=1)), ["log_softmax"]),
    (
        "global pool",
        apply("adaptive_avg_pool", x_input(1, 2, 6, 4), sizes=(1, 1), layout="channels_first"),
        ["mean"],
    ),
    (
        "even pool",
        apply("adaptive_avg_pool", x_input(1, 2, 6, 4), sizes=(3, 2), layout="channels_first"),
        ["avg_pool"],
    ),
    (
        "even max",
        apply("adaptive_max_pool", x_input(1, 2, 6, 4), sizes=(3, 1), layout="channels_first"),
        ["max_pool"],
    ),
    (
        "global max",
        apply("adaptive_max_pool", x_input(1, 6, 4, 2), sizes=(1, 1), layout="channels_last"),
        ["amax"],
    ),
    (
        "uneven pool",
        apply("adaptive_avg_pool", x_input(1, 2, 7, 4), sizes=(3, 2), layout="channels_first"),
        ["adaptive_avg_pool"],
    ),
    (
        "resize to the same",
        apply("resize", X, sizes=(3, 4), mode="linear", coordinates="half_pixel"),
        [],
    ),
]


@pytest.mark.parametrize("node,expected", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_rules(node: Node, expected: list[str]) -> None:
    before = graph_of(node)
    # Inputs that are no longer used stay in the graph.
    after = Simplify().run(before)
    verify(after, "imported")
    assert ops_of(after) == expected
    # Reciprocals of constants are rounded to f32.
    assert_same_function(before, after, tolerance=1e-7)
    assert structurally_equal(Simplify().run(after), after)


def test_strict_numerics_divide_where_the_reciprocal_is_not_exact() -> None:
    strict = Simplify(fast=False)
    assert ops_of(strict.run(graph_of(apply("div", X, scalar(3))))) == ["div"]
    assert ops_of(strict.run(graph_of(apply("div", X, scalar(-8))))) == ["mul"]
    mixed = constant(np.array([2, 3, 4, 8], np.float32))
    assert ops_of(strict.run(graph_of(apply("div", X, mixed)))) == ["div"]


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan, 1e-45, 3e38])
def test_divisors_whose_reciprocal_is_not_normal_stay(value: float) -> None:
    assert ops_of(Simplify().run(graph_of(apply("div", X, scalar(value))))) == ["div"]


def test_halves_are_divided_unless_exact() -> None:
    x = x_input(4, dtype=DType.F16)
    assert ops_of(Simplify().run(graph_of(apply("div", x, scalar(3, DType.F16))))) == ["div"]
    assert ops_of(Simplify().run(graph_of(apply("div", x, scalar(4, DType.F16))))) == ["mul"]


def test_scalars_become_constants_of_rank_0() -> None:
    (node,) = Simplify().run(graph_of(apply("mul", X, constant(np.full((1, 1), 2, np.float32))))).outputs
    assert node.inputs[1].is_constant and node.inputs[1].shape == ()


def test_lossless_conversions_hold_every_value() -> None:
    for source in DType:
        for target in DType:
            if not lossless(source, target) or source is target:
                continue
            if source.is_float:
                info = np.finfo(np.float32 if source is DType.BF16 else source.numpy)
                values = np.array([float(info.max) * (1 - 2.0**-8), 1 + 2.0**-7, -0.5]).astype(source.numpy)
            elif source is DType.BOOL:
                values = np.array([False, True])
            else:
                values = np.array([np.iinfo(source.numpy).min, np.iinfo(source.numpy).max], source.numpy)
            np.testing.assert_array_equal(values.astype(target.numpy).astype(source.numpy), values)
    assert not lossless(DType.I32, DType.F32)
    assert not lossless(DType.F32, DType.BF16)
    assert not lossless(DType.F16, DType.BF16)
    assert not lossless(DType.I8, DType.U8)
    assert not lossless(DType.I64, DType.F64)


# -- reshapes that sink -------------------------------------------------------------------------------------------


def linear(x: Node, width: int, seed: int = 0) -> Node:
    """As decompose writes it: [..., K] -> [M, K] -> [M, N] -> [..., N]."""
    flat = reshape(x, x.type.size // x.shape[-1], x.shape[-1])
    return reshape(apply("matmul", flat, weight(x.shape[-1], width, seed=seed)), *x.shape[:-1], width)


def sunk(*nodes: Node) -> list[str]:
    before = graph_of(*nodes)
    after = Simplify().run(before)
    assert_same_function(before, after)
    return ops_of(after)


def test_reshapes_between_matmuls_cancel() -> None:
    assert sunk(linear(apply("gelu", linear(X, 5), approximate="none"), 3)) == [
        *["reshape", "matmul", "gelu", "matmul", "reshape"],
    ]


def test_residuals_become_views_of_what_is_in_memory() -> None:
    normed = apply("layer_norm", X, dims=1, eps=1e-5)
    other = apply("relu", X)
    # The sum goes to the matmul; `other` and the norm, which are read elsewhere, are seen through a reshape.
    assert sunk(apply("add", linear(normed, 4), normed), other) == [
        *["layer_norm", "reshape", "matmul", "reshape", "add", "reshape", "relu"],
    ]


def test_a_reshape_stays_where_its_other_operand_is_a_contraction() -> None:
    image = conv(x_input(1, 3, 4, 4), weight(2, 3, 1, 1))
    flat = apply("exp", reshape(apply("permute", x_input(4, 4, 2, index=1), axes=(2, 0, 1)), 32))
    ops = sunk(apply("add", image, reshape(flat, 1, 2, 4, 4)))
    assert ops.index("conv") + 1 == ops.index("add") or ops[-1] == "add"


def test_parameters_follow_the_reshape() -> None:
    y = reshape(apply("matmul", reshape(X, 6, 4), weight(4, 4)), 2, 3, 4)
    assert sunk(apply("add", y, weight(4)))[-2:] == ["add", "reshape"]
    assert sunk(apply("mul", y, scalar(3)))[-2:] == ["mul", "reshape"]
    assert sunk(apply("mul", y, weight(2, 3, 1)))[-2:] == ["mul", "reshape"]
    # One value per row of the first axis does not follow: rows of both axes are one now.
    assert sunk(apply("mul", y, weight(3, 1)))[-1] == "mul"


def test_a_reshape_of_an_input_stays() -> None:
    assert sunk(apply("relu", reshape(X, 24))) == ["reshape", "relu"]


def test_a_reshape_that_others_read_stays() -> None:
    y = linear(X, 5)
    assert sunk(apply("relu", y), y)[-1] == "relu"


def test_many_rounds_do_not_change_names() -> None:
    node = apply(
        "add", apply("mul", X, scalar(1), name="m"), scalar(1), name="out", source=Provenance(("here",))
    )
    (out,) = Simplify().run(graph_of(node)).outputs
    assert (out.name, str(out.source)) == ("out", "here")


def test_nan_and_infinities_stay() -> None:
    special = np.array([math.nan, math.inf, -math.inf, -0.0], np.float32)
    x = x_input(4)
    nodes = [
        apply("relu", clamp(x, -1, 0.7)),
        apply("maximum", x, scalar(0)),
        apply("mul", x, scalar(0)),
        apply("select", scalar(1, DType.BOOL), x, x),
        apply("div", x, scalar(2)),
    ]
    before = graph_of(*nodes)
    after = Simplify().run(before)
    for a, b in zip(evaluate(before, [special]), evaluate(after, [special]), strict=True):
        np.testing.assert_array_equal(a, b)
