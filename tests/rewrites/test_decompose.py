from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.rewrites.helpers import (
    array,
    assert_close,
    assert_same_function,
    batch_norm,
    conv,
    graph_of,
    ops_of,
    weight,
    x_input,
)
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, constant
from tilewright.graph.op import apply, flops_of
from tilewright.graph.oracle import evaluate
from tilewright.graph.provenance import Provenance
from tilewright.graph.verify import MAX_CONCATENATED, verify
from tilewright.rewrites.decompose import Decompose
from tilewright.rewrites.fold_constants import FoldConstants
from tilewright.rewrites.simplify import Simplify


def decomposed(node: Node, tolerance: float = 1e-12) -> Graph:
    before = graph_of(node)
    after = Decompose().run(before)
    verify(after, "decomposed")
    assert_same_function(before, after, tolerance)
    return after


# -- matrices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 3, 5, 4)])
def test_linear_is_a_matmul_of_one_long_m(shape: tuple[int, ...], bias: bool) -> None:
    node = apply(
        "linear",
        x_input(*shape),
        weight(6, 4),
        *([weight(6)] if bias else []),
        name="fc",
        source=Provenance(("fc",), "m.py:1"),
    )
    after = decomposed(node)
    around = ["reshape"] if len(shape) != 2 else []
    assert ops_of(after) == [*around, "permute", "matmul", *(["add"] if bias else []), *around]
    (product,) = (n for n in after.nodes() if n.op == "matmul")
    assert product.shape == (math.prod(shape[:-1]), 6)
    assert after.outputs[0].name == "fc"
    assert all(n.source == Provenance(("fc",), "m.py:1") for n in after.nodes() if n.inputs)


def test_a_matmul_with_one_matrix_is_flat_others_are_not() -> None:
    a = x_input(2, 3, 5, 4)
    assert ops_of(decomposed(apply("matmul", a, weight(4, 6)))) == ["reshape", "matmul", "reshape"]
    assert ops_of(decomposed(apply("matmul", a, weight(1, 4, 6)))) == [*["reshape"] * 2, "matmul", "reshape"]
    assert ops_of(decomposed(apply("matmul", a, x_input(3, 4, 6, index=1)))) == ["matmul"]
    assert ops_of(decomposed(apply("matmul", x_input(5, 4), weight(4, 6)))) == ["matmul"]
    assert ops_of(decomposed(apply("matmul", x_input(5, 4), weight(1, 4, 6)))) == ["matmul"]


# -- convolutions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_padding_and_bias_of_a_convolution(layout: str, rank: int) -> None:
    extents = (5,) * rank
    x = x_input(2, 4, *extents) if layout == "channels_first" else x_input(2, *extents, 4)
    w = weight(6, 4, *[3] * rank) if layout == "channels_first" else weight(*[3] * rank, 4, 6)
    padding = tuple((i + 1, i) for i in range(rank))
    node = conv(x, w, weight(6), layout=layout, padding=padding)
    after = decomposed(node)
    assert [op for op in ops_of(after) if op != "reshape"] == ["pad", "conv", "add"]
    assert ops_of(decomposed(conv(x, w, layout=layout))) == ["conv"]


def test_padding_of_integers() -> None:
    x = x_input(1, 2, 4, 4, dtype=DType.I8)
    after = decomposed(conv(x, weight(3, 2, 3, 3, dtype=DType.I8), padding=((1, 1), (1, 1))))
    assert ops_of(after) == ["pad", "conv"]


