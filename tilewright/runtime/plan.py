"""A Plan: a compiled model as plain data, which the executor runs and an artifact stores.

A plan is a list of steps over four kinds of memory. A step calls one kernel with pointers into them. Nothing here
knows how a kernel was made; `task` and `detail` are texts for display and for `explain`.

The kernel's calling convention: `void kernel(uint8_t** arguments, int64_t begin, int64_t end)` runs the iterations
[begin, end) of its outermost loop, whose length is the step's `extent`. Iterations may run in any order and on any
thread; they write disjoint memory, or the same values to the same memory. The arguments are the inputs of the task in
order, then its output. Every buffer that is written is 64-byte aligned, except the caller's own outputs; one that is
read may be a part of a value and begin at any of its elements. Buffers are dense and row-major in the shape that the
task's `TensorSpec` gives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from tilewright.dtypes import DType
from tilewright.errors import VerificationError
from tilewright.runtime import tree
from tilewright.runtime.packing import Packing
from tilewright.support.budget import MAX_RANK
from tilewright.support.layers import fused_name

FORMAT_VERSION = 5
ALIGNMENT = 64
_MAX_THREADS = 1024  # of a block, on every GPU

SPACES = ("input", "output", "constant", "arena")
_DTYPES = {dtype.short: dtype for dtype in DType}


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor: an input, output or constant of the model, or an argument of a task."""

    name: str
    dtype: str  # short name: "f32"
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return DType.parse(self.dtype).bytes * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Place(msgspec.Struct, frozen=True):
    """The start of a buffer. `index` counts inputs, outputs or constants. A place in the arena, or a part of a value,
    has a byte `offset`."""

    space: str  # "input", "output", "constant" or "arena"
    index: int = 0
    offset: int = 0
    whole: int = 0  # bytes of the value that this is a part of; 0: it is the whole value


class MatrixMap(msgspec.Struct, frozen=True):
    """An argument of a step as a matrix of contiguous rows, `stride` elements apart, of which a kernel's tensor copy
    engine copies boxes. The kernel takes the encoded map behind its arguments."""

    argument: int
    rows: int
    columns: int
    stride: int
    box_rows: int
    box_columns: int


class Launch(msgspec.Struct, frozen=True):
    """How a GPU launches a kernel; the step's `extent` is the number of blocks."""

    threads: int  # of a block
    shared_bytes: int = 0  # dynamic
    awaits: bool = False  # whether it may start early: it waits itself for the end of the previous kernel
    # What its tensor copy engine copies from. Absent without any, so that the digests of other plans stay the same.
    maps: tuple[MatrixMap, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def matrix_maps(self) -> tuple[MatrixMap, ...]:
        return () if isinstance(self.maps, msgspec.UnsetType) else self.maps


class View(msgspec.Struct, frozen=True):
    """An argument of a step as a strided tensor; units are elements."""

    argument: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


class VendorCall(msgspec.Struct, frozen=True):
    """A step computed by a vendor library through PyTorch; `runtime/cuda/vendor.py` has the functions."""

    function: str
    operands: tuple[View, ...]
    result: tuple[int, ...]  # the shape of the function's result
    order: tuple[int, ...] = ()  # of the result's axes in memory; (): unchanged
    options: dict[str, Any] = {}


class Step(msgspec.Struct, frozen=True):
    kernel: str  # symbol, a key of `Plan.kernels`; "" if a library computes it
    arguments: tuple[Place, ...]  # the task's inputs, then its output
    extent: int  # iterations of the parallel loop; 1: runs on the calling thread
    task: str  # key of `Plan.tasks`
    name: str = ""  # for display: the operators, or the framework's name of the value
    launch: Launch | None = None  # on a GPU
    vendor: VendorCall | None = None
    # The layers of the user's model that it computes. Older files lack it; their digests are those of plans without
    # this field.
    layers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def layer(self) -> str:
        """One name for them: `layer1.0.conv1 + bn1 + relu`; the value's own name if none is known."""
        named = "" if isinstance(self.layers, msgspec.UnsetType) else fused_name(self.layers)
        return named or self.name


class Origin(msgspec.Struct, frozen=True):
    """Where the choice of a task's kernel came from.

    - "predicted": the analytical model expects it to be the fastest
    - "default": no template applies, and the default schedule needs no choice
    - "tuned": it won a measurement; `when` says on which day
    - "lock": a lock file names it
    - "only": there is no other candidate
    - "neighbour": of a tile kernel, predicted from measurements at other values of its key
    """

    kind: str = "predicted"
    when: float | None = None  # seconds since 1970, of a measurement

    def __str__(self) -> str:
        if self.kind == "only":
            return "only candidate"
        return self.kind if self.when is None else f"{self.kind} {_day(self.when)}"


def _day(when: float) -> str:
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(when))
    except (OverflowError, ValueError, OSError):  # a file may hold any number
        return "?"


