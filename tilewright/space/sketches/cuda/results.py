"""Cache write: a block's sums go to shared memory, and from there, as vectors, through the epilogue."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.gpu.thread_index import at_positions, guarded, index_at_positions, under
from tilewright.loops.ir import Buffer, For, Kind, Scope, Stmt, Store, nest
from tilewright.loops.tiling import extent_of, with_results
from tilewright.space.contraction import TwoFactorContraction
from tilewright.te.index import coefficient, linear, simplify

_BYTES = 16  # of a vector of results
_PADDING = 8  # padding floats at the end of a row of sums, against bank conflicts
_AT_ONCE = 4  # vectors per thread: other operands are prefetched for all of them before the first is needed


@dataclass(frozen=True)
class Results:
    """A tile of `rows` x `columns` results along the fused axes `m` and `n`."""

    work: TwoFactorContraction
    m: tuple[te.Var, ...]
    n: tuple[te.Var, ...]
    rows: int
    columns: int

    @property
    def pitch(self) -> int:
        return self.columns + _PADDING

    @property
    def sums(self) -> Buffer:
        return Buffer("sums", DType.F32, self.rows * self.pitch, Scope.SCRATCH)

    @property
    def along_m(self) -> bool:
        """Whether neighbours in memory are neighbours along m, not along n."""
        store = self.work.formula.store
        along = [bool(axes) and coefficient(store, axes[-1]) == 1 for axes in (self.n, self.m)]
        return along == [False, True]

    @property
    def lanes(self) -> int:
        """Neighbours that are written together, whole vectors only."""
        axes = self.m if self.along_m else self.n
        form = linear(self.work.formula.store)
        if not axes or form.terms.get(axes[-1]) != 1:
            return 1
        numbers = [axes[-1].extent, form.constant, *(c for atom, c in form.terms.items() if atom != axes[-1])]
        lanes = _BYTES // self.work.formula.output.dtype.bytes
        while lanes > 1 and any(number % lanes for number in (*numbers, self.rows, self.columns)):
            lanes //= 2
        return lanes

    def write(self, thread: te.Var, m0: te.Expr, n0: te.Expr, batch: dict[te.Var, te.Expr]) -> Stmt:
        formula, threads, lanes = self.work.formula, thread.extent, self.lanes
        vectors = self.rows * self.columns // lanes
        turns = -(-vectors // threads)
        at_once = next(n for n in range(min(turns, _AT_ONCE), 0, -1) if turns % n == 0)
        turn, part, lane = te.Var("turn", turns // at_once), te.Var("part", at_once), te.Var("v", lanes)
        flat = (turn * at_once + part) * threads + thread
        if self.along_m:
            wide = self.rows // lanes
            row, column = flat % wide * lanes + lane, flat // wide
            first = (flat % wide * lanes, column)
        else:
            wide = self.columns // lanes
            row, column = flat // wide, flat % wide * lanes + lane
            first = (row, flat % wide * lanes)
        total = te.Load(self.sums, (simplify(row * self.pitch + column),))

        def placed(expr: te.Expr) -> te.Expr:
            at = at_positions(at_positions(expr, self.n, n0 + column), self.m, m0 + row)
            return simplify(te.substitute(at, batch))

        position = index_at_positions(
            index_at_positions(formula.store, self.n, n0 + column), self.m, m0 + row
        )
        store = Store(
            formula.output,
            simplify(te.substitute(position, batch)),
            with_results(placed(formula.value), {self.work.reduction.result: total}),
        )
        conditions = [
            guarded(flat, vectors, turns * threads),
            *(
                te.call("lt", simplify(start + at), extent_of(axes)) if extent_of(axes) % size else None
                for start, at, axes, size in (
                    (m0, first[0], self.m, self.rows),
                    (n0, first[1], self.n, self.columns),
                )
            ),
        ]
        body = under(te.all_of([c for c in conditions if c is not None]), nest([(lane, Kind.VECTOR)], store))
        return For(thread, Kind.THREAD, nest([(turn, Kind.SERIAL), (part, Kind.UNROLL)], body))
