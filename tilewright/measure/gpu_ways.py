"""The ways of one task on a GPU, raced: each a plan by itself, checked against the oracle, timed by turns.

Runs in a process of its own (`serve`), which may crash, hang or spoil its context: the one who asks sees `Dead`, and
one candidate is lost. A plan repeats its way several times in one CUDA graph, so that launches do not count; operands
are in the second cache where they fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda.pieces import build_piece
from tilewright.errors import CodegenError, DeviceError, SpaceError, TilewrightError
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph
from tilewright.hw.gpu import GpuMachine
from tilewright.measure.check import relative_error
from tilewright.measure.exam import L2_BOUNDS
from tilewright.measure.process import Channel, Failed
from tilewright.runtime.cuda.executor import TRIPLE, GpuExecutor
from tilewright.runtime.plan import (
    Launch,
    MemoryReport,
    Place,
    Plan,
    Step,
    TaskInfo,
    TensorSpec,
    aligned,
)
from tilewright.space.space import Config
from tilewright.space.vendor.candidates import way_of
from tilewright.space.vendor.pieces import Piece, Way

_GRAPH_SECONDS = 5e-4  # of one graph: repeats of a way until it takes about so long
_MOST_REPEATS = 20
_TURNS = 5
_DRAWN = 1_000_003  # numbers, which are repeated: a prime, so that no two rows are alike
_ROWS = 64  # of a result that is checked, where its rows are independent


class Question(msgspec.Struct, frozen=True, tag=True):
    """Race these configs of a task. `libraries` and `ordinal` as in the target."""

    text: str
    constants: tuple[int, ...]
    machine: GpuMachine
    numerics: str
    libraries: tuple[str, ...]
    ordinal: int
    configs: tuple[Config, ...]


class Trying(msgspec.Struct, frozen=True, tag=True):
    """The config of this number comes next: if nothing more is heard, it is to blame."""

    number: int


class Tried(msgspec.Struct, frozen=True, tag=True):
    number: int
    times: tuple[float, ...]
    error: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    number: int
    failed: Failed


class Finished(msgspec.Struct, frozen=True, tag=True):
    pass


Answer = Trying | Tried | Refused | Finished


def serve(channel: Channel) -> None:
    import torch  # the libraries are its

    torch.empty(1, device="cuda")
    decoder = msgspec.msgpack.Decoder(Question)
    while True:
        message, _ = channel.receive()
        question = decoder.decode(message)
        for answer in _Race(question, channel).run():
            channel.send(msgspec.msgpack.encode(answer))


def _say(channel: Channel, answer: Answer) -> None:
    channel.send(msgspec.msgpack.encode(answer))


@dataclass
class _Runner:
    """One way, ready to be timed."""

    number: int
    executor: GpuExecutor
    repeats: int
    error: float
    times: list[float]


class _Race:
    def __init__(self, question: Question, channel: Channel) -> None:
        self._question, self._channel = question, channel
        self._task = Task(parse_graph(question.text, {}), frozenset(question.constants))
        self._inputs = _random_inputs(self._task.graph)
        self._expected: tuple[np.ndarray, slice] | None = None
        self._result = np.empty(self._task.output.shape, self._task.output.dtype.numpy)

    def run(self) -> list[Answer]:
        question = self._question
        runners: list[_Runner] = []
        answers: list[Answer] = []
        for number, config in enumerate(question.configs):
            _say(self._channel, Trying(number))
            try:
                way = way_of(self._task, question.machine, question.numerics, question.libraries, config)
                if way is None:
                    raise SpaceError(f"{config} is no way to compute this task")
                runners.append(self._ready(number, way))
            except (SpaceError, CodegenError) as error:
                answers.append(Refused(number, Failed("build", error.message)))
            except _Wrong as error:
                answers.append(Refused(number, Failed("wrong", str(error))))
            except (DeviceError, TilewrightError, RuntimeError) as error:
                answers.append(Refused(number, Failed("illegal", str(error)[:300])))
        for _ in range(_TURNS):
            for runner in runners:
                _say(self._channel, Trying(runner.number))
                runner.times.append(runner.executor.seconds_of_graph() / runner.repeats)
        answers += [Tried(r.number, tuple(r.times), r.error) for r in runners]
        return [*answers, Finished()]

    def _ready(self, number: int, way: Way) -> _Runner:
        once = self._executor(way, 1)
        once.poison()
        once.run(self._given(), [self._result])
        error = self._error(self._result)
        bound = L2_BOUNDS.get(self._task.output.dtype, 0.0)
        if not error <= bound:
            raise _Wrong(f"its error is {error:.1e}, of at most {bound:.0e}")
        seconds = min(once.seconds_of_graph() for _ in range(3))
        repeats = max(1, min(_MOST_REPEATS, int(_GRAPH_SECONDS / max(seconds, 1e-7))))
        executor = once if repeats == 1 else self._executor(way, repeats)
        if executor is not once:
            executor.run(self._given(), [self._result])
        return _Runner(number, executor, repeats, error, [])

    def _given(self) -> list[np.ndarray]:
        return [x for n, x in enumerate(self._inputs) if n not in self._task.constants]

    def _executor(self, way: Way, repeats: int) -> GpuExecutor:
        question = self._question
        plan, constants, objects = way_plan(
            self._task, way, self._inputs, question.machine, question.numerics, repeats
        )
        return GpuExecutor(plan, constants, objects, question.ordinal)

    def _error(self, result: np.ndarray) -> float:
        if self._expected is None:
            self._expected = expected_of(self._task.graph, self._inputs)
        expected, rows = self._expected
        return relative_error(result.reshape(self._task.output.shape)[rows], expected)


class _Wrong(Exception):
    pass


# -- plans ----------------------------------------------------------------------------------------------------------


def way_plan(
    task: Task,
    way: Way,
    inputs: Sequence[np.ndarray],
    machine: GpuMachine,
    numerics: str,
    repeats: int = 1,
) -> tuple[Plan, list[np.ndarray], dict[str, bytes]]:
    """(the plan that computes a task in one way, so often; its constants; its machine code)."""
    cache = ObjectCache.default()
    places: dict[Node, Place] = {}
    specs: list[TensorSpec] = []
    for number, node in enumerate(way.inputs):
        if number not in task.constants:
            places[node] = Place("input", len(specs))
            specs.append(_spec(f"x{number}", node.type))
    constants: list[np.ndarray] = []
    constant_specs: list[TensorSpec] = []
    objects: dict[str, bytes] = {}
    kernels: dict[str, str] = {}
    tasks: dict[str, TaskInfo] = {}
    steps: list[Step] = []
    arena = 0
    stored: dict[tuple[int, object], Place] = {}
    for number, piece in enumerate(way.pieces):
        packings = (*piece.packings, *[None] * (len(piece.operands) - len(piece.packings)))
        arguments = []
        for node, packing in zip(piece.operands, packings, strict=True):
            if node in places:
                arguments.append(places[node])
                continue
            index = way.inputs.index(node)
            if (index, packing) not in stored:
                data = inputs[index] if packing is None else packing.pack(inputs[index])
                stored[index, packing] = Place("constant", len(constants))
                constant_specs.append(TensorSpec(f"x{index}", node.dtype.short, data.shape))
                constants.append(data)
            arguments.append(stored[index, packing])
        if number == len(way.pieces) - 1:
            places[piece.result] = Place("output", 0)
        else:
            places[piece.result] = Place("arena", 0, arena)
            arena += aligned(piece.result.type.bytes)
        arguments.append(places[piece.result])
        key = f"piece{number}"
        tasks[key] = _info(piece, packings)
        if piece.call is not None:
            steps.append(Step("", tuple(arguments), 1, key, piece.task.label, vendor=piece.call))
            continue
        kernel = build_piece(piece, machine, numerics, cache)
        objects[kernel.symbol] = kernel.cubin
        kernels[kernel.symbol] = kernel.symbol
        launch = Launch(kernel.threads, kernel.shared_bytes)
        steps.append(Step(kernel.symbol, tuple(arguments), kernel.blocks, key, piece.task.label, launch))
    leaves = [{"kind": "leaf", "index": index} for index in range(len(specs))]
    plan = Plan(
        inputs=tuple(specs),
        outputs=(_spec("out", task.output.type),),
        constants=tuple(constant_specs),
        steps=tuple(steps) * repeats,
        kernels=kernels,
        tasks=tasks,
        memory=MemoryReport(arena, arena, arena, sum(array.nbytes for array in constants)),
        input_tree={
            "kind": "tuple",
            "items": [{"kind": "tuple", "items": leaves}, {"kind": "dict", "keys": [], "items": []}],
        },
        output_tree={"kind": "leaf", "index": 0},
        target={"triple": TRIPLE, "cpu": machine.capability, "features": []},
        numerics=numerics,
    )
    return plan, constants, objects


def _spec(name: str, type: TensorType) -> TensorSpec:
    return TensorSpec(name, type.dtype.short, type.shape)


def _info(piece: Piece, packings: Sequence[object]) -> TaskInfo:
    inputs = tuple(
        _spec(f"x{n}", node.type)
        if packing is None
        else TensorSpec(f"x{n}", node.dtype.short, (packing.size,))  # type: ignore[attr-defined]
        for n, (node, packing) in enumerate(zip(piece.operands, packings, strict=True))
    )
    task = piece.task
    return TaskInfo(task.label, task.text, task.flops, task.bytes, inputs, _spec("out", task.output.type))


# -- what is right --------------------------------------------------------------------------------------------------


def _random_inputs(graph: Graph, seed: int = 0) -> list[np.ndarray]:
    """Values of a network's size: what is summed over many is scaled down."""
    rng = np.random.default_rng(seed)
    arrays = []
    for node in graph.inputs:
        if node.dtype.is_float:
            scale = 1.0
            if any(
                user.op in ("matmul", "linear", "conv") and user.inputs[1] is node
                for user in graph.users()[node]
            ):
                scale = 1.0 / math.sqrt(max(1, node.type.size // max(node.shape[-1], 1)))
            drawn = rng.standard_normal(min(node.type.size, _DRAWN), np.float32) * np.float32(scale)
            arrays.append(np.resize(drawn.astype(node.dtype.numpy), node.shape))
        else:
            arrays.append(rng.integers(0, 2, node.shape).astype(node.dtype.numpy))
    return arrays


def expected_of(graph: Graph, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, slice]:
    """(The oracle's answer, for which rows): for a few where rows are computed each by itself, since in float64 on a
    processor a whole batch takes long."""
    small = _few_rows(graph)
    if small is None:
        (answer,) = evaluate(graph, list(inputs), precise=True)
        return np.asarray(answer), slice(None)
    arrays = [array[: node.shape[0]] for array, node in zip(inputs, small.inputs, strict=True)]
    (answer,) = evaluate(small, arrays, precise=True)
    return np.asarray(answer), slice(0, small.outputs[0].shape[0])


def _few_rows(graph: Graph) -> Graph | None:
    """The same graph of the first rows alone; None where rows are not independent, or are few."""
    (output,) = graph.outputs
    rows = output.shape[0] if output.shape else 0
    images = output.type.rank == 4
    few = 1 if images else _ROWS
    if rows <= few:
        return None
    weights = {
        node.inputs[1] for node in graph.nodes() if node.op in ("matmul", "linear", "conv") and node.inputs
    }
    made: dict[Node, Node] = {}
    for node in graph.nodes():
        if node.is_input:
            split = node.shape[:1] == (rows,) and node not in weights and node.type.rank == output.type.rank
            type = TensorType((few, *node.shape[1:]), node.dtype) if split else node.type
            made[node] = input_node(node.attrs["index"], type)
        elif node.is_constant:
            made[node] = node
        elif _keeps_rows(node):
            made[node] = apply(node.op, *(made[x] for x in node.inputs), **node.attrs)
        else:
            return None
    return Graph(tuple(made[node] for node in graph.inputs), (made[output],))


def _keeps_rows(node: Node) -> bool:
    if node.op == "pad":
        return not (node.attrs["low"][0] or node.attrs["high"][0] or node.attrs["interior"][0])
    if node.op in ("conv", "linear"):
        return bool(node.attrs.get("layout", "channels_last") == "channels_last")
    if node.op == "matmul":
        return node.inputs[1].type.rank == 2 and node.type.rank == 2
    return op_of(node.op).fusion is Fusion.ELEMENTWISE
