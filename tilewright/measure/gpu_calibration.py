"""A GPU's measured rates, kept with those of CPUs: copy bandwidth, and tensor-core throughput through `mma.sync`.

The analytical model's constants hold for the GPU that it was fitted on; these two rates say how another GPU differs
from its data sheet. `rated` returns the GPU with adjusted rates. They only rank configs and are not part of the GPU's
identity, so records stay valid whether it was calibrated or not.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import msgspec

from tilewright.codegen.cuda.build import GpuSource
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.dtypes import DType
from tilewright.errors import InternalError
from tilewright.graph.ir import Graph, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.gpu.default import default_program
from tilewright.loops.gpu.tensor import TensorGemm
from tilewright.loops.ir import Program
from tilewright.measure.calibration import keep_at, kept_at
from tilewright.measure.gpu import GpuProgram
from tilewright.runtime.cuda.device import Device
from tilewright.space.space import Config
from tilewright.space.template import GpuWork, normal_form
from tilewright.space.templates.cuda.matmul import NAME, TensorCores
from tilewright.support.fingerprint import fingerprint

VERSION = 1
_COPIED = 1 << 27  # elements of two bytes: far larger than every L2
_SIZE = 4096  # of a product that keeps all tensor cores busy
_TILES = {"bm": 128, "bn": 128, "bk": 32, "warps_m": 2, "warps_n": 2, "stages": 3}
_REPEATS, _LAUNCHES = 7, 5
_OF_COPY, _OF_PRODUCT = (
    0.81,
    0.99,
)  # measured share of the described rates on the GPU that the model was fitted on
_MIN, _MAX = 0.25, 4.0  # plausible range, relative to the described rates


class GpuCalibration(msgspec.Struct, frozen=True):
    version: int
    card: str  # the `_key` of its GPU
    copy: float  # bytes per second, read plus written
    products: float  # operations per second, 16-bit floats with 32-bit sums

    @property
    def is_sensible(self) -> bool:
        return all(math.isfinite(rate) and rate > 0 for rate in (self.copy, self.products))


def _key(machine: GpuMachine) -> str:
    return fingerprint("card", asdict(replace(machine, libraries=())))


def stored(machine: GpuMachine) -> GpuCalibration | None:
    found = kept_at(_key(machine), GpuCalibration)
    return found if found is not None and is_of(found, machine) else None


def is_of(found: GpuCalibration, machine: GpuMachine) -> bool:
    """Whether it was measured on such a GPU, by this version, and is plausible."""
    return found.version == VERSION and found.card == _key(machine) and found.is_sensible


def keep(machine: GpuMachine, calibration: GpuCalibration) -> None:
    keep_at(_key(machine), calibration)


def rated(machine: GpuMachine) -> GpuMachine:
    """The GPU with its measured rates, or as described if it was not calibrated."""
    found = stored(machine)
    if found is None:
        return machine
    whole = machine.tensor_flops_clock * machine.clock_mhz * 1e6 * machine.sms
    memory = found.copy / (_OF_COPY * machine.memory_bytes_per_second)
    tensor = found.products / (_OF_PRODUCT * whole)
    if not (_MIN <= memory <= _MAX and _MIN <= tensor <= _MAX):
        return machine
    return replace(
        machine,
        memory_bytes_per_second=machine.memory_bytes_per_second * memory,
        tensor_flops_clock=machine.tensor_flops_clock * tensor,
    )


def calibrate(machine: GpuMachine, device: Device) -> GpuCalibration:
    """Measure, which takes a second or two, and store the result."""
    seconds = _seconds(_copy(machine), machine, device)
    copy = 4.0 * _COPIED / seconds
    products = 2.0 * _SIZE**3 / _seconds(_product(machine), machine, device)
    result = GpuCalibration(VERSION, _key(machine), copy, products)
    keep(machine, result)
    return result


def _copy(machine: GpuMachine) -> Program:
    x = input_node(0, TensorType((_COPIED,), DType.F16))
    formula = normal_form(Task(Graph((x,), (apply("neg", x),))), "fast")
    if formula is None:
        raise InternalError("a copy has no normal form")
    return default_program(formula, machine)


def _product(machine: GpuMachine) -> GpuSource:
    a, b = (input_node(number, TensorType((_SIZE, _SIZE), DType.F16)) for number in range(2))
    applied = TensorCores().apply(GpuWork(Task(Graph((a, b), (apply("matmul", a, b),))), machine))
    if applied is None:
        raise InternalError("a product of matrices has no template")
    kernel = applied.program(Config.of(NAME, {**_TILES, "split": 1, "persistent": False}))
    assert isinstance(kernel, TensorGemm)
    return tensor_source(kernel)


def _seconds(program: Program | GpuSource, machine: GpuMachine, device: Device) -> float:
    """Seconds of one launch: the fastest of several short series."""
    kernel = GpuProgram(program, machine, device)
    for address, buffer in zip(kernel.addresses, program.params, strict=True):
        device.fill(address, 0, buffer.size * buffer.dtype.bytes)
    stream = device.new_stream()
    begin, end = (device.new_event(timing=True) for _ in range(2))
    best = math.inf
    for _ in range(_REPEATS):
        begin.record(stream.handle)
        for _ in range(_LAUNCHES):
            kernel.launch(stream.handle)
        end.record(stream.handle)
        stream.synchronise()
        best = min(best, begin.seconds_to(end) / _LAUNCHES)
    kernel.close()
    return best
