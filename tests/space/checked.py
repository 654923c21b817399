"""Running what templates make: a task of its own, any config's program, its result beside the oracle's."""

from __future__ import annotations

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from tests.rewrites.helpers import array
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.measure.check import relative_error
from tilewright.measure.single import SingleKernel
from tilewright.space.space import Config, Space


class Inputs:
    """Makes the inputs of a task, and remembers which are constant."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.constants: set[int] = set()

    def __call__(self, *shape: int, constant: bool = False, dtype: DType = DType.F32) -> Node:
        if constant:
            self.constants.add(len(self.nodes))
        node = input_node(len(self.nodes), TensorType(shape, dtype), f"x{len(self.nodes)}")
        self.nodes.append(node)
        return node

    def task(self, output: Node) -> Task:
        return Task(Graph(tuple(self.nodes), (output,)), frozenset(self.constants))


def results(
    program: Program, task: Task, *, numerics: str = "fast", seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(what the kernel computes, what the oracle does) on random data; the same bits on one thread and on two."""
    verify_program(program)
    arrays = [array(*n.shape, seed=seed + i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    packings = (*program.packings, *[None] * (len(arrays) - len(program.packings)))
    stored = [
        np.ascontiguousarray(a).reshape(-1) if packing is None else packing.pack(a)
        for a, packing in zip(arrays, packings, strict=True)
    ]
    (reference,) = evaluate(task.graph, arrays, precise=True)
    one, two = (
        SingleKernel(program, host(), numerics=numerics, threads=threads)(stored).copy() for threads in (1, 2)
    )
    np.testing.assert_array_equal(one, two)
    return one.reshape(reference.shape), reference


def error(program: Program, task: Task, *, numerics: str = "fast", seed: int = 0) -> float:
    return relative_error(*results(program, task, numerics=numerics, seed=seed))


@st.composite
def legal_configs(draw: st.DrawFn, space: Space) -> Config:
    """Any config of the space; illegal draws are thrown away."""
    values = {knob.name: draw(st.sampled_from(knob.choices), label=knob.name) for knob in space.knobs}
    assume(space.legal(values))
    return Config.of(space.template, values)
