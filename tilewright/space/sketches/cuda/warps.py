"""Warp-level code: load fragments from shared memory into registers, and multiply them on tensor cores.

A warp computes `wm` x `wn` of a block's results. A fragment is an operand of the instruction; the matrices of a
fragment are loaded several at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.hw.gpu import WARP
from tilewright.hw.intrinsics import Intrinsic
from tilewright.hw.tensor_cores import ROWS, columns, load_matrices
from tilewright.loops.ir import Buffer, For, Kind, Scope, Stmt, Store, Warp, block, nest
from tilewright.space.sketches.cuda.fetch import Fetched
from tilewright.te.index import simplify

_MATRICES = 4  # maximum matrices loaded by one instruction


@dataclass(frozen=True)
class Fragments:
    """An operand's fragments for one step: `size` indices of its walked axes, beginning at `start`."""

    tile: Fetched
    left: bool
    size: int
    start: te.Expr
    instruction_k: int  # k of the instruction
    thread: te.Var

    @property
    def rows(self) -> int:
        """Rows of one fragment."""
        return 16 if self.left else 8

    @property
    def count(self) -> int:
        return self.size // self.rows

    @property
    def elements(self) -> int:
        """Elements of one fragment per thread."""
        return self.rows * self.instruction_k // WARP

    @property
    def buffer(self) -> Buffer:
        return Buffer(
            f"{self.tile.name}_held", self.tile.factor.dtype, self.count * self.elements, Scope.REGISTER
        )

    @property
    def matrices(self) -> int:
        """Matrices of one fragment."""
        return self.rows // ROWS * (self.instruction_k // columns(self.buffer.dtype))

    @property
    def together(self) -> int:
        """Fragments loaded by one instruction."""
        most = max(1, _MATRICES // self.matrices)
        return next(n for n in (most, most // 2, 1) if n and self.count % n == 0)

    def position(self, number: int) -> te.Expr:
        """The index of a fragment in `buffer`."""
        return te.as_index(number * self.elements)

    def load(self, number: int, step: te.Expr) -> Stmt:
        """Load `together` fragments starting at `number`, for step `step` of the tile."""
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
        index = simplify(self.tile.position(walked, instruction_k, further))
        instruction = load_matrices(matrices, self.buffer.dtype, self.tile.transposed)
        return Warp(
            instruction, self.thread, ((self.buffer, self.position(number)), (self.tile.buffer, index))
        )

    def _matrix(self, number: te.Expr) -> tuple[te.Expr, te.Expr]:
        """The position of a matrix in the fragments: its row along the walked axes, and its k."""
        if self.instruction_k == columns(self.buffer.dtype):
            return number, te.as_index(0)
        return (number % 2, number // 2) if self.left else (number // 2, number % 2)


@dataclass(frozen=True)
class WarpAccumulators:
    """A warp's results as fragments, with rows `i` and columns `j`."""

    left: Fragments
    right: Fragments
    instruction: Intrinsic  # multiplies two fragments

    @property
    def buffer(self) -> Buffer:
        return Buffer("acc", DType.F32, self.left.count * self.right.count * 4, Scope.REGISTER)

    def clear(self) -> Stmt:
        number = te.Var("e", self.buffer.size)
        store = Store(self.buffer, number, te.const(0.0, DType.F32))
        return For(self.left.thread, Kind.THREAD, nest([(number, Kind.UNROLL)], store))

    def step(self, number: te.Expr) -> list[Stmt]:
        """Load the fragments of a step of the tile and multiply them: loads in the order in which rows need them,
        then a block for each row of fragments."""
        rows = self.left.count
        loads = []
        for fragments in (self.left, self.right):
            groups = fragments.count // fragments.together
            loads += [(group * rows // groups, fragments, group) for group in range(groups)]
        loads.sort(key=lambda each: each[0])
        return [
            *(fragments.load(group * fragments.together, number) for _, fragments, group in loads),
            *(self.multiply(row) for row in range(rows)),
        ]

    def multiply(self, i: int) -> Stmt:
        """Multiply a row of fragments by all columns, in alternating direction per row, so that one fragment is
        reused."""
        left, right = self.left, self.right
        columns = range(right.count) if i % 2 == 0 else reversed(range(right.count))
        return block(
            *(
                Warp(
                    self.instruction,
                    left.thread,
                    (
                        (self.buffer, te.as_index((i * right.count + j) * 4)),
                        (left.buffer, left.position(i)),
                        (right.buffer, right.position(j)),
                    ),
                )
                for j in columns
            )
        )

    def store(self, sums: Buffer, pitch: int) -> Stmt:
        """Store into a block's rows of length `pitch`, two neighbours at a time, in the instruction's layout."""
        thread = self.left.thread
        i, j, half = te.Var("i", self.left.count), te.Var("j", self.right.count), te.Var("half", 2)
        pair = te.Var("v", 2)
        row = self.left.start + i * 16 + half * 8 + thread % WARP // 4
        column = self.right.start + j * 8 + thread % 4 * 2 + pair
        held = te.Load(self.buffer, ((i * self.right.count + j) * 4 + half * 2 + pair,))
        store = Store(sums, simplify(row * pitch + column), held)
        loops = [(i, Kind.UNROLL), (j, Kind.UNROLL), (half, Kind.UNROLL), (pair, Kind.VECTOR)]
        return For(thread, Kind.THREAD, nest(loops, store))
