"""A launch of a tile kernel as a kernel of a plan: it takes the operands of its task, the result last, and has one axis
of blocks; the grid and all numbers are constants in it."""

from __future__ import annotations

from tilewright import te
from tilewright.codegen.cuda.build import GpuSource
from tilewright.codegen.cuda.scalars import constant
from tilewright.codegen.cuda.tiles.emit import SYMBOL
from tilewright.codegen.cuda.tiles.executor import emitted, prints
from tilewright.codegen.cuda.tiles.text import element_type
from tilewright.codegen.cuda.tiles.values import tile_type
from tilewright.errors import CodegenError
from tilewright.hw.gpu import GpuMachine
from tilewright.loops.ir import Buffer
from tilewright.space.tile_operator import TileCall
from tilewright.tile.executors import Facts

_DIVISOR = 16  # of addresses: operands of a plan's steps begin at such
_INNER = f"{SYMBOL}_instance"


def call_source(call: TileCall, machine: GpuMachine) -> GpuSource:
    """The CUDA text of a tile kernel in a plan. The plan's values do not overlap, and the kernel stores only to its
    result."""
    if prints(call.program):
        raise CodegenError(f"{call.name}: a kernel that prints cannot be compiled")
    known = []
    for param, operand, number in zip(call.program.params, call.operands, call.numbers, strict=True):
        if operand is not None:
            known.append((param.name, _DIVISOR))
        elif isinstance(number, int) and not isinstance(number, bool) and not number % 2:
            known.append((param.name, min(_DIVISOR, number & -number) if number else _DIVISOR))
    facts = Facts(disjoint=True, divisors=tuple(known))
    made = emitted(call.program, facts, machine, dict(call.options), bulk_copies=False, grid=call.grid)
    # The kernel of `emit.py` becomes a function of the one that is launched.
    head = f'extern "C" __global__ void __launch_bounds__({made.threads}) {SYMBOL}('
    assert head in made.kernel
    inner = made.kernel.replace(head, f"__device__ __forceinline__ void {_INNER}(")
    names = [f"x{number}" for number in range(len(call.specs))]
    kinds = [f"{dtype.short}*" for dtype, _ in call.specs]
    passed = []
    for param, operand, number in zip(call.program.params, call.operands, call.numbers, strict=True):
        kind = tile_type(param)
        if operand is not None:
            passed.append(f"({element_type(kind.element)}){names[operand]}")
        else:
            passed.append(constant(te.Const(number, kind.dtype)))
    params = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, names, strict=True))
    outer = f"{head}{params}) {{ {_INNER}({', '.join(passed)}); }}\n"
    return GpuSource(
        call.name,
        f"{made.headers}\n{inner}\n{outer}",
        tuple(Buffer(name, dtype, size) for name, (dtype, size) in zip(names, call.specs, strict=True)),
        call.extent,
        made.threads,
        made.shared_bytes,
        call.decisions,
    )
