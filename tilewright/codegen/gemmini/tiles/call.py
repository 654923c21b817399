"""A launch of a tile kernel that is an operator of a model, as a kernel in a plan."""

from __future__ import annotations

from tilewright.codegen.gemmini.tiles.executor import compiled
from tilewright.errors import AcceleratorMatchError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.runtime.gemmini.isa import encode
from tilewright.runtime.gemmini.kernel import Header, Region, packed
from tilewright.space.tile_operator import TileCall


def call_code(call: TileCall, machine: GemminiMachine) -> bytes | None:
    """The accelerator's code for a call; None if the accelerator has no instructions for it, so that the host computes
    it."""
    operands = {
        param.name: operand
        for param, operand in zip(call.program.params, call.operands, strict=True)
        if operand is not None
    }
    result = len(call.specs) - 1
    if len(set(operands.values())) < len(operands):
        return None  # one tensor as two parameters
    sizes = {
        name: call.specs[operand][0].bytes * call.specs[operand][1] for name, operand in operands.items()
    }
    try:
        found = compiled(call.program, call.grid, call.scalars, machine, sizes=sizes)
    except AcceleratorMatchError:
        return None
    if any(operands[name] != result for name in found.stored):
        return None
    regions = {operands[name]: Region(start, high, False) for name, (start, _, high) in found.regions.items()}
    every = [
        regions.get(number, Region(0, dtype.bytes * size, False))
        for number, (dtype, size) in enumerate(call.specs)
    ]
    if any(number not in regions for number in range(len(every))):
        return None  # an operand that the kernel does not take
    buffers = f"{found.stages} buffers" if found.stages > 1 else "one buffer"
    header = Header(
        dim=machine.dim,
        scratchpad_rows=machine.scratchpad_rows,
        accumulator_rows=machine.accumulator_rows,
        dram_bytes=found.dram_bytes,
        images=1,
        arguments=tuple(every[:-1]),
        result=every[-1],
        instructions=len(found.program),
        cycles=found.cycles.total,
        decisions=f"{call.decisions}, {buffers}",
    )
    return packed(header, encode(found.program))
