"""Link kernel calls into a Plan: where every value lives, and which kernel runs when.

Inputs and outputs live in the caller's memory, constants in the model's memory, and everything else in one arena
whose offsets are planned by liveness. `link` links the calls of a model's partition; there, a view occupies no memory
of its own but all or a part of the buffer it views. `link_calls` links calls that have no graph, for example those of
a trial.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tilewright import knobs
from tilewright.graph.ir import Node, TensorType
from tilewright.graph.task import Partition, Task, TaskCall
from tilewright.runtime.contract import Argument, Contract, plan_digest, sealed
from tilewright.runtime.loader import object_digest
from tilewright.runtime.memory import LiveBuffer, plan_memory
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import (
    PREDICTED,
    FusionReport,
    Launch,
    MemoryReport,
    Origin,
    Pinned,
    Place,
    Plan,
    Step,
    TaskInfo,
    TensorSpec,
    VendorCall,
)

_PACKED_AT_ONCE = 4  # weights; packing one takes some times its memory


@dataclass(frozen=True)
class Boundary:
    """A model's calling convention: the names and the nesting of its inputs and outputs."""

    input_names: tuple[str, ...]
    input_tree: dict[str, Any]
    output_tree: dict[str, Any]
    argument_names: tuple[str, ...]
    pinned: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # inputs that must have this one value, by name

    @classmethod
    def anonymous(cls, inputs: int, outputs: int) -> Boundary:
        """The boundary of a plan that is not called by name: flat tuples."""

        def leaves(count: int) -> dict[str, Any]:
            return {"kind": "tuple", "items": [{"kind": "leaf", "index": index} for index in range(count)]}

        names = tuple(f"x{number}" for number in range(inputs))
        keywords = {"kind": "dict", "keys": [], "items": []}
        return cls(names, {"kind": "tuple", "items": [leaves(inputs), keywords]}, leaves(outputs), names)


@dataclass(frozen=True)
class Linkable:
    """A kernel of any target, or a library call in its place: what a plan needs to know about it."""

    symbol: str
    code: bytes  # b"" if a library computes it
    extent: int
    decisions: str
    packings: tuple[Packing | None, ...]
    launch: Launch | None = None
    vendor: VendorCall | None = None
    arguments: tuple[Argument, ...] = ()  # the arguments that the code was generated for
    origin: Origin = PREDICTED  # where the choice came from

    def sealed(self, target: dict[str, Any], plan: str) -> bytes:
        """The code followed by its contract. `plan` is the plan's digest."""
        contract = Contract(self.symbol, self.extent, self.arguments, target, plan, self.launch)
        return sealed(self.code, contract)


