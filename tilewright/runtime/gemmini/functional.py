"""Simulates the results of a Gemmini program bit for bit, instruction by instruction, without timing.

The arithmetic, which the RTL shares: products of 8-bit integers, sums in 32 bits that wrap around; a scale takes an
integer to a 32-bit float, multiplies it there, rounds to the nearest integer (ties to even) and saturates; ReLU before
scaling; pooling of scaled values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.errors import InstructionError
from tilewright.runtime.gemmini.isa import (
    ACCUMULATE,
    ACCUMULATOR,
    COMPUTES,
    FULL,
    MVINS,
    NONE,
    ROW_MASK,
    Array,
    Convolution,
    Instruction,
    make,
    scale_of,
)
from tilewright.runtime.gemmini.verify import verify

_I8 = (-128, 127)
_I32 = (-(2**31), 2**31 - 1)


def scaled(values: np.ndarray, scale: np.float32, bounds: tuple[int, int] = _I8) -> np.ndarray:
    """Integers times a scale, rounded and saturated."""
    with np.errstate(over="ignore"):
        product = values.astype(np.float32) * scale
    return np.clip(np.rint(product.astype(np.float64)), *bounds).astype(np.int64)


class Functional:
    """A machine with its memories: `dram` is the caller's array of bytes, at address 0, and is written in place."""

    def __init__(self, machine: Array, dram: np.ndarray) -> None:
        if dram.dtype != np.uint8 or dram.ndim != 1:
            raise InstructionError(f"DRAM is an array of bytes, got {dram.dtype} of shape {dram.shape}")
        self.machine = machine
        self.dram = dram
        self.scratchpad = np.zeros((machine.scratchpad_rows, machine.dim), np.int8)
        self.accumulator = np.zeros((machine.accumulator_rows, machine.dim), np.int32)
        self._reset()

    def _reset(self) -> None:
        self._weights = np.zeros((self.machine.dim, self.machine.dim), np.float64)
        self._next_weights = self._weights
        self._a_stride = 1
        self._loads: dict[int, Instruction] = {}
        self._store = make("config_st")
        self._target = 0
        self._loop: dict[str, Instruction] = {}

    def run(self, program: Sequence[Instruction]) -> None:
        """InstructionError before anything has run where the machine cannot execute the program."""
        verify(program, self.machine)
        self.execute(program)

    def execute(self, program: Sequence[Instruction]) -> None:
        """The same of a program that is verified."""
        for at, instruction in enumerate(program):
            try:
                self._execute(instruction)
            except InstructionError as error:
                raise InstructionError(f"instruction {at} ({instruction}): {error.message}") from None

    def _execute(self, instruction: Instruction) -> None:
        name = instruction.name
        if name in MVINS:
            self._mvin(instruction, self._loads[MVINS.index(name)])
        elif name == "preload":
            if instruction["b"] != NONE:
                rows, cols, start = instruction["rows"], instruction["cols"], instruction["b"]
                weights = np.zeros((self.machine.dim, self.machine.dim), np.float64)
                weights[:rows, :cols] = self.scratchpad[start : start + rows, :cols]
                self._next_weights = weights
            self._target = instruction["c"]
        elif name in COMPUTES:
            if name == "compute_preloaded":
                self._weights = self._next_weights
            self._compute(instruction)
        elif name == "mvout":
            self._mvout(instruction)
        elif name == "config_ex":
            self._a_stride = instruction["a_stride"]
        elif name == "config_ld":
            self._loads[instruction["slot"]] = instruction
        elif name == "config_st":
            self._store = instruction
        elif name == "flush":
            self._reset()
        elif name == "loop_ws":
            self._loop_ws(instruction)
        elif name == "loop_conv_ws":
            self._loop_conv_ws(Convolution.of(instruction, self._loop))
        elif name.startswith("loop_"):
            self._loop[name] = instruction

    # -- DRAM -----------------------------------------------------------------------------------------------------

    def _bytes(self, start: int, rows: int, width: int, stride: int) -> np.ndarray:
        """The indices of a block of bytes in DRAM."""
        last = start + (rows - 1) * stride + width
        if last > self.dram.size:
            raise InstructionError(f"it reaches byte {last - 1} of a DRAM of {self.dram.size} bytes")
        return start + stride * np.arange(rows)[:, None] + np.arange(width)

    def _read(self, start: int, rows: int, cols: int, stride: int, dtype: type) -> np.ndarray:
        if start == 0:
            return np.zeros((rows, cols), np.int64)
        size = np.dtype(dtype).itemsize
        found = self.dram[self._bytes(start, rows, cols * size, stride)]
        return np.ascontiguousarray(found).view(dtype).astype(np.int64)

    def _write(self, start: int, stride: int, values: np.ndarray, dtype: type) -> None:
        found = np.ascontiguousarray(values.astype(dtype)).view(np.uint8)
        rows, width = found.shape
        self.dram[self._bytes(start, rows, width, stride)] = found

    # -- instructions ---------------------------------------------------------------------------------------------

    def _mvin(self, instruction: Instruction, config: Instruction) -> None:
        rows, cols, local = instruction["rows"], instruction["cols"], instruction["local"]
        accumulator = bool(local & ACCUMULATOR)
        wide = accumulator and not config["shrunk"]
        found = self._read(instruction["dram"], rows, cols, config["stride"], np.int32 if wide else np.int8)
        if not wide:
            found = scaled(found, scale_of(config["scale"]), _I32 if accumulator else _I8)
        dim, start = self.machine.dim, local & ROW_MASK
        for block in range(0, cols, dim):
            part = np.zeros((rows, dim), np.int64)
            part[:, : min(dim, cols - block)] = found[:, block : block + dim]
            to = slice(start, start + rows)
            if not accumulator:
                self.scratchpad[to] = part
            elif local & ACCUMULATE:
                self.accumulator[to] += part.astype(np.int32)
            else:
                self.accumulator[to] = part
            start += config["block_stride"]

    def _compute(self, instruction: Instruction) -> None:
        rows, cols, start = instruction["rows"], instruction["cols"], instruction["a"]
        a = self.scratchpad[start : start + (rows - 1) * self._a_stride + 1 : self._a_stride, :cols]
        result = _wrapped(a.astype(np.float64) @ self._weights[:cols])
        row = self._target & ROW_MASK
        if self._target & ACCUMULATE:
            self.accumulator[row : row + rows] += result
        else:
            self.accumulator[row : row + rows] = result

    def _mvout(self, instruction: Instruction) -> None:
        config, local = self._store, instruction["local"]
        start, cols, rows = local & ROW_MASK, instruction["cols"], instruction["rows"]
        pool = config["pool_size"]
        if pool:
            rows = config["rows_in"] * config["cols_in"]
        if not local & ACCUMULATOR:
            values = self.scratchpad[start : start + rows, :cols].astype(np.int64)
        else:
            values = self.accumulator[start : start + rows, :cols].astype(np.int64)
        if config["relu"]:
            values = np.maximum(values, 0)
        if local & ACCUMULATOR and local & FULL:
            self._write(instruction["dram"], config["stride"], values, np.int32)
            return
        if local & ACCUMULATOR:
            values = scaled(values, scale_of(config["scale"]))
        if not pool:
            self._write(instruction["dram"], config["stride"], values, np.int8)
            return
        pooled = _max_pool(values.reshape(config["rows_in"], config["cols_in"], cols), config)
        for row, line in enumerate(pooled):
            to = instruction["dram"] + row * config["pool_pitch"] * config["stride"]
            self._write(to, config["stride"], line, np.int8)

    def _loop_ws(self, instruction: Instruction) -> None:
        """Compute the instructions of `unroll.loop_ws` at once. Local memories are not changed."""
        sizes, starts, strides = loop_operands(self._loop, self.machine.dim)
        (m, n, k) = sizes
        a = self._read(starts["a"], m, k, strides["a"], np.int8).astype(np.float64)
        b = self._read(starts["b"], k, n, strides["b"], np.int8).astype(np.float64)
        result = _wrapped(a @ b)
        if starts["d"]:
            bias = self._read(
                starts["d"], m, n, strides["d"], np.int8 if instruction["low_bias"] else np.int32
            )
            result += bias.astype(np.int32)
        if instruction["relu"]:
            result = np.maximum(result, 0)
        if instruction["full"]:
            self._write(starts["c"], strides["c"], result, np.int32)
        else:
            self._write(starts["c"], strides["c"], scaled(result, scale_of(instruction["scale"])), np.int8)
        self._after_loop()

    def _after_loop(self) -> None:
        loop = self._loop
        self._reset()
        self._loop = loop

    def _loop_conv_ws(self, conv: Convolution) -> None:
        """The same of `unroll.loop_conv_ws`."""
        data = np.zeros((conv.height, conv.width, conv.in_channels), np.float64)
        rows = min(conv.in_rows, conv.height - conv.top)
        cols = min(conv.in_cols, conv.width - conv.left)
        for row in range(rows if cols > 0 else 0):
            start = conv.data + row * conv.data_row
            found = self._read(start, cols, conv.in_channels, conv.data_pitch, np.int8)
            data[conv.top + row, conv.left : conv.left + cols] = found
        taps = conv.kernel_rows * conv.kernel_cols
        depth = taps * conv.in_channels
        weights = self._read(conv.weights, depth, conv.out_channels, conv.weights_pitch, np.int8)
        weights = weights.astype(np.float64).reshape(taps, conv.in_channels, conv.out_channels)
        sums = np.zeros((conv.out_rows, conv.out_cols, conv.out_channels), np.float64)
        if conv.bias:
            sums += self._read(conv.bias, 1, conv.out_channels, 0, np.int32)
        below, right = (conv.out_rows - 1) * conv.stride + 1, (conv.out_cols - 1) * conv.stride + 1
        for tap in range(taps):
            kr, kc = divmod(tap, conv.kernel_cols)
            sums += data[kr : kr + below : conv.stride, kc : kc + right : conv.stride] @ weights[tap]
        result = _wrapped(sums)
        if conv.relu:
            result = np.maximum(result, 0)
        if not conv.full:
            result = scaled(result, scale_of(conv.scale))
        for row, line in enumerate(result):
            start = conv.results + row * conv.results_row
            self._write(start, conv.results_pitch, line, np.int32 if conv.full else np.int8)
        self._after_loop()


