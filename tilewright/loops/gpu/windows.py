"""Sums over windows that move along an axis, with contiguous channels: depthwise convolutions.

    for blocks, threads: n, y, a few neighbours x0 ... along the axis, a few channels
      for rows of the window:
        w[:, :] = the row's weights                          (in lanes)
        for t along the positions that the neighbours read:
          data[:] = x[y + ky, x0 + t]                        (in lanes)
          for neighbours that read it: acc[u, :] += data * w[t - u * stride]
      for neighbours: out[x0 + u, :] = value

Neighbours share loads and index arithmetic. With one result per thread, these would be repeated for each window
position.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright import te
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.formula import Formula, Reduction
from tilewright.loops.gpu.thread_index import blocks_for, by_stride, guarded, positions, under, vector_lanes
from tilewright.loops.ir import Buffer, For, Kind, Program, Scope, Stmt, Store, block, nest
from tilewright.loops.tiling import columns_of, extent_of, updated, with_results, with_values
from tilewright.loops.window_pattern import stride_of
from tilewright.te.index import coefficient

_THREADS = 128
_BUSY = 256  # minimum threads per multiprocessor
_NEIGHBOURS = (4, 2)
_MAX_TAPS = 7  # maximum along the axis


@dataclass(frozen=True)
class _Window:
    reduction: Reduction
    data: te.Expr  # the factor that depends on the axis
    weight: te.Expr
    axis: te.Var  # of the output, along which neighbours share loads
    tap: te.Var  # of the window, along that axis
    stride: int
    lanes: int
    neighbours: int


def windows_program(formula: Formula, machine: GpuMachine) -> Program | None:
    """The program; None if the formula is not such a sum or too small."""
    rows = by_stride(formula, formula.rows)
    window = _window(formula, rows, machine)
    return None if window is None else _program(formula, rows, window)


def _window(formula: Formula, rows: list[te.Var], machine: GpuMachine) -> _Window | None:
    if len(formula.reductions) != 1 or len(rows) < 2 or columns_of(formula):
        return None
    (reduction,) = formula.reductions
    body = reduction.body
    if reduction.kind != "sum" or not (isinstance(body, te.Call) and body.op == "mul"):
        return None
    axis, channels, tap = rows[-2], rows[-1], reduction.axes[-1]
    moving = [axis in te.variables(factor) for factor in body.args]
    if sorted(moving) != [False, True] or tap.extent > _MAX_TAPS or coefficient(formula.store, channels) != 1:
        return None
    data, weight = body.args if moving[0] else body.args[::-1]
    stride = stride_of(data, axis, tap)
    accesses = [
        (load.indices[0], load.dtype.bytes)
        for e in (body, formula.value)
        for load in te.loads(e)
        if load.indices
    ]
    if stride is None or any(
        channels in te.variables(offset) and coefficient(offset, channels) != 1 for offset, _ in accesses
    ):
        return None
    lanes = vector_lanes([*accesses, (formula.store, formula.output.dtype.bytes)], channels)
    vectors = extent_of(rows) // lanes
    for neighbours in _NEIGHBOURS if lanes > 1 else ():
        if axis.extent % neighbours == 0 and vectors // neighbours >= _BUSY * machine.sms:
            return _Window(reduction, data, weight, axis, tap, stride, lanes, neighbours)
    return None


def _program(formula: Formula, rows: list[te.Var], window: _Window) -> Program:
    lanes, many, stride = window.lanes, window.neighbours, window.stride
    axis, tap, reduction = window.axis, window.tap, window.reduction
    lane = te.Var("v", lanes)
    along = te.Var(axis.name, axis.extent // many)
    channels = te.Var(rows[-1].name, rows[-1].extent // lanes)
    units = [*rows[:-2], along, channels]
    count = extent_of(units)
    at, thread = blocks_for(count, _THREADS), te.Var("t", _THREADS)
    number = at * _THREADS + thread
    coords = positions(number, units)
    position: dict[te.Var, te.Expr] = {unit: coords[unit] for unit in rows[:-2]}
    position[rows[-1]] = coords[channels] * lanes + lane
    first = coords[along] * many

    sums = Buffer("sums", reduction.result.dtype, many * lanes, Scope.REGISTER)
    weights = Buffer("weights", window.weight.dtype, tap.extent * lanes, Scope.REGISTER)
    datum = Buffer("datum", window.data.dtype, lanes, Scope.REGISTER)

    def vector(buffer: Buffer, coord: int, value: te.Expr) -> Stmt:
        return nest([(lane, Kind.VECTOR)], Store(buffer, lane + coord * lanes, value))

    def kept(buffer: Buffer, coord: int) -> te.Expr:
        return te.Load(buffer, (lane + coord * lanes,))

    def weight(coord: int) -> te.Expr:
        return te.substitute(window.weight, {**position, tap: te.as_index(coord)})

    row: list[Stmt] = [vector(weights, k, weight(k)) for k in range(tap.extent)]
    for coord in range((many - 1) * stride + tap.extent):
        where = {**position, axis: first, tap: te.as_index(coord)}
        readers = [u for u in range(many) if 0 <= coord - u * stride < tap.extent]
        if not readers:
            continue
        row.append(vector(datum, 0, te.substitute(window.data, where)))
        for u in readers:
            product = te.call("mul", kept(datum, 0), kept(weights, coord - u * stride))
            row.append(vector(sums, u, updated(reduction, kept(sums, u), product)))

    identity = te.reduce_identity(reduction.kind, sums.dtype)
    stmts: list[Stmt] = [vector(sums, u, identity) for u in range(many)]
    stmts.append(nest([(other, Kind.UNROLL) for other in reduction.axes[:-1]], block(*row)))
    for u in range(many):
        here = {**position, axis: first + u}
        value = with_results(te.substitute(formula.value, here), {reduction.result: kept(sums, u)})
        store = Store(formula.output, te.substitute(formula.store, here), value)
        stmts.append(nest([(lane, Kind.VECTOR)], store))

    body = under(guarded(number, count, at.extent * _THREADS), block(*stmts))
    nested = nest([(at, Kind.PARALLEL)], For(thread, Kind.THREAD, body))
    words = f"windows: sum of {reduction.length}, {_THREADS} threads of {many} x {lanes}"
    return Program(formula.name, (*formula.inputs, formula.output), with_values(nested, {}), words)
