"""The ways of one task on a GPU, raced: each a plan by itself, checked against the oracle, timed by turns.

Runs in a process of its own (`serve`), which may crash, hang or spoil its context: the one who asks sees `Dead`, or a
failure that went astray, and one candidate is lost. A run is announced with the time that it may take; what a library
does before its first run, as a search for an algorithm, is no run. A plan repeats its way several times in one CUDA
graph, so that launches do not count; operands are in the second cache where they fit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda.pieces import build_piece
from tilewright.dtypes import DType
from tilewright.errors import DeviceError, SpaceError, TilewrightError
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph
from tilewright.hw.gpu import GpuMachine
from tilewright.measure.check import relative_error
from tilewright.measure.exam import L2_BOUNDS
from tilewright.measure.process import Channel, Failed
from tilewright.numerics import may_round_to_tf32
from tilewright.runtime.cuda.device import Device
from tilewright.runtime.cuda.executor import TRIPLE, GpuExecutor
from tilewright.runtime.cuda.vendor import as_tensor
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
from tilewright.space.vendor.candidates import is_contraction, way_of
from tilewright.space.vendor.pieces import Piece, Way

_GRAPH_SECONDS = 5e-4  # of one graph: repeats of a way until it takes about so long
_MOST_REPEATS = 20
_TURNS = 5
_DRAWN = 1_000_003  # numbers, which are repeated: a prime, so that no two rows are alike
_ROWS = 64  # of a result that are checked, where its rows are independent
_RUN_SECONDS, _TIMES_BEST = 1.0, 10  # a run of more than both, the second of the best so far, hangs
_SLOWEST_FLOPS, _SLOWEST_BYTES = 1e12, 4e9  # a second: what no kernel stays below, before there is a best
_TRANSFER_BYTES = 1e9  # a second, between the host and the card

# What the driver and the framework say of a kernel that failed, and what kind of failure that is.
_KINDS = {
    "out_of_memory": "memory",
    "out of memory": "memory",
    "illegal_address": "illegal",
    "illegal memory access": "illegal",
    "misaligned": "illegal",
    "invalid_address_space": "illegal",
    "invalid_pc": "illegal",
    "launch_failed": "crash",
    "unspecified launch failure": "crash",
    "illegal_instruction": "crash",
    "hardware_stack_error": "crash",
    "assert": "crash",
    "launch_timeout": "timeout",
}


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


class Running(msgspec.Struct, frozen=True, tag=True):
    """It runs now, on the card: if nothing is heard for so long, it hangs."""

    number: int
    seconds: float


class Tried(msgspec.Struct, frozen=True, tag=True):
    number: int
    times: tuple[float, ...]
    error: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    number: int
    failed: Failed


class Finished(msgspec.Struct, frozen=True, tag=True):
    pass


Answer = Trying | Running | Tried | Refused | Finished


def serve(channel: Channel) -> None:
    import torch  # the libraries are its

    torch.empty(1, device="cuda")
    decoder = msgspec.msgpack.Decoder(Question)
    while True:
        message, _ = channel.receive()
        _Race(decoder.decode(message), channel).run()


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
        Device(question.ordinal)  # the driver is loaded now, and not in the first candidate's run
        self._task = Task(parse_graph(question.text, {}), frozenset(question.constants))
        self._inputs = _random_inputs(self._task.graph)
        self._result = np.empty(self._task.output.shape, self._task.output.dtype.numpy)
        self._answers = _Answers(self._task, self._inputs)
        self._best = math.inf  # seconds of one run
        self._runners: list[_Runner] = []

    def run(self) -> None:
        question = self._question
        for number, config in enumerate(question.configs):
            self._tell(Trying(number))
            try:
                way = way_of(self._task, question.machine, question.numerics, question.libraries, config)
                if way is None:
                    raise SpaceError(f"{config} is no way to compute this task")
                self._runners.append(self._ready(number, way))
            except (TilewrightError, RuntimeError, _Wrong) as error:
                self._refuse(number, error)
        for _ in range(_TURNS):
            for runner in list(self._runners):
                self._running(runner.number)
                try:
                    runner.times.append(runner.executor.seconds_of_graph() / runner.repeats)
                except (DeviceError, RuntimeError) as error:
                    self._refuse(runner.number, error)
        for runner in self._runners:
            self._tell(Tried(runner.number, tuple(runner.times), runner.error))
        self._tell(Finished())

    def _ready(self, number: int, way: Way) -> _Runner:
        once = self._loaded(number, way, 1)
        once.poison()
        once.run(self._given(), [self._result])
        self._tell(Trying(number))
        error = self._checked(once)
        self._running(number)
        seconds = min(once.seconds_of_graph() for _ in range(3))
        self._best = min(self._best, seconds)
        repeats = max(1, min(_MOST_REPEATS, int(_GRAPH_SECONDS / max(seconds, 1e-7))))
        executor = once if repeats == 1 else self._loaded(number, way, repeats)
        if executor is not once:
            executor.run(self._given(), [self._result])
        return _Runner(number, executor, repeats, error, [])

    def _loaded(self, number: int, way: Way, repeats: int) -> GpuExecutor:
        """The plan on the card, its steps run once. Then it is running."""
        self._tell(Trying(number))
        executor = self._executor(way, repeats)
        if way.is_ours:  # where a library takes part, it may search first
            self._running(number)
        executor.loaded()
        self._running(number)
        return executor

    def _given(self) -> list[np.ndarray]:
        return [x for n, x in enumerate(self._inputs) if n not in self._task.constants]

    def _executor(self, way: Way, repeats: int) -> GpuExecutor:
        question = self._question
        plan, constants, objects = way_plan(
            self._task, way, self._inputs, question.machine, question.numerics, repeats
        )
        # In a model its neighbours may be a library's calls: what overlapping would gain is not this way's own.
        return GpuExecutor(plan, constants, objects, question.ordinal, dependent_launch="off")

    def _checked(self, executor: GpuExecutor) -> float:
        """Its error, where that is within bounds. What agrees with the oracle where the oracle was asked, and not with
        the first that did so elsewhere, makes the oracle be asked for all of it."""
        error = self._answers.error(self._result)
        bound = error_bound(self._task, self._question.numerics)
        if not error <= bound:
            raise _Wrong(f"its error is {error:.1e}, of at most {bound:.0e}")
        if self._answers.are_partial and not self._answers.agrees(_result_of(executor), 2 * bound):
            self._answers.complete()
            again = np.empty_like(self._result)
            for runner in list(self._runners):
                runner.executor.run(self._given(), [again])
                runner.error = self._answers.error(again)
                if not runner.error <= bound:
                    self._refuse(
                        runner.number, _Wrong(f"its error is {runner.error:.1e}, of at most {bound:.0e}")
                    )
            return self._checked(executor)
        return error

    # -- what is said -------------------------------------------------------------------------------------------------

    def _tell(self, answer: Answer) -> None:
        self._channel.send(msgspec.msgpack.encode(answer))

    def _running(self, number: int) -> None:
        task = self._task
        slowest = task.flops / _SLOWEST_FLOPS + task.bytes / _SLOWEST_BYTES
        run = _TIMES_BEST * self._best if self._best < math.inf else slowest
        self._tell(Running(number, max(_RUN_SECONDS, run) + task.bytes / _TRANSFER_BYTES))

    def _refuse(self, number: int, error: Exception) -> None:
        """One candidate less. In a context that it has spoiled nothing else can run: the process ends."""
        self._runners = [runner for runner in self._runners if runner.number != number]
        spoiled = not isinstance(error, _Wrong) and _is_spoiled(self._question.ordinal)
        words = error.message if isinstance(error, TilewrightError) else str(error)
        self._tell(Refused(number, Failed(_kind(error), words[:300], astray=spoiled)))
        if spoiled:
            os._exit(1)


def _kind(error: Exception) -> str:
    """A kernel that the card does not take counts as one that could not be built."""
    if isinstance(error, _Wrong):
        return "wrong"
    words = str(error).lower()
    return next((kind for said, kind in _KINDS.items() if said in words), "build")


def _is_spoiled(ordinal: int) -> bool:
    try:
        Device(ordinal).synchronise()
    except DeviceError:
        return True
    return False


def _result_of(executor: GpuExecutor) -> Any:
    """The result of the last run, where it is on the card."""
    (spec,) = executor.plan.outputs
    return as_tensor(executor.loaded().results[0], spec, executor.ordinal)


class _Answers:
    """What a task's result must be: of some rows, where the oracle was not asked for more."""

    def __init__(self, task: Task, inputs: Sequence[np.ndarray]) -> None:
        self._task, self._inputs = task, inputs
        self._expected: tuple[np.ndarray, Rows] | None = None
        self._first: Any = None  # the whole result of the first that was right, on the card

    @property
    def are_partial(self) -> bool:
        return self._expected is not None and not isinstance(self._expected[1], slice)

    def complete(self) -> None:
        self._expected = whole_answer(self._task.graph, self._inputs), slice(None)

    def error(self, result: np.ndarray) -> float:
        if self._expected is None:
            self._expected = expected_of(self._task.graph, self._inputs)
        expected, rows = self._expected
        return relative_error(result.reshape(self._task.output.shape)[rows], expected)

    def agrees(self, result: Any, bound: float) -> bool:
        if self._first is None:
            self._first = result.clone()
            return True
        wanted, found = (x.float() if x.is_floating_point() else x for x in (self._first, result))
        if not wanted.is_floating_point():
            return bool((wanted == found).all())
        return bool((wanted - found).norm() <= bound * wanted.norm())


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
        kernel = build_piece(piece, machine, numerics, cache) if piece.call is None else None
        packings = piece.packings if kernel is None else kernel.packings
        packings = (*packings, *[None] * (len(piece.operands) - len(packings)))
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
        if kernel is None:
            steps.append(Step("", tuple(arguments), 1, key, piece.task.label, vendor=piece.call))
            continue
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


