"""The first level of tiling: which tile of the result a block computes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.loops.gpu.thread_index import positions
from tilewright.loops.tiling import extent_of
from tilewright.space.mapping import Mapping
from tilewright.support.batch import Number, select
from tilewright.te.index import simplify

_NEIGHBOURS = 8  # tiles along m in a group of neighbouring blocks, which share columns of the right factor


@dataclass(frozen=True)
class BlockGrid:
    mapping: Mapping
    bm: int
    bn: int

    @property
    def rows(self) -> int:
        return -(-extent_of(self.mapping.m) // self.bm)

    @property
    def columns(self) -> int:
        return -(-extent_of(self.mapping.n) // self.bn)

    @property
    def count(self) -> int:
        return self.rows * self.columns * extent_of(self.mapping.batch)

    @property
    def number(self) -> te.Var:
        return te.Var("p", self.count)

    @property
    def together(self) -> Number:
        """Rows of tiles in a group of neighbouring blocks."""
        found: Number = 1
        for n in range(2, _NEIGHBOURS + 1):
            found = select(self.rows % n == 0, n, found)
        return found

    @property
    def starts(self) -> tuple[te.Expr, te.Expr]:
        """The start of a block's tile along m and n. Neighbouring blocks form groups of rows, which share
        data in L2."""
        near = self.together
        group = near * self.columns
        tile = self.number % (self.rows * self.columns)
        return (
            simplify((tile // group * near + tile % near) * self.bm),
            simplify(tile % group // near * self.bn),
        )

    @property
    def batch(self) -> dict[te.Var, te.Expr]:
        coords = positions(self.number // (self.rows * self.columns), self.mapping.batch)
        return {axis: simplify(coord) for axis, coord in coords.items()}