PREDICTED = Origin()


class TaskInfo(msgspec.Struct, frozen=True):
    """The information about a task for `explain`."""

    label: str  # "conv+add+relu"
    text: str  # the task's graph in text form
    flops: int
    bytes: int  # minimum bytes to move: inputs once, output once
    inputs: tuple[TensorSpec, ...]  # the step's arguments except the last, in order
    output: TensorSpec  # the step's last argument
    program: str = ""  # the schedule of the kernel, with its decisions
    packings: tuple[Packing | None, ...] = ()  # how each input is stored; None, or beyond the end: unchanged
    origin: Origin = PREDICTED  # where the choice of this kernel came from


class Pinned(msgspec.Struct, frozen=True):
    """An input that decided shapes at compile time: a call must pass the same value."""

    index: int  # of `Plan.inputs`
    data: bytes  # its elements, contiguous


class MemoryReport(msgspec.Struct, frozen=True):
    arena_bytes: int
    lower_bound: int  # the largest number of live bytes at any step
    no_reuse: int  # the sum of all intermediate buffers
    constant_bytes: int


class PartReport(msgspec.Struct, frozen=True):
    """A kernel that computes a part of a group."""

    label: str
    seconds: float
    measured: bool = False  # otherwise predicted


class GroupReport(msgspec.Struct, frozen=True):
    """A group of operators that one kernel could compute, and what it was compared with."""

    label: str  # "conv+add+relu"
    output: str  # "f32[1,56,56,64]"
    used: bool
    is_greedy: bool  # greedy fusion makes this group too
    seconds: float  # as one kernel
    separate_seconds: float  # as one kernel for each of its units
    measured: bool = False  # otherwise predicted
    calls: int = 1
    # Older files lack these.
    layers: tuple[str, ...] = ()  # of the user's model, at the first call
    parts: tuple[
        PartReport, ...
    ] = ()  # the alternative: a kernel for each unit if it is used, else those in use
    rest: tuple[PartReport, ...] = ()  # kernels for what those in use compute besides this group
    margin: float = 0.0  # the share of the time below which a predicted gain does not count

    @property
    def total_seconds(self) -> float:
        """The time of the group as one kernel, with that of the rest."""
        return self.seconds + sum(part.seconds for part in self.rest)

    @property
    def parts_seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def gain(self) -> float:
        """The share of the alternative's time that one kernel saves; negative if it takes longer."""
        return 1.0 - self.total_seconds / self.parts_seconds if self.parts_seconds else 0.0

    @property
    def source(self) -> str:
        """Where `total_seconds` comes from."""
        return _source([self, *self.rest])

    @property
    def parts_source(self) -> str:
        return _source(self.parts)

    @property
    def name(self) -> str:
        """Its layers, or its operators."""
        return fused_name(self.layers) or f"{self.label}, {self.output}"

    @property
    def alternative(self) -> str:
        """Its time as one kernel and that of the alternative, in words."""
        besides = "".join(f", {part.label} {part.seconds * 1e6:.1f} apart" for part in self.rest)
        text = f"{self.total_seconds * 1e6:.1f} us as one kernel{besides} ({self.source})"
        if not self.parts:
            return text
        text += (
            f"; {self.parts_seconds * 1e6:.1f} us {'apart' if self.used else 'in use'} ({self.parts_source}): "
        ) + ", ".join(f"{part.label} {part.seconds * 1e6:.1f}" for part in self.parts)
        if not self.used and self.gain > 0:
            text += f"; a predicted gain below {self.margin:.0%} does not count"
        return text

    def __str__(self) -> str:
        times = f" ({self.calls} times)" if self.calls > 1 else ""
        return f"{self.name}{times}: {self.alternative}"


def _source(times: Sequence[GroupReport | PartReport]) -> str:
    known = {each.measured for each in times}
    return "partly measured" if len(known) > 1 else "measured" if True in known else "predicted"


class RefusedGroup(msgspec.Struct, frozen=True):
    """Contractions and reductions in a chain that no kernel computes, and why."""

    label: str
    output: str
    reason: str
    calls: int = 1
    layers: tuple[str, ...] = ()  # of the user's model, at the first call; older files lack them

    def __str__(self) -> str:
        times = f" ({self.calls} times)" if self.calls > 1 else ""
        layer = fused_name(self.layers)
        if not layer:
            return f"{self.label}, {self.output}{times}: {self.reason}"
        return f"{layer}{times}, {self.output}: {self.reason} ({self.label})"


