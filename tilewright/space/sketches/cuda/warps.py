"""What the warps of a block do with tiles in scratch memory: fragments into registers, multiplications on tensor cores.

A warp has `wm` x `wn` of a block's results. Fragments are what the instruction takes: the matrices that make
up one are loaded several at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gpu import WARP
from tilewright.hw.tensor_cores import ROWS, columns, load_matrices, multiply
from tilewright.loops.ir import Buffer, For, Kind, Scope, Stmt, Store, Warp, block, nest
from tilewright.space.sketches.cuda.fetch import Fetched
from tilewright.te.index import simplify

_MATRICES = 4  # that one instruction loads at most


@dataclass(frozen=True)
class Fragments:
    """An operand's fragments of one step, `size` places of its walked axes from `start` on; `ahead`: those of the next
    step alongside them."""

    tile: Fetched
    left: bool
    size: int
    start: te.Expr
    instruction_k: int  # of the instruction
    ahead: bool
    thread: te.Var

    @property
    def rows(self) -> int:
        """Places that one fragment has."""
        return 16 if self.left else 8

    @property
    def count(self) -> int:
        return self.size // self.rows

    @property
    def elements(self) -> int:
        """Of one fragment, in a thread."""
        return self.rows * self.instruction_k // WARP

    @property
    def buffer(self) -> Buffer:
        size = (2 if self.ahead else 1) * self.count * self.elements
        return Buffer(f"{self.tile.name}_held", self.tile.factor.dtype, size, Scope.REGISTER)

    @property
    def matrices(self) -> int:
        """Of one fragment."""
        return self.rows // ROWS * (self.instruction_k // columns(self.buffer.dtype))

    @property
    def together(self) -> int:
        """Fragments that one instruction loads."""
        most = max(1, _MATRICES // self.matrices)
        return next(n for n in (most, most // 2, 1) if n and self.count % n == 0)

    def position(self, held: int, number: int) -> te.Expr:
        """Where a fragment is in `buffer`."""
        return te.as_index((held * self.count + number) * self.elements)

    def load(self, held: int, number: int, step: int, stage: te.Expr) -> Stmt:
        """`together` fragments from `number` on, of step `step` of the tile in `stage`."""
        matrices = self.together * self.matrices
        lane = self.thread % WARP
        down, along = self._matrix(lane // ROWS % matrices)
        row = lane % ROWS
        walked, instruction_k = self.start + down * ROWS, along * columns(self.buffer.dtype)
        if self.tile.transposed:
            instruction_k = instruction_k + row
        else:
            walked = walked + row
        further = (number * self.rows, step * self.instruction_k)
        index = simplify(self.tile.position(stage, walked, instruction_k, further))
        instruction = load_matrices(matrices, self.buffer.dtype, self.tile.transposed)
        return Warp(
            instruction, self.thread, ((self.buffer, self.position(held, number)), (self.tile.buffer, index))
        )

    def _matrix(self, number: te.Expr) -> tuple[te.Expr, te.Expr]:
        """Where in the fragments, by rows of the walked axes and by the depth, the matrix of that number is."""
        if self.instruction_k == columns(self.buffer.dtype):
            return number, te.as_index(0)
        return (number % 2, number // 2) if self.left else (number // 2, number % 2)


@dataclass(frozen=True)
class WarpAccumulators:
    """A warp's results, in fragments: of rows `i` and columns `j`."""

    left: Fragments
    right: Fragments

    @property
    def buffer(self) -> Buffer:
        return Buffer("acc", DType.F32, self.left.count * self.right.count * 4, Scope.REGISTER)

    def clear(self) -> Stmt:
        number = te.Var("e", self.buffer.size)
        store = Store(self.buffer, number, te.const(0.0, DType.F32))
        return For(self.left.thread, Kind.THREAD, nest([(number, Kind.UNROLL)], store))

    def multiply(self, held: int, i: int) -> Stmt:
        """A row of fragments with all columns: there, and in the next row back, so that one is used twice in a row."""
        left, right = self.left, self.right
        instruction = multiply(left.instruction_k, left.buffer.dtype)
        columns = range(right.count) if i % 2 == 0 else reversed(range(right.count))
        return block(
            *(
                Warp(
                    instruction,
                    left.thread,
                    (
                        (self.buffer, te.as_index((i * right.count + j) * 4)),
                        (left.buffer, left.position(held, i)),
                        (right.buffer, right.position(held, j)),
                    ),
                )
                for j in columns
            )
        )

    def store(self, sums: Buffer, pitch: int) -> Stmt:
        """Into a block's rows of `pitch`, as the instruction's shares say: two neighbours at a time."""
        thread = self.left.thread
        i, j, half = te.Var("i", self.left.count), te.Var("j", self.right.count), te.Var("half", 2)
        pair = te.Var("v", 2)
        row = self.left.start + i * 16 + half * 8 + thread % WARP // 4
        column = self.right.start + j * 8 + thread % 4 * 2 + pair
        held = te.Load(self.buffer, ((i * self.right.count + j) * 4 + half * 2 + pair,))
        store = Store(sums, simplify(row * pitch + column), held)
        loops = [(i, Kind.UNROLL), (j, Kind.UNROLL), (half, Kind.UNROLL), (pair, Kind.VECTOR)]
        return For(thread, Kind.THREAD, nest(loops, store))
