"""Work for checking Gemmini's simulators against each other: random programs, random layers, and a layer's results by
plain NumPy."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.gemmini.layers import Buffers, Layer, Placement, Pooling, Tiling
from tilewright.loops.gemmini.layer import Inner
from tilewright.runtime.gemmini.bias import decoded, encoded, stored_bytes
from tilewright.runtime.gemmini.functional import scaled
from tilewright.runtime.gemmini.isa import (
    ACCUMULATE,
    ACCUMULATOR,
    FULL,
    MVINS,
    NONE,
    ONE,
    Array,
    Instruction,
    make,
    scale_bits,
)

DRAM_BYTES = 1 << 13  # of random programs: the first half is read, the second written


def cleared(machine: Array) -> list[Instruction]:
    """Local memories filled with zeros: RTL does not clear them."""
    program = [make("config_ld", slot=0, scale=ONE)]
    for base, rows in ((0, machine.scratchpad_rows), (ACCUMULATOR, machine.accumulator_rows)):
        for row in range(0, rows, machine.dim):
            count = min(machine.dim, rows - row)
            program.append(make("mvin", local=base + row, rows=count, cols=machine.dim))
    return program


class RandomProgram:
    """A short program that the verifier accepts: small addresses, so that instructions depend on each other."""

    def __init__(self, rng: np.random.Generator, machine: Array, length: int) -> None:
        self.rng, self.machine = rng, machine
        self.program: list[Instruction] = []
        self._restart()
        pick = [self._mvin] * 6 + [self._pair] * 6 + [self._mvout] * 3 + [self._config] * 2 + [self._other]
        while len(self.program) < length:
            pick[self._below(len(pick))]()
        self._before_stores()
        for row in range(
            0, machine.accumulator_rows - machine.dim + 1, machine.dim
        ):  # everything can be seen
            self._emit("config_st", stride=4 * machine.dim, scale=ONE)
            dram = DRAM_BYTES // 2 + 2048 + row * 4 * machine.dim
            local = ACCUMULATOR | FULL | row
            self._emit("mvout", dram=dram, local=local, rows=machine.dim, cols=machine.dim)

    def _below(self, limit: int) -> int:
        return int(self.rng.integers(limit))

    def _emit(self, name: str, **fields: int) -> None:
        self.program.append(make(name, **fields))

    def _restart(self) -> None:
        self.program += cleared(self.machine)
        self.fenced = False
        self.reads_stored = False  # since the last fence
        self.weights = False
        self.computed = False
        for slot in range(3):
            self._config_ld(slot)
        self._config_ex()
        self._config_st()

    def _scale(self) -> int:
        choices = (1.0, 0.5, 0.003, -0.25, 0.0, 1e-30, 3e38, 7.3, float(self.rng.normal() * 0.02) or 1.0)
        return scale_bits(choices[self._below(len(choices))])

    def _config_ld(self, slot: int) -> None:
        self.blocks = self.machine.dim + self._below(3)
        stride, shrunk = 4 * self._below(20), self._below(2)
        self._emit(
            "config_ld",
            slot=slot,
            stride=stride,
            shrunk=shrunk,
            scale=self._scale(),
            block_stride=self.machine.dim,
        )

    def _config_ex(self) -> None:
        self.a_stride = 1 + self._below(3)
        self._emit("config_ex", a_stride=self.a_stride)

    def _config_st(self) -> None:
        self.pool = (0, 0)
        fields = {
            "stride": 4 * self.machine.dim + self._below(8),
            "relu": self._below(2),
            "scale": self._scale(),
        }
        if self._below(3) == 0:
            size = 2 + self._below(2)
            top, left = self._below(2), self._below(2)
            rows_in, cols_in = 3 + self._below(2), 3 + self._below(2)
            fields |= {
                "pool_size": size,
                "pool_stride": 1 + self._below(2),
                "pool_top": top,
                "pool_left": left,
            }
            fields |= {"pool_pitch": 3, "rows_in": rows_in, "cols_in": cols_in, "rows_out": 2, "cols_out": 2}
            self.pool = (rows_in, cols_in)
        self._emit("config_st", **fields)

    def _config(self) -> None:
        (lambda: self._config_ld(self._below(3)), self._config_ex, self._config_st)[self._below(3)]()

    def _mvin(self) -> None:
        dim, rows, cols = (
            self.machine.dim,
            1 + self._below(self.machine.dim),
            1 + self._below(2 * self.machine.dim),
        )
        if self._below(2):
            limit = self.machine.scratchpad_rows - 2 * dim
            local = self._below(limit)
        else:
            limit = self.machine.accumulator_rows - 2 * dim
            local = ACCUMULATOR | self._below(2) * ACCUMULATE | self._below(limit)
        dram = 64 + self._below(DRAM_BYTES // 2 - 64 - 80 * dim - 32 * dim) if self._below(8) else 0
        if self.fenced and self._below(2):
            dram += DRAM_BYTES // 2  # what was written before the fence
            self.reads_stored = True
        self._emit(MVINS[self._below(3)], dram=dram, local=local, rows=rows, cols=cols)

    def _pair(self) -> None:
        dim = self.machine.dim
        rows, depth, cols = (1 + self._below(dim) for _ in range(3))
        fresh = not self.weights or self._below(3) > 0
        b = self._below(self.machine.scratchpad_rows - dim) if fresh else NONE
        c = ACCUMULATOR | self._below(2) * ACCUMULATE | self._below(self.machine.accumulator_rows - dim)
        self._emit("preload", b=b, rows=depth, cols=cols, c=c, c_rows=rows, c_cols=cols)
        self.weights = True
        again = self.computed and (not fresh or self._below(8) == 0)
        self.computed = True
        a = self._below(self.machine.scratchpad_rows - 3 * dim)
        self._emit(
            "compute_accumulated" if again else "compute_preloaded", a=a, rows=rows, cols=depth, d=NONE
        )

    def _before_stores(self) -> None:
        """Only a fence orders loads and stores of the same bytes of DRAM."""
        if self.reads_stored:
            self._emit("fence")
        self.fenced = self.reads_stored = False

    def _mvout(self) -> None:
        self._before_stores()
        dim = self.machine.dim
        rows, cols = 1 + self._below(dim), 1 + self._below(dim)
        dram = DRAM_BYTES // 2 + self._below(1024)
        if self.pool[0]:
            limit = self.machine.accumulator_rows - self.pool[0] * self.pool[1] + 1
            self._emit("mvout", dram=dram, local=ACCUMULATOR | self._below(limit), rows=1, cols=cols)
        elif self._below(4) == 0:
            self._emit(
                "mvout",
                dram=dram,
                local=self._below(self.machine.scratchpad_rows - dim),
                rows=rows,
                cols=cols,
            )
        else:
            local = ACCUMULATOR | self._below(2) * FULL | self._below(self.machine.accumulator_rows - dim)
            self._emit("mvout", dram=dram, local=local, rows=rows, cols=cols)

    def _other(self) -> None:
        which = self._below(5)
        if which < 2:
            self._emit("fence")
            self.fenced, self.reads_stored = True, False
        elif which == 2:
            self._emit("flush")
            self._restart()
        elif which == 3:
            self._convolution()
            self._restart()
        else:
            self._loop()
            self._restart()

    def _loop(self) -> None:
        self._before_stores()
        dim = self.machine.dim
        i, j, k = (1 + self._below(2) for _ in range(3))
        pads = {f"pad_{axis}": self._below(dim) for axis in "ijk"}
        self._emit("loop_ws_bounds", i=i, j=j, k=k, **pads)
        self._emit("loop_ws_addresses_ab", a=64 + self._below(999), b=64 + self._below(999))
        self._emit("loop_ws_addresses_dc", d=self._below(2) * 512, c=DRAM_BYTES // 2 + self._below(1024))
        self._emit("loop_ws_strides_ab", a=self._below(40), b=self._below(40))
        self._emit("loop_ws_strides_dc", d=4 * self._below(9), c=8 * dim + self._below(9))
        low, full, relu = (self._below(2) for _ in range(3))
        self._emit("loop_ws", low_bias=low, full=full, relu=relu, scale=self._scale())

    def _convolution(self) -> None:
        self._before_stores()
        dim = self.machine.dim
        while True:
            kernel_rows, kernel_cols, stride = 1 + self._below(2), 1 + self._below(3), 1 + self._below(2)
            out_rows, out_cols = 1 + self._below(3), 1 + self._below(2 * dim)
            in_channels, out_channels = 1 + self._below(2 * dim), 1 + self._below(2 * dim)
            height, width = (out_rows - 1) * stride + kernel_rows, (out_cols - 1) * stride + kernel_cols
            blocks, out_blocks = -(-in_channels // dim), -(-out_channels // dim)
            weights = kernel_rows * kernel_cols * blocks * out_blocks * dim
            if blocks * height * width + weights > self.machine.scratchpad_rows:
                continue
            if out_blocks * out_rows * out_cols <= self.machine.accumulator_rows:
                break
        top, left = self._below(2), self._below(3)
        in_rows, in_cols = 1 + self._below(height), 1 + self._below(width)
        full = self._below(2)
        pitch = (4 if full else 1) * out_channels + self._below(3)
        self._emit(
            "loop_conv_ws_image",
            in_rows=in_rows,
            in_cols=in_cols,
            in_channels=in_channels,
            out_channels=out_channels,
        )
        self._emit(
            "loop_conv_ws_window",
            out_rows=out_rows,
            out_cols=out_cols,
            kernel_rows=kernel_rows,
            kernel_cols=kernel_cols,
            stride=stride,
            top=top,
            left=left,
        )
        self._emit("loop_conv_ws_operands", data=64 + self._below(999), weights=64 + self._below(999))
        self._emit("loop_conv_ws_results", bias=self._below(2) * 512, results=DRAM_BYTES // 2)
        self._emit(
            "loop_conv_ws_pitches",
            data=self._below(20),
            data_row=self._below(99),
            results=pitch,
            results_row=pitch * out_cols,
        )
        relu, weights_pitch = self._below(2), self._below(20)
        scale = self._scale()
        self._emit("loop_conv_ws", relu=relu, full=full, weights_pitch=weights_pitch, scale=scale)


def random_program(
    rng: np.random.Generator, machine: Array, length: int = 60
) -> tuple[list[Instruction], np.ndarray]:
    """A program and the DRAM that it starts from."""
    dram = rng.integers(0, 256, DRAM_BYTES).astype(np.uint8)
    return RandomProgram(rng, machine, length).program, dram


# -- layers -----------------------------------------------------------------------------------------------------------


def layer_memory(layer: Layer, rng: np.random.Generator) -> tuple[np.ndarray, Placement, int]:
    """A DRAM with random operands of a layer, where they are, and how many bytes of results there will be."""
    taps = layer.kernel[0] * layer.kernel[1]
    sizes = {
        "data": layer.height * layer.width * layer.in_channels,
        "weights": taps * layer.in_channels * layer.out_channels,
        "bias": _bias_bytes(layer),
        "residual": layer.rows * layer.cols * layer.out_channels if layer.residual is not None else 0,
        "results": layer.stored[0] * layer.stored[1] * layer.out_channels * (4 if layer.full else 1),
    }
    starts, at = {}, 64
    for name, size in sizes.items():
        starts[name] = at
        at += -(-size // 64) * 64
    dram = rng.integers(0, 256, at).astype(np.uint8)
    if layer.bias:
        values = rng.integers(-9999, 9999, layer.out_channels).astype(np.int32)
        stored = encoded(values, layer.bias_rows) if layer.bias_rows else values.view(np.uint8)
        dram[starts["bias"] : starts["bias"] + sizes["bias"]] = stored
    return dram, Placement(**starts), sizes["results"]


def _bias_bytes(layer: Layer) -> int:
    if layer.bias_rows:
        return stored_bytes(layer.out_channels, layer.bias_rows)
    return 4 * layer.out_channels if layer.bias else 0


def layer_results(layer: Layer, dram: np.ndarray, at: Placement) -> np.ndarray:
    """The bytes that a layer's program must write, computed without tiles."""

    def tensor(start: int, shape: tuple[int, ...], dtype: type = np.int8) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return dram[start : start + count].view(dtype).reshape(shape).astype(np.int64)

    top, left, bottom, right = layer.padding
    data = tensor(at.data, (layer.height, layer.width, layer.in_channels))
    data = np.pad(data, ((top, bottom), (left, right), (0, 0)))
    weights = tensor(at.weights, (*layer.kernel, layer.in_channels, layer.out_channels))
    shape = (layer.rows, layer.cols, layer.out_channels)
    sums = np.zeros(shape, np.int64)
    if layer.bias_rows:
        sums += decoded(dram[at.bias : at.bias + _bias_bytes(layer)], layer.bias_rows)
    elif layer.bias:
        sums += tensor(at.bias, (layer.out_channels,), np.int32)
    if layer.residual is not None:
        bounds = (-(2**31), 2**31 - 1)
        sums += scaled(tensor(at.residual, shape), np.float32(layer.residual), bounds)
    step = layer.stride
    for r in range(layer.kernel[0]):
        for c in range(layer.kernel[1]):
            part = data[
                r : r + (layer.rows - 1) * step + 1 : step, c : c + (layer.cols - 1) * step + 1 : step
            ]
            sums += np.rint(part.astype(np.float64) @ weights[r, c].astype(np.float64)).astype(np.int64)
    if layer.relu:
        sums = np.maximum(sums, 0)
    if layer.full:
        return np.ascontiguousarray(sums.astype(np.int32)).view(np.uint8).ravel()
    results = scaled(sums, np.float32(layer.scale))
    if layer.pooling:
        results = _pooled(results, layer.pooling)
    return np.ascontiguousarray(results.astype(np.int8)).view(np.uint8).ravel()


