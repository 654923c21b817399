"""The reference kernel of a GPU: a chain of FMAs in registers, whose time follows the GPU's clock alone.

It is timed before and after a candidate: when it becomes slower, so has the GPU.
"""

from __future__ import annotations

from tilewright.measure.gpu_checks import gpu_functions
from tilewright.runtime.cuda.device import Device

_ROUNDS = 20_000  # of some four cycles each: tens of microseconds
_THREADS = 256
_LAUNCHES = 3  # the fastest counts


class GpuReference:
    def __init__(self, ordinal: int) -> None:
        self._device = Device(ordinal)
        self._function = gpu_functions(ordinal)["tw_reference"]
        self._blocks = self._device.attribute("MULTIPROCESSOR_COUNT")
        self._out = self._device.block(4)
        self._stream = self._device.new_stream()
        self._begin, self._end = (self._device.new_event(timing=True) for _ in range(2))

    def seconds(self) -> float:
        """The time of one launch now."""
        return min(self._launched() for _ in range(_LAUNCHES))

    def _launched(self) -> float:
        stream = self._stream.handle
        self._begin.record(stream)
        self._function.launch(self._blocks, _THREADS, [self._out.address, _ROUNDS], stream)
        self._end.record(stream)
        self._stream.synchronise()
        return self._begin.seconds_to(self._end)
