"""The position at which code of a tile program is emitted: its stack, and loops over the locations of tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from llvmlite import ir

from tilewright.codegen.llvm.tiles.values import Buffer, Element, Location, bytes_of, memory_type
from tilewright.codegen.llvm.types import I64, PTR
from tilewright.dtypes import DType
from tilewright.errors import KernelError
from tilewright.hw import CpuMachine
from tilewright.hw.memory import STACK_BYTES
from tilewright.support.source import SourceLocation

ALIGNED = 64
_IN_REGISTERS = 8  # vectors of a tile with one axis: its code has no loop


class TileLoops:
    def __init__(self, module: ir.Module, machine: CpuMachine) -> None:
        self.module, self.machine = module, machine
        self.builder: ir.IRBuilder
        self.entry: ir.Block
        self.lanes = machine.lanes(DType.F32)
        self.stack = 0
        self.where: SourceLocation | None = None  # of the operation whose code is written

    def alloca(self, kind: ir.Type, count: int = 1, size: int = 0) -> ir.Value:
        self.stack += size
        if self.stack > STACK_BYTES:
            raise KernelError(
                f"one program instance needs {self.stack} bytes of stack, more than {STACK_BYTES}; this operation"
                f" needs {size} of them",
                remedy="use smaller blocks, and loop over them",
                where=self.where,
            )
        builder = ir.IRBuilder(self.entry)
        made = builder.alloca(ir.ArrayType(kind, count) if count > 1 else kind)
        made.align, made.type = ALIGNED, PTR  # llvmlite would have it point to one type alone
        return made

    def buffer(self, element: Element, shape: tuple[int, ...]) -> Buffer:
        count = int(np.prod(shape))
        size = -(-count * bytes_of(element) // ALIGNED) * ALIGNED
        return Buffer(self.alloca(memory_type(element), count, size), element, shape)

    @contextmanager
    def loop(self, extent: ir.Value | int, step: int = 1) -> Iterator[ir.Value]:
        """A loop from 0 up to `extent`; a constant `extent` is at least 1."""
        builder = self.builder
        if isinstance(extent, int) and extent <= step:
            yield I64(0)
            return
        last = I64(extent) if isinstance(extent, int) else extent
        head, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        before = builder.block
        if isinstance(extent, int):
            builder.branch(head)
        else:
            builder.cbranch(builder.icmp_signed("<", I64(0), last), head, after)
        builder.position_at_end(head)
        counter = builder.phi(I64)
        counter.add_incoming(I64(0), before)
        yield counter
        following = builder.add(counter, I64(step), flags=("nsw", "nuw"))
        counter.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, last), head, after)
        builder.position_at_end(after)

    @contextmanager
    def over(self, shape: Sequence[int], unroll: int = 1) -> Iterator[list[Location]]:
        """Loop over all locations of a tile: vectors along the last axis, several locations at a time."""
        if not shape:
            yield [Location(())]
            return
        lanes, unroll = self.vectors(shape, unroll)
        with self._nest(list(shape[:-1])) as outer, self.loop(shape[-1], lanes * unroll) as inner:
            starts = [self.plus(inner, n * lanes) for n in range(unroll)]
            axis = len(shape) - 1 if lanes > 1 else -1
            yield [Location((*outer, start), axis, lanes) for start in starts]

    def vectors(self, shape: Sequence[int], unroll: int) -> tuple[int, int]:
        """The lanes of a vector along the last axis, and the number of vectors per iteration."""
        lanes = min(shape[-1], self.lanes)
        unroll = self.whole(shape) or unroll
        while unroll > 1 and shape[-1] % (lanes * unroll):
            unroll //= 2
        return lanes, unroll

    def whole(self, shape: Sequence[int]) -> int:
        """The number of vectors of a tile that is small enough to stay in registers; 0 for larger ones."""
        lanes = min(shape[-1], self.lanes)
        count = int(np.prod(shape)) // lanes
        return count if len(shape) == 1 and lanes > 1 and count <= _IN_REGISTERS else 0

    @contextmanager
    def _nest(self, shape: list[int]) -> Iterator[list[ir.Value]]:
        if not shape:
            yield []
            return
        with self.loop(shape[0]) as first, self._nest(shape[1:]) as others:
            yield [first, *others]

    def plus(self, a: ir.Value, number: int) -> ir.Value:
        if number == 0:
            return a
        if isinstance(a, ir.Constant):
            return ir.Constant(a.type, a.constant + number)
        return self.builder.add(a, ir.Constant(a.type, number), flags=("nsw",))

    def times(self, a: ir.Value, number: int) -> ir.Value:
        if isinstance(a, ir.Constant):
            return ir.Constant(a.type, a.constant * number)
        return a if number == 1 else self.builder.mul(a, ir.Constant(a.type, number), flags=("nsw",))

    def intrinsic(self, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(result, [arg.type for arg in args]), name
        )
        return self.builder.call(function, args)
