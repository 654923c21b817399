"""A matmul and a norm of its rows, such as a softmax, as one schedule, and the blocks of rows that compute both.

    left, right, sums as in `matrices.py`
    row_max0[b, m] = max over n of value(sums[b, m, n])
    row_sum1[b, m] = sum over n of exp(value(sums[b, m, n]) - row_max0[b, m])
    out[b, m, n] = exp(value(sums[b, m, n]) - row_max0[b, m]) / row_sum1[b, m]

`value` is what the task computes between the matmul and the norm, in fp32. A block has all columns of its rows in
shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright import te
from tilewright.graph.chain import Refused
from tilewright.hw.gpu import WARP
from tilewright.hw.memory import Scope
from tilewright.loops.formula import drop_rounding
from tilewright.loops.gpu.thread_index import at_positions, step_of
from tilewright.loops.ir import Buffer
from tilewright.loops.schedule.nest import CHUNK_BYTES, Leaf, Loop, Node, Tile, nested, stage_nest
from tilewright.loops.tiling import extent_of, with_results
from tilewright.space.chain import Stage, stages_of
from tilewright.space.row_norm import RowNorm, instructions, is_norm, row_norm_of
from tilewright.space.sketches.analysis import Extents
from tilewright.space.sketches.block_frames import BLOCK, BlockFrame, Values, at
from tilewright.space.sketches.cuda.block_reduction import Threads
from tilewright.space.sketches.matrices import LEFT, OUT, RIGHT, Matrices, from_tiles
from tilewright.space.template import GpuTerms, GpuWork
from tilewright.support.arith import round_up
from tilewright.support.batch import Number, Truth, most, select
from tilewright.te.index import linear, simplify

_MIN_THREADS = 4  # that share a row: they combine their partial results twice
_GAP = 8  # elements after each row of sums
_ROUNDED = 384  # bytes by which a reduction's three buffers may be rounded up
_OTHERS = 2.0  # instructions per element of a pass besides the norm's own: a load, and the loop


@dataclass(frozen=True)
class NormedProduct:
    """A task that is a matmul and then a norm of rows. `inputs`: those of the task, in order."""

    product: Stage
    norm: RowNorm
    inputs: tuple[Buffer, ...]


def normed_product(work: GpuWork) -> NormedProduct | None:
    """The matmul and the norm of a task; None if it is something else."""
    if work.numerics == "strict":  # every operator would round
        return None
    stages = stages_of(work)
    if isinstance(stages, Refused) or [is_norm(stage) for stage in stages] != [False, True]:
        return None
    product, after = stages
    norm = row_norm_of(after.formula)
    if isinstance(norm, Refused) or not norm.reads_rows_of(product.formula.output):
        return None
    known = {b.name: b for stage in stages for b in stage.formula.inputs if b != stage.source}
    names = [f"x{number}" for number in range(len(work.task.graph.inputs))]
    if any(name not in known for name in names):
        return None
    return NormedProduct(product, norm, tuple(known[name] for name in names))


@dataclass(frozen=True)
class NormedMatrices(Matrices):
    """Matmuls whose rows are normed."""

    task: NormedProduct

    def has_whole_rows(self) -> bool:
        """Whether the norm's rows are the rows of the matmuls, one after the other."""
        mapping, norm = self.mapping, self.task.norm
        batch, m, n = (extent_of(axes) for axes in (mapping.batch, mapping.m, mapping.n))
        form = linear(self.task.product.formula.store)
        steps = ((mapping.batch, m * n), (mapping.m, n), (mapping.n, 1))
        return (
            not self.windowed
            and min(m, n) > 1
            and (norm.count, norm.length) == (batch * m, n)
            and not form.constant
            and all(step_of(form.terms, axes) == step for axes, step in steps if extent_of(axes) > 1)
        )

    @property
    def columns(self) -> int:
        return extent_of(self.mapping.n)

    @property
    def inputs(self) -> Sequence[Buffer]:
        return self.task.inputs

    @property
    def output(self) -> Buffer:
        return self.task.norm.formula.output

    @property
    def constants(self) -> Collection[Buffer]:
        return self.work.formula.constants | self.task.norm.formula.constants

    def _output(self, out: Tile, sums: Tile) -> tuple[Node, ...]:
        formula, mapping = self.task.norm.formula, self.mapping
        rows, columns = extent_of(mapping.m), extent_of(mapping.n)
        results: dict[Buffer, Tile] = {}
        body: list[Node] = []
        for number, reduction in enumerate(formula.reductions):
            name = f"row_{reduction.kind}{number}"
            tile = Tile(name, reduction.result.dtype, (*self._batch(), rows), Scope.SCRATCH)
            column = te.Var(f"{name}.k", columns)
            element = _OfRow(self, sums, dict(results), reduction.body, reduction.axes, column)
            body += stage_nest(name, tile, [Loop(column, ())], reduction.kind, element)
            results[reduction.result] = tile
        batch = [te.Var(f"{OUT}.b", extent_of(mapping.batch))] if self.batched else []
        m, n = te.Var(f"{OUT}.m", rows), te.Var(f"{OUT}.n", columns)
        value = _OfRow(self, sums, results, formula.value, self.task.norm.columns, n)((*batch, m))
        index = simplify(self.row((*batch, m)) * columns + n)
        body += nested([Loop(var, ()) for var in (*batch, m, n)], (Leaf(OUT, out, (index,), value),))
        return tuple(body)

    def row(self, indices: Sequence[te.Expr]) -> te.Expr:
        """The number of a row among those of the norm."""
        *batch, m = indices
        return batch[0] * extent_of(self.mapping.m) + m if batch else m

    def element(self, sums: Tile, indices: Sequence[te.Expr], column: te.Expr) -> te.Expr:
        """What the norm reads, which is not rounded on the way: it might overflow."""
        mapping, *batch = self.mapping, *indices[:-1]
        value = self.work.formula.value
        if isinstance(value, te.Cast) and value.dtype.is_half:
            value = value.value
        value = at_positions(at_positions(value, mapping.n, column), mapping.m, indices[-1])
        value = te.substitute(value, self.around(batch))
        return with_results(value, {self.work.reduction.result: te.Load(sums, (*indices, column))})