class FusionReport(msgspec.Struct, frozen=True):
    """How a model was cut into kernels. The seconds are sums over the groups that had an alternative."""

    partition: str  # "dynamic" or "greedy"
    groups: int
    greedy_groups: int
    changed: int = 0  # groups that greedy fusion does not make
    seconds: float = 0.0
    greedy_seconds: float = 0.0
    states: int = 0
    priced: int = 0  # distinct groups that were priced
    note: str = ""  # why greedy fusion was used instead, or which groups a limit left out
    considered: tuple[GroupReport, ...] = ()
    refused: tuple[RefusedGroup, ...] = ()

    def __str__(self) -> str:
        if self.partition == "greedy":
            return f"{self.groups} groups" + (f", {self.note}" if self.note else " by greedy fusion")
        if not self.considered and not self.note:
            chains = "1 chain has" if len(self.refused) == 1 else f"{len(self.refused)} chains have"
            why = f"; {chains} no kernel" if self.refused else ""
            return f"{self.groups} groups, the same as greedy fusion{why}"
        gain = max(0.0, 1.0 - self.seconds / self.greedy_seconds) if self.greedy_seconds else 0.0
        text = (
            f"{self.groups} groups by dynamic programming, {self.greedy_groups} by greedy fusion; {self.changed}"
            f" differ, which saves {gain:.1%} of {self.greedy_seconds * 1e6:.1f} us; {self.priced} groups priced"
        )
        return f"{text}; {self.note}" if self.note else text


class Plan(msgspec.Struct, frozen=True):
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    constants: tuple[TensorSpec, ...]
    steps: tuple[Step, ...]
    kernels: dict[str, str]  # symbol -> digest of the object code that holds it
    tasks: dict[str, TaskInfo]
    memory: MemoryReport
    input_tree: dict[str, Any]  # runtime.tree form of (args, kwargs)
    output_tree: dict[str, Any]
    target: dict[str, Any]  # {"triple":..., "cpu":..., "features": [...]} : what the object code requires
    numerics: str = "fast"
    producer: str = ""  # "tilewright 0.1.0"
    input_names: tuple[
        str, ...
    ] = ()  # parameters of the original `forward` that may be passed by position, in order
    pinned: tuple[Pinned, ...] = ()
    # How the model was cut into kernels. Older files lack it, as do their digests.
    fusion: FusionReport | msgspec.UnsetType = msgspec.UNSET

    def validate(self) -> None:
        """Raise VerificationError unless every index, offset and size is within bounds.

        It cannot check what a kernel does with its pointers, but each argument is within its memory.
        """
        _check_boundary(self)
        sizes = {
            "input": [spec.bytes for spec in self.inputs],
            "output": [spec.bytes for spec in self.outputs],
            "constant": [spec.bytes for spec in self.constants],
            "arena": [self.memory.arena_bytes],
        }
        written = set()
        for number, step in enumerate(self.steps):
            _check_step(self, number, step, sizes)
            if step.arguments[-1].space == "output":
                written.add(step.arguments[-1].index)
        for index, spec in enumerate(self.outputs):
            if index not in written and spec.bytes:
                _fail(f"no step writes output {index} ({spec.name})")


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def _check_boundary(plan: Plan) -> None:
    specs = [*plan.inputs, *plan.outputs, *plan.constants]
    for info in plan.tasks.values():
        specs += [*info.inputs, info.output]
        _check_packings(info)
    for spec in specs:
        if spec.dtype not in _DTYPES:
            _fail(f"{spec.name or 'a tensor'} has the unknown element type {spec.dtype!r}")
        sizes = [max(extent, 1) for extent in spec.shape]
        if len(sizes) > MAX_RANK or min((*spec.shape, 0)) < 0 or math.prod(sizes) >= 1 << 56:
            _fail(f"{spec.name or 'a tensor'} has the impossible shape {spec.shape}")
    if plan.memory.arena_bytes < 0:
        _fail("the arena has a negative size")
    triple, features = plan.target.get("triple"), plan.target.get("features")
    if not isinstance(triple, str) or not isinstance(features, (list, tuple)):
        _fail("the target lacks its triple or its features")
    if not all(isinstance(feature, str) for feature in features):
        _fail("the target has features that are not names")
    try:
        input_leaves, output_leaves = tree.check(plan.input_tree), tree.check(plan.output_tree)
    except ValueError as error:
        _fail(f"the input or output tree is broken: {error}")
    if sorted(input_leaves) != list(range(len(plan.inputs))):
        _fail(f"the input tree has the leaves {input_leaves} for {len(plan.inputs)} inputs")
    if any(index >= len(plan.outputs) for index in output_leaves):
        _fail(f"the output tree has the leaves {output_leaves} for {len(plan.outputs)} outputs")
    for pinned in plan.pinned:
        if not 0 <= pinned.index < len(plan.inputs) or len(pinned.data) != plan.inputs[pinned.index].bytes:
            _fail(f"{len(pinned.data)} bytes for input {pinned.index} of {len(plan.inputs)}")
    kinds = [item.get("kind") for item in plan.input_tree.get("items", ())]
    if plan.input_tree["kind"] != "tuple" or kinds != ["tuple", "dict"]:
        _fail("the input tree is not a tuple of positional and a dict of keyword arguments")


