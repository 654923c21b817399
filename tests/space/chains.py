"""Chains of contractions, and contractions between norms, for tests: named ones, and any number of random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.space.checked import Inputs
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.task import Task

POINTWISE: dict[str, Any] = {
    "stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1, "layout": "channels_last",
}  # fmt: skip
ACTIVATIONS = ("relu", "silu", "gelu", "tanh", "none")
NORMS = ("layer_norm", "rms_norm", "softmax")


@dataclass(frozen=True)
class After:
    """What follows a contraction."""

    bias: bool = True
    activation: str = "relu"
    residual: bool = False


@dataclass(frozen=True)
class Case:
    """x @ a -> x @ b -> ...: `widths` are the columns of x and of every product. With an `image` (of a batch of 2), the
    first is a convolution with this window and stride, and the others are 1x1."""

    rows: int
    widths: tuple[int, ...]
    after: tuple[After, ...] = ()
    kind: str = "linear"  # rows of k in the weights, or "matmul": rows of n
    image: tuple[int, int] | None = None
    window: int = 3
    stride: int = 1
    edge: int = 1
    dtype: DType = DType.F16

    @property
    def name(self) -> str:
        at = f"{self.image[0]}x{self.image[1]}s{self.stride}w{self.window}" if self.image else str(self.rows)
        ends = "-".join(f"{a.activation}{'b' * a.bias}{'r' * a.residual}" for a in self.after)
        return "-".join([at, *map(str, self.widths), self.kind, self.dtype.short, ends])

    def task(self) -> Task:
        x = Inputs()
        return x.task(self.output(x))

    def output(self, x: Inputs) -> Node:
        shape = (2, *self.image) if self.image else (self.rows,)
        y = x(*shape, self.widths[0], dtype=self.dtype)
        after = self.after or (After(),) * (len(self.widths) - 1)
        for number, (inside, outside, each) in enumerate(
            zip(self.widths[:-1], self.widths[1:], after, strict=True)
        ):
            y = self._contraction(x, y, inside, outside, number)
            if each.bias:
                y = apply("add", y, x(outside, constant=True, dtype=self.dtype))
            if each.residual:
                y = apply("add", y, x(*y.shape, dtype=self.dtype))
            if each.activation == "gelu":
                y = apply("gelu", y, approximate="none")
            elif each.activation != "none":
                y = apply(each.activation, y)
        return y

    def _contraction(self, x: Inputs, y: Node, inside: int, outside: int, number: int) -> Node:
        if self.image:
            window, stride, edge = (self.window, self.stride, self.edge) if number == 0 else (1, 1, 0)
            weight = x(window, window, inside, outside, constant=True, dtype=self.dtype)
            if edge:
                ends = (0, edge, edge, 0)
                y = apply("pad", y, low=ends, high=ends, interior=(0, 0, 0, 0), value=0.0)
            return apply("conv", y, weight, **{**POINTWISE, "stride": (stride, stride)})
        if self.kind == "linear":
            return apply("linear", y, x(outside, inside, constant=True, dtype=self.dtype))
        return apply("matmul", y, x(inside, outside, constant=True, dtype=self.dtype))


def random_case(rng: Random, widest: int = 96, dtypes: Sequence[DType] = (DType.F16, DType.BF16)) -> Case:
    count = rng.choice((2, 2, 2, 3))
    step = rng.choice((1, 2, 8, 8))  # how elements can be copied
    widths = tuple(step * rng.randint(1, max(1, widest // step)) for _ in range(count + 1))
    after = tuple(
        After(rng.random() < 0.7, rng.choice(ACTIVATIONS), rng.random() < 0.3) for _ in range(count)
    )
    image = (rng.randint(3, 9), rng.randint(3, 9)) if rng.random() < 0.4 else None
    window = rng.choice((1, 2, 3))
    return Case(
        rows=rng.randint(1, 150), widths=widths, after=after, kind=rng.choice(("linear", "matmul")), image=image,
        window=window, stride=rng.choice((1, 2)), edge=rng.randint(0, window // 2), dtype=rng.choice(list(dtypes)),
    )  # fmt: skip


@dataclass(frozen=True)
class NormCase:
    """norm(x) @ a, norm(x @ a), or both: `before` and `after` are the norms, "" for none. `k` are the columns of x,
    `n` those of the product; `more` adds to x before its norm."""

    rows: int
    k: int
    n: int
    before: str = "layer_norm"
    after: str = ""
    ends: After = After(activation="none")
    kind: str = "linear"
    scaled: bool = True
    more: bool = False
    dtype: DType = DType.F16

    @property
    def name(self) -> str:
        flags = f"{'s' * self.scaled}{'m' * self.more}{'b' * self.ends.bias}{'r' * self.ends.residual}"
        norms = f"{self.before or 'no'}-{self.after or 'no'}"
        words = (self.rows, self.k, self.n, norms, self.kind, self.ends.activation, flags, self.dtype.short)
        return "-".join(map(str, words))

    def task(self) -> Task:
        x, dtype = Inputs(), self.dtype
        y = x(self.rows, self.k, dtype=dtype)
        if self.more:
            y = apply("add", y, x(self.rows, self.k, dtype=dtype))
        if self.before:
            y = self._norm(x, y, self.before)
        shape = (self.n, self.k) if self.kind == "linear" else (self.k, self.n)
        y = apply(self.kind, y, x(*shape, constant=True, dtype=dtype))
        if self.ends.bias:
            y = apply("add", y, x(self.n, constant=True, dtype=dtype))
        if self.ends.activation == "gelu":
            y = apply("gelu", y, approximate="none")
        elif self.ends.activation != "none":
            y = apply(self.ends.activation, y)
        if self.ends.residual:
            y = apply("add", y, x(*y.shape, dtype=dtype))
        return x.task(self._norm(x, y, self.after) if self.after else y)

    def _norm(self, x: Inputs, y: Node, norm: str) -> Node:
        if norm == "softmax":
            return apply("softmax", y, axis=1)
        count = {"layer_norm": 2, "rms_norm": 1}[norm] if self.scaled else 0
        weights = [x(y.shape[-1], constant=True, dtype=self.dtype) for _ in range(count)]
        return apply(norm, y, *weights, dims=1, eps=1e-5)


def random_norms(
    rng: Random, widest: int = 96, dtypes: Sequence[DType] = (DType.F16, DType.BF16)
) -> NormCase:
    step = rng.choice((1, 2, 8, 8))
    before, after = rng.choice(((True, False), (False, True), (True, True)))
    return NormCase(
        rows=rng.randint(2, 150), k=step * rng.randint(max(1, 4 // step), widest // step),
        n=step * rng.randint(max(1, 4 // step), widest // step),
        before=rng.choice(NORMS) if before else "", after=rng.choice(NORMS) if after else "",
        ends=After(rng.random() < 0.7, rng.choice(ACTIVATIONS), rng.random() < 0.4),
        kind=rng.choice(("linear", "matmul")), scaled=rng.random() < 0.8, more=rng.random() < 0.2,
        dtype=rng.choice(list(dtypes)),
    )  # fmt: skip