@pytest.mark.parametrize(
    "kernel,stride,padding,extra,dilation,groups",
    [
        (2, 2, 0, 0, 1, 1),
        (3, 3, 0, 0, 1, 1),
        (1, 1, 0, 0, 1, 1),
        (2, 2, 0, 0, 1, 2),
        (3, 2, 1, 1, 1, 1),
        (4, 2, 1, 0, 1, 2),
        (3, 1, 0, 0, 2, 1),
        (2, 2, 0, 1, 1, 1),
        (1, 1, 1, 0, 1, 1),
        (2, 3, 2, 0, 1, 1),
    ],
)
@pytest.mark.parametrize("rank", [1, 2])
def test_transposed_convolutions(
    kernel: int, stride: int, padding: int, extra: int, dilation: int, groups: int, rank: int
) -> None:
    x, w, b = x_input(2, 4, *[5] * rank), weight(4, 3, *[kernel] * rank), weight(3 * groups)
    node = apply(
        "conv_transpose",
        x,
        w,
        b,
        stride=(stride,) * rank,
        padding=(padding,) * rank,
        output_padding=(extra,) * rank,
        dilation=(dilation,) * rank,
        groups=groups,
    )
    after = decomposed(node)
    separate = kernel == stride and not padding and not extra and dilation == 1 and groups == 1
    assert ("matmul" in ops_of(after)) == separate
    data = array(*x.shape)
    function = F.conv_transpose1d if rank == 1 else F.conv_transpose2d
    parameters = [torch.from_numpy(p.data).double() for p in (w, b)]  # type: ignore[arg-type]
    expected = function(
        torch.from_numpy(data).double(), *parameters, stride, padding, extra, groups, dilation
    )
    assert_close(evaluate(after, [data]), [expected.numpy()], 1e-12)


def test_separate_windows_multiply_no_zeros() -> None:
    node = apply(
        "conv_transpose",
        x_input(1, 8, 4, 4),
        weight(8, 3, 2, 2),
        stride=(2, 2),
        padding=(0, 0),
        output_padding=(0, 0),
        dilation=(1, 1),
        groups=1,
    )
    assert sum(map(flops_of, decomposed(node).nodes())) == 2 * 8 * 3 * 4 * 16


# -- normalisation ------------------------------------------------------------------------------------------------


def test_batch_norm_of_constants_is_a_multiplication_and_an_addition() -> None:
    after = Simplify().run(decomposed(batch_norm(x_input(2, 4, 3, 3)), tolerance=1e-6))
    assert ops_of(after) == ["mul", "add"]


def test_batch_norm_of_inputs() -> None:
    x = x_input(2, 4, 3)
    parameters = [x_input(4, index=i) for i in range(1, 4)]
    variance = apply("square", x_input(4, index=4))
    decomposed(apply("batch_norm", x, *parameters, variance, eps=1e-3), tolerance=1e-6)


def test_batch_norm_of_halves_is_computed_in_f32() -> None:
    after = Simplify().run(decomposed(batch_norm(x_input(2, 4, 3, dtype=DType.F16)), tolerance=1e-2))
    assert ops_of(after) == ["cast", "mul", "add", "cast"]


# -- attention ----------------------------------------------------------------------------------------------------


Q, K, V = x_input(2, 3, 5, 8), x_input(2, 3, 6, 8, index=1), x_input(2, 3, 6, 7, index=2)
BOOL_MASK = np.array([[True, False, True, True, False, True]] * 4 + [[False] * 6])
FLOAT_MASK = np.where(BOOL_MASK, array(5, 6), -np.inf).astype(np.float32)


def attention(*mask: Node, causal: bool = False, scale: float = 0.5) -> Node:
    return apply("attention", Q, K, V, *mask, causal=causal, scale=scale)


@pytest.mark.parametrize(
    "node",
    [
        attention(),
        attention(scale=1.0),
        attention(causal=True),
        attention(constant(BOOL_MASK)),
        attention(constant(FLOAT_MASK)),
        attention(constant(BOOL_MASK), causal=True),
        attention(constant(FLOAT_MASK), causal=True),
        attention(x_input(2, 1, 1, 6, index=3, dtype=DType.BOOL)),
        attention(x_input(6, index=3, dtype=DType.BOOL), causal=True),
        attention(x_input(2, 1, 5, 6, index=3)),
        attention(x_input(5, 1, index=3, dtype=DType.BOOL)),
    ],
)
def test_attention(node: Node) -> None:
    after = decomposed(node)
    assert ops_of(after).count("matmul") == 2
    assert ops_of(after).count("softmax") == 1


