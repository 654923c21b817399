"""LLVM as a toolchain: textual IR in, optimised object code or assembly out."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import llvmlite
import llvmlite.binding as llvm
from llvmlite.binding.newpassmanagers import NewPassManager

from tilewright.errors import CodegenError


class Processor(Protocol):
    """The properties of a `CpuMachine` that LLVM needs. Code for equal values is the same."""

    @property
    def triple(self) -> str: ...

    @property
    def cpu(self) -> str: ...

    def feature_string(self) -> str: ...

    def __hash__(self) -> int: ...


@lru_cache(maxsize=1)
def _initialised() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # for inline assembly


def version() -> str:
    """What, besides the program and the machine, decides the object code."""
    return f"llvmlite {llvmlite.__version__}, LLVM {'.'.join(map(str, llvm.llvm_version_info))}"


@lru_cache(maxsize=1)
def _all_initialised() -> None:
    """Every target that LLVM was built with, for machines that are not this one."""
    _initialised()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@lru_cache(maxsize=8)
def _target_machine(machine: Processor) -> Any:
    here = machine.triple.partition("-")[0] == llvm.get_process_triple().partition("-")[0]
    (_initialised if here else _all_initialised)()
    target = llvm.Target.from_triple(machine.triple)
    # Position-independent and small: kernels are loaded anywhere, and reach only their own constants.
    return target.create_target_machine(
        cpu=machine.cpu, features=machine.feature_string(), opt=3, reloc="pic", codemodel="small"
    )


def optimise(ir_text: str, machine: Processor) -> Any:
    """The parsed, verified and optimised module. Programs are explicit about vectors and unrolling, so LLVM's own
    vectorisers and unroller stay off: they cost time and second-guess the schedule."""
    _initialised()
    try:
        # In a context of its own, which goes with the module: constants and types of the global one are never freed.
        module = llvm.parse_assembly(ir_text, llvm.create_context())
        module.verify()
    except RuntimeError as error:
        raise CodegenError(f"LLVM rejected generated code: {error}") from None
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_interleaving = False
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(_target_machine(machine), options)
    manager = builder.getModulePassManager()
    manager.run(module, builder)
    # llvmlite's own finaliser of these frees nothing, for another base class comes first: 90 KB for each kernel.
    if type(manager)._dispose is not NewPassManager._dispose:
        NewPassManager._dispose(manager)
    return module


def object_code(ir_text: str, machine: Processor) -> bytes:
    return bytes(_target_machine(machine).emit_object(optimise(ir_text, machine)))


def assembly(ir_text: str, machine: Processor, *, comments: bool = False) -> str:
    """`comments`: with LLVM's remarks, which name what is spilled."""
    target = _target_machine(machine)
    target.set_asm_verbosity(comments)
    return str(target.emit_assembly(optimise(ir_text, machine)))
