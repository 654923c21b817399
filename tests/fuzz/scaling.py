"""Compile time against the size of the model, for networks of one repeated part: it must be linear.

    python -m tests.fuzz.scaling                 (all kinds; some minutes)
    python -m tests.fuzz.scaling silu recurrence

Each kind is compiled at three sizes, each twice the one before, with an empty cache of kernels, and its outputs are
compared with the oracle. The command fails where the processor's time grows faster than n^1.3 from the first size to
the last, where a compilation raises, or where an output is wrong.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from tests.fuzz.whole_pipeline import random_inputs
from tests.rewrites.helpers import scalar, weight, x_input
from tilewright.driver import compile_imported
from tilewright.graph.ir import Graph, Node, constant
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.hw import host
from tilewright.measure.check import relative_error
from tilewright.testing.targets import as_model

MAX_GROWTH = 1.3  # exponent of the time in the size
BOUND = 1e-4
DOUBLINGS = 2

Kind = Callable[[int], Graph]


def compiled_right(graph: Graph) -> float:
    """Seconds of the processor for the compilation; AssertionError where the model is wrong."""
    gc.collect()
    gc.freeze()  # what is there already is no part of this compilation
    begin = time.process_time()
    compiled = compile_imported(as_model(graph), host())
    seconds = time.process_time() - begin
    gc.unfreeze()
    arrays = random_inputs(graph, np.random.default_rng(0))
    for got, truth in zip(compiled(*arrays), evaluate(graph, arrays, precise=True), strict=True):
        error = relative_error(got, truth)
        assert error <= BOUND, f"an output is off by {error:.1e}"
    return seconds


def growth(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent of the time in the size, from the first size to the last."""
    return math.log(seconds[-1] / seconds[0]) / math.log(sizes[-1] / sizes[0])


# -- shared values ----------------------------------------------------------------------------------------------------


def silu(n: int) -> Graph:
    """x * sigmoid(x) again and again: written out, the input is there 2^n times."""
    return _chain(n, lambda v: apply("mul", v, apply("sigmoid", v)))


def mish(n: int) -> Graph:
    return _chain(n, lambda v: apply("mish", v))


def doubled(n: int) -> Graph:
    return _chain(n, lambda v: apply("mul", apply("add", v, v), scalar(0.5)))


def runge_kutta(n: int) -> Graph:
    """Steps of the classical method for y' = -y * tanh(y)."""

    def slope(y: Node) -> Node:
        return apply("neg", apply("mul", y, apply("tanh", y)))

    def ahead(y: Node, k: Node, step: float) -> Node:
        return apply("add", y, apply("mul", k, scalar(step)))

    def step(y: Node) -> Node:
        k1 = slope(y)
        k2 = slope(ahead(y, k1, 0.05))
        k3 = slope(ahead(y, k2, 0.05))
        k4 = slope(ahead(y, k3, 0.1))
        middle = apply("mul", apply("add", k2, k3), scalar(2.0))
        return ahead(y, apply("add", apply("add", k1, middle), k4), 0.1 / 6)

    return _chain(n, step)


def fibonacci(n: int) -> Graph:
    """Each value is read by the next two."""
    x = x_input(4, 16)
    before, last = x, apply("tanh", x)
    for _ in range(n):
        before, last = last, apply("mul", apply("add", before, last), scalar(0.5))
    return Graph((x,), (last,))


def additions(n: int) -> Graph:
    """The same value added again and again."""
    x = x_input(8, 32)
    return _chain(n, lambda v: apply("add", v, x), x)


