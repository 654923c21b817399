"""The kinds of machines that a plan can be for, by the first part of the target's triple: how it is checked
and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.errors import CodegenError
from tilewright.runtime import contract, elf, host
from tilewright.runtime.plan import Plan

if TYPE_CHECKING:
    from tilewright.runtime.model import CompiledModel

_Make = Callable[[Plan, Sequence[np.ndarray], Mapping[str, bytes], "int | None"], "CompiledModel"]


@dataclass(frozen=True)
class MachineKind:
    check: Callable[[dict[str, Any]], None]  # raises ArtifactMachineError if this machine cannot run it
    model: _Make
    well_formed: Callable[[bytes, str], None]  # raises CodegenError unless the loader can take the code


def _processor_model(
    plan: Plan, constants: Sequence[np.ndarray], objects: Mapping[str, bytes], threads: int | None
) -> CompiledModel:
    from tilewright.runtime.model import CompiledModel

    return CompiledModel(plan, constants, objects, threads=threads)


def _check_gpu(target: dict[str, Any]) -> None:
    from tilewright.runtime.cuda.executor import check_target

    check_target(target)


def _gpu_model(
    plan: Plan, constants: Sequence[np.ndarray], objects: Mapping[str, bytes], threads: int | None
) -> CompiledModel:
    from tilewright.runtime.cuda.model import GpuModel

    return GpuModel(plan, constants, objects)


def _check_gpu_code(code: bytes, symbol: str) -> None:
    """The driver checks both forms itself."""
    if not code.startswith((b"\x7fELF", b"//", b".version")) or symbol.encode() not in code:
        raise CodegenError(f"no machine code for a GPU that has the kernel {symbol[:80]!r}")


def _check_accelerated(target: dict[str, Any]) -> None:
    from tilewright.runtime.gemmini.executor import check_target

    check_target(target)


def _accelerated_model(
    plan: Plan, constants: Sequence[np.ndarray], objects: Mapping[str, bytes], threads: int | None
) -> CompiledModel:
    from tilewright.runtime.gemmini.executor import GemminiModel

    return GemminiModel(plan, constants, objects, threads=threads)


def _check_accelerated_code(code: bytes, symbol: str) -> None:
    from tilewright.runtime.gemmini.kernel import is_accelerated, well_formed

    (well_formed if is_accelerated(code) else elf.check)(code, symbol)


_PROCESSOR = MachineKind(host.check, _processor_model, elf.check)
_KINDS = {
    "nvptx64": MachineKind(_check_gpu, _gpu_model, _check_gpu_code),
    "gemmini": MachineKind(_check_accelerated, _accelerated_model, _check_accelerated_code),
}


def _kind(target: dict[str, Any]) -> MachineKind:
    return _KINDS.get(str(target["triple"]).partition("-")[0], _PROCESSOR)


def check(target: dict[str, Any]) -> None:
    _kind(target).check(target)


def check_contracts(plan: Plan, objects: Mapping[str, bytes]) -> None:
    """Raise VerificationError or CodegenError unless the plan fits its kernels, and these can be loaded."""
    contract.check_contracts(plan, objects, _kind(plan.target).well_formed)


def model(
    plan: Plan, constants: Sequence[np.ndarray], objects: Mapping[str, bytes], threads: int | None = None
) -> CompiledModel:
    return _kind(plan.target).model(plan, constants, objects, threads)
