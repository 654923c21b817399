"""The values of a tile program as variables of a CUDA kernel.

A scalar is a variable of every thread, a tile an array of the registers that a thread has in the tile's layout. `get`
gives a value in the requested layout: it is there already, or computed again (index arithmetic and views), or
moved from its home through shared memory, once, where it is defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tilewright import te
from tilewright.codegen.cuda import scalars
from tilewright.codegen.cuda.tiles.assign import VIEWS, Homes, shape_of
from tilewright.codegen.cuda.tiles.tensor_maps import TensorMap
from tilewright.codegen.cuda.tiles.text import THREAD, element_type, loop, of_bits, picked
from tilewright.dtypes import DType
from tilewright.errors import CodegenError
from tilewright.hw.gpu import GpuMachine
from tilewright.te.scalars import SCALARS
from tilewright.tile.executors import Facts
from tilewright.tile.ir import For, Op, Pointer, TileProgram, TileType, Value
from tilewright.tile.passes.axes import analyse_axes
from tilewright.tile.passes.layouts import (
    Layout,
    axis_bits,
    broadcast_bits,
    inverse,
    joined_bits,
    transposed_bits,
)
from tilewright.tile.passes.shared_memory import CodeNode, ProgramStep, Resource, SharedBuffer
from tilewright.tile.passes.written import pointer_origins

Element = DType | Pointer
_SLOW = ("floordiv", "mod")


@dataclass(eq=False)
class Scope:
    """A block of the program: its code so far, and its known values."""

    nodes: list[CodeNode] = field(default_factory=list)
    names: dict[tuple[Value, Layout], str] = field(default_factory=dict)
    buffers: dict[tuple[Value, tuple[int, ...]], SharedBuffer] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockPointer:
    """The names of a block pointer's variables: the pointer, and for each axis its size, stride and offset in
    elements."""

    base: str
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    offsets: tuple[str, ...]


class Values:
    def __init__(
        self,
        program: TileProgram,
        facts: Facts,
        machine: GpuMachine,
        warps: int,
        stages: int = 1,
        bulk_copies: bool = True,
        grid: tuple[int, int, int] | None = None,
    ) -> None:
        """`warps`: the bits of a warp's number. `stages`: iterations whose operands are in shared memory together.
        `bulk_copies`: whether the launch can encode tensor maps. `grid`: of a launch whose blocks have one axis."""
        self.stages, self.bulk_copies, self.grid = stages, bulk_copies, grid
        self.unbulked: dict[For, str] = {}  # loops whose loads do not use the copy engine, and why
        self.skipped: set[Op] = set()  # loads prefetched into shared memory
        self.read_back: dict[
            Op, tuple[tuple[int, ...], SharedBuffer]
        ] = {}  # prefetched loads that are read back from there
        self.program, self.facts, self.machine, self.warps = program, facts, machine, warps
        self.threads = 32 << warps
        self.axes = analyse_axes(program, facts)
        self.homes = Homes(program, self.axes, machine, warps)
        self.origins = pointer_origins(program)
        self.scopes = [Scope()]
        self.in_flight: dict[Op, tuple[str, int] | None] = {}
        self.maps: list[TensorMap] = []  # parameters of the kernel
        self.visited: dict[Op, Scope] = {}  # the scope in which each operation was visited
        self.blocks: dict[Value, BlockPointer] = {}
        self.functions: dict[str, str] = {}  # of instructions, by name
        self.count = 0
        self.conversions: list[str] = []  # of tiles that moved through shared memory
        self.op: Op | None = None  # whose code is being written
        self.slots: dict[SharedBuffer, str] = {}  # of rings: the offset of the current slot

    # -- code --------------------------------------------------------------------------------------------------------

    @property
    def scope(self) -> Scope:
        return self.scopes[-1]

    def step(
        self,
        lines: Sequence[str],
        reads: Sequence[Resource] = (),
        writes: Sequence[Resource] = (),
        *,
        barrier: bool = False,
    ) -> None:
        self.scope.nodes.append(ProgramStep(list(lines), tuple(reads), tuple(writes), barrier))

    def name(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def array(self, element: Element, size: int) -> tuple[str, str]:
        """Declare an array: its name and the line."""
        name = self.name()
        return name, f"{element_type(element)} {name}[{size}];"

    @contextmanager
    def inside(self) -> Iterator[Scope]:
        scope = Scope()
        self.scopes.append(scope)
        yield scope
        self.scopes.pop()

    @contextmanager
    def at_definition(self, value: Value) -> Iterator[None]:
        """Emit code where the value is defined: before a loop that is being emitted."""
        kept, layout = self.scopes, self.homes.of(value)
        last = max(n for n, scope in enumerate(kept) if (value, layout) in scope.names)
        self.scopes = kept[: last + 1]
        yield
        self.scopes = kept

    @contextmanager
    def at_visit(self, op: Op) -> Iterator[None]:
        """Emit divisions of indices where the program has them, not in every iteration that uses them: the compiler
        does not hoist them out of a loop."""
        kept = self.scopes
        scope = self.visited.get(op) if op.name in _SLOW else None
        if scope in kept:
            self.scopes = kept[: kept.index(scope) + 1]
        yield
        self.scopes = kept

    def define(self, value: Value, layout: Layout, name: str) -> None:
        self.scope.names[value, layout] = name

    def buffer(self, size: int, what: str, alignment: int = 0) -> SharedBuffer:
        where = None if self.op is None else self.op.where
        return SharedBuffer(self.name("shared"), size, what, where, alignment=alignment)

    def address(self, buffer: SharedBuffer) -> str:
        """The address of the buffer's first byte, which is known once all buffers are allocated; for a ring buffer, of
        its current slot."""
        slot = self.slots.get(buffer)
        first = f"smem + @{buffer.name}@"
        return first if slot is None else f"{first} + {slot}"

    # -- values ------------------------------------------------------------------------------------------------------

    def known(self, value: Value, layout: Layout) -> str | None:
        for scope in reversed(self.scopes):
            found = scope.names.get((value, layout))
            if found is not None:
                return found
        return None

    def scalar(self, value: Value) -> str:
        return self.get(value, self.homes.uniform)

    def get(self, value: Value, layout: Layout) -> str:
        """The variable that holds a value in this layout."""
        found = self.known(value, layout)
        if found is not None:
            return found
        op = self.homes.definitions.get(value)
        if op is not None and op.name in VIEWS:
            name = self.view(op, value, layout)
        elif value not in self.homes.home:
            assert op is not None
            with self.at_visit(op):
                name = self.elementwise(op, value, layout) if shape_of(value) else self.computed(op, value)
                self.define(value, layout, name)
            return name
        else:
            with self.at_definition(value):
                home = self.homes.home[value]
                name = self.convert(value, home, layout)
                self.define(value, layout, name)
            return name
        self.define(value, layout, name)
        return name

    def computed(self, op: Op, value: Value) -> str:
        """A scalar, computed from other scalars."""
        text = self.expression(op, [self.scalar(each) for each in op.operands])
        if op.name == "constant":
            return text
        name = self.name()
        self.step([f"{element_type(_tile(value).element)} const {name} = {text};"])
        return name

    def convert(self, value: Value, home: Layout, layout: Layout) -> str:
        """The value in another layout; `moves.py` implements it."""
        raise NotImplementedError

    def at(self, value: Value, layout: Layout, index: str) -> str:
        """One register of a value."""
        name = self.get(value, layout)
        return f"{name}[{index}]" if shape_of(value) else name

    def filled(self, value: Value, layout: Layout, item: Callable[[str], str]) -> str:
        """A new array; `item` gives the expression for register number i."""
        element = _tile(value).element
        name, declared = self.array(element, layout.size)
        self.step([declared, *loop("r", layout.size, f"{name}[r] = {item('r')};")])
        return name

    # -- elementwise ---------------------------------------------------------------------------------------------------

    def elementwise(self, op: Op, value: Value, layout: Layout) -> str:
        if op.name == "arange":
            bits = range(len(axis_bits(_tile(value).shape, 0)))
            start = op.settings["start"]
            where = self.coordinate(layout, bits)
            first = f"{start} + " if start else ""
            return self.filled(value, layout, lambda r: f"{first}{where.replace('@', r)}")
        sources = [self._stretched(operand) for operand in op.operands]
        parts = [
            self.get(operand, layout if shape_of(operand) else self.homes.uniform) for operand in sources
        ]
        tiles = [bool(shape_of(operand)) for operand in sources]

        def item(r: str) -> str:
            args = [f"{part}[{r}]" if tile else part for part, tile in zip(parts, tiles, strict=True)]
            return self.expression(op, args)

        return self.filled(value, layout, item)

    def _stretched(self, value: Value) -> Value:
        """The scalar that a tile is a broadcast of; otherwise the tile itself."""
        op = self.homes.definitions.get(value)
        if op is not None and op.name == "broadcast" and not shape_of(op.operands[0]):
            return op.operands[0]
        return value

    def coordinate(self, layout: Layout, bits: Sequence[int]) -> str:
        """The number formed by some bits of an element's index, for register @ of this thread."""
        number = {bit: 1 << n for n, bit in enumerate(bits)}
        thread = of_bits(THREAD, [number.get(bit, 0) for bit in layout.threads])
        register = of_bits("@", [number.get(bit, 0) for bit in layout.registers])
        if register == "0":
            return thread
        return register if thread == "0" else f"{thread} + {register}"

    def expression(self, op: Op, args: list[str]) -> str:
        """An elementwise operation on scalars."""
        name, attrs = op.name, op.settings
        kind = _tile(op.operands[0]) if op.operands else None
        if name == "constant":
            return scalars.constant(te.Const(attrs["value"], attrs["dtype"]))
        if name in ("program_id", "num_programs"):
            return self._instance(name, attrs["axis"])
        assert kind is not None
        if name == "cast":
            if kind.dtype is attrs["dtype"]:
                return args[0]
            return scalars.conversion(args[0], kind.dtype, attrs["dtype"])
        if name == "bitcast":
            return f"with_bits_of<{element_type(attrs['dtype'])}>({args[0]})"
        if name == "select":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        if name == "addptr":
            return f"({args[0]} + (i64)({args[1]}))"
        if name not in SCALARS:
            raise CodegenError(f"tile operation {name} has no CUDA code")
        return self.function(name, kind.dtype, args)

    def _instance(self, name: str, axis: int) -> str:
        if self.grid is None:
            return f"(i32){'blockIdx' if name == 'program_id' else 'gridDim'}.{'xyz'[axis]}"
        if name == "num_programs":
            return str(self.grid[axis])
        return f"(i32)(blockIdx.x / {math.prod(self.grid[:axis])} % {self.grid[axis]})"

    def function(self, name: str, dtype: DType, args: list[str]) -> str:
        """A function of te.scalars; 16-bit floats are computed in f32 and rounded once."""
        if not dtype.is_half:
            return _call(name, dtype, args)
        wide = [scalars.conversion(arg, dtype, DType.F32) for arg in args]
        text = _call(name, DType.F32, wide)
        return text if SCALARS[name].predicate else scalars.conversion(text, DType.F32, dtype)

    # -- views -------------------------------------------------------------------------------------------------------

    def view(self, op: Op, value: Value, layout: Layout) -> str:
        source = op.operands[0]
        old, shape = shape_of(source), shape_of(value)
        if not shape:  # of one element
            name = self.name()
            first = self.at(source, self.homes.uniform, "0")
            self.step([f"{element_type(_tile(value).element)} const {name} = {first};"])
            return name
        if op.name == "join":
            return self._joined(op, value, layout)
        if not old:
            scalar = self.scalar(source)
            return self.filled(value, layout, lambda r: scalar)
        if op.name == "trans":
            return self.get(source, layout.mapped(inverse(transposed_bits(old, op.settings["order"]))))
        if op.name != "broadcast":
            return self.get(source, layout)
        bits = inverse(broadcast_bits(old, shape))
        held = self.get(source, layout.mapped(bits))
        kept = layout.kept_registers(bits)
        if len(kept) == len(layout.registers):
            return held
        return self.filled(value, layout, lambda r: f"{held}[{picked(r, kept)}]")

    def _joined(self, op: Op, value: Value, layout: Layout) -> str:
        bits = inverse(joined_bits(shape_of(op.operands[0])))
        inner = layout.mapped(bits)
        kept = layout.kept_registers(bits)
        parts = [self.get(each, inner if shape_of(each) else self.homes.uniform) for each in op.operands]
        if shape_of(op.operands[0]):
            parts = [f"{part}[{picked('r', kept)}]" for part in parts]
        which = self.coordinate(layout, (0,)).replace("@", "r")
        return self.filled(value, layout, lambda r: f"({which}) ? {parts[1]} : {parts[0]}")


def _call(name: str, dtype: DType, args: list[str]) -> str:
    """A call of a scalar function. The `exp` of f32 uses the hardware's power of two, because `exp` dominates a
    softmax."""
    if name == "exp" and dtype is DType.F32:
        return f"exponential({args[0]})"
    return scalars.call(name, dtype, args)


def _tile(value: Value) -> TileType:
    assert isinstance(value.type, TileType)
    return value.type


tile_type = _tile
