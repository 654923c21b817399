"""Intrinsics of a CPU as LLVM calls: its own intrinsics, inline assembly, functions of the C library.

LLVM ends the process for assembly that it cannot parse and for an intrinsic that it cannot select. So each is compiled
by itself in a process of its own, once, before it becomes part of a kernel: what fails there is an error of whoever
declared it, and costs other kernels nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache

from llvmlite import ir

from tilewright.codegen.llvm.types import element_type, vector_of
from tilewright.errors import IntrinsicError
from tilewright.hw import CpuMachine
from tilewright.hw.intrinsics import ExternalSymbol, Fragment, Intrinsic, LlvmAssembly, LlvmIntrinsic, Native
from tilewright.runtime.loader import ALLOWED

_SECONDS = 60.0
_SAID = 400  # characters of what LLVM says

# Arguments: the triple, the processor, its features, then the folders to import llvmlite from.
_COMPILE = """
import sys
triple, cpu, features, *folders = sys.argv[1:]
sys.path[:] = folders
import llvmlite.binding as llvm
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.initialize_native_asmparser()
module = llvm.parse_assembly(sys.stdin.read())
module.verify()
machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic")
machine.emit_object(module)
"""


def arguments_of(intrinsic: Intrinsic) -> tuple[str, ...]:
    """The operands that the instruction takes, by name and in order."""
    return _native(intrinsic).arguments


def call(
    builder: ir.IRBuilder, machine: CpuMachine, intrinsic: Intrinsic, values: Mapping[str, ir.Value]
) -> ir.Value:
    """The instruction with these operands; raises IntrinsicError if the machine lacks it, or LLVM cannot compile it."""
    _check(intrinsic, machine)
    return _call(builder, intrinsic, [values[name] for name in arguments_of(intrinsic)])


def _native(intrinsic: Intrinsic) -> Native:
    emit = intrinsic.emit
    if not isinstance(emit, LlvmIntrinsic | LlvmAssembly | ExternalSymbol):
        raise IntrinsicError(f"intrinsic {intrinsic.name}: LLVM cannot emit a {type(emit).__name__}")
    return emit


def _type(fragment: Fragment) -> ir.Type:
    return vector_of(element_type(fragment.tensor.dtype), fragment.size)


def _call(builder: ir.IRBuilder, intrinsic: Intrinsic, values: list[ir.Value]) -> ir.Value:
    emit = _native(intrinsic)
    signature = ir.FunctionType(_type(intrinsic.fragments[0]), [value.type for value in values])
    if isinstance(emit, LlvmAssembly):
        assembly = _Assembly(signature, emit.text, emit.constraints, intel=emit.intel)
        return builder.call(assembly, values)
    name = emit.name if isinstance(emit, LlvmIntrinsic) else emit.symbol
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(function, values)


class _Assembly(ir.InlineAsm):
    """llvmlite's knows no dialects, and writes quotes and line breaks as they are."""

    def __init__(self, signature: ir.FunctionType, text: str, constraints: str, *, intel: bool) -> None:
        super().__init__(signature, text, constraints)
        self.intel = intel

    def descr(self, buf: list[str]) -> None:
        dialect = "inteldialect " if self.intel else ""
        buf.append(f'asm {dialect}"{_escaped(self.asm)}", "{_escaped(self.constraint)}"')


def _escaped(text: str) -> str:
    plain = (32 <= byte < 127 and byte not in b'"\\' for byte in text.encode())
    pairs = zip(text.encode(), plain, strict=True)
    return "".join(chr(byte) if is_plain else f"\\{byte:02X}" for byte, is_plain in pairs)


@lru_cache(maxsize=256)
def _check(intrinsic: Intrinsic, machine: CpuMachine) -> None:
    intrinsic.check_supported(machine)
    emit = _native(intrinsic)
    if isinstance(emit, ExternalSymbol) and emit.symbol not in ALLOWED:
        raise IntrinsicError(
            f"intrinsic {intrinsic.name}: object code may not call {emit.symbol}",
            remedy="call a function of the C library's mathematics, or emit an instruction",
        )
    try:
        text = str(_alone(intrinsic, machine))
        folders = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str) and folder]
        target = [machine.triple, machine.cpu, machine.feature_string()]
        done = subprocess.run(
            [sys.executable, "-I", "-c", _COMPILE, *target, *folders],
            input=text,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IntrinsicError(f"intrinsic {intrinsic.name}: it could not be compiled: {error}") from None
    if done.returncode:
        said = " ".join(done.stderr.split())[-_SAID:]
        raise IntrinsicError(f"intrinsic {intrinsic.name}: LLVM cannot compile it: {said}")


def _alone(intrinsic: Intrinsic, machine: CpuMachine) -> ir.Module:
    """A module with nothing but the instruction, of operands in memory: vectors may be wider than any argument."""
    module = ir.Module(name=intrinsic.name)
    module.triple = machine.triple
    fragments = [intrinsic.fragment(name) for name in arguments_of(intrinsic)]
    pointer = ir.PointerType()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer] * (1 + len(fragments))), "alone")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    out, *given = function.args
    values = [
        builder.load(argument, typ=_type(fragment), align=1)
        for argument, fragment in zip(given, fragments, strict=True)
    ]
    builder.store(_call(builder, intrinsic, values), out, align=1)
    builder.ret_void()
    return module
