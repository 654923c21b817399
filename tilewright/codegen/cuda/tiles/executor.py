"""The executor of tile kernels on NVIDIA GPUs: `tile/executors.py` has the contract.

A launch goes to PyTorch's current stream of its current device, through the driver. Arguments are packed into one
block of memory, whose addresses were prepared: a warm call is that, one call of the driver, and nothing else. Tensor
maps lie in the same memory; they are encoded again when an argument changes that they depend on.
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.tiles.emit import SYMBOL, TileSource, emit_tile_program
from tilewright.codegen.cuda.tiles.tensor_maps import TensorMap
from tilewright.codegen.cuda.toolchain import Compiled
from tilewright.dtypes import DType
from tilewright.errors import CacheError, DeviceError, KernelArgumentError, OptionError, SharedMemoryError
from tilewright.hw.gpu import GpuMachine, detect
from tilewright.runtime.cuda.device import CudaFunction, Device
from tilewright.runtime.cuda.tensor_maps import MAP_BYTES, encoded
from tilewright.support.fingerprint import fingerprint
from tilewright.tile.executors import Facts, Launchable, Options
from tilewright.tile.ir import Op, TileProgram, TileType, Value, walk

WARPS = (1, 2, 4, 8, 16, 32)
STAGES = range(1, 9)
_DEFAULT_WARPS, _DEFAULT_STAGES = 4, 3
_MAX_GRID = (2**31 - 1, 65_535, 65_535)


@lru_cache(maxsize=1)
def _generator_version() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*")):
        if path.suffix in (".py", ".cuh"):
            digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {toolchain.version()}"


class Executor:
    """Its options are `warps`, how many run one program instance, 4 by default; and `stages`, how many
    iterations of a loop have their operands of dot in shared memory at once: 3, or as many as there is room for."""

    wants_divisors = True

    def __init__(self, machine: GpuMachine | None = None) -> None:
        self._machine = machine
        try:
            self.cache: ObjectCache | None = ObjectCache.default()
        except CacheError:
            self.cache = None

    @property
    def machine(self) -> GpuMachine:
        """The GPU that kernels are compiled for: the given one, or else the current one."""
        return self._machine or detect(_current_device())

    def compile(self, program: TileProgram, facts: Facts, options: Options) -> Launchable | None:
        if prints(program):
            return None
        source, compiled, symbol = self.build(program, facts, options)

        def without_maps() -> _Launchable:
            return _Launchable(program, *self.build(program, facts, options, bulk_copies=False))

        return _Launchable(program, source, compiled, symbol, without_maps)

    def build(
        self, program: TileProgram, facts: Facts, options: Options, *, bulk_copies: bool = True
    ) -> tuple[TileSource, Compiled, str]:
        """The text, the machine code, and the kernel's name in it. This needs no GPU."""
        machine = self.machine
        source = emitted(program, facts, machine, options, bulk_copies=bulk_copies)
        key = fingerprint("tile", source.text, machine.capability, _generator_version())
        symbol = f"tw_{key}"
        found = self.cache.get(key) if self.cache is not None else None
        if found is not None:
            return source, msgspec.msgpack.decode(found, type=Compiled), symbol
        text = source.text.replace(SYMBOL, symbol)
        compiled = toolchain.compile_source(text, machine.capability, exact_division=True)
        if self.cache is not None:
            self.cache.put(key, msgspec.msgpack.encode(compiled))
        return source, compiled, symbol

    def source(self, program: TileProgram, facts: Facts, options: Options) -> str:
        return emitted(program, facts, self.machine, options).kernel


def prints(program: TileProgram) -> bool:
    return any(isinstance(node, Op) and node.name == "print" for node in walk(program.body))


def emitted(
    program: TileProgram,
    facts: Facts,
    machine: GpuMachine,
    options: Options,
    *,
    bulk_copies: bool = True,
    grid: tuple[int, int, int] | None = None,
) -> TileSource:
    """The text for the options of a launch; `emit.py` has the other parameters."""
    warps, stages = checked_options(options)
    while True:
        try:
            return emit_tile_program(
                program, facts, machine, warps, stages, bulk_copies=bulk_copies, grid=grid
            )
        except SharedMemoryError:
            if "stages" in options or stages == 1:
                raise
            stages -= 1


def checked_options(options: Options) -> tuple[int, int]:
    """The numbers of warps and stages, checked."""
    for name in options:
        if name not in ("warps", "stages"):
            raise OptionError(
                f"a tile kernel on a GPU has no option {name!r}", remedy="it takes warps and stages"
            )
    warps, stages = options.get("warps", _DEFAULT_WARPS), options.get("stages", _DEFAULT_STAGES)
    if warps not in WARPS:
        raise OptionError(
            f"warps must be one of {', '.join(map(str, WARPS))}, got {warps!r}",
            remedy="use a power of two up to 32",
        )
    if stages not in STAGES:
        raise OptionError(
            f"stages must be a number from 1 to {STAGES[-1]}, got {stages!r}", remedy="use 2 to 4"
        )
    return int(warps), int(stages)


