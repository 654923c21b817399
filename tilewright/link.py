"""Partition + Kernels -> Plan: where every value lives, and which kernel runs when.

Graph inputs and outputs live in the caller's memory, constants in the model's, everything else in one arena whose
offsets are planned by liveness. A view has no place of its own: it is the place of what it views, or within that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tilewright.graph.ir import Node, TensorType
from tilewright.graph.task import Partition, TaskCall
from tilewright.runtime.contract import Argument, Contract, plan_digest, sealed
from tilewright.runtime.loader import object_digest
from tilewright.runtime.memory import Buffer, plan_memory
from tilewright.runtime.packing import Packing
from tilewright.runtime.plan import (
    PREDICTED,
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


@dataclass(frozen=True)
class Boundary:
    """How the model meets its caller: names and nesting of inputs and outputs."""

    input_names: tuple[str, ...]
    input_tree: dict[str, Any]
    output_tree: dict[str, Any]
    argument_names: tuple[str, ...]
    pinned: Mapping[str, np.ndarray] = field(default_factory=dict)  # inputs of one value only, by name


@dataclass(frozen=True)
class Linkable:
    """A kernel of any target, or what stands for one: what a plan needs to know of it."""

    symbol: str
    code: bytes  # b"" where a library computes it
    extent: int
    decisions: str
    packings: tuple[Packing | None, ...]
    launch: Launch | None = None
    vendor: VendorCall | None = None
    arguments: tuple[Argument, ...] = ()  # what the code was made for
    origin: Origin = PREDICTED  # where the choice of it came from

    def sealed(self, target: dict[str, Any], plan: str) -> bytes:
        """The code, with its contract behind it. `plan`: the plan's digest."""
        contract = Contract(self.symbol, self.extent, self.arguments, target, plan, self.launch)
        return sealed(self.code, contract)


@dataclass(frozen=True)
class Linked:
    plan: Plan
    constants: tuple[np.ndarray, ...]
    objects: Mapping[str, bytes]  # digest -> object code


def link(
    partition: Partition,
    kernels: Mapping[str, Linkable],
    boundary: Boundary,
    target: dict[str, Any],
    *,
    numerics: str,
    producer: str,
) -> Linked:
    """The plan that runs `partition` with `kernels` (by the key of a call) on what `target` describes."""
    # A tensor without elements needs no kernel.
    calls = [call for call in partition.calls if call.output.type.size]
    constants = _constants(partition, calls, kernels)
    places, memory = _places(partition, calls, constants)
    graph = partition.graph
    plan = Plan(
        inputs=tuple(
            _spec(name, node.type) for name, node in zip(boundary.input_names, graph.inputs, strict=True)
        ),
        outputs=tuple(_spec(node.name or f"output{n}", node.type) for n, node in enumerate(graph.outputs)),
        constants=tuple(stored.spec for stored in constants),
        steps=tuple(_step(partition, call, kernels[call.key], places) for call in calls),
        kernels={},
        tasks={call.key: _info(call, kernels[call.key]) for call in calls},
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
    )
    plan_is = plan_digest(plan)
    code = {kernel.symbol: kernel.sealed(target, plan_is) for kernel in kernels.values() if kernel.code}
    digests = {symbol: object_digest(data) for symbol, data in code.items()}
    plan = msgspec.structs.replace(plan, kernels=digests)
    plan.validate()
    objects = {digest: code[symbol] for symbol, digest in digests.items()}
    return Linked(plan, tuple(stored.array() for stored in constants), objects)


def _spec(name: str, type: TensorType) -> TensorSpec:
    return TensorSpec(name, type.dtype.short, type.shape)


@dataclass(frozen=True)
class _Stored:
    """A constant in the order in which some kernel reads it."""

    node: Node
    packing: Packing | None

    @property
    def spec(self) -> TensorSpec:
        shape = self.node.shape if self.packing is None else (self.packing.size,)
        return TensorSpec(self.node.name, self.node.dtype.short, shape)

    def array(self) -> np.ndarray:
        assert self.node.data is not None
        return self.node.data if self.packing is None else self.packing.pack(self.node.data)


def _arguments(partition: Partition, call: TaskCall, kernel: Linkable) -> list[Node | _Stored]:
    """What the call's kernel is given: buffers by the node that stands for them, constants as they are stored."""
    arguments: list[Node | _Stored] = []
    for node, packing in zip(call.inputs, kernel.packings, strict=True):
        buffer = partition.buffer_of(node)
        arguments.append(_Stored(buffer, packing) if buffer.is_constant else buffer)
    return [*arguments, partition.buffer_of(call.output)]


def _constants(partition: Partition, calls: list[TaskCall], kernels: Mapping[str, Linkable]) -> list[_Stored]:
    """The constants that some call reads, each once in every order it is read in, by first use."""
    used: dict[_Stored, None] = {}
    for call in calls:
        arguments = _arguments(partition, call, kernels[call.key])
        used |= {argument: None for argument in arguments if isinstance(argument, _Stored)}
    return list(used)


def _places(
    partition: Partition, calls: list[TaskCall], constants: list[_Stored]
) -> tuple[dict[Node | _Stored, Place], MemoryReport]:
    """A place for every buffer, and how good the arena is."""
    places: dict[Node | _Stored, Place] = {
        node: Place("input", index) for index, node in enumerate(partition.graph.inputs)
    }
    places |= {stored: Place("constant", index) for index, stored in enumerate(constants)}
    places |= {node: Place("output", index) for index, node in enumerate(partition.graph.outputs)}
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    for step, call in enumerate(calls):
        for node in (*call.inputs, call.output):
            buffer = partition.buffer_of(node)
            if buffer not in places and not buffer.is_constant:
                first.setdefault(buffer, step)
                last[buffer] = step
    kept = [node for node in first if node.type.size]
    constant_bytes = sum(stored.spec.bytes for stored in constants)
    offsets, memory = plan_memory([Buffer(n.type.bytes, first[n], last[n]) for n in kept], constant_bytes)
    places |= {node: Place("arena", 0, offset) for node, offset in zip(kept, offsets, strict=True)}
    # An input without elements has no memory: any place does.
    places |= {node: Place("arena") for node in first if not node.type.size}
    return places, memory


def _step(
    partition: Partition, call: TaskCall, kernel: Linkable, places: Mapping[Node | _Stored, Place]
) -> Step:
    arguments = tuple(
        _part(places[buffer], partition, node)
        for node, buffer in zip((*call.inputs, call.output), _arguments(partition, call, kernel), strict=True)
    )
    return Step(kernel.symbol, arguments, kernel.extent, call.key, call.name, kernel.launch, kernel.vendor)


def _part(place: Place, partition: Partition, node: Node) -> Place:
    """Where the value of a node is, of what is at `place`."""
    if node not in partition.offsets:
        return place
    whole = partition.buffer_of(node).type.bytes
    return msgspec.structs.replace(place, offset=place.offset + partition.offsets[node], whole=whole)


def _info(call: TaskCall, kernel: Linkable) -> TaskInfo:
    task = call.task
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
