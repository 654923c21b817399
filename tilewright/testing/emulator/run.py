"""Compiles a kernel's CUDA text for the emulator with g++, and runs it on arrays of the host."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from tilewright.codegen.cuda.build import SYMBOL, GpuSource
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.errors import TargetError
from tilewright.graph.ir import Node
from tilewright.measure.validation import CheckCase
from tilewright.runtime.plan import MatrixMap, VendorCall
from tilewright.space.implementation import Implementation
from tilewright.testing.emulator.translate import translated

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") if sys.platform == "linux" else None
_WORD = 4  # bytes
_CLUSTER = re.compile(r"__cluster_dims__\((\d+), 1, 1\)")
# A misaligned access and an index beyond a register array are traps.
_FLAGS = (
    *("-std=c++17", "-O0", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv"),
    *("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"),
)
_UNSET_REGISTERS = "-ftrivial-auto-var-init={}"  # what they hold; from GCC 12 on
_SECONDS = (
    900.0  # on the clock; a busy machine is no mistake of a kernel, whose process may use 60 s of a core
)


@lru_cache(maxsize=2)
def _flags(unset: str = "pattern") -> tuple[str, ...]:
    registers = _UNSET_REGISTERS.format(unset)
    probe = subprocess.run(
        [str(COMPILER), registers, "-fsyntax-only", "-xc++", "/dev/null"], capture_output=True, check=False
    )
    return _FLAGS if probe.returncode else (*_FLAGS, registers)


class Complaint(Exception):
    """What the emulator found wrong with a kernel, other than its result."""


class Emulated:
    """A kernel as a program of this machine."""

    def __init__(
        self,
        source: GpuSource,
        folder: Path,
        text: str | None = None,
        *,
        unset: str = "pattern",
        granule: int = _WORD,
    ) -> None:
        """`text`: instead of the source's own; for mutants. `unset`: what registers hold before they are written, a
        "pattern" that is a very large negative number in every float type, or "zero"."""
        if COMPILER is None:
            raise TargetError(
                "the emulated GPU needs g++ on Linux", remedy="install g++ and put it on the PATH"
            )
        self.source, self.folder = source, folder
        self.program = folder / "kernel"
        written = folder / "kernel.cpp"
        written.write_text(_main(source, source.text if text is None else text, granule))
        command = [COMPILER, *_flags(unset), f"-I{HERE}", str(written), "-o", str(self.program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Complaint(f"it does not compile: {done.stderr[:3000]}")

    def __call__(
        self, launches: Sequence[Sequence[np.ndarray]], *, descending: bool = False
    ) -> list[np.ndarray]:
        """The flat result of each launch, of inputs as the task has them."""
        inputs, results = self.folder / "inputs", self.folder / "results"
        inputs.write_bytes(b"".join(self._stored(arrays) for arrays in launches))
        order = "descending" if descending else "ascending"
        command = [str(self.program), str(inputs), str(results), str(len(launches)), order]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise Complaint("it does not end") from None
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise Complaint("it does not end")
        if done.returncode:
            raise Complaint(done.stderr.strip() or f"exit code {done.returncode}")
        output = self.source.params[-1]
        found = np.frombuffer(results.read_bytes(), output.dtype.numpy)
        return list(found.reshape(len(launches), output.size))

    def in_both_orders(self, launches: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """The results; a Complaint if they depend on which threads run first, or on what shared memory held before."""
        found, again = self(launches), self(launches, descending=True)
        for number, (one, other) in enumerate(zip(found, again, strict=True)):
            if one.tobytes() != other.tobytes():
                raise Complaint(
                    "the result depends on the order of threads, or on memory that was never written,"
                    f" in launch {number}"
                )
        return found

    def _stored(self, arrays: Sequence[np.ndarray]) -> bytes:
        packings = [*self.source.packings, *[None] * (len(arrays) - len(self.source.packings))]
        stored = [
            np.ascontiguousarray(array if packing is None else packing.pack(array)).reshape(-1)
            for array, packing in zip(arrays, packings, strict=True)
        ]
        for array, buffer in zip(stored, self.source.params, strict=False):
            assert array.size == buffer.size and array.dtype == buffer.dtype.numpy, buffer
        return b"".join(array.tobytes() for array in stored)


def check(
    source: GpuSource,
    cases: Sequence[CheckCase],
    folder: Path,
    text: str | None = None,
    granule: int = _WORD,
) -> None:
    """The emulated kernel answers within bounds, its threads running first to last and last to first. WrongResult or
    Complaint otherwise. `granule`: bytes of shared memory that one thread accesses at a time: 1 in tile kernels."""
    found = Emulated(source, folder, text, granule=granule).in_both_orders([case.inputs for case in cases])
    for case, result in zip(cases, found, strict=True):
        case.error(result)


def results_of(implementation: Implementation, cases: Sequence[CheckCase], folder: Path) -> list[np.ndarray]:
    """The flat result of each case, computed by all kernels of an implementation."""
    values: dict[Node, list[np.ndarray]] = {
        node: [case.inputs[number] for case in cases] for number, node in enumerate(implementation.inputs)
    }
    for part in implementation.parts:
        if isinstance(part.body, VendorCall):
            raise TargetError(
                "the emulated GPU has no libraries", remedy="test a template that calls one on a GPU"
            )
        launches = [list(arrays) for arrays in zip(*(values[node] for node in part.operands), strict=True)]
        found = Emulated(tensor_source(part.body), folder).in_both_orders(launches)
        values[part.result] = [result.reshape(part.result.type.shape) for result in found]
    return [result.reshape(-1) for result in values[implementation.parts[-1].result]]


def _map(map: MatrixMap, element_bytes: int) -> str:
    sizes = (map.rows, map.columns, map.stride, map.box_rows, map.box_columns, element_bytes)
    return f"emulator::tensor_map<TensorMap>(arguments[{map.argument}], {', '.join(str(size) for size in sizes)})"


def _main(source: GpuSource, text: str, granule: int) -> str:
    cluster = found[1] if (found := _CLUSTER.search(text)) else "1"
    *inputs, output = source.params
    arguments = [f"{{{b.size * b.dtype.bytes}, false}}" for b in inputs]
    arguments.append(f"{{{output.size * output.dtype.bytes}, true}}")
    types = [f"{b.dtype.short}*" for b in (*inputs, output)]  # a tile kernel's are not const
    given = [f"({kind})arguments[{n}]" for n, kind in enumerate(types)]
    passed = ", ".join(
        [*given, *(_map(each, source.params[each.argument].dtype.bytes) for each in source.maps)]
    )
    return "\n".join(
        [
            '#include "cuda.h"',
            translated(text.replace(SYMBOL, "kernel")),
            f"static void launched(void** arguments) {{ kernel({passed}); }}",
            "int main(int argc, char** argv) {",
            "  emulator::Machine machine = {};",
            f"  machine.blocks = {source.blocks};",
            f"  machine.threads = {source.threads};",
            f"  machine.cluster = {cluster};",
            f"  machine.granule = {granule};",
            f"  machine.shared_bytes = {source.shared_bytes};",
            "  machine.kernel = launched;",
            f"  return emulator::main_of(argc, argv, machine, {{{', '.join(arguments)}}});",
            "}",
            "",
        ]
    )
