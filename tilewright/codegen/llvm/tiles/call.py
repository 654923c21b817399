"""A launch of a tile kernel as a kernel of a plan: the grid and all numbers are constants in it.

void symbol(void** arguments, int64_t begin, int64_t end)     fills the slots of `emit.py` and runs those instances
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.llvm import toolchain
from tilewright.codegen.llvm.tiles.emit import emit_tile_program, prints
from tilewright.codegen.llvm.tiles.executor import tile_key
from tilewright.codegen.llvm.types import I64, PTR
from tilewright.dtypes import DType
from tilewright.errors import CodegenError
from tilewright.hw import CpuMachine
from tilewright.link import Linkable
from tilewright.runtime.contract import Argument
from tilewright.space.tile_operator import TileCall
from tilewright.tile.executors import Facts
from tilewright.tile.ir import TileType

_FACTS = Facts(
    disjoint=True
)  # values of a plan lie apart, and a tile kernel of one only stores to its result


def call_key(call: TileCall, machine: CpuMachine) -> str:
    return tile_key(str(call), _FACTS, machine)


def call_ir(call: TileCall, machine: CpuMachine, symbol: str) -> str:
    if prints(call.program):
        raise CodegenError(f"{call.name}: a kernel that prints cannot be compiled")
    module = emit_tile_program(call.program, _FACTS, machine, f"{symbol}_instances")
    instances = module.globals[f"{symbol}_instances"]
    instances.linkage = "internal"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR, I64, I64]), symbol)
    function.attributes.add("nounwind")
    arguments, begin, end = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    slots = builder.alloca(I64, size=I64(3 + len(call.program.params)), name="slots")

    def store(number: int, value: Any) -> None:
        at = builder.gep(slots, [I64(number)], inbounds=True, source_etype=I64)
        builder.store(value, at)

    for axis, size in enumerate(call.grid):
        store(axis, I64(size))
    for number, param in enumerate(call.program.params):
        operand = call.operands[number]
        if operand is not None:
            at = builder.gep(arguments, [I64(operand)], inbounds=True, source_etype=PTR)
            store(3 + number, builder.ptrtoint(builder.load(at, typ=PTR), I64))
        else:
            assert isinstance(param.type, TileType)
            store(3 + number, _constant(param.type.dtype, call.numbers[number]))
    builder.call(instances, [slots, begin, end])
    builder.ret_void()
    return str(module)


def _constant(dtype: DType, number: bool | int | float) -> ir.Constant:
    """A number as the first bytes of a slot."""
    bits = dtype.numpy.type(number).tobytes()
    return I64(int.from_bytes(bits.ljust(8, b"\0"), "little"))


def build_call(call: TileCall, machine: CpuMachine, cache: ObjectCache | None) -> tuple[Linkable, bool]:
    key = call_key(call, machine)
    symbol = f"tw_{key}"
    code = cache.get(key) if cache is not None else None
    cached = code is not None
    if code is None:
        code = toolchain.object_code(call_ir(call, machine, symbol), machine)
        if cache is not None:
            cache.put(key, code)
    arguments = tuple(Argument(dtype.short, size) for dtype, size in call.specs)
    packings = (None,) * (len(call.specs) - 1)
    return Linkable(symbol, code, call.extent, call.decisions, packings, arguments=arguments), cached
