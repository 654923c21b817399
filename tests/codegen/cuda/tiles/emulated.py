"""Tile programs on the emulated GPU: the very CUDA text, several kernels in one binary."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright import te
from tilewright.codegen.cuda.scalars import constant
from tilewright.codegen.cuda.tiles.emit import SYMBOL, TileSource, emit_tile_program, headers
from tilewright.codegen.cuda.tiles.tensor_maps import TensorMap
from tilewright.hw.gpu import H200, GpuMachine
from tilewright.testing.emulator.run import COMPILER, HERE, Complaint, _flags
from tilewright.testing.emulator.translate import translated
from tilewright.tile.executors import Facts
from tilewright.tile.ir import TileProgram, TileType

_SECONDS = 120.0
_DISJOINT = Facts(disjoint=True)


@dataclass(frozen=True)
class Launch:
    """A program, its grid, and its arguments by name: arrays, which it may change, and numbers."""

    program: TileProgram
    arguments: dict[str, np.ndarray | int | float]
    grid: tuple[int, int, int] = (1, 1, 1)
    facts: Facts = _DISJOINT
    warps: int = 4
    stages: int = 1

    def source(self, machine: GpuMachine = H200) -> TileSource:
        return emit_tile_program(self.program, self.facts, machine, self.warps, self.stages)


def launch(
    kernel: Any, *arguments: Any, grid: tuple[int, int, int] = (1, 1, 1), warps: int = 4, **constants: Any
) -> Launch:
    """A launch of a kernel; the constants are its own."""
    program = kernel.program(*arguments, **constants)
    bound = kernel._bind(arguments, constants)
    values = {param.name: bound[param.name] for param in program.params}
    return Launch(program, values, grid, _DISJOINT, warps)


def run(launches: Sequence[Launch], folder: Path, *, descending: bool = False) -> list[dict[str, np.ndarray]]:
    """What the arrays of each launch hold afterwards. Complaint: what the emulator found wrong, and in which launch."""
    binary = build(launches, folder)
    return [run_one(launch, number, binary, folder, descending) for number, launch in enumerate(launches)]


def build(launches: Sequence[Launch], folder: Path, mutate: tuple[str, str] = ("", "")) -> Path:
    assert COMPILER is not None
    parts, calls = ['#include "cuda.h"', translated(headers())], []
    for number, launch in enumerate(launches):
        source = launch.source()
        text = source.kernel.replace(SYMBOL, f"kernel_{number}")
        if mutate[0]:
            assert mutate[0] in text
            text = text.replace(*mutate)
        # A function of an instruction may be in several kernels.
        parts.append(f"namespace of_{number} {{\n{translated(text)}\n}}")
        calls.append(_case(launch, number, source))
    parts += [
        "int main(int argc, char** argv) {",
        "  emulator::Machine machine = {};",
        "  machine.cluster = 1, machine.granule = 1;",
        "  switch (atoi(argv[5])) {",
        *calls,
        "  }",
        "  return 9;",
        "}",
        "",
    ]
    written, binary = folder / "kernels.cpp", folder / "kernels"
    written.write_text("\n".join(parts))
    command = [COMPILER, *_flags(), f"-I{HERE}", str(written), "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Complaint(f"it does not compile: {done.stderr[:3000]}")
    return binary


def _case(launch: Launch, number: int, source: TileSource) -> str:
    passed, sizes = [], []
    for param in launch.program.params:
        value, kind = launch.arguments[param.name], param.type
        assert isinstance(kind, TileType)
        if isinstance(value, np.ndarray):
            passed.append(f"({kind.dtype.short}*)arguments[{len(sizes)}]")
            sizes.append(f"{{{value.nbytes}, true, true}}")
        else:
            passed.append(constant(te.Const(value, kind.dtype)))
    values = [launch.arguments[param.name] for param in launch.program.params]
    passed += [_map(each, values) for each in source.maps]
    x, y, z = launch.grid
    return "\n".join(
        [
            f"    case {number}:",
            f"      machine.blocks = {x * y * z}, machine.grid_x = {x}, machine.grid_y = {y};",
            f"      machine.threads = {source.threads}, machine.shared_bytes = {source.shared_bytes};",
            f"      machine.kernel = [](void** arguments) {{ of_{number}::kernel_{number}({', '.join(passed)}); }};",
            f"      return emulator::main_of(5, argv, machine, {{{', '.join(sizes)}}});",
        ]
    )


def _map(map: TensorMap, values: Sequence[Any]) -> str:
    """A tensor map for the emulator."""
    arrays = [n for n, value in enumerate(values) if isinstance(value, np.ndarray)]
    plain = [0 if n in arrays else value for n, value in enumerate(values)]
    box = map.box
    sizes = [each.of(plain) for each in (map.rows, map.columns, map.stride)]
    numbers = ", ".join(str(each) for each in (*sizes, box.rows, box.columns, box.dtype.bytes))
    return f"emulator::tensor_map<TensorMap>(arguments[{arrays.index(map.parameter)}], {numbers})"


def run_one(
    launch: Launch, number: int, binary: Path, folder: Path, descending: bool = False
) -> dict[str, np.ndarray]:
    arrays = [launch.arguments[param.name] for param in launch.program.params]
    given = [array for array in arrays if isinstance(array, np.ndarray)]
    inputs, results = folder / "inputs", folder / "results"
    inputs.write_bytes(b"".join(np.ascontiguousarray(array).tobytes() for array in given))
    order = "descending" if descending else "ascending"
    command = [str(binary), str(inputs), str(results), "1", order, str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise Complaint(f"{launch.program.name} does not end") from None
    if done.returncode:
        raise Complaint(f"{launch.program.name}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    found, begin, data = {}, 0, results.read_bytes()
    for param in launch.program.params:
        array = launch.arguments[param.name]
        if isinstance(array, np.ndarray):
            found[param.name] = np.frombuffer(data, array.dtype, array.size, begin).reshape(array.shape)
            begin += array.nbytes
    return found