@dataclass(frozen=True)
class _OfRow:
    """An expression of the norm in a row and a column, with results of reductions in tiles."""

    matrices: NormedMatrices
    sums: Tile
    results: Mapping[Buffer, Tile]
    expr: te.Expr
    axes: tuple[te.Var, ...]
    column: te.Expr

    def __call__(self, indices: tuple[te.Expr, ...]) -> te.Expr:
        found, norm = self.matrices, self.matrices.task.norm
        between = found.task.product.formula.output
        element = found.element(self.sums, indices, self.column)

        def rule(node: te.Expr) -> te.Expr | None:
            if isinstance(node, te.Load) and node.source == between:
                return te.cast(element, node.dtype)
            return drop_rounding(node)

        placed = at_positions(at_positions(self.expr, norm.rows, found.row(indices)), self.axes, self.column)
        known: dict[Buffer, te.Expr] = {
            buffer: te.Load(tile, tuple(indices)) for buffer, tile in self.results.items()
        }
        return simplify(from_tiles(with_results(te.rewrite(placed, rule), known)))


@dataclass(frozen=True)
class NormedFrame(BlockFrame):
    """Blocks of rows, each with all columns: they are summed in steps of BN, and kept in shared memory."""

    matrices: NormedMatrices
    by_warps: bool  # on tensor cores

    @property
    def block_loop(self) -> str:
        return f"{OUT}.m.o"

    def at_block(self, values: Values) -> Extents:
        batch = (1,) if self.matrices.batched else ()
        return (*batch, self.sizes(values).bm)

    def threads(self, values: Values) -> Threads:
        """How the threads of a block share its rows."""
        t = self.sizes(values)
        return Threads(t.threads // t.bm, t.bm, 1)

    def legal(self, values: Values) -> Truth:
        t = self.sizes(values)
        shared = (t.threads % t.bm == 0) & (t.threads >= _MIN_THREADS * t.bm)
        shared = shared & (t.bm <= extent_of(self.matrices.mapping.m))  # a thread for each share of each row
        return super().legal(values) & shared

    def shared_bytes(self, values: Values) -> Number:
        t = self.sizes(values)
        kernel = self.applied.structure(t)
        depth = round_up(extent_of(self.matrices.mapping.k), t.bk)
        found: Number = 256
        columns = round_up(self.matrices.columns, t.bn)
        for name, operand, size in zip((LEFT, RIGHT), kernel.operands, (t.bm, columns), strict=True):
            # Rows that are not swizzled end with a gap of a chunk, whichever axis they are along.
            whole = size * depth * operand.factor.dtype.bytes + most(size, depth) * CHUNK_BYTES
            found = found + select(values.get(at(name), "") == BLOCK, whole, operand.bytes)
        group = self.threads(values)
        norm = self.matrices.task.norm
        for reduction in norm.formula.reductions:
            results = (group.group + group.parts + 1) * t.bm
            found = found + results * reduction.result.dtype.bytes + _ROUNDED
        return found + t.bm * (columns + _GAP) * 4

    def terms(self, sketch: object) -> Callable[[Values], GpuTerms]:
        return self._terms

    def _terms(self, values: Values) -> GpuTerms:
        """Those of the matmul, whose steps a block repeats for its columns, and then the passes over its rows."""
        t = self.sizes(values)
        plain = self.applied.terms_of(self._all(values))
        matrices, norm = self.matrices, self.matrices.task.norm
        elements = 1.0 * t.bm * matrices.columns
        readings = norm.passes + 1
        own: float = sum(instructions(r.body) + 1 for r in norm.formula.reductions) + instructions(norm.value)
        moved = sum(buffer.size * buffer.dtype.bytes for buffer in (*matrices.inputs, matrices.output))
        return replace(
            plain,
            blocks=-(-extent_of(matrices.mapping.m) // t.bm) * extent_of(matrices.mapping.batch),
            steps=plain.steps * -(-matrices.columns // t.bn),
            shared_bytes=self.shared_bytes(values),
            memory=float(moved),
            write_loaded=elements * readings * matrices.work.formula.epilogue_reads,
            written=elements * matrices.output.dtype.bytes,
            write_shared=elements * 4 * (readings + 1),
            write_scalar=elements / WARP * (own + _OTHERS * readings),
            grid=None,
        )
