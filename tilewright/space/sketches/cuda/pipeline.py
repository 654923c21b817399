"""The software pipeline: `stages` tiles are in shared memory, and all but the current one are in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.loops.ir import Await, Block, Commit, Kind, Stmt, block, nest
from tilewright.loops.tiling import with_values
from tilewright.space.sketches.cuda.fetch import Fetched


@dataclass(frozen=True)
class Pipeline:
    """`starts`: where the tiles of each operand begin along its walked axes. `batch`: the block's index in axes that
    are not tiled."""

    operands: tuple[Fetched, ...]
    starts: tuple[te.Expr, ...]
    batch: dict[te.Var, te.Expr]
    thread: te.Var
    stages: int

    @property
    def step(self) -> te.Var:
        return te.Var("step", self.operands[0].summed.total)

    def fetch(self, step: te.Expr, last: int, part: int = 0, parts: int = 1) -> list[Stmt]:
        """A part of the copies of tile `step`, which is at most `last`."""
        stage = step % self.stages
        made = [
            operand.copies(self.thread, start, step, stage, last, part, parts)
            for operand, start in zip(self.operands, self.starts, strict=True)
        ]
        return [with_values(stmt, self.batch) for stmt in made if stmt != Block(())]

    def fetch_next(self, part: int = 0, parts: int = 1) -> list[Stmt]:
        """A part of the copies of the tile that is prefetched while `step` is in use."""
        ahead = self.stages - 1
        return self.fetch(self.step + ahead, self.step.extent - 1 + ahead, part, parts)

    def begin(self) -> list[Stmt]:
        """The copies that start before the first tile is used."""
        stmts: list[Stmt] = []
        for number in range(self.stages - 1):
            stmts += [*self.fetch(te.as_index(number), number), Commit()]
        return stmts

    def loop(self, use: Callable[[te.Expr], Sequence[Stmt]]) -> list[Stmt]:
        """All steps; `use` receives the stage that holds the current tile."""
        used = use(self.step % self.stages)
        body: list[Stmt] = [Await(max(0, self.stages - 2)), *self.fetch_next()]
        body += [Commit(), Await(0), *used] if self.stages == 1 else [*used, Commit()]
        return [*self.begin(), nest([(self.step, Kind.SERIAL)], block(*body)), Await(0)]