@pytest.mark.parametrize("mask", [None, BOOL_MASK, FLOAT_MASK], ids=["none", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_what_torch_computes(mask: np.ndarray | None, causal: bool) -> None:
    if mask is not None and causal:
        pytest.skip("torch takes one of them")
    node = attention(*([] if mask is None else [constant(mask)]), causal=causal)
    arrays = [array(*x.shape, seed=i) for i, x in enumerate((Q, K, V))]
    tensors = [torch.from_numpy(a).double() for a in arrays]
    given = None if mask is None else torch.from_numpy(mask)
    if given is not None and given.dtype != torch.bool:
        given = given.double()
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=given, is_causal=causal, scale=0.5)
    assert_close(evaluate(Decompose().run(graph_of(node)), arrays), [expected.numpy()], 1e-9)
    if mask is not None:
        assert not expected[:, :, 4].any()  # a query that sees nothing


def test_a_mask_under_which_every_query_sees_costs_nothing_more() -> None:
    full = constant(np.tri(5, 6, dtype=np.bool_))
    after = Simplify().run(FoldConstants().run(decomposed(attention(full))))
    assert ops_of(after) == ["mul", "permute", "matmul", "select", "softmax", "matmul"]
    causal = Simplify().run(FoldConstants().run(decomposed(attention(causal=True))))
    assert ops_of(causal) == ops_of(after)


def test_attention_of_halves_has_its_scores_in_f32() -> None:
    q, k, v = (x_input(2, 4, 8, index=i, dtype=DType.BF16) for i in range(3))
    after = decomposed(apply("attention", q, k, v, causal=False, scale=0.5))
    types = {n.op: n.dtype for n in after.nodes() if n.op in ("softmax", "matmul")}
    assert types == {"softmax": DType.F32, "matmul": DType.BF16}
    assert after.outputs[0].dtype is DType.BF16


@pytest.mark.parametrize("mask", [None, BOOL_MASK[:2], FLOAT_MASK[:2].astype(DType.BF16.numpy)])
@pytest.mark.parametrize("heads", [3, 1])
def test_few_queries_of_halves_transpose_no_keys(mask: np.ndarray | None, heads: int) -> None:
    q, k, v = (
        x_input(2, stack, rows, 8, index=i, dtype=DType.BF16)
        for i, (stack, rows) in enumerate([(3, 2), (heads, 6), (heads, 6)])
    )
    masks = [] if mask is None else [constant(mask)]
    node = apply("attention", q, k, v, *masks, causal=not masks, scale=0.5)
    before = graph_of(node)
    after = Decompose(few_queries=2).run(before)
    verify(after, "decomposed")
    assert_same_function(before, after, 1e-12)
    found = ops_of(after)
    assert "permute" not in found and found.count("matmul") == 1
    assert "permute" in ops_of(Decompose(few_queries=1).run(before))


def test_few_queries_of_f32_are_a_matmul() -> None:
    after = Decompose(few_queries=8).run(graph_of(attention()))
    assert ops_of(after).count("matmul") == 2


# -- concatenations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 32, 33, 40, 63, 64, 500, 1024, 1025, 3000])
def test_wide_concatenations_become_several(count: int) -> None:
    inputs = [x_input(1 + k % 2, 2, index=k) for k in range(count)]
    before = graph_of(apply("concat", *inputs, axis=0))
    after = Decompose().run(before)
    for graph in (after, Simplify().run(after)):  # which does not join them again
        found = [len(node.inputs) for node in graph.nodes() if node.op == "concat"]
        assert max(found, default=0) <= MAX_CONCATENATED
        assert_same_function(before, graph)
    inner = [node for node in after.nodes() if node.op == "concat" and node is not after.outputs[0]]
    assert len(inner) == -(-max(count - 32, 0) // 31)
    if count <= 32 * 32:  # what is copied twice is no more than must be
        copied = sum(len(node.inputs) for node in inner)
        assert copied == max(count - 32, 0) + len(inner)
