"""Run one program on a GPU with arrays of the host, and time it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.codegen.cuda.build import GpuSource, build
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.ir import Program
from tilewright.runtime.cuda.device import Device
from tilewright.runtime.cuda.tensor_maps import of_arguments


class GpuProgram:
    """A program with its own GPU memory for inputs and output."""

    def __init__(
        self, program: Program | GpuSource, machine: GpuMachine, device: Device, *, numerics: str = "fast"
    ) -> None:
        self.kernel = build(program, machine, numerics, cache=None)
        self._device = device
        self._params = program.params
        self._function = device.load(self.kernel.cubin, self.kernel.symbol, self.kernel.shared_bytes)
        self.addresses = [device.allocate(buffer.size * buffer.dtype.bytes) for buffer in program.params]
        kinds = [buffer.dtype.short for buffer in program.params]
        self.maps = of_arguments(self.kernel.maps, self.addresses, kinds)

    def close(self) -> None:
        for address in self.addresses:
            self._device.free(address)
        self.addresses = []

    def upload(self, inputs: Sequence[np.ndarray]) -> None:
        for address, buffer, array in zip(self.addresses[:-1], self._params[:-1], inputs, strict=True):
            dense = np.ascontiguousarray(array, buffer.dtype.numpy)
            self._device.upload(address, dense.ctypes.data, dense.nbytes)

    def run(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """The flat output; unwritten bytes are 0xFF, which is NaN in every float type."""
        self.upload(inputs)
        output = self._params[-1]
        result = np.empty(output.size, output.dtype.numpy)
        self._device.fill(self.addresses[-1], 0xFF, result.nbytes)
        self.launch()
        self._device.synchronise()
        self._device.download(result.ctypes.data, self.addresses[-1], result.nbytes)
        return result

    def launch(self, stream: int = 0) -> None:
        self._function.launch(self.kernel.blocks, self.kernel.threads, self.addresses, stream, maps=self.maps)
