"""The tile IR: what one program instance does, in SSA form. The semantics are at the head of `tile/__init__.py`.

- A `Value` is defined once: as a parameter of the program, as the result of a node, or as a parameter of a block.
- An `Op` is one entry of the table in `ops.py`, which has its operands, type rule and meaning. Types of operands are
  exact: the front end has inserted every cast and broadcast.
- `For`, `While` and `If` are structured. What a loop changes is carried: `init` enters the first iteration as the
  block's parameters, the values that the block yields enter the next one, and the last ones are the results. `For`
  evaluates its bounds once; its block's first parameter is the index. Both blocks of an `If` yield its results.
- Nodes of a block run in order. A block may use all values that are defined before it.
- All nodes are immutable and compared by identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tilewright.dtypes import DType
from tilewright.support.source import SourceLocation

# The most elements that one tile may have, and that a launch's grid may have along one axis.
MAX_ELEMENTS = 1 << 20
MAX_GRID = 2**31 - 1


@dataclass(frozen=True)
class Pointer:
    """The element type of pointers."""

    element_ty: DType

    @property
    def short(self) -> str:
        return f"*{self.element_ty.short}"

    def __repr__(self) -> str:
        return self.short


@dataclass(frozen=True)
class TileType:
    """A tile of numbers or of pointers; a scalar is a tile of shape ()."""

    element: DType | Pointer
    shape: tuple[int, ...] = ()

    @property
    def is_pointer(self) -> bool:
        return isinstance(self.element, Pointer)

    @property
    def dtype(self) -> DType:
        """The type of its numbers, or the type that its pointers point to."""
        return self.element.element_ty if isinstance(self.element, Pointer) else self.element

    def of(self, element: DType | Pointer) -> TileType:
        return TileType(element, self.shape)

    def shaped(self, shape: tuple[int, ...]) -> TileType:
        return TileType(self.element, shape)

    def __str__(self) -> str:
        return self.element.short + (str(list(self.shape)) if self.shape else "")


@dataclass(frozen=True)
class BlockPointerType:
    """A window of `block` elements in a strided tensor in memory. `order`: its axes, the one with the smallest stride
    first."""

    dtype: DType
    block: tuple[int, ...]
    order: tuple[int, ...]

    def __str__(self) -> str:
        return f"block*{self.dtype.short}{list(self.block)}"


Type = TileType | BlockPointerType


@dataclass(frozen=True, eq=False)
class Value:
    type: Type
    name: str = ""  # of parameters and carried values


@dataclass(frozen=True, eq=False)
class Op:
    name: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    where: SourceLocation | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.attrs)


@dataclass(frozen=True, eq=False)
class Block:
    params: tuple[Value, ...]
    nodes: tuple[Node, ...]
    yields: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class For:
    """for index in range(lower, upper, step): all of one integer type; a step of 0 is undefined."""

    lower: Value
    upper: Value
    step: Value
    init: tuple[Value, ...]
    body: Block
    results: tuple[Value, ...]
    where: SourceLocation | None = None


@dataclass(frozen=True, eq=False)
class While:
    """`condition` yields one bool of the carried values; while it is true, `body` runs."""

    init: tuple[Value, ...]
    condition: Block
    body: Block
    results: tuple[Value, ...]
    where: SourceLocation | None = None


@dataclass(frozen=True, eq=False)
class If:
    condition: Value
    then: Block
    other: Block
    results: tuple[Value, ...]
    where: SourceLocation | None = None


Node = Op | For | While | If


@dataclass(frozen=True, eq=False)
class TileProgram:
    """A specialised kernel: its parameters have types, and its constexpr parameters are constants in the body."""

    name: str
    params: tuple[Value, ...]
    body: Block
    constants: tuple[tuple[str, Any], ...] = ()
    names: tuple[tuple[Value, str], ...] = ()  # the user's names of values that have none of their own

    def __str__(self) -> str:
        from tilewright.tile.text import print_tile_program

        return print_tile_program(self)


def blocks_of(node: Node) -> tuple[Block, ...]:
    """The blocks directly inside a node."""
    if isinstance(node, For):
        return (node.body,)
    if isinstance(node, While):
        return (node.condition, node.body)
    if isinstance(node, If):
        return (node.then, node.other)
    return ()


def operands_of(node: Node) -> tuple[Value, ...]:
    """The values that a node uses itself, without those that its blocks use."""
    if isinstance(node, Op):
        return node.operands
    if isinstance(node, For):
        return (node.lower, node.upper, node.step, *node.init)
    if isinstance(node, While):
        return node.init
    return (node.condition,)


def walk(block: Block) -> Iterator[Node]:
    """All nodes of a block and of the blocks inside it; a node comes before those inside it."""
    for node in block.nodes:
        yield node
        for inner in blocks_of(node):
            yield from walk(inner)