def wide_sum(n: int) -> Graph:
    """A balanced tree of additions."""
    x = x_input(8, 32)
    values = [apply("mul", x, scalar(1 + k)) for k in range(n)]
    while len(values) > 1:
        pairs = [values[k : k + 2] for k in range(0, len(values), 2)]
        values = [apply("add", *pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return Graph((x,), (values[0],))


def sum_of_inputs(n: int) -> Graph:
    inputs = tuple(x_input(2, 8, index=k) for k in range(n))
    total = inputs[0]
    for each in inputs[1:]:
        total = apply("add", total, each)
    return Graph(inputs, (total,))


# -- depth ------------------------------------------------------------------------------------------------------------


def layers(n: int) -> Graph:
    """An MLP."""
    x = value = x_input(2, 8)
    for k in range(n):
        transposed = constant(np.roll(np.eye(8, dtype=np.float32), k % 7, axis=1))  # of which no power grows
        value = apply("relu", apply("linear", value, transposed, weight(8, seed=k % 7)))
    return Graph((x,), (value,))


def recurrence(n: int) -> Graph:
    """An RNN, written out, with all of its states as the result."""
    x, matrix = x_input(n, 2, 8), constant(np.eye(8, dtype=np.float32) * 0.5)
    state: Node = apply("full", value=0.0, shape=(2, 8), dtype=x.dtype)
    states = []
    for k in range(n):
        now = apply("reshape", _row(x, k), shape=(2, 8))
        state = apply("tanh", apply("add", now, apply("linear", state, matrix)))
        states.append(apply("reshape", state, shape=(1, 2, 8)))
    return Graph((x,), (apply("concat", *states, axis=0),))


def filtered(n: int) -> Graph:
    """A recurrence without a matrix, whose steps could all be fused."""
    x = x_input(n, 8)
    state = _row(x, 0)
    for k in range(1, n):
        state = apply("add", apply("mul", state, scalar(0.5)), _row(x, k))
    return Graph((x,), (state,))


def residual(n: int) -> Graph:
    """Convolutions with a shortcut around each."""
    x, kernel = x_input(1, 4, 6, 6), constant(weight(4, 4, 3, 3).data * np.float32(0.1))  # type: ignore[operator]
    attrs = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}

    def block(v: Node) -> Node:
        return apply("relu", apply("add", v, apply("conv", v, kernel, **attrs, layout="channels_first")))

    return _chain(n, block, x)


def branches(n: int) -> Graph:
    """Convolutions of one image, which are all alive until they are concatenated."""
    x = x_input(1, 3, 6, 6)
    attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    made = [
        apply("conv", x, weight(4, 3, 1, 1, seed=k % 5), **attrs, layout="channels_first") for k in range(n)
    ]
    return Graph((x,), (apply("concat", *made, axis=1),))


def conditions(n: int) -> Graph:
    """A choice inside a choice inside a choice."""
    x = value = x_input(8, 32)
    for k in range(n):
        positive = apply("gt", x, scalar(k / n))
        value = apply("select", positive, apply("mul", value, scalar(0.9)), apply("neg", value))
    return Graph((x,), (value,))


def scans(n: int) -> Graph:
    return _chain(n, lambda v: apply("tanh", apply("cumsum", v, axis=1)), x_input(4, 8))


def norms(n: int) -> Graph:
    def step(v: Node) -> Node:
        return apply("add", v, apply("sub", v, apply("mean", v, axes=(1,), keepdims=True)))

    return _chain(n, lambda v: apply("mul", step(v), scalar(0.5)))


# -- movement ---------------------------------------------------------------------------------------------------------


def rows(n: int) -> Graph:
    """Computed rows that are concatenated."""
    x = x_input(n, 8)
    return Graph((x,), (apply("concat", *(apply("relu", _row(x, k)) for k in range(n)), axis=0),))


def concatenated(n: int) -> Graph:
    inputs = tuple(x_input(2, 4, index=k) for k in range(n))
    return Graph(inputs, (apply("concat", *inputs, axis=0),))


def slices(n: int) -> Graph:
    """Each step leaves an element out."""

    def step(v: Node) -> Node:
        end = v.shape[1]
        part = apply("slice", v, starts=(0, 1), stops=(4, end), steps=(1, 1))
        return apply("abs", apply("mul", part, scalar(0.99)))

    return _chain(n, step, x_input(4, n + 8))


def borders(n: int) -> Graph:
    """Each step adds what is to the left."""

    def step(v: Node) -> Node:
        moved = apply("pad", v, low=(0, 1), high=(0, 0), interior=(0, 0), value=0.0)
        left = apply("slice", moved, starts=(0, 0), stops=(4, 16), steps=(1, 1))
        return apply("maximum", apply("mul", apply("add", v, left), scalar(0.5)), scalar(0.01))

    return _chain(n, step, x_input(4, 16))


def shuffles(n: int) -> Graph:
    """Channels shuffled by a reshape, a permute and a reshape, with work in between."""

    def step(v: Node) -> Node:
        apart = apply("permute", apply("reshape", v, shape=(4, 3, 8)), axes=(0, 2, 1))
        return apply("abs", apply("mul", apply("reshape", apart, shape=(4, 24)), scalar(0.99)))

    return _chain(n, step, x_input(4, 24))


def transposes(n: int) -> Graph:
    def step(v: Node) -> Node:
        return apply("mul", apply("add", v, apply("permute", v, axes=(1, 0))), scalar(0.5))

    return _chain(n, step, x_input(8, 8))


def outputs(n: int) -> Graph:
    x = x_input(4, 16)
    return Graph((x,), tuple(apply("mul", x, scalar(2 + k)) for k in range(n)))


def _chain(n: int, step: Callable[[Node], Node], start: Node | None = None) -> Graph:
    x = value = x_input(4, 16) if start is None else start
    for _ in range(n):
        value = step(value)
    return Graph((x,), (value,))


def _row(x: Node, k: int) -> Node:
    rest = x.shape[1:]
    ones = (1,) * x.type.rank
    return apply("slice", x, starts=(k, *(0 for _ in rest)), stops=(k + 1, *rest), steps=ones)


# Of each kind, the first size here, and the size for the tests of every day.
KINDS: Mapping[str, tuple[Kind, int, int]] = {
    "silu": (silu, 32, 20),
    "mish": (mish, 8, 6),
    "doubled": (doubled, 250, 80),
    "runge_kutta": (runge_kutta, 12, 3),
    "fibonacci": (fibonacci, 250, 60),
    "additions": (additions, 1250, 200),
    "wide_sum": (wide_sum, 250, 100),
    "sum_of_inputs": (sum_of_inputs, 125, 100),
    "layers": (layers, 250, 60),
    "recurrence": (recurrence, 150, 40),
    "filtered": (filtered, 150, 60),
    "residual": (residual, 50, 10),
    "branches": (branches, 20, 8),
    "conditions": (conditions, 100, 30),
    "scans": (scans, 100, 20),
    "norms": (norms, 100, 20),
    "rows": (rows, 128, 70),
    "concatenated": (concatenated, 125, 40),
    "slices": (slices, 100, 60),
    "borders": (borders, 100, 20),
    "shuffles": (shuffles, 100, 20),
    "transposes": (transposes, 100, 20),
    "outputs": (outputs, 50, 10),
}


def measure(name: str) -> tuple[list[int], list[float]]:
    """(sizes, seconds) of a kind, each compiled with an empty cache."""
    make, first, _ = KINDS[name]
    sizes = [first << doubling for doubling in range(DOUBLINGS + 1)]
    seconds = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setenv("TILEWRIGHT_CACHE_DIR", folder)
            patch.setenv("TILEWRIGHT_STRICT_PASSES", "on")
            seconds.append(compiled_right(make(size)))
    return sizes, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help=f"some of {', '.join(KINDS)}; all of them by default")
    chosen = parser.parse_args(arguments).kinds or list(KINDS)
    if unknown := [name for name in chosen if name not in KINDS]:
        parser.error(f"there is no kind {', '.join(unknown)}")
    compiled_right(layers(3))  # imports and the first use of LLVM are no kind's
    failed = []
    for name in chosen:
        try:
            sizes, seconds = measure(name)
        except Exception as error:
            failed.append(name)
            print(f"{name:14} {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        exponent = growth(sizes, seconds)
        failed += [name] if exponent > MAX_GROWTH else []
        times = "  ".join(f"{size}: {each:.2f} s" for size, each in zip(sizes, seconds, strict=True))
        print(f"{name:14} n^{exponent:.2f}   {times}", flush=True)
    print(f"{len(failed)} of {len(chosen)} kinds failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
