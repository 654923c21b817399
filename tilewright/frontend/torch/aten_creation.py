"""Operators that create tensors, and those that mask by position."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewright.dtypes import DType
from tilewright.frontend.builder import Ints, Number, Operand
from tilewright.frontend.torch.context import Context
from tilewright.frontend.torch.registry import converter, refuse
from tilewright.graph.ir import Node


@converter(
    "aten.full.default", "aten.full_like.default", "aten.new_full.default", "aten.scalar_tensor.default"
)
def full(ctx: Context, *arguments: Any, fill_value: Operand | None = None, **keywords: Any) -> Node:
    """The value is the last positional argument of each of these."""
    value = arguments[-1] if fill_value is None else fill_value
    return (
        ctx.broadcast_to(ctx.operand(value, ctx.dtype), ctx.shape)
        if isinstance(value, Node)
        else _filled(ctx, value)
    )


def _filled(ctx: Context, value: Number) -> Node:
    return ctx.full(value, ctx.dtype, ctx.shape)


@converter(
    "aten.zeros.default",
    "aten.zeros_like.default",
    "aten.new_zeros.default",
    # The contents of an empty tensor are unspecified; zeros are deterministic.
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.new_empty.default",
    "aten.empty_strided.default",
    "aten.new_empty_strided.default",
    "aten.empty_permuted.default",
    "prims.empty_strided.default",
)
def zeros(ctx: Context, *arguments: Any, **keywords: Any) -> Node:
    return _filled(ctx, 0)


@converter("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")
def ones(ctx: Context, *arguments: Any, **keywords: Any) -> Node:
    return _filled(ctx, 1)


@converter("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def arange(ctx: Context, *limits: Number, **keywords: Any) -> Node:
    start, step = (
        (limits[0], 1) if len(limits) == 2 else (0, 1) if len(limits) == 1 else (limits[0], limits[2])
    )
    (size,) = ctx.shape
    if not all(isinstance(number, int) for number in (start, step)):
        # PyTorch's own rounding of start + i * step
        return ctx.constant(torch.arange(*limits, dtype=ctx.value.dtype, device="cpu"))
    wide = DType.I64 if ctx.dtype.is_integer else ctx.dtype
    exact = ctx.iota((size,), 0, wide)
    if step != 1:
        exact = ctx.emit("mul", exact, ctx.full(step, wide))
    if start != 0:
        exact = ctx.emit("add", exact, ctx.full(start, wide))
    return ctx.cast(exact, ctx.dtype)


@converter("prims.iota.default")
def iota(ctx: Context, length: int, start: int, step: int, **keywords: Any) -> Node:
    return arange(ctx, start, start + length * step, step)


def _evaluated(function: Callable[..., torch.Tensor]) -> Callable[..., Node]:
    """An operator with only numbers as operands: PyTorch's result is a constant."""

    @functools.wraps(function)
    def convert(ctx: Context, *arguments: Any, **keywords: Any) -> Node:
        return ctx.constant(function(*arguments, **{**keywords, "dtype": ctx.value.dtype, "device": "cpu"}))

    return convert


converter("aten.linspace.default")(_evaluated(torch.linspace))
converter("aten.logspace.default")(_evaluated(torch.logspace))
converter("aten.tril_indices.default")(_evaluated(torch.tril_indices))
converter("aten.triu_indices.default")(_evaluated(torch.triu_indices))
converter("aten.hann_window.default", "aten.hann_window.periodic")(_evaluated(torch.hann_window))
converter("aten.hamming_window.default", "aten.hamming_window.periodic")(_evaluated(torch.hamming_window))


@converter("aten.eye.default", "aten.eye.m")
def eye(ctx: Context, *sizes: int, **keywords: Any) -> Node:
    on_diagonal = ctx.emit("eq", ctx.iota(ctx.shape, 0), ctx.iota(ctx.shape, 1))
    return ctx.cast(on_diagonal, ctx.dtype)


def _below(ctx: Context, shape: Ints, offset: int) -> Node:
    """Whether each element of a matrix of this shape lies on or below the diagonal with this offset."""
    matrix = tuple(shape[-2:])
    rows = ctx.iota(matrix, 0)
    return ctx.emit("le", ctx.iota(matrix, 1), rows if offset == 0 else ctx.add(rows, offset))


@converter("aten.tril.default")
def tril(ctx: Context, x: Node, diagonal: int = 0) -> Node:
    return ctx.select(_below(ctx, x.shape, diagonal), x, 0, x.dtype)


@converter("aten.triu.default")
def triu(ctx: Context, x: Node, diagonal: int = 0) -> Node:
    return ctx.select(_below(ctx, x.shape, diagonal - 1), 0, x, x.dtype)


refuse(
    "a symbolic size: only static shapes are supported",
    "aten.sym_size.int",
    "aten.sym_numel.default",
    "aten.sym_stride.int",
    "aten.sym_storage_offset.default",
    "aten.sym_constrain_range_for_size.default",
)
refuse(
    "random numbers",
    "aten.rand.default",
    "aten.rand.generator",
    "aten.rand_like.default",
    "aten.randn.default",
    "aten.randn.generator",
    "aten.randn_like.default",
    "aten.randint.default",
    "aten.randint.low",
    "aten.randint_like.default",
    "aten.randint_like.low_dtype",
    "aten.randperm.default",
    "aten.bernoulli.default",
    "aten.bernoulli.p",
    "aten.multinomial.default",
    "aten.normal.Tensor_Tensor",
    "aten.normal.Tensor_float",
    "aten.normal.float_Tensor",
    "aten.normal_functional.default",
    "aten.uniform.default",
    "aten.poisson.default",
)