Rows = slice | np.ndarray


def error_bound(task: Task, numerics: str) -> float:
    """In the L2 norm, of the coarsest type that a task computes: between two operators it may be rounded to that."""
    computed = [node.dtype for node in task.graph.nodes() if not node.is_input and not node.is_constant]
    if may_round_to_tf32(numerics) and task.output.dtype is DType.F32 and is_contraction(task):
        computed.append(DType.F16)
    return max((L2_BOUNDS[dtype] for dtype in computed if dtype in L2_BOUNDS), default=0.0)


def whole_answer(graph: Graph, inputs: Sequence[np.ndarray]) -> np.ndarray:
    (answer,) = evaluate(graph, list(inputs), precise=True)
    return np.asarray(answer)


def expected_of(graph: Graph, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, Rows]:
    """(The oracle's answer, for which rows): for a few where rows are computed each by itself, since in float64 on a
    processor a whole batch takes long. The last is among them: mistakes are made at edges."""
    small = _few_rows(graph)
    if small is None:
        return whole_answer(graph, inputs), slice(None)
    count, few = graph.outputs[0].shape[0], small.outputs[0].shape[0]
    rows = np.linspace(count - 1, 0, few, dtype=np.int64)[::-1]
    arrays = [
        array if array.shape == node.shape else array[rows]
        for array, node in zip(inputs, small.inputs, strict=True)
    ]
    return whole_answer(small, arrays), rows


def _few_rows(graph: Graph) -> Graph | None:
    """The same graph of a few rows alone; None where rows are not independent, or are few."""
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