def _pooled(results: np.ndarray, pool: Pooling) -> np.ndarray:
    rows, cols = (pool.extent(extent) for extent in results.shape[:2])
    found = np.zeros((rows, cols, results.shape[2]), np.int64)
    for r in range(rows):
        for c in range(cols):
            top, left = r * pool.stride - pool.padding, c * pool.stride - pool.padding
            window = results[max(0, top) : top + pool.size, max(0, left) : left + pool.size]
            found[r, c] = window.max(axis=(0, 1))
    return found


def random_layer(rng: np.random.Generator, dim: int) -> tuple[Layer, Tiling]:
    """A small layer of any kind, with a tiling that may or may not fit."""

    def below(limit: int) -> int:
        return int(rng.integers(limit))

    kernel = (1 + below(3), 1 + below(3)) if below(3) else (1, 1)
    padding = tuple(below(kernel[at % 2]) for at in range(4))
    pooling = Pooling(2 + below(2), 1 + below(2), below(2)) if below(3) == 0 else None
    full = pooling is None and below(4) == 0
    bias = bool(below(2))
    layer = Layer(
        5 + below(5),
        5 + below(2 * dim),
        1 + below(3 * dim),
        1 + below(3 * dim),
        kernel,
        1 + below(2),
        padding,  # type: ignore[arg-type]
        relu=bool(below(2)),
        scale=0.01,
        full=full,
        bias=bias,
        bias_rows=bias * below(4),
        residual=None if below(3) else 3.7,
        pooling=pooling,
    )
    taps = (1 + below(3), 1 + below(3)) if below(2) else None
    inner: Inner = "channels" if below(2) else "pixels"
    buffers = Buffers(*(1 + below(2) for _ in range(3)))
    return layer, Tiling(1 + below(3), 1 + below(6), 1 + below(2), 1 + below(2), taps, inner, buffers)
