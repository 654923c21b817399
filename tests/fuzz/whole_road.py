"""Random graphs down the whole road: rewritten, fused, compiled, run, and compared with the oracle of the original.

    python -m tests.fuzz.whole_road --graphs 2000 --seed 0

A mismatch is shrunk to a minimal graph and printed in its text form.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.rewrites.random_graphs import graphs
from tilewright.driver import compile_imported
from tilewright.frontend import ImportedModel
from tilewright.graph.ir import Graph
from tilewright.graph.oracle import evaluate
from tilewright.graph.text import print_graph
from tilewright.hw import host
from tilewright.measure.check import relative_error

BOUND = 1e-4  # end to end, numerics "fast"


def as_model(graph: Graph) -> ImportedModel:
    """A bare graph as a model: its inputs by position, a tuple out."""

    def leaves(count: int) -> dict[str, Any]:
        return {"kind": "tuple", "items": [{"kind": "leaf", "index": index} for index in range(count)]}

    names = tuple(f"x{index}" for index in range(len(graph.inputs)))
    inputs = {"kind": "tuple", "items": [leaves(len(names)), {"kind": "dict", "keys": [], "items": []}]}
    return ImportedModel(graph, names, inputs, leaves(len(graph.outputs)), names)


def random_inputs(graph: Graph, rng: np.random.Generator) -> list[np.ndarray]:
    arrays = []
    for node in graph.inputs:
        values = rng.standard_normal(node.shape) if node.dtype.is_float else rng.integers(-9, 10, node.shape)
        arrays.append(np.asarray(values).astype(node.dtype.numpy))
    return arrays


def mismatch(graph: Graph, number: int) -> str | None:
    """What is wrong with the compiled graph, or None. Errors that single precision explains do not count: the bound
    is relative to what the framework's own arithmetic, one rounding per node, gives."""
    arrays = random_inputs(graph, np.random.default_rng(number))
    compiled = compile_imported(as_model(graph), host(), threads=1 + number % 2)
    exact = evaluate(graph, arrays, precise=True)
    rounded = evaluate(graph, arrays, precise=False)
    for position, (ours, truth, plain) in enumerate(zip(compiled(*arrays), exact, rounded, strict=True)):
        if ours.shape != truth.shape:
            return f"output {position} has the shape {ours.shape}, not {truth.shape}"
        error, usual = relative_error(ours, truth), relative_error(plain, truth)
        if error > max(BOUND, 4 * usual) and not math.isinf(usual):
            return f"output {position} is off by {error:.1e}; one rounding per node is off by {usual:.1e}"
    return None


def run(count: int, start: int) -> None:
    """AssertionError, after shrinking, at the first graph that comes out wrong."""

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(st.booleans().flatmap(lambda images: graphs(images=images)), st.integers(0, 1000))
    def check(graph: Graph, number: int) -> None:
        wrong = mismatch(graph, number)
        assert wrong is None, f"{wrong}\n{print_graph(graph)}"

    check()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        run(options.graphs, options.seed)
    except AssertionError as error:
        print(error)
        sys.exit(1)
    print(f"{options.graphs} graphs, no mismatch")


if __name__ == "__main__":
    main()