def loop_operands(
    loop: dict[str, Instruction], dim: int
) -> tuple[tuple[int, int, int], dict[str, int], dict[str, int]]:
    """The extents of a matmul (m, n, k), and each operand's address and stride, that a loop_ws was given."""
    bounds = loop["loop_ws_bounds"]
    m, n, k = (bounds[axis] * dim - bounds[f"pad_{axis}"] for axis in "ijk")
    starts = {name: loop[f"loop_ws_addresses_{'ab' if name in 'ab' else 'dc'}"][name] for name in "abdc"}
    strides = {name: loop[f"loop_ws_strides_{'ab' if name in 'ab' else 'dc'}"][name] for name in "abdc"}
    return (m, n, k), starts, strides


def _wrapped(product: np.ndarray) -> np.ndarray:
    """Exact sums (far below 2^53) as 32-bit integers."""
    return product.astype(np.int64).astype(np.int32)


def _max_pool(values: np.ndarray, config: Instruction) -> np.ndarray:
    """[row, column, channel] -> the maximum of each window, of the part that lies inside."""
    size, stride = config["pool_size"], config["pool_stride"]
    top, left = config["pool_top"], config["pool_left"]
    rows, cols = config["rows_out"], config["cols_out"]
    height, width = (rows - 1) * stride + size, (cols - 1) * stride + size
    padded = np.full((height, width, values.shape[2]), _I8[0], np.int64)
    inside = values[: height - top, : width - left]
    padded[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
    windows = [
        padded[r : r + (rows - 1) * stride + 1 : stride, c : c + (cols - 1) * stride + 1 : stride]
        for r in range(size)
        for c in range(size)
    ]
    pooled: np.ndarray = np.maximum.reduce(windows)
    return pooled