class _Launchable:
    """A kernel, loaded on each device at its first launch there."""

    def __init__(
        self,
        program: TileProgram,
        source: TileSource,
        compiled: Compiled,
        symbol: str,
        without_maps: Callable[[], _Launchable] | None = None,
    ) -> None:
        """`without_maps`: the same kernel for arguments that cannot have tensor maps."""
        self._source, self._cubin, self._symbol = source, compiled.cubin, symbol
        self._maps, self._without_maps = source.maps, without_maps
        self._other: _Launchable | None = None
        # What the maps depend on.
        self._read = operator.itemgetter(*_parameters(source.maps)) if source.maps else None
        layout = struct.Struct("=" + "".join(_slot(param) for param in program.params))
        self._pack, self._count = layout.pack_into, len(program.params)
        self._functions: dict[int, CudaFunction] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._name = program.name
        self._device, self._stream = _torch_functions()

    def __call__(self, grid: tuple[int, int, int], values: Sequence[Any], /) -> None:
        device = self._device()
        function = self._functions.get(device)
        if function is None:
            function = self._load(device)
        try:
            slots, parameters = self._local.arguments
        except AttributeError:
            slots, parameters = self._local.arguments = self._argument_memory()
        self._pack(slots, 0, *values)
        if self._read is not None:
            read = self._read(values)
            if read != self._local.mapped and not self._encode(slots, read, values):
                self._plain()(grid, values)
                return
        if grid[1] > _MAX_GRID[1] or grid[2] > _MAX_GRID[2]:
            raise KernelArgumentError(
                f"the grid of {self._name} is {grid}, and a GPU's has at most {_MAX_GRID}",
                remedy="put the longest axis of the grid first",
            )
        function.launch_grid(grid, self._source.threads, parameters, self._stream(device))

    def _argument_memory(self) -> tuple[Any, int]:
        """Memory with an 8-byte slot for each argument, the tensor maps after them, and the array of all their
        addresses."""
        count, maps = max(1, self._count), len(self._maps)
        first_map = -(-8 * count // MAP_BYTES) * MAP_BYTES
        size = first_map + MAP_BYTES * maps
        memory = (ctypes.c_uint8 * (size + MAP_BYTES))()
        begin = -ctypes.addressof(memory) % MAP_BYTES
        slots = (ctypes.c_uint8 * size).from_buffer(memory, begin)
        first = ctypes.addressof(slots)
        addresses = [first + 8 * n for n in range(count)]
        addresses += [first + first_map + MAP_BYTES * n for n in range(maps)]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._local.mapped, self._local.kept = None, (memory, pointers)
        return slots, ctypes.addressof(pointers)

    def _encode(self, slots: Any, read: Any, values: Sequence[Any]) -> bool:
        """Write the tensor maps of these arguments to the argument memory; return False if the driver cannot encode
        one."""
        first = -(-8 * max(1, self._count) // MAP_BYTES) * MAP_BYTES
        for number, each in enumerate(self._maps):
            rows, columns, stride = (part.of(values) for part in (each.rows, each.columns, each.stride))
            box = each.box
            try:
                found = encoded(
                    values[each.parameter],
                    box.dtype.short,
                    rows,
                    columns,
                    stride * box.dtype.bytes,
                    box.rows,
                    box.columns,
                )
            except DeviceError:
                return False
            at = first + MAP_BYTES * number
            slots[at : at + MAP_BYTES] = found
        self._local.mapped = read
        return True

    def _plain(self) -> _Launchable:
        assert self._without_maps is not None
        with self._lock:
            if self._other is None:
                self._other = self._without_maps()
            return self._other

    def _load(self, device: int) -> CudaFunction:
        with self._lock:
            if device not in self._functions:
                card = Device(device)
                self._functions[device] = card.load(self._cubin, self._symbol, self._source.shared_bytes)
            return self._functions[device]


def _parameters(maps: Sequence[TensorMap]) -> list[int]:
    """The indices of the parameters that tensor maps depend on."""
    found: set[int] = set()
    waiting = [part for each in maps for part in (each.rows, each.columns, each.stride)]
    while waiting:
        part = waiting.pop()
        found |= {part.value} if part.name == "parameter" else set()
        waiting += part.operands
    return sorted(found | {each.parameter for each in maps})


@lru_cache(maxsize=1)
def _torch_functions() -> tuple[Callable[[], int], Callable[[int], int]]:
    """The functions for the current device's number and for the handle of its current stream."""
    import torch

    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return torch.cuda.current_device, lambda device: int(torch.cuda.current_stream(device).cuda_stream)
    return torch.cuda.current_device, raw


def _current_device() -> int:
    return _torch_functions()[0]()


def _slot(param: Value) -> str:
    """The 8 bytes of an argument."""
    kind = param.type
    assert isinstance(kind, TileType)
    if kind.is_pointer:
        return "Q"
    formats = {DType.F32: "f4x", DType.F64: "d", DType.I32: "i4x", DType.I64: "q", DType.BOOL: "?7x"}
    return formats[kind.dtype]
