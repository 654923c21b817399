"""GPU sketches derived by rules beside those written by hand: what NVRTC makes of the same sizes. No GPU is needed.

    python benchmarks/gpu_sketch_rules.py [--capability sm_90a] [--only WORD] [--markdown FILE]

For each shape of `pipelining.py`, the config that the analytical model ranks first in the written sketch, and the first
without a pipeline of registers, are built by both. Instructions are those of the whole kernel's machine code, of
16 bytes each, and those of the loop over steps in its PTX. Nothing is timed.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from pipelining import SHAPES, Shape, task_of
from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.build import build, source_of
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200, GpuMachine
from tilewright.loops.ir import Program
from tilewright.space.sketches import derive
from tilewright.space.sketches.block_frames import STEP
from tilewright.space.sketches.cuda.tensorised import Tensorised
from tilewright.space.sketches.cuda.tiled import Tiled
from tilewright.space.space import Config
from tilewright.space.template import Applied, GpuWork, Template
from tilewright.tune.choose import ranked

_INSTRUCTION = 16  # bytes
_PAIRS: dict[str, Template] = {"sketch:warps": Tensorised(), "sketch:threads": Tiled()}
_PARTS = {"mma": r"\bmma\.sync", "ldmatrix": r"\bldmatrix", "copies": r"\bcp\.async\.c[ag]", "all": r"^\t\w"}


@dataclass(frozen=True)
class Built:
    registers: int
    spilled: int
    shared: int
    instructions: int
    loop: dict[str, int]  # instructions of the loop over steps, by kind


def single(m: int, n: int, k: int) -> Task:
    """A GEMM in single precision."""
    x = [input_node(i, TensorType(s, DType.F32), f"x{i}") for i, s in enumerate(((m, k), (n, k)))]
    return Task(Graph(tuple(x), (apply("matmul", x[0], apply("permute", x[1], axes=(1, 0))),)))


def tasks() -> Iterator[tuple[str, Task, str]]:
    for shape in SHAPES:
        assert isinstance(shape, Shape)
        yield shape.name, task_of(shape), "sketch:warps"
    for sizes in ((1024, 1024, 1024), (512, 768, 3072)):
        yield f"fp32: {' x '.join(map(str, sizes))}", single(*sizes), "sketch:threads"


def pairs(task: Task, name: str, machine: GpuMachine) -> Iterator[tuple[str, Program, Program]]:
    """Programs of the same sizes: (the sizes, written, derived)."""
    work = GpuWork(task, machine)
    written = _PAIRS[name].apply(work)
    derived = {each.space.template: each for each in derive(work)}
    assert written is not None
    for prefetch in (True, False):
        for _, config in ranked(written, work):
            values = dict(config.values)
            number = int(values["mapping"])
            other = derived.get(name if number == 0 else f"{name}#{number + 1}")
            if values["prefetch"] is not prefetch or not values["fused"] or other is None:
                continue
            like = in_derived(values, other)
            if like in other.space:
                yield str(like), program_of(written, config), program_of(other, like)
                break


def in_derived(values: dict[str, Any], derived: Applied) -> Config:
    values = {**values, "left_at": STEP, "right_at": STEP}
    return Config.of(derived.space.template, {knob.name: values[knob.name] for knob in derived.space.knobs})


def program_of(applied: Applied, config: Config) -> Program:
    program = applied.program(config)
    assert isinstance(program, Program)
    return program


def built(program: Program, machine: GpuMachine) -> Built:
    source = source_of(program)
    kernel = build(source, machine, "fast", None)
    ptx = toolchain.compile_source(source.text, "compute_80").cubin.decode()
    used = kernel.resources
    size = text_bytes(kernel.cubin)
    return Built(used.registers, used.spilled_bytes, kernel.shared_bytes, size // _INSTRUCTION, in_loop(ptx))


def in_loop(ptx: str) -> dict[str, int]:
    """Instructions of the loop that multiplies most, from its label to the jump back to it."""
    lines = ptx.splitlines()
    labels = {line.rstrip(":"): n for n, line in enumerate(lines) if re.match(r"\$L\w+:", line)}
    loops = []
    for number, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        if jump and labels.get(jump[1], number) < number:
            loops.append("\n".join(lines[labels[jump[1]] : number + 1]))
    multiplying = r"\bmma\.sync|\bfma\.rn"
    body = max(loops, key=lambda each: (len(re.findall(multiplying, each)), -len(each)), default=ptx)
    return {kind: len(re.findall(pattern, body, re.MULTILINE)) for kind, pattern in _PARTS.items()}


def text_bytes(cubin: bytes) -> int:
    """The size of the machine code in an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    each, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + number * each) for number in range(count)]
    strings = headers[names][4]
    found = 0
    for name, _, _, _, _, size in headers:
        start = strings + name
        if cubin[start : cubin.index(b"\0", start)].startswith(b".text."):
            found += size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", default="sm_90a")
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    machine = replace(H200, capability=options.capability)
    lines = [
        f"Written -> derived, for {options.capability} by {toolchain.version()}; the loop's counts are PTX.",
        "",
        "| shape | config | registers | spilled bytes | shared bytes | instructions"
        " | loop: all | mma | ldmatrix | copies |",
        "| --- " * 10 + "|",
    ]
    for name, task, sketch in tasks():
        if options.only not in name:
            continue
        for config, *programs in pairs(task, sketch, machine):
            one, other = (built(program, machine) for program in programs)
            cells = [
                f"{getattr(one, field)} -> {getattr(other, field)}"
                for field in ("registers", "spilled", "shared", "instructions")
            ]
            cells += [
                f"{one.loop[kind]} -> {other.loop[kind]}" for kind in ("all", "mma", "ldmatrix", "copies")
            ]
            lines.append(
                f"| {name} | {config.partition(': ')[2].partition(' left_at')[0]} | {' | '.join(cells)} |"
            )
            print(lines[-1], flush=True)
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
