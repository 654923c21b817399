"""Random graphs down the whole road: rewritten, fused, compiled, run, and compared with the oracle of the original;
and rewritten once more with made-up times, the oracle after every pass.

    python -m tests.fuzz.whole_pipeline --graphs 2000 --seed 0

A mismatch is shrunk to a minimal graph and printed in its text form.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.judge import Judge, skipped, with_dice
from tests.graph.ops.checks import Case
from tests.graph.ops.test_table import CASES
from tests.rewrites import random_graphs
from tests.rewrites.random_graphs import graphs
from tilewright.driver import compile_imported
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, constant, input_node
from tilewright.graph.op import apply
from tilewright.graph.text import print_graph
from tilewright.hw import host
from tilewright.support.trace import Trace
from tilewright.testing.targets import as_model

BOUND = 1e-4  # end to end, numerics "fast"
# Of 16-bit floats, four roundings: with few elements, what one rounding per node gives can be small by luck.
HALF_BOUNDS = {DType.F16: 4 * 2.0**-11, DType.BF16: 4 * 2.0**-8}


def random_inputs(graph: Graph, rng: np.random.Generator) -> list[np.ndarray]:
    arrays = []
    for node in graph.inputs:
        values = rng.standard_normal(node.shape) if node.dtype.is_float else rng.integers(-9, 10, node.shape)
        arrays.append(np.asarray(values).astype(node.dtype.numpy))
    return arrays


@dataclass(frozen=True, eq=False)
class Example:
    """A graph with inputs; None: random ones."""

    graph: Graph
    inputs: tuple[np.ndarray, ...] | None = None

    def __repr__(self) -> str:
        return print_graph(self.graph)


@st.composite
def around_cases(draw: Any) -> Example:
    """Any operator of the table, by one of its test cases, with random work before its first operand and behind its
    result; operands come as inputs or as constants."""
    case: Case = draw(st.sampled_from(CASES))
    dtype: DType = draw(st.sampled_from(list(case.dtypes)))
    inputs: list[Node] = []
    values: list[np.ndarray] = []
    operands: list[Node] = []
    for array in case.arrays(dtype):
        if array.size and draw(st.booleans()):
            operands.append(constant(array))
            continue
        inputs.append(input_node(len(inputs), TensorType(array.shape, DType.of(array)), f"x{len(inputs)}"))
        values.append(array)
        operands.append(inputs[-1])
    if operands and operands[0].dtype is DType.F32 and operands[0].type.size and draw(st.booleans()):
        before = draw(st.sampled_from(["neg", "relu", "abs", "square"]))
        operands[0] = apply(before, operands[0])
    pool = [*inputs, apply(case.op, *operands, **case.attrs)]
    for step in range(draw(st.integers(0, 4))):
        if not pool[-1].type.size or not pool[-1].type.rank:
            break
        made = random_graphs._apply(
            draw, draw(st.sampled_from(random_graphs.EVERYTHING)), pool[-1], pool, step
        )
        if made is not None and 0 < made.type.size <= 20_000:
            pool.append(made)
    return Example(Graph(tuple(inputs), (pool[-1],)), tuple(values))


examples = st.one_of(
    graphs().map(Example), graphs(images=True).map(Example), around_cases(), around_cases(), around_cases()
)


def mismatch(graph: Graph, arrays: Sequence[np.ndarray], number: int) -> str:
    """What is wrong with the compiled graph, or with the graph after a pass; nothing where all is right. Errors that
    the types explain do not count: the bound is relative to what one rounding per node gives. `number` decides the
    threads and the made-up times of the second round."""
    judge = Judge(graph, arrays, max([BOUND, *(HALF_BOUNDS.get(node.dtype, 0) for node in graph.nodes())]))
    trace = Trace()
    compiled = compile_imported(as_model(graph), host(), threads=1 + number % 2, trace=trace)
    wrong = skipped(trace) or judge.of(compiled(*arrays), "output")
    return wrong or with_dice(judge, "fast", number)


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
    @given(examples, st.integers(0, 1000))
    def check(example: Example, number: int) -> None:
        graph = example.graph
        arrays = example.inputs or random_inputs(graph, np.random.default_rng(number))
        wrong = mismatch(graph, arrays, number)
        assert not wrong, f"{wrong}\n{print_graph(graph)}"

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
