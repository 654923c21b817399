"""Random graphs for property tests: small shapes, and operators chosen so that values stay within some magnitudes.

Comparisons are with constants only: a rewrite may change a value by a rounding, and must not flip a bool by that.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.rewrites.helpers import array, batch_norm, conv, scalar, weight
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node
from tilewright.graph.op import apply

UNARY = ("relu", "neg", "abs", "tanh", "sigmoid", "sin", "gelu", "square", "clamp", "leaky_relu", "floor")
MOVEMENT = ("permute", "reshape", "slice", "pad", "concat", "broadcast_to", "flip", "take", "resize")
REDUCTIONS = ("sum", "mean", "amax", "softmax", "layer_norm", "group_norm", "var", "argmax", "cumsum")
CONTRACTIONS = ("matmul", "linear", "conv", "conv_transpose", "attention")
ELEMENTWISE = ("unary", "binary", "constant", "select", "cast")
WINDOWS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
# N C H W: channels that divide into blocks of several sizes, odd images and images of one row or one pixel.
IMAGES = ((2, 4, 4, 6), (1, 12, 3, 5), (2, 24, 2, 3), (1, 6, 1, 4), (1, 16, 5, 1), (3, 8, 1, 1))
EVERYTHING = (*ELEMENTWISE, *ELEMENTWISE, *MOVEMENT, *MOVEMENT, *REDUCTIONS, *CONTRACTIONS, *WINDOWS)


@st.composite
def graphs(draw: Any, kinds: tuple[str, ...] = EVERYTHING, images: bool = False, most: int = 10) -> Graph:
    """`images`: the first input is N C H W, and convolutions are likely."""
    shapes = (
        [draw(st.sampled_from(IMAGES))]
        if images
        else [tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)))]
    )
    if draw(st.booleans()):
        shapes.append(shapes[0] if draw(st.booleans()) else (shapes[0][-1],))
    inputs = [input_node(i, TensorType(shape, DType.F32), f"x{i}") for i, shape in enumerate(shapes)]
    pool: list[Node] = list(inputs)
    for step in range(draw(st.integers(1, most))):
        x = pool[-1] if draw(st.integers(0, 2)) else draw(st.sampled_from(pool))
        made = _apply(draw, draw(st.sampled_from(kinds)), x, pool, step)
        if made is not None and 0 < made.type.size <= 4000:
            pool.append(made)
    outputs = [pool[-1], *draw(st.lists(st.sampled_from(pool), max_size=2))]
    return Graph(tuple(inputs), tuple(outputs))


def _apply(draw: Any, kind: str, x: Node, pool: list[Node], seed: int) -> Node | None:
    if x.dtype is not DType.F32 and (not x.dtype.is_float or kind not in ("unary", "cast", *MOVEMENT)):
        x = apply("cast", x, dtype=DType.F32)
    for family in (_elementwise, _movement, _reduction, _window, _contraction):
        made = family(draw, kind, x, pool, seed)
        if made is not None:
            return made
    return None


def _elementwise(draw: Any, kind: str, x: Node, pool: list[Node], seed: int) -> Node | None:
    if kind == "unary":
        op = draw(st.sampled_from(UNARY))
        attrs = {
            "clamp": {
                "min": draw(st.sampled_from([None, -1, 0])),
                "max": draw(st.sampled_from([None, 1.0, 6])),
            },
            "gelu": {"approximate": "tanh"},
            "leaky_relu": {"slope": 0.1},
        }
        return apply(op, x, **attrs.get(op, {}))
    if kind == "binary":
        fitting = [n for n in pool if n.dtype is x.dtype and _broadcasts(n.shape, x.shape)]
        other = draw(st.sampled_from(fitting)) if fitting else x
        operands = (x, other) if draw(st.booleans()) else (other, x)
        return apply(draw(st.sampled_from(["add", "sub", "mul", "maximum"])), *operands)
    if kind == "constant":
        shape = tuple(draw(st.sampled_from([1, extent])) for extent in x.shape)[
            draw(st.integers(0, x.type.rank)) :
        ]
        values = [weight(*shape, seed=seed), scalar(draw(st.sampled_from([0, 1, 2, -1, 0.5]))), _full(shape)]
        op = draw(st.sampled_from(["add", "sub", "mul", "div", "maximum"]))
        other = draw(st.sampled_from(values))
        if op == "div":
            other = scalar(draw(st.sampled_from([1, 2, 0.25, 4])))
        return apply(op, x, other)
    if kind == "select":
        mask = apply("gt", x, scalar(0.1234567))
        return apply("select", mask, x, scalar(draw(st.sampled_from([0, 1]))))
    if kind == "cast":
        return apply("cast", x, dtype=draw(st.sampled_from([DType.F32, DType.F64])))
    if kind == "batch_norm" and x.type.rank >= 2 and x.dtype is DType.F32:
        return batch_norm(x, seed)
    return None


def _full(shape: tuple[int, ...]) -> Node:
    return apply("full", value=1.0, shape=shape, dtype=DType.F32)


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(a, b)
    except ValueError:
        return False
    return True


def _movement(draw: Any, kind: str, x: Node, pool: list[Node], seed: int) -> Node | None:
    shape, rank = x.shape, x.type.rank
    if kind == "permute":
        return apply("permute", x, axes=tuple(draw(st.permutations(range(rank)))))
    if kind == "reshape":
        return apply("reshape", x, shape=_another_shape(draw, shape))
    if kind == "slice":
        starts = [draw(st.integers(0, extent - 1)) for extent in shape]
        stops = [draw(st.integers(start + 1, extent)) for start, extent in zip(starts, shape, strict=True)]
        steps = [draw(st.sampled_from([1, 1, 2])) for _ in shape]
        return apply("slice", x, starts=tuple(starts), stops=tuple(stops), steps=tuple(steps))
    if kind == "pad":
        low, high, interior = (tuple(draw(st.sampled_from([0, 0, 1])) for _ in shape) for _ in range(3))
        return apply("pad", x, low=low, high=high, interior=interior, value=0.0)
    if kind == "concat" and rank:
        axis = draw(st.integers(0, rank - 1))
        same = [n for n in pool if n.type == x.type]
        return apply("concat", x, *same[: draw(st.integers(0, 2))], axis=axis)
    if kind == "broadcast_to":
        wide = tuple(3 if extent == 1 and draw(st.booleans()) else extent for extent in shape)
        return apply("broadcast_to", x, shape=(*([2] if draw(st.booleans()) else []), *wide))
    if kind == "flip":
        return apply("flip", x, axes=tuple(d for d in range(rank) if draw(st.booleans())))
    if kind == "take" and rank:
        axis = draw(st.integers(0, rank - 1))
        indices = np.arange(-1, min(shape[axis], 3) - 1).astype(np.int64)
        return apply("take", x, constant(indices), axis=axis)
    if kind == "resize" and rank >= 2:
        sizes = tuple(draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 2))))
        mode = draw(st.sampled_from(["nearest", "linear"]))
        return apply("resize", x, sizes=sizes, mode=mode, coordinates="half_pixel")
    return None


def _another_shape(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Merges, splits and ones, at random; the number of elements stays."""
    how = draw(st.sampled_from(["merge", "flat", "ones", "split"]))
    if how == "flat" or not shape:
        return (math.prod(shape),)
    if how == "ones":
        at = draw(st.integers(0, len(shape)))
        return (*shape[:at], 1, *shape[at:])
    at = draw(st.integers(0, len(shape) - 1))
    if how == "merge":
        return (*shape[:at], math.prod(shape[at : at + 2]), *shape[at + 2 :])
    factor = 2 if shape[at] % 2 == 0 else 1
    return (*shape[:at], factor, shape[at] // factor, *shape[at + 1 :])


def _reduction(draw: Any, kind: str, x: Node, pool: list[Node], seed: int) -> Node | None:
    rank = x.type.rank
    if kind not in REDUCTIONS or not rank:
        return None
    axis = draw(st.integers(0, rank - 1))
    keepdims = draw(st.booleans())
    if kind in ("softmax", "cumsum"):
        return apply(kind, x, axis=axis)
    if kind == "group_norm":
        if rank < 3:
            return None
        groups = draw(st.sampled_from([n for n in (1, 2, 3, 4) if x.shape[1] % n == 0]))
        return apply("group_norm", x, groups=groups, eps=0.1)
    if kind == "argmax":
        # Equal elements would make the place depend on roundings.
        return apply(
            "argmax",
            apply("add", x, weight(*x.shape, seed=seed, dtype=x.dtype)),
            axis=axis,
            keepdims=keepdims,
        )
    if kind == "layer_norm":
        return apply("layer_norm", x, dims=draw(st.integers(1, rank)), eps=0.1)
    axes = tuple(d for d in range(rank) if d == axis or draw(st.booleans()))
    extra = {"correction": 0} if kind == "var" else {}
    return apply(kind, x, axes=axes, keepdims=keepdims, **extra)


def _window(draw: Any, kind: str, x: Node, pool: list[Node], seed: int) -> Node | None:
    if kind not in WINDOWS or x.type.rank not in (3, 4):
        return None
    spatial = x.shape[2:]
    if kind in ("adaptive_avg_pool", "adaptive_max_pool"):
        return apply(kind, x, sizes=tuple(draw(st.integers(1, 3)) for _ in spatial), layout="channels_first")
    kernel = tuple(min(2, extent) for extent in spatial)
    common = {
        "kernel": kernel,
        "stride": tuple(draw(st.integers(1, 2)) for _ in spatial),
        "padding": tuple(k // 2 for k in kernel),
        "ceil_mode": False,
        "layout": "channels_first",
    }
    if kind == "max_pool":
        return apply(kind, x, **common, dilation=(1,) * len(spatial))
    return apply(kind, x, **common, count_include_pad=draw(st.booleans()), divisor=None)


def _contraction(draw: Any, kind: str, x: Node, pool: list[Node], seed: int) -> Node | None:
    rank = x.type.rank
    if x.dtype is not DType.F32 or not rank:
        return None
    bias = draw(st.booleans())
    if kind == "linear":
        return apply(
            "linear", x, weight(3, x.shape[-1], seed=seed), *([weight(3, seed=seed)] if bias else [])
        )
    if kind == "matmul" and rank >= 2:
        return apply("matmul", x, weight(x.shape[-1], 3, seed=seed))
    if kind == "attention" and rank >= 2:
        mask = [constant(array(x.shape[-2], x.shape[-2], seed=seed, dtype=DType.BOOL))] if bias else []
        return apply("attention", x, x, apply("tanh", x), *mask, causal=draw(st.booleans()), scale=0.5)
    if kind in ("conv", "conv_transpose") and rank in (3, 4):
        return _convolution(draw, kind, x, bias, seed)
    return None


def _convolution(draw: Any, kind: str, x: Node, bias: bool, seed: int) -> Node | None:
    spatial, channels = x.shape[2:], x.shape[1]
    groups = channels if draw(st.integers(0, 2)) == 0 else 1
    k = draw(st.integers(1, 3))
    rank = len(spatial)
    if kind == "conv":
        if any(extent + 2 < k for extent in spatial):
            return None
        width = groups * draw(st.sampled_from([1, 2, 3] if groups > 1 else [2, 3, 8, 12, 16, 24]))
        biases = [weight(width, seed=seed + 1)] if bias else []
        w = weight(width, channels // groups, *[k] * rank, seed=seed)
        stride = (draw(st.integers(1, 2)),) * rank
        return conv(x, w, *biases, stride=stride, padding=((1, 1),) * rank, groups=groups)
    biases = [weight(2 * groups, seed=seed + 1)] if bias else []
    w = weight(channels, 2, *[k] * rank, seed=seed)
    separate = draw(st.booleans())
    if not separate and any(extent + k < 4 for extent in spatial):
        return None
    return apply(
        "conv_transpose",
        x,
        w,
        *biases,
        stride=(k if separate else 2,) * rank,
        padding=(0 if separate else 1,) * rank,
        output_padding=(0 if separate else 1,) * rank,
        dilation=(1,) * rank,
        groups=groups,
    )
