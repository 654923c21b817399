"""Tasks that the tests of sketches work on: of every class that rules know, of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.task import Task

F32, BF16 = DType.F32, DType.BF16


def matmul(
    m: int,
    k: int,
    n: int,
    *,
    constant: bool = True,
    batch: int = 1,
    epilogue: bool = False,
    dtype: DType = F32,
    prologue: bool = False,
) -> Task:
    x = Inputs()
    lead = (batch,) if batch > 1 else ()
    left = x(*lead, m, k, dtype=dtype)
    right = x(k, n, dtype=dtype, constant=True) if constant else x(*lead, k, n, dtype=dtype)
    product = apply("matmul", apply("relu", left) if prologue else left, right)
    if epilogue:
        product = apply("relu", apply("add", product, x(n, dtype=dtype)))
    return x.task(product)


def linear(m: int, k: int, n: int, *, constant: bool = True) -> Task:
    """The weight lies as in PyTorch: n x k."""
    x = Inputs()
    return x.task(apply("linear", x(m, k), x(n, k, constant=constant)))


def conv(
    size: tuple[int, int],
    channels: tuple[int, int],
    window: tuple[int, int] = (3, 3),
    stride: int = 1,
    pad: int = 1,
    layout: str = "channels_last",
    groups: int = 1,
) -> Task:
    x = Inputs()
    last = layout == "channels_last"
    inside, outside = channels
    image = x(1, *size, inside) if last else x(1, inside, *size)
    each = inside // groups
    weight = (*window, each, outside) if last else (outside, each, *window)
    if pad:
        edge = (0, pad, pad, 0) if last else (0, 0, pad, pad)
        image = apply("pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    attrs: dict[str, Any] = {
        "stride": (stride, stride),
        "padding": ((0, 0), (0, 0)),
        "dilation": (1, 1),
        "groups": groups,
    }
    return x.task(apply("relu", apply("conv", image, x(*weight, constant=True), layout=layout, **attrs)))


def two_convs(size: int, channels: int, filters: int, pad: int = 1) -> Task:
    """A product of all channels, then a window of each: what the first computes at the border is not there."""
    x = Inputs()
    attrs: dict[str, Any] = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
    first = apply(
        "conv", x(1, size, size, channels), x(1, 1, channels, filters, constant=True), layout="channels_last",
        groups=1, **attrs,
    )  # fmt: skip
    edge = (0, pad, pad, 0)
    padded = apply("pad", apply("relu", first), low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    weight = x(3, 3, 1, filters, constant=True)
    return x.task(apply("conv", padded, weight, layout="channels_last", groups=filters, **attrs))


def softmax(rows: int, columns: int, axis: int = 1) -> Task:
    x = Inputs()
    return x.task(apply("softmax", x(rows, columns), axis=axis))


def matmul_softmax(batch: int, m: int, k: int, n: int, *, then: int = 0) -> Task:
    """softmax(a @ b), and a further product where `then` says how wide."""
    x = Inputs()
    out: Node = apply("softmax", apply("matmul", x(batch, m, k), x(batch, k, n)), axis=2)
    return x.task(apply("matmul", out, x(batch, n, then)) if then else out)


def attention(heads: int, queries: int, keys: int, depth: int) -> Task:
    x = Inputs()
    q, k, v = x(1, heads, queries, depth), x(1, heads, keys, depth), x(1, heads, keys, depth)
    return x.task(apply("attention", q, k, v, scale=0.3, causal=False))


def total(shape: tuple[int, ...], axes: tuple[int, ...], op: str = "sum") -> Task:
    x = Inputs()
    return x.task(apply(op, x(*shape), axes=axes, keepdims=False))


def elementwise(rows: int, columns: int) -> Task:
    x = Inputs()
    return x.task(apply("tanh", apply("add", x(rows, columns), x(columns))))


def transposed(*shape: int) -> Task:
    x = Inputs()
    return x.task(apply("permute", x(*shape), axes=tuple(reversed(range(len(shape))))))


# One of each, with extents that nothing divides.
EXAMPLES: dict[str, Callable[[], Task]] = {
    "matmul": lambda: matmul(37, 29, 53, epilogue=True),
    "matmul_variable": lambda: matmul(11, 48, 40, constant=False, batch=3),
    "matmul_bf16": lambda: matmul(13, 32, 24, dtype=BF16),
    "matmul_prologue": lambda: matmul(9, 17, 19, prologue=True),
    "linear": lambda: linear(17, 31, 23),
    "linear_variable": lambda: linear(5, 31, 23, constant=False),
    "vector": lambda: matmul(1, 64, 50),
    "column": lambda: matmul(30, 41, 1, constant=False),
    "conv": lambda: conv((7, 9), (5, 24)),
    "conv_strided": lambda: conv((8, 7), (3, 18), stride=2),
    "conv_first": lambda: conv((6, 11), (3, 7), layout="channels_first"),
    "depthwise": lambda: conv((6, 7), (20, 20), groups=20),
    "two_convs": lambda: two_convs(6, 5, 18),
    "softmax": lambda: softmax(7, 35),
    "softmax_first": lambda: softmax(9, 21, axis=0),
    "matmul_softmax": lambda: matmul_softmax(2, 13, 8, 21),
    "matmul_softmax_matmul": lambda: matmul_softmax(2, 11, 8, 19, then=17),
    "attention": lambda: attention(2, 9, 13, 8),
    "sum_last": lambda: total((5, 3, 37), (2,)),
    "sum_middle": lambda: total((5, 3, 37), (1,)),
    "sum_all": lambda: total((5, 37), (0, 1)),
    "max_last": lambda: total((6, 23), (1,), "amax"),
    "elementwise": lambda: elementwise(5, 37),
    "transposed": lambda: transposed(7, 5, 18),
}

_SIZE = st.integers(1, 24)


def tasks() -> st.SearchStrategy[Task]:
    """Any size, 1 and primes included."""
    return st.one_of(
        st.builds(
            matmul,
            _SIZE,
            _SIZE,
            _SIZE,
            constant=st.booleans(),
            batch=st.integers(1, 3),
            epilogue=st.booleans(),
            dtype=st.sampled_from([F32, F32, BF16]),
            prologue=st.booleans(),
        ),
        st.builds(linear, _SIZE, _SIZE, _SIZE, constant=st.booleans()),
        st.builds(
            conv,
            st.tuples(st.integers(3, 7), st.integers(3, 7)),
            st.tuples(st.integers(1, 4), st.integers(1, 20)),
            st.tuples(st.integers(1, 3), st.integers(1, 3)),
            stride=st.integers(1, 2),
            pad=st.integers(0, 2),
            layout=st.sampled_from(["channels_last", "channels_first"]),
        ),
        st.builds(two_convs, st.integers(3, 6), st.integers(1, 6), st.integers(1, 20), st.integers(0, 2)),
        st.builds(softmax, _SIZE, _SIZE, st.integers(0, 1)),
        st.builds(
            matmul_softmax,
            st.integers(1, 2),
            st.integers(1, 20),
            st.integers(1, 9),
            st.integers(1, 24),
            then=st.sampled_from([0, 1, 7, 16]),
        ),
        st.builds(
            total,
            st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40)),
            st.sampled_from([(0,), (1,), (2,), (0, 2), (0, 1, 2)]),
            st.sampled_from(["sum", "amax"]),
        ),
        st.builds(elementwise, _SIZE, _SIZE),
        st.builds(transposed, st.integers(1, 9), st.integers(1, 9), st.integers(1, 20)),
    )
