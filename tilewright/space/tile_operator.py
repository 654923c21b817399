"""Tile kernels as implementations of tasks: the launch of one as data, and the configs of its knobs as a space.

    tile_kernel node  --(its attribute `kernel`, JSON)-->  TileOperator  --config-->  TileCall, a Kernel

A task with a `tile_kernel` is computed by that kernel and by nothing else: its user wrote it for this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import msgspec

from tilewright.dtypes import DType
from tilewright.errors import SpaceError
from tilewright.graph.task import Task
from tilewright.graph.tile_operator import NAME
from tilewright.space.space import Config, Knob, Space, Value
from tilewright.support.bundle import Bundle, Reference, restored, value_of
from tilewright.tile.frontend.builder import held
from tilewright.tile.ir import Pointer, TileProgram, TileType
from tilewright.tile.kernel import Kernel as TileKernel
from tilewright.tile.text import print_tile_program

TEMPLATE = "tile"
GPU_OPTIONS = ("warps", "stages")  # of a launch; a model has its own number of threads
Number = bool | int | float


class TileArgument(msgspec.Struct, frozen=True):
    """A parameter of the kernel: the number of an operand of the task (the last one is its result), or a number, whose
    type is `dtype`."""

    name: str
    dtype: str
    operand: int | None = None
    number: str = ""  # as Python writes it: JSON has no infinity


class TileVariant(msgspec.Struct, frozen=True):
    """The launch with one config of the knobs: constexprs, and options of a launch on a GPU."""

    values: tuple[tuple[str, Value], ...]
    grid: tuple[int, int, int]


class TileOperator(msgspec.Struct, frozen=True):
    """`arguments`: in the order of parameters. `constants`: constexprs that are not knobs. `options`: of a launch on a
    GPU, those that are not knobs."""

    bundle: Bundle
    arguments: tuple[TileArgument, ...]
    constants: tuple[tuple[str, Reference], ...]
    variants: tuple[TileVariant, ...]
    options: tuple[tuple[str, Value], ...] = ()

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def gpu_options_of(kernel: TileKernel) -> tuple[str, ...]:
    """What a knob's name stands for as an option of the launch, and not as a parameter of the kernel."""
    parameters = {each.name for each in kernel.source.parameters}
    return tuple(name for name in GPU_OPTIONS if name not in parameters)


@lru_cache(maxsize=64)
def _parsed(text: str) -> tuple[TileOperator, TileKernel]:
    try:
        found = msgspec.json.decode(text, type=TileOperator)
    except msgspec.MsgspecError as error:
        raise SpaceError(f"a tile kernel's description cannot be read: {error}") from None
    return found, restored(found.bundle, TileKernel)


@dataclass(frozen=True, eq=False)
class TileCall:
    """A tile program on a grid, with its tensors among the operands of a task: what code generation makes a kernel of.

    `values`: of each parameter, the number of an operand, or None and then a number in `numbers`."""

    name: str
    program: TileProgram
    grid: tuple[int, int, int]
    operands: tuple[int | None, ...]
    numbers: tuple[Number, ...]
    specs: tuple[tuple[DType, int], ...]  # of the task's inputs and its result: type and elements
    options: tuple[tuple[str, Value], ...] = ()  # of the launch

    @property
    def extent(self) -> int:
        return math.prod(self.grid)

    @property
    def scalars(self) -> dict[str, Number]:
        return {
            param.name: number
            for param, operand, number in zip(self.program.params, self.operands, self.numbers, strict=True)
            if operand is None
        }

    @property
    def decisions(self) -> str:
        values = " ".join(f"{name}={value}" for name, value in (*self.program.constants, *self.options))
        return f"{TEMPLATE}: {self.name} {values}".rstrip()

    def __str__(self) -> str:
        shown = print_tile_program(self.program)
        return f"{self.operands} {self.numbers} {self.grid} {self.specs}\n{shown}"

    @property
    def tensor_bytes(self) -> int:
        return sum(dtype.bytes * size for dtype, size in self.specs)