def _check_packings(info: TaskInfo) -> None:
    for packing, spec in zip(info.packings, info.inputs, strict=False):
        if packing is None:
            continue
        try:
            sound = packing.size == math.prod(spec.shape) and packing.is_sound
        except (ArithmeticError, LookupError, ValueError):
            sound = False
        if not sound:
            _fail(f"invalid constant order in {info.label!r}")


def _check_map(where: str, map: MatrixMap, inputs: Sequence[TensorSpec]) -> None:
    """Nothing outside of the argument is copied."""
    if not 0 <= map.argument < len(inputs):
        _fail(f"{where}: a tensor map of argument {map.argument}, of {len(inputs)} inputs")
    held = math.prod(inputs[map.argument].shape)
    sizes = (map.rows, map.columns, map.box_rows, map.box_columns)
    if min(sizes) < 1 or map.columns > map.stride or (map.rows - 1) * map.stride + map.columns > held:
        _fail(f"{where}: a tensor map of {map}, in an argument of {held} elements")


def _check_step(plan: Plan, number: int, step: Step, sizes: dict[str, list[int]]) -> None:
    where = f"step {number} ({step.name or step.kernel})"
    if step.vendor is None and step.kernel not in plan.kernels:
        _fail(f"{where}: no kernel {step.kernel!r}")
    info = plan.tasks.get(step.task)
    if info is None:
        _fail(f"{where}: no task {step.task!r}")
    if step.extent < 0:
        _fail(f"{where}: the extent {step.extent}")
    specs = (*info.inputs, info.output)
    if step.vendor is not None:
        _check_views(where, step.vendor, specs)
    if step.launch is not None and not (
        0 < step.launch.threads <= _MAX_THREADS and step.launch.shared_bytes >= 0
    ):
        _fail(f"{where}: the launch {step.launch}")
    for map in () if step.launch is None else step.launch.matrix_maps:
        _check_map(where, map, specs[:-1])
    if len(specs) != len(step.arguments):
        _fail(f"{where}: {len(step.arguments)} arguments for a task with {len(specs)}")
    for position, (place, spec) in enumerate(zip(step.arguments, specs, strict=True)):
        if place.space not in SPACES:
            _fail(f"{where}: an argument in the unknown memory {place.space!r}")
        spaces = sizes[place.space]
        if not 0 <= place.index < len(spaces):
            _fail(f"{where}: {place.space} {place.index} of {len(spaces)}")
        if place.offset < 0 or place.offset + spec.bytes > spaces[place.index]:
            end = place.offset + spec.bytes
            _fail(
                f"{where}: bytes {place.offset} to {end} of {place.space} {place.index}, of {spaces[place.index]}"
            )
        if place.whole and (
            place.space == "constant" or position == len(specs) - 1 or step.launch is not None
        ):
            _fail(f"{where}: a part of a value, where a whole one is needed")
        alignment = _DTYPES[spec.dtype].bytes if place.whole else ALIGNMENT
        if place.offset % alignment:
            _fail(f"{where}: the offset {place.offset} in {place.space} is not a multiple of {alignment}")
    output, output_bytes = step.arguments[-1], specs[-1].bytes
    if output.space not in ("output", "arena"):
        _fail(f"{where}: writes to {output.space} memory")
    for place, spec in zip(step.arguments[:-1], specs, strict=False):
        same = place.space == output.space and place.index == output.index
        if same and place.offset < output.offset + output_bytes and output.offset < place.offset + spec.bytes:
            _fail(f"{where}: its output overlaps one of its inputs")


def _check_views(where: str, call: VendorCall, specs: tuple[TensorSpec, ...]) -> None:
    """Every element of every view must be within its argument."""
    for view in call.operands:
        if not 0 <= view.argument < len(specs) - 1 or len(view.shape) != len(view.strides):
            _fail(f"{where}: a view of argument {view.argument} of {len(specs) - 1}")
        last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
        if min(*view.shape, 1) < 1 or min(*view.strides, view.offset) < 0:
            _fail(f"{where}: the view {view}")
        if last >= math.prod(specs[view.argument].shape):
            _fail(f"{where}: a view beyond the end of argument {view.argument}")
    if math.prod(call.result) != math.prod(specs[-1].shape):
        _fail(f"{where}: a result of {call.result} for {specs[-1]}")


def _fail(problem: str) -> NoReturn:
    raise VerificationError(f"a plan that cannot be run: {problem}")
