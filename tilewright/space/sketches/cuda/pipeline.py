"""The load-and-use loop of a block: each step copies a tile of both operands, waits for them and uses them. The pass
`loops/passes/pipeline.py` turns it into a software pipeline, of as many stages and levels as a config says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.loops.ir import Await, Commit, For, Kind, Program, Stmt, block
from tilewright.loops.passes.load_and_use import ProgramAccesses, pipelines
from tilewright.loops.passes.pipeline import planned
from tilewright.loops.tiling import with_values
from tilewright.space.sketches.cuda.fetch import Fetched

REGISTER_STAGES = 2  # a thread loads one step ahead: more stages need more registers than they hide latency


@dataclass(frozen=True)
class TileLoop:
    """`starts`: where the tiles of each operand begin along its walked axes. `batch`: the block's index in axes that
    are not tiled."""

    operands: tuple[Fetched, ...]
    starts: tuple[te.Expr, ...]
    batch: dict[te.Var, te.Expr]
    thread: te.Var

    @property
    def step(self) -> te.Var:
        return te.Var("step", self.operands[0].summed.total)

    def loop(self, uses: Sequence[Stmt]) -> Stmt:
        """All steps, one after another. Threads synchronise before a tile is overwritten and before it is used."""
        copies = [
            with_values(operand.copies(self.thread, start, self.step), self.batch)
            for operand, start in zip(self.operands, self.starts, strict=True)
        ]
        body = block(Await(0), *copies, Commit(), Await(0), *uses)
        return For(self.step, Kind.SERIAL, body) if self.step.extent > 1 else body


def pipelined(
    program: Program,
    operands: Sequence[Fetched],
    stages: int,
    registers: Sequence[str] = (),
    fused: bool = True,
) -> Program:
    """The program with tiles in `stages` stages, and the register buffers of this name loaded a step ahead."""
    computed = [operand.name for operand in operands if operand.factor.value is not None]
    counts = dict.fromkeys(registers, REGISTER_STAGES)
    if stages > 1:
        counts |= {operand.name: stages for operand in operands}
    known = ProgramAccesses(program)
    plan = planned(known, counts, fused=fused, synchronous=computed)
    words = [f"{stages} stages"] if stages > 1 else ["no pipeline"] if not registers else []
    words += ["registers a step ahead" + (", fused" if plan.is_fused else "")] if registers else []
    kept = pipelines(known, counts)
    decisions = f"{program.decisions}, {', '.join(words)}" + (f"; {kept}" if kept else "")
    return replace(plan.program(), decisions=decisions, unpipelined=program if counts else None)