@dataclass(frozen=True)
class TileApplied:
    task: Task
    operator: TileOperator
    kernel: TileKernel
    name: str
    machine: str  # its kind

    @cached_property
    def variants(self) -> tuple[TileVariant, ...]:
        """Those that differ on this kind of machine."""
        if self.machine == "cuda":
            return self.operator.variants
        found: dict[tuple[tuple[str, Value], ...], TileVariant] = {}
        for variant in self.operator.variants:
            values = tuple(each for each in variant.values if each[0] not in self._knobs_of_launch)
            found.setdefault(values, TileVariant(values, variant.grid))
        return tuple(found.values())

    @cached_property
    def _knobs_of_launch(self) -> tuple[str, ...]:
        return gpu_options_of(self.kernel)

    @property
    def space(self) -> Space:
        variants = self.variants
        legal = {variant.values for variant in variants}
        names = [name for name, _ in variants[0].values]
        knobs = tuple(
            _knob(name, tuple(dict.fromkeys(dict(variant.values)[name] for variant in variants)))
            for name in names
        )
        return Space(TEMPLATE, knobs, lambda values: tuple((name, values[name]) for name in names) in legal)

    def terms(self, config: Config) -> None:
        """They are counted in the tile program."""

    def program(self, config: Config) -> TileCall:
        values = dict(config.values)
        variant = next((each for each in self.variants if dict(each.values) == values), None)
        if variant is None:
            raise SpaceError(f"{config} is not a config of {self.name}")
        types = {each.name: TileType(element_of(each)) for each in self.operator.arguments}
        constants = {name: value_of(reference) for name, reference in self.operator.constants}
        options = {name: values.pop(name) for name in self._knobs_of_launch if name in values}
        if self.machine == "cuda":
            options.update(self.operator.options)
        program = self.kernel.specialise(types, {**constants, **values})
        by_name = {each.name: each for each in self.operator.arguments}
        arguments = [by_name[param.name] for param in program.params]
        nodes = (*self.task.graph.inputs, self.task.output)
        return TileCall(
            self.name,
            program,
            variant.grid,
            tuple(each.operand for each in arguments),
            tuple(0 if each.operand is not None else _number(each) for each in arguments),
            tuple((node.dtype, node.type.size) for node in nodes),
            tuple(options.items()),
        )


def tile_operator_of(task: Task, machine: str) -> TileApplied | None:
    """The candidates of a task that is one tile kernel, on this kind of machine; None for any other task."""
    node = task.output
    if node.op != NAME:
        return None
    if node.inputs != task.graph.inputs:
        # One input that is read twice is one input of the task.
        return _with_repeated_inputs(task, machine)
    operator, kernel = _parsed(node.attrs["kernel"])
    return TileApplied(task, operator, kernel, node.attrs["operator"], machine)


def _with_repeated_inputs(task: Task, machine: str) -> TileApplied:
    node = task.output
    operator, kernel = _parsed(node.attrs["kernel"])
    positions = [task.graph.inputs.index(operand) for operand in node.inputs] + [len(task.graph.inputs)]
    arguments = tuple(
        each if each.operand is None else msgspec.structs.replace(each, operand=positions[each.operand])
        for each in operator.arguments
    )
    return TileApplied(
        task,
        msgspec.structs.replace(operator, arguments=arguments),
        kernel,
        node.attrs["operator"],
        machine,
    )


def _knob(name: str, choices: tuple[Value, ...]) -> Knob:
    if all(isinstance(each, int) and not isinstance(each, bool) for each in choices):
        return Knob(name, tuple(sorted(choices, key=int)), default=choices[0])
    return Knob(name, choices, ordered=False)


def element_of(argument: TileArgument) -> DType | Pointer:
    dtype = DType.parse(argument.dtype)
    return dtype if argument.operand is None else Pointer(dtype)


def _number(argument: TileArgument) -> Number:
    if argument.dtype == DType.BOOL.short:
        return argument.number == "True"
    dtype = DType.parse(argument.dtype)
    return held(float(argument.number) if dtype.is_float else int(argument.number), dtype)
