"""Match 3x3 convolutions with stride 1 in formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.dtypes import DType
from tilewright.loops.formula import Formula
from tilewright.runtime.winograd import TAPS
from tilewright.space.templates.cpu.gemm import BlockedGemm, Gemm, gemm_of
from tilewright.te.index import coefficient, linear, simplify


@dataclass(frozen=True)
class WindowConvolution:
    """A 3x3 convolution. `data` is the padded image at (`row`, `column`), counted from the first position of any
    window; `inside` says where it is not zero (None: everywhere)."""

    gemm: Gemm
    batch: tuple[te.Var, ...]
    y: te.Var
    x: te.Var
    channel: te.Var
    row: te.Var
    column: te.Var
    data: te.Expr
    inside: te.Expr | None

    @property
    def output(self) -> te.Var:
        """The axis of the output's channels."""
        return self.gemm.vector


def convolution_of(formula: Formula | None) -> WindowConvolution | None:
    gemm = gemm_of(formula)
    if (
        gemm is None
        or isinstance(gemm, BlockedGemm)
        or gemm.shared
        or not gemm.constant_weight
        or len(gemm.rows) < 2
    ):
        return None
    load = gemm.weight_load
    if gemm.weight is not load or gemm.reduction.result.dtype is not DType.F32:
        return None
    if sum(x.source == load.source for e in gemm.formula.expressions() for x in te.loads(e)) > 1:
        return None
    axes = _window_and_channel(gemm.reduction.axes)
    if axes is None:
        return None
    ky, kx, channel, values = axes
    outputs, step = gemm.vector.extent, channel.extent * gemm.vector.extent
    walked = linear(te.substitute(load.indices[0], values))
    if walked.constant or walked.terms != {ky: TAPS * step, kx: step, channel: outputs, gemm.vector: 1}:
        return None
    data = simplify(te.substitute(gemm.data, values))
    *batch, y, x = gemm.rows
    along_y = _along(data, y, ky)
    along_x = _along(along_y[1], x, kx) if along_y is not None else None
    if along_y is None or along_x is None:
        return None
    row, (column, data) = along_y[0], along_x
    if any(coefficient(load.indices[0], channel) != 1 for load in te.loads(data)):
        return None
    inside = None
    if isinstance(data, te.Select) and data.other == te.const(0, data.dtype) and _is_box(data.cond):
        if channel not in te.variables(data.cond):
            inside, data = data.cond, data.then
    return WindowConvolution(gemm, tuple(batch), y, x, channel, row, column, data, inside)


def _window_and_channel(
    axes: Sequence[te.Var],
) -> tuple[te.Var, te.Var, te.Var, dict[te.Var, te.Expr]] | None:
    """(ky, kx, channel, values of the reduction's axes in them). Without padding, kx and the channel are one axis."""
    if len(axes) == 3 and axes[0].extent == axes[1].extent == TAPS:
        return axes[0], axes[1], axes[2], {}
    if len(axes) != 2 or axes[0].extent != TAPS or axes[1].extent % TAPS or axes[1].extent == TAPS:
        return None
    both = axes[1]
    kx, channel = te.Var(f"{both.name}_x", TAPS), te.Var(f"{both.name}_c", both.extent // TAPS)
    return axes[0], kx, channel, {both: kx * channel.extent + channel}


def _along(data: te.Expr, axis: te.Var, tap: te.Var) -> tuple[te.Var, te.Expr] | None:
    """(position, the data as a function of it) if the data depends on axis and tap only through their sum."""
    position = te.Var(f"{axis.name}_at", axis.extent + tap.extent - 1)
    moved = simplify(te.substitute(data, {axis: position, tap: te.as_index(0)}))
    back = simplify(te.substitute(moved, {position: axis + tap}))
    return (position, moved) if position in te.variables(moved) and back == data else None


def _is_box(condition: te.Expr) -> bool:
    """Whether the condition bounds each index separately: then it also holds between any two points where it holds."""
    if isinstance(condition, te.Call) and condition.op == "and":
        return all(map(_is_box, condition.args))
    if not isinstance(condition, te.Call) or condition.op not in ("lt", "le"):
        return False
    sides = [linear(side) for side in condition.args if side.dtype is DType.I64]
    return len(sides) == 2 and all(isinstance(atom, te.Var) for side in sides for atom in side.terms)
