"""Convolution chains as tasks, and a program of theirs run on this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from tests.space.checked import same_on_two_threads, stored_for
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.space.space import Config, Space


@dataclass(frozen=True)
class Chain:
    """The sizes of expand (1x1) -> depthwise -> project (1x1); without `inputs` nothing is expanded, without `outputs`
    nothing is projected."""

    batch: int
    height: int
    width: int
    inputs: int | None
    channels: int
    outputs: int | None
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    low: tuple[int, int] = (1, 1)
    high: tuple[int, int] = (1, 1)
    residual: bool = False

    @property
    def fits(self) -> bool:
        """Whether the window is larger than its step and lies in the padded image."""
        extents = (self.height, self.width)
        for axis in range(2):
            reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            if reach <= self.stride[axis] or reach > extents[axis] + self.low[axis] + self.high[axis]:
                return False
        return self.kernel != (1, 1)

    def task(self) -> Task:
        nodes: list[Node] = []

        def given(*shape: int) -> Node:
            nodes.append(input_node(len(nodes), TensorType(shape, DType.F32)))
            return nodes[-1]

        def conv(x: Node, weight: Node, **changed: object) -> Node:
            attrs: dict[str, object] = {
                "stride": (1, 1),
                "padding": ((0, 0), (0, 0)),
                "dilation": (1, 1),
                "groups": 1,
                "layout": "channels_last",
            }
            return apply("conv", x, weight, **{**attrs, **changed})

        first = self.channels if self.inputs is None else self.inputs
        source = given(self.batch, self.height, self.width, first)
        y = source
        if self.inputs is not None:
            y = apply("add", conv(y, given(1, 1, self.inputs, self.channels)), given(self.channels))
            y = apply("clamp", y, min=0.0, max=6.0)
        if any(self.low + self.high):
            low, high = (0, *self.low, 0), (0, *self.high, 0)
            y = apply("pad", y, low=low, high=high, interior=(0, 0, 0, 0), value=0.0)
        window = given(*self.kernel, 1, self.channels)
        y = conv(y, window, stride=self.stride, dilation=self.dilation, groups=self.channels)
        y = apply("clamp", apply("add", y, given(self.channels)), min=-2.0, max=None)
        if self.outputs is not None:
            y = apply("add", conv(y, given(1, 1, self.channels, self.outputs)), given(self.outputs))
        varying = {source}
        if self.residual:
            other = source if y.shape == source.shape else given(*y.shape)
            y = apply("add", y, other)
            varying.add(other)
        constants = frozenset(number for number, node in enumerate(nodes) if node not in varying)
        return Task(Graph(tuple(nodes), (y,)), constants)


extents = st.integers(1, 17)
pairs = st.tuples(st.integers(0, 2), st.integers(0, 2))


@st.composite
def chains(draw: st.DrawFn, *, expand: bool, project: bool) -> Chain:
    chain = Chain(
        batch=draw(st.integers(1, 2)),
        height=draw(extents),
        width=draw(extents),
        inputs=draw(st.integers(1, 20)) if expand else None,
        channels=draw(st.integers(2, 50)),
        outputs=draw(st.integers(2, 50)) if project else None,
        kernel=draw(st.tuples(st.sampled_from((1, 2, 3, 5)), st.sampled_from((1, 2, 3, 5)))),
        stride=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        dilation=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        low=draw(pairs),
        high=draw(pairs),
        residual=draw(st.booleans()),
    )
    assume(chain.fits)
    return chain


@st.composite
def machines(draw: st.DrawFn) -> CpuMachine:
    here = host()
    size, registers = draw(st.sampled_from(((16, 16), (32, 16), (64, 32))))
    return dataclasses.replace(here, vector_bytes=size, vector_registers=registers)


def some_config(draw: st.DrawFn, space: Space) -> Config:
    """One of the space's configs; few of all combinations are legal, so they are not left to hypothesis to filter."""
    random = draw(st.randoms(use_true_random=False))
    for _ in range(300):
        values = {knob.name: random.choice(knob.choices) for knob in space.knobs}
        if space.legal(values):
            return Config.of(space.template, values)
    return next(iter(space.configs()))


def check(task: Task, program: Program, machine: CpuMachine, numerics: str = "fast") -> None:
    """The program is legal, near the oracle, and gives the same bits on one and two threads."""
    verify_program(program)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(node.shape, np.float32) for node in task.graph.inputs]
    flat = stored_for(program, arrays)
    (expected,) = evaluate(task.graph, arrays)
    result = same_on_two_threads(program, flat, machine=machine, numerics=numerics)
    error = np.linalg.norm(result - expected.reshape(-1)) / max(np.linalg.norm(expected), 1e-30)
    assert error < 1e-6
