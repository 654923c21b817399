"""Fourier transforms, as matmuls with matrices of sines and cosines built at compile time."""

from __future__ import annotations

import numpy as np

from tilewright.frontend.builder import Unsupported
from tilewright.frontend.onnx.context import Context, axis_of
from tilewright.frontend.onnx.registry import converter
from tilewright.graph.ir import Node

MAX_LENGTH = 4096  # of a transform: the matrix has its square


def _parts(ctx: Context, x: Node) -> tuple[Node, Node | None]:
    """The real and imaginary parts along the last axis; a real signal has no imaginary part."""
    last = x.type.rank - 1
    if x.shape[last] == 1:
        return ctx.squeeze(x, last), None
    if x.shape[last] != 2:
        raise Unsupported(f"a last axis of {x.shape[last]}: 1 for real, 2 for complex numbers")
    return ctx.index_axis(x, last, 0), ctx.index_axis(x, last, 1)


def _fitted(ctx: Context, x: Node, axis: int, length: int) -> Node:
    """Truncate or zero-pad to `length` along `axis`."""
    if x.shape[axis] >= length:
        return ctx.slice_axis(x, axis, 0, length)
    high = [0] * x.type.rank
    high[axis] = length - x.shape[axis]
    return ctx.pad(x, [0] * x.type.rank, high, 0)


def _along(ctx: Context, x: Node, axis: int, matrix: np.ndarray) -> Node:
    """The matrix [results, elements] times x along `axis`."""
    last = x.type.rank - 1
    table = ctx.constant(np.ascontiguousarray(matrix.astype(x.dtype.numpy)))
    return ctx.move_axis(ctx.emit("linear", ctx.move_axis(x, axis, last), table), last, axis)


def transformed(
    ctx: Context, x: Node, axis: int, length: int, *, inverse: bool = False, onesided: bool = False
) -> Node:
    """The transform of x [..., 1 or 2] along `axis`, as [..., 2]; from one half back to a real signal, [..., 1]."""
    if not 1 <= length <= MAX_LENGTH:
        raise Unsupported(f"a transform of length {length}: 1 to {MAX_LENGTH}")
    ctx.reserve(4 * length * length, f"the matrices of a transform of length {length}")
    dtype = x.dtype
    real, imaginary = _parts(ctx, ctx.widen(x))
    if inverse and onesided:
        half = length // 2 + 1
        real = _fitted(ctx, real, axis, half)
        k, n = np.arange(half), np.arange(length)
        turn = 2 * np.pi * np.outer(n, k) / length
        # All frequencies except the first, and the middle one of an even length, count twice.
        twice = np.where((k == 0) | ((length % 2 == 0) & (k == length // 2)), 1, 2) / length
        result = _along(ctx, real, axis, np.cos(turn) * twice)
        if imaginary is not None:
            imaginary = _fitted(ctx, imaginary, axis, half)
            result = ctx.sub(result, _along(ctx, imaginary, axis, np.sin(turn) * twice))
        return ctx.cast(ctx.unsqueeze(result, result.type.rank), dtype)
    real = _fitted(ctx, real, axis, length)
    turn = 2 * np.pi * (np.outer(np.arange(length), np.arange(length)) % length) / length
    if onesided:
        turn = turn[: length // 2 + 1]
    scale = 1 / length if inverse else 1.0
    cosine, sine = np.cos(turn) * scale, (np.sin(turn) if inverse else -np.sin(turn)) * scale
    a, b = _along(ctx, real, axis, cosine), _along(ctx, real, axis, sine)
    if imaginary is not None:
        imaginary = _fitted(ctx, imaginary, axis, length)
        a = ctx.sub(a, _along(ctx, imaginary, axis, sine))
        b = ctx.add(b, _along(ctx, imaginary, axis, cosine))
    return ctx.cast(ctx.stack([a, b], a.type.rank), dtype)


def _dft(ctx: Context, x: Node, length: Node | None, axis: int, inverse: int, onesided: int) -> Node:
    axis = axis_of(axis, x.type.rank)
    if axis == x.type.rank - 1:
        raise Unsupported("a transform along the axis of real and imaginary parts")
    if length is not None:
        size = ctx.static_int(length)
    else:
        size = 2 * (x.shape[axis] - 1) if inverse and onesided else x.shape[axis]
    return transformed(ctx, x, axis, size, inverse=bool(inverse), onesided=bool(onesided))


@converter("DFT", since=20)
def dft(
    ctx: Context,
    x: Node,
    length: Node | None = None,
    axis: Node | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Node:
    return _dft(ctx, x, length, -2 if axis is None else ctx.static_int(axis), inverse, onesided)


@converter("DFT", since=17)
def dft17(
    ctx: Context, x: Node, length: Node | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Node:
    return _dft(ctx, x, length, axis, inverse, onesided)


@converter("STFT")
def stft(
    ctx: Context,
    signal: Node,
    frame_step: Node,
    window: Node | None = None,
    frame_length: Node | None = None,
    *,
    onesided: int = 1,
) -> Node:
    """The transforms of overlapping frames: x [batch, time, 1 or 2] -> [batch, frames, frequencies, 2].

    PyTorch's exporter writes a real signal without its last axis, [batch, time], and ONNX Runtime takes it so.
    """
    if signal.type.rank == 2:
        signal = ctx.unsqueeze(signal, 2)
    if signal.type.rank != 3:
        raise Unsupported(f"a signal {signal.type!r}: [batch, time], or [batch, time, 1 or 2]")
    step = ctx.static_int(frame_step)
    if frame_length is not None:
        length = ctx.static_int(frame_length)
    elif window is not None:
        length = window.shape[0]
    else:
        length = signal.shape[1]
    frames = 1 + (signal.shape[1] - length) // step if step > 0 else 0
    if frames < 1 or length < 1:
        raise Unsupported(f"frames of {length} every {step} in a signal of {signal.shape[1]}")
    ctx.reserve(frames * length, f"{frames} frames of {length}")
    positions = np.arange(frames)[:, None] * step + np.arange(length)[None]
    framed = ctx.take(signal, positions, 1)  # [batch, frames, length, 1 or 2]
    if window is not None and (window.type.rank != 1 or window.shape[0] > length):
        raise Unsupported(f"a window {window.type!r} for frames of {length}")
    if window is not None:
        low = (length - window.shape[0]) // 2
        weight = ctx.pad(window, (low,), (length - window.shape[0] - low,), 0)
        framed = ctx.mul(framed, ctx.reshape(weight, (length, 1)))
    return transformed(ctx, framed, 2, length, onesided=bool(onesided))
