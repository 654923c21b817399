"""The executor of tile kernels on this processor: `tile/executors.py` has the contract."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilewright import te
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.llvm import toolchain
from tilewright.codegen.llvm.tiles.emit import emit_tile_program, prints
from tilewright.dtypes import DType
from tilewright.errors import CacheError, OptionError
from tilewright.hw import CpuMachine, host
from tilewright.runtime import native, threads
from tilewright.runtime.loader import load_objects, object_digest
from tilewright.support.fingerprint import fingerprint
from tilewright.tile import passes
from tilewright.tile.executors import Facts, Launchable, Options
from tilewright.tile.ir import TileProgram, TileType, Value


@lru_cache(maxsize=1)
def _generator_version() -> str:
    digest = hashlib.sha256()
    for room in (Path(__file__).parent.parent, Path(te.__file__).parent, Path(passes.__file__).parent):
        for path in sorted(room.rglob("*.py")):
            digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {toolchain.version()}"


def tile_key(text: str, facts: Facts, machine: CpuMachine) -> str:
    """A fingerprint of everything that determines the machine code; `text` is the program."""
    described = asdict(machine), asdict(machine.throughput)
    return fingerprint("tile", text, facts.disjoint, *described, _generator_version())


class Executor:
    """Its only option is `threads`, the number of threads that share the program instances; 0, the default, takes the
    knob's value."""

    wants_divisors = False

    def __init__(self) -> None:
        self.machine = host()
        try:
            self.cache: ObjectCache | None = ObjectCache.default()
        except CacheError:
            self.cache = None

    def compile(self, program: TileProgram, facts: Facts, options: Options) -> Launchable | None:
        count = _threads(options)
        if prints(program):
            return None
        key = tile_key(str(program), facts, self.machine)
        symbol = f"tw_{key}"
        code = self.cache.get(key) if self.cache is not None else None
        if code is None:
            text = str(emit_tile_program(program, facts, self.machine, symbol))
            code = toolchain.object_code(text, self.machine)
            if self.cache is not None:
                self.cache.put(key, code)
        return _Compiled(program, code, symbol, count)

    def source(self, program: TileProgram, facts: Facts, options: Options) -> str:
        _threads(options)
        return toolchain.assembly(
            str(emit_tile_program(program, facts, self.machine, program.name)), self.machine
        )


def _threads(options: Options) -> int | None:
    for name in options:
        if name != "threads":
            raise OptionError(f"a tile kernel on a CPU has no option {name!r}", remedy="it takes threads")
    count = options.get("threads")
    threads.resolve(count)
    return count


class _Compiled:
    def __init__(self, program: TileProgram, code: bytes, symbol: str, count: int | None) -> None:
        digest = object_digest(code)
        self._library = load_objects({digest: code}, {symbol: digest})
        self._kernel = self._library[symbol]
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self._run: Callable[..., None] = kind(self._kernel)
        self._pack = struct.Struct("=3q" + "".join(_slot(param) for param in program.params)).pack_into
        self._slots = ctypes.c_uint64 * (3 + len(program.params))
        self._threads = threads.resolve(count) if count else None
        self._spread: tuple[threads.Launcher, Callable[..., None]] | None = None

    def __call__(self, grid: tuple[int, int, int], values: Sequence[Any], /) -> None:
        slots = self._slots()
        self._pack(slots, 0, *grid, *values)
        extent = grid[0] * grid[1] * grid[2]
        count = min(self._threads or threads.resolve(None), extent)
        address = ctypes.addressof(slots)
        if count > 1:
            launcher = threads.launcher()
            count = launcher.prepare(count)
            if count > 1:
                spread = self._spread
                if spread is None or spread[0] is not launcher:
                    self._spread = spread = launcher, _launch(launcher)
                spread[1](launcher.address, self._kernel, address, extent, count)
                return
        self._run(address, 0, extent)


def _launch(launcher: threads.Launcher) -> Callable[..., None]:
    """The C function that runs a kernel's instances on the threads of a launcher."""
    code, pointer, number = native.native(), ctypes.c_void_p, ctypes.c_int64
    address = code.launch_openmp if launcher.runtime == "openmp" else code.launch_pool
    return ctypes.CFUNCTYPE(None, pointer, pointer, pointer, number, number)(address)


def _slot(param: Value) -> str:
    """The 8-byte slot of a parameter."""
    kind = param.type
    assert isinstance(kind, TileType)
    if kind.is_pointer:
        return "Q"
    formats = {DType.F32: "f4x", DType.F64: "d", DType.I32: "i4x", DType.I64: "q", DType.BOOL: "?7x"}
    return formats[kind.dtype]
