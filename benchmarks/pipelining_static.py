"""What the compiler makes of pipelined matmuls for sm_90a, without a GPU: registers, shared memory, instructions.

    python benchmarks/pipelining_static.py

The same product, 4096 x 4096 x 4096 in half precision, from the hand-written template, the generated sketches and the
tile language. For the template and `sketch:tensorised` it is the config that the analytical model ranks first.
Instructions are the bytes of machine code over 16, with what the compiler pads.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

BLOCKS = ((128, 128, 5), (128, 256, 4))  # rows, columns and stages of what has no ranked config


def instructions(cubin: bytes) -> int:
    """The sizes of an ELF file's sections of code, in instructions of 16 bytes."""
    (begin,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, begin + number * size) for number in range(count)]
    strings = sections[names][4]
    total = 0
    for section in sections:
        first = strings + section[0]
        if cubin[first:].startswith(b".text."):
            total += section[5]
    return total // 16


def generated() -> Iterator[tuple[str, str, Any]]:
    """Name, config and kernel."""
    from pipelining import Shape, task_of
    from tilewright.codegen.cuda.build import build
    from tilewright.codegen.cuda.tensor import tensor_source
    from tilewright.hw.gpu import H200
    from tilewright.space.sketches.cuda.tensorised import Tensorised
    from tilewright.space.sketches.cuda.warpgroups import WarpgroupMatmul
    from tilewright.space.template import GpuWork
    from tilewright.space.templates.cuda.matmul import TensorCores
    from tilewright.tune.choose import ranked

    def built(applied: Any, config: Any) -> Any:
        return build(tensor_source(applied.program(config)), H200, "fast", None)

    work = GpuWork(task_of(Shape("square", "matmul", (1, 4096, 4096, 4096))), H200)
    for template in (TensorCores(), Tensorised()):
        applied = template.apply(work)
        assert applied is not None
        values = dict((config := ranked(applied, work)[0][1]).values)
        words = f"{values['bm']} x {values['bn']} x {values['bk']}, {values['stages']} stages"
        yield template.name, words, built(applied, config)
    applied = WarpgroupMatmul().apply(work)
    assert applied is not None
    for rows, columns, stages in BLOCKS:
        for roles in (False, True):
            wanted = {"bm": rows, "bn": columns, "stages": stages, "roles": roles}
            config = next(c for c in applied.space.configs() if wanted.items() <= dict(c.values).items())
            words = f"{rows} x {columns} x 64, {stages} stages{', roles' if roles else ''}"
            made = built(applied, config)
            yield WarpgroupMatmul.name, words, made


def of_the_tile_language() -> Iterator[tuple[str, str, Any, int]]:
    """Name, config, what the compiler made, and shared memory."""
    import numpy as np

    from tests.tile import kernels
    from tilewright.codegen.cuda.tiles.emit import emit_tile_program
    from tilewright.codegen.cuda.toolchain import compile_source
    from tilewright.hw.gpu import H200
    from tilewright.tile.executors import Facts

    half = np.zeros((128, 128), np.float16)
    for rows, columns, stages in BLOCKS:
        program = kernels.matmul_gelu.program(
            half, half, half[0], half, 128, 128, 128, BM=rows, BN=columns, BK=64
        )
        facts = Facts(True, tuple((param.name, 16) for param in program.params))
        source = emit_tile_program(program, facts, H200, 8, stages=stages)
        compiled = compile_source(source.headers + source.kernel, H200.capability)
        words = f"{rows} x {columns} x 64, {stages} stages, bias and GELU"
        yield "tile language", words, compiled, source.shared_bytes


def main() -> None:
    print("| kernel | config | registers | spilled bytes | shared memory | instructions |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, words, kernel in generated():
        cells = (kernel.resources.registers, kernel.resources.spilled_bytes, kernel.shared_bytes)
        print(f"| {name} | {words} | {' | '.join(map(str, cells))} | {instructions(kernel.cubin)} |")
    for name, words, compiled, shared in of_the_tile_language():
        cells = (compiled.resources.registers, compiled.resources.spilled_bytes, shared)
        print(f"| {name} | {words} | {' | '.join(map(str, cells))} | {instructions(compiled.cubin)} |")


if __name__ == "__main__":
    main()
