"""Reductions to few results: the threads of a block share the terms of each result and combine partial results.

    for blocks, C results side by side, V neighbours for each thread:     (parallel)
      for each reduction:
        for threads, G x C: acc[V] = combination of every Gth term        (serial, in lanes)
          parts[G, C, V] = acc
        for threads, twice: total[C, V] = combination of parts over G     (serial: about the root of G each time)
      for threads, G x C: out = value(total), every Gth column            (serial, in lanes)

Neighbouring threads have neighbouring results if these are contiguous in memory, otherwise neighbouring terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright import te
from tilewright.hw.gpu import WARP, GpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.gpu.thread_index import by_stride, positions, under, vector_lanes
from tilewright.loops.ir import Buffer, For, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import columns_of, extent_of, load_offsets, updated, with_results, with_values
from tilewright.space.space import Config, Knob, Space
from tilewright.space.template import Applied, GpuTerms, GpuWork
from tilewright.support.batch import Number, Truth, Values, floor_log2, most
from tilewright.te.index import coefficient, simplify

NAME = "sketch:block-reduction"
_MIN_TERMS = 64
_MIN, _MAX = 64, 1024  # minimum and maximum threads of a block
_MAX_SUMS = 4  # maximum reductions of a formula, each with its own memory
_ROUNDED = 384  # bytes by which a reduction's three buffers may be rounded up
_SECTOR_BYTES = 32  # minimum bytes of a memory access
_IN_FLIGHT = 4  # terms per thread that are prefetched before the first is needed


@dataclass(frozen=True)
class Threads:
    group: int  # threads that share a result
    results: int  # results per block, in vectors
    lanes: int

    @property
    def all(self) -> int:
        return self.group * self.results

    @property
    def parts(self) -> Number:
        """Partial results per result after the first combination, about the square root of their number."""
        return 1 << floor_log2(self.group) // 2


class BlockReduction:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        formula = work.formula
        if formula is None or not 1 <= len(formula.reductions) <= _MAX_SUMS:
            return None
        if min(reduction.length for reduction in formula.reductions) < _MIN_TERMS:
            return None
        results = extent_of(formula.rows)
        if results * _MIN > work.machine.sms * work.machine.threads_sm:
            return None
        return AppliedBlockReduction(formula, work.machine)


class AppliedBlockReduction:
    def __init__(self, formula: Formula, machine: GpuMachine) -> None:
        self.formula, self.machine = formula, machine
        self.rows = by_stride(formula, formula.rows)

    @cached_property
    def most_lanes(self) -> int:
        """Maximum results per thread: more than one if they are contiguous and can be loaded together."""
        formula = self.formula
        if not self.rows or coefficient(formula.store, self.rows[-1]) != 1 or columns_of(formula):
            return 1
        axis = self.rows[-1]
        loads = [load for expr in formula.expressions() for load in te.loads(expr) if load.indices]
        accesses = [(load.indices[0], load.dtype.bytes) for load in loads]
        if any(axis in te.variables(offset) and coefficient(offset, axis) != 1 for offset, _ in accesses):
            return 1
        return vector_lanes([*accesses, (formula.store, formula.output.dtype.bytes)], axis)

    @cached_property
    def along_terms(self) -> bool:
        """Whether neighbouring terms are contiguous in memory and neighbouring results are not."""
        return any(
            coefficient(offset, reduction.axes[-1]) == 1
            for reduction in self.formula.reductions
            for offset in load_offsets(reduction.body)
        ) and not any(
            coefficient(offset, self.rows[-1]) == 1
            for reduction in self.formula.reductions
            for offset in load_offsets(reduction.body)
            if self.rows
        )

    @cached_property
    def space(self) -> Space:
        lanes = tuple(n for n in (1, 2, 4, 8) if n <= self.most_lanes)
        knobs = (
            Knob("group", (4, 8, 16, 32, 64, 128, 256, 512, 1024)),
            Knob("results", (1, 2, 4, 8, 16, 32)),
            Knob("lanes", lanes),
        )
        return Space(NAME, knobs, self._legal, together=(("group", "results", "lanes"),), batched=True)

    def _legal(self, values: Values) -> Truth:
        t = threads_of(values)
        longest = max(reduction.length for reduction in self.formula.reductions)
        results = extent_of(self.rows)
        legal = (t.all >= _MIN) & (t.all <= _MAX) & (t.group <= longest)
        legal = legal & (t.results * t.lanes < 2 * max(1, results))
        return legal & (self.scratch_bytes(t) <= self.machine.shared_block)

    def scratch_bytes(self, t: Threads) -> Number:
        each = max(reduction.result.dtype.bytes for reduction in self.formula.reductions)
        return len(self.formula.reductions) * (
            (t.group + t.parts + 1) * t.results * t.lanes * each + _ROUNDED
        )

    def program(self, config: Config) -> Program:
        return _Program(self, threads_of(dict(config.values))).made()

    def terms(self, config: Config) -> GpuTerms:
        return self.terms_of(dict(config.values))

    def terms_of(self, values: Values) -> GpuTerms:
        """The terms of a config or, if its values are arrays, of many."""
        t = threads_of(values)
        formula = self.formula
        blocks = -(-extent_of(self.rows) // (t.results * t.lanes))
        lengths = sum(reduction.length for reduction in formula.reductions)
        steps = -(-lengths // (t.group * _IN_FLIGHT))
        buffers = (*formula.inputs, formula.output)
        read = float(sum(b.size * b.dtype.bytes for b in formula.inputs))
        side_by_side = t.results * t.lanes * min(b.dtype.bytes for b in formula.inputs)
        sectors = 1 if self.along_terms or not self.rows else most(1, _SECTOR_BYTES // side_by_side)
        warps = t.all / WARP
        return GpuTerms(
            blocks=blocks,
            threads=t.all,
            registers=32 + 2 * t.lanes * _IN_FLIGHT,
            shared_bytes=self.scratch_bytes(t),
            steps=steps,
            stages=2,
            flops=0.0,
            scalar=warps * _IN_FLIGHT * t.lanes * 4 + warps * 4 * t.parts / most(1, steps),
            copies=0.0,
            shared_traffic=0.0,
            loaded=read * sectors / blocks / steps,
            memory=float(sum(b.size * b.dtype.bytes for b in buffers)) * sectors,
            write_loaded=0.0,
            written=formula.output.size * formula.output.dtype.bytes / blocks,
            write_shared=8.0 * t.all * t.lanes,
        )


def threads_of(values: Values) -> Threads:
    return Threads(**values)


class _Program:
    def __init__(self, applied: AppliedBlockReduction, threads: Threads) -> None:
        self.formula, self.rows, self.t = applied.formula, applied.rows, threads
        t = threads
        self.thread, self.lane = te.Var("t", t.all), te.Var("v", t.lanes)
        if applied.along_terms:
            self.part, self.coord = self.thread % t.group, self.thread // t.group
        else:
            self.part, self.coord = self.thread // t.results, self.thread % t.results
        results = extent_of(self.rows)
        vectors = -(-results // t.lanes)
        self.at = te.Var("b", -(-vectors // t.results))
        number = self.at * t.results + self.coord
        if self.at.extent * t.results > vectors:
            number = te.call("min", number, vectors - 1)
        self.position = {
            axis: simplify(coord)
            for axis, coord in positions(number * t.lanes + self.lane, self.rows).items()
        }
        self.results: dict[Buffer, te.Expr] = {}

    def made(self) -> Program:
        formula, t = self.formula, self.t
        stmts = [stmt for reduction in formula.reductions for stmt in self.reduced(reduction)]
        stmts.append(self.written())
        body = with_values(nest([(self.at, Kind.PARALLEL)], block(*stmts)), {})
        words = "shared sums: " + ", ".join(f"{r.kind} of {r.length}" for r in formula.reductions)
        return Program(
            formula.name,
            (*formula.inputs, formula.output),
            body,
            f"{words}, {t.group} threads for each of {t.results} x {t.lanes}",
        )

    def reduced(self, reduction: Reduction) -> list[Stmt]:
        t, name, dtype = self.t, reduction.result.name, reduction.result.dtype
        acc = Buffer(f"acc_{name}", dtype, t.lanes, Scope.REGISTER)
        parts = Buffer(f"parts_{name}", dtype, t.all * t.lanes, Scope.SCRATCH)
        total = Buffer(f"total_{name}", dtype, t.results * t.lanes, Scope.SCRATCH)
        own = te.Load(acc, (self.lane,))
        identity = te.reduce_identity(reduction.kind, dtype)
        lanes = [(self.lane, Kind.VECTOR)]

        turns = -(-reduction.length // t.group)
        turn = te.Var("turn", turns)
        term = turn * t.group + self.part
        inside = te.call("lt", term, reduction.length) if turns * t.group > reduction.length else None
        at = {**self.position, **positions(term, reduction.axes)}
        element = with_results(te.substitute(reduction.body, at), self.results)
        step = nest(lanes, Store(acc, self.lane, updated(reduction, own, element)))
        coord = (self.part * t.results + self.coord) * t.lanes + self.lane
        shared = block(
            nest(lanes, Store(acc, self.lane, identity)),
            nest([(turn, Kind.SERIAL)], under(inside, step)),
            nest(lanes, Store(parts, coord, own)),
        )

        few = t.parts
        fewer = Buffer(f"fewer_{name}", dtype, few * t.results * t.lanes, Scope.SCRATCH)
        self.results[reduction.result] = te.Load(total, (self.coord * t.lanes + self.lane,))
        return [
            For(self.thread, Kind.THREAD, shared),
            self.joined(reduction, acc, parts, t.group // few, fewer, few),
            self.joined(reduction, acc, fewer, few, total, 1),
        ]

    def joined(
        self, reduction: Reduction, acc: Buffer, parts: Buffer, count: int, into: Buffer, rows: int
    ) -> Stmt:
        """Combine `count` rows of partial results that are `rows` apart into one, with a thread for each remaining
        vector."""
        t, wide = self.t, self.t.results * self.t.lanes
        lanes = [(self.lane, Kind.VECTOR)]
        own = te.Load(acc, (self.lane,))
        other = te.Var("other", count)
        at = self.thread * t.lanes + self.lane
        part = te.Load(parts, (other * (rows * wide) + at,))
        combine = te.call(te.REDUCE_COMBINERS[reduction.kind], own, part)
        body = block(
            nest(lanes, Store(acc, self.lane, te.reduce_identity(reduction.kind, acc.dtype))),
            nest([(other, Kind.SERIAL), *lanes], Store(acc, self.lane, combine)),
            nest(lanes, Store(into, at, own)),
        )
        return For(self.thread, Kind.THREAD, under(te.call("lt", self.thread, rows * t.results), body))

    def written(self) -> Stmt:
        formula, t = self.formula, self.t
        columns = columns_of(formula)
        count = extent_of(columns)
        turns = -(-count // t.group)
        turn = te.Var("turn", turns)
        number = turn * t.group + self.part
        inside = te.call("lt", number, count) if turns * t.group > count else None
        at = {**self.position, **positions(number, columns)}
        value = with_results(te.substitute(formula.value, at), self.results)
        store = Store(formula.output, te.substitute(formula.store, at), value)
        body = nest([(turn, Kind.SERIAL)], under(inside, nest([(self.lane, Kind.VECTOR)], store)))
        return For(self.thread, Kind.THREAD, body)