@dataclass(frozen=True)
class Linked:
    plan: Plan
    constants: tuple[np.ndarray, ...]
    objects: Mapping[str, bytes]  # digest -> object code


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A kernel applied to values. Any hashable key may identify a value."""

    kernel: Linkable
    key: str  # the key of its task in the plan
    info: TaskInfo
    arguments: tuple[Hashable, ...]
    result: Hashable
    name: str = ""
    # For arguments that are a part of a value, by number: the offset of the part and the size of the value, in bytes.
    within: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    layers: tuple[str, ...] = ()  # layers of the user's model that it computes


@dataclass(frozen=True)
class Values:
    """The values that live outside the arena, in order."""

    inputs: Mapping[Hashable, TensorSpec]
    outputs: Mapping[Hashable, TensorSpec]
    constants: Mapping[Hashable, TensorSpec] = field(default_factory=dict)


def link(
    partition: Partition,
    kernels: Mapping[str, Linkable],
    boundary: Boundary,
    target: dict[str, Any],
    *,
    numerics: str,
    producer: str,
) -> Linked:
    """Return the plan that runs `partition` with `kernels` (by call key) on the machine of `target`."""
    # A tensor without elements needs no kernel.
    calls = [_call(partition, call, kernels[call.key]) for call in partition.calls if call.output.type.size]
    stored = dict.fromkeys(x for call in calls for x in call.arguments if isinstance(x, _Stored))
    graph = partition.graph
    named = zip(boundary.input_names, graph.inputs, strict=True)
    values = Values(
        inputs={node: _spec(name, node.type) for name, node in named},
        outputs={node: _spec(node.name or f"output{n}", node.type) for n, node in enumerate(graph.outputs)},
        constants={constant: constant.spec for constant in stored},
    )
    plan, objects = link_calls(
        calls, values, boundary, target, numerics=numerics, producer=producer, fusion=partition.fusion
    )
    # NumPy packs without the GIL, and the weights of a large model take a second.
    with ThreadPoolExecutor(min(_PACKED_AT_ONCE, knobs.usable_cores()), "tilewright-pack") as pool:
        arrays = tuple(pool.map(_Stored.array, stored))
    return Linked(plan, arrays, objects)


def link_calls(
    calls: Sequence[KernelCall],
    values: Values,
    boundary: Boundary,
    target: dict[str, Any],
    *,
    numerics: str = "fast",
    producer: str = "",
    fusion: FusionReport | None = None,
) -> tuple[Plan, dict[str, bytes]]:
    """Return the plan that runs these calls in order, and the object code of its kernels by digest."""
    places, memory = _places(calls, values)
    plan = Plan(
        inputs=tuple(values.inputs.values()),
        outputs=tuple(values.outputs.values()),
        constants=tuple(values.constants.values()),
        steps=tuple(_step(call, places) for call in calls),
        kernels={},
        tasks={call.key: call.info for call in calls},
        memory=memory,
        input_tree=boundary.input_tree,
        output_tree=boundary.output_tree,
        target=target,
        numerics=numerics,
        producer=producer,
        input_names=boundary.argument_names,
        pinned=tuple(
            Pinned(index, np.ascontiguousarray(boundary.pinned[name]).tobytes())
            for index, name in enumerate(boundary.input_names)
            if name in boundary.pinned
        ),
        fusion=msgspec.UNSET if fusion is None else fusion,
    )
    plan_is = plan_digest(plan)
    kernels = {call.kernel.symbol: call.kernel for call in calls if call.kernel.code}
    code = {symbol: kernel.sealed(target, plan_is) for symbol, kernel in kernels.items()}
    digests = {symbol: object_digest(data) for symbol, data in code.items()}
    plan = msgspec.structs.replace(plan, kernels=digests)
    plan.validate()
    return plan, {digest: code[symbol] for symbol, digest in digests.items()}


def _spec(name: str, type: TensorType) -> TensorSpec:
    return TensorSpec(name, type.dtype.short, type.shape)


@dataclass(frozen=True)
class _Stored:
    """A constant in the order in which a kernel reads it."""

    node: Node
    packing: Packing | None

    @property
    def spec(self) -> TensorSpec:
        shape = self.node.shape if self.packing is None else (self.packing.size,)
        return TensorSpec(self.node.name, self.node.dtype.short, shape)

    def array(self) -> np.ndarray:
        assert self.node.data is not None
        return self.node.data if self.packing is None else self.packing.pack(self.node.data)


def _call(partition: Partition, call: TaskCall, kernel: Linkable) -> KernelCall:
    info, result = task_info(call.task, kernel), partition.buffer_of(call.output)
    within = {
        number: (partition.offsets[node], partition.buffer_of(node).type.bytes)
        for number, node in enumerate((*call.inputs, call.output))
        if node in partition.offsets
    }
    arguments = _arguments(partition, call, kernel)
    return KernelCall(kernel, call.key, info, arguments, result, call.name, within, call.layers)


def _arguments(partition: Partition, call: TaskCall, kernel: Linkable) -> tuple[Node | _Stored, ...]:
    """The arguments of the call's kernel: buffers by the node that defines them, constants as stored."""
    arguments: list[Node | _Stored] = []
    for node, packing in zip(call.inputs, kernel.packings, strict=True):
        buffer = partition.buffer_of(node)
        arguments.append(_Stored(buffer, packing) if buffer.is_constant else buffer)
    return tuple(arguments)


def _places(calls: Sequence[KernelCall], values: Values) -> tuple[dict[Hashable, Place], MemoryReport]:
    """Assign a place to every value, and report the size of the arena against its lower bound."""
    places: dict[Hashable, Place] = {
        value: Place(space, index)
        for space, some in (
            ("input", values.inputs),
            ("constant", values.constants),
            ("output", values.outputs),
        )
        for index, value in enumerate(some)
    }
    first: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    for number, call in enumerate(calls):
        for value in (*call.arguments, call.result):
            if value not in places:
                first.setdefault(value, number)
                last[value] = number
    sizes = {call.result: call.info.output.bytes for call in calls}
    kept = [value for value in first if value in sizes]
    constant_bytes = sum(spec.bytes for spec in values.constants.values())
    buffers = [LiveBuffer(sizes[value], first[value], last[value]) for value in kept]
    offsets, memory = plan_memory(buffers, constant_bytes)
    places |= {value: Place("arena", 0, offset) for value, offset in zip(kept, offsets, strict=True)}
    # A value that is read but never written has no elements, so any place will do.
    places |= {value: Place("arena") for value in first if value not in sizes}
    return places, memory


def _step(call: KernelCall, places: Mapping[Hashable, Place]) -> Step:
    kernel = call.kernel
    arguments = tuple(
        _part(places[value], call.within.get(number))
        for number, value in enumerate((*call.arguments, call.result))
    )
    return Step(
        kernel.symbol,
        arguments,
        kernel.extent,
        call.key,
        call.name,
        kernel.launch,
        kernel.vendor,
        call.layers,
    )


def _part(place: Place, within: tuple[int, int] | None) -> Place:
    if within is None:
        return place
    offset, whole = within
    return msgspec.structs.replace(place, offset=place.offset + offset, whole=whole)


def task_info(task: Task, kernel: Linkable) -> TaskInfo:
    return TaskInfo(
        label=task.label,
        text=task.text,
        flops=task.flops,
        bytes=task.bytes,
        inputs=tuple(
            _spec(f"x{n}", node.type)
            if packing is None
            else TensorSpec(f"x{n}", node.dtype.short, (packing.size,))
            for n, (node, packing) in enumerate(zip(task.graph.inputs, kernel.packings, strict=True))
        ),
        output=_spec("out", task.output.type),
        program=kernel.decisions,
        packings=kernel.packings,
        origin=kernel.origin,
    )
