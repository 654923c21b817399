"""Intrinsics: instructions and micro-kernels as data, for CPUs and GPUs alike.

An intrinsic is declared by the tensor expression that it computes over tiles, by which part of each tile a thread
holds, by the features that a machine needs for it, and by how code for it is emitted. One that is a reduction
combines with what its output holds: `c[m, n] += sum(a[m, k] * b[k, n], k)`.

    a, b = te.Tensor("a", (), F32), te.Tensor("b", (8,), F32)
    c = te.compute("c", (8,), F32, lambda n: te.reduce_over("sum", a[()] * b[n], []))
    register_intrinsic(
        Intrinsic(
            "fma_8xf32", c, (a, b),
            LlvmAssembly("vfmadd231ps $2, $1, $0", "=x,x,x,0", ("a", "b", "c")),
            fragments=(vector(c), broadcast(a, 8), vector(b)),
            features=("avx2", "fma"),
        )
    )

Registered intrinsics are candidates wherever their expression matches a task's (`space/sketches/rules/tensorise.py`).
Like all candidates they are built in a separate process, checked against the oracle and timed before one is chosen.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from tilewright import te
from tilewright.errors import IntrinsicError
from tilewright.hw.memory import Scope
from tilewright.support.fingerprint import fingerprint
from tilewright.support.modules import importable_modules
from tilewright.support.plugins import register_installed

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_DIGITS = 8  # of a digest in names
ENTRY_POINTS = "tilewright.intrinsics"  # a callable that registers some

# -- how code is emitted ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LlvmIntrinsic:
    """A call of LLVM's intrinsic of this name (`llvm.x86.avx2.pmadd.wd`).

    `arguments`: the names of the operands in order, including the output if the instruction accumulates into it;
    otherwise the result of a reduction is combined with it afterwards. The same applies to the other kinds.
    """

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class LlvmAssembly:
    """Inline assembly in LLVM's syntax: a template (`$0` is the result, `$1` the first argument) and constraints."""

    text: str
    constraints: str
    arguments: tuple[str, ...]
    intel: bool = False  # the dialect on x86; AT&T's otherwise


@dataclass(frozen=True)
class PtxAssembly:
    """A PTX instruction; its operands follow in assembler syntax, registers in braces and addresses in brackets.
    `through`: a function of `codegen/cuda` that input registers pass through."""

    mnemonic: str
    through: str = ""


@dataclass(frozen=True)
class ExternalSymbol:
    """A call of a function with vector arguments and result. Object code may only call the functions in
    `runtime/loader.py`: the C library's math."""

    symbol: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class AcceleratorCode:
    """Instructions of an accelerator by their names; code generation of its own (`codegen/gemmini/`) emits them."""

    opcodes: tuple[str, ...]


Native = LlvmIntrinsic | LlvmAssembly | ExternalSymbol  # one instruction of a CPU
# A function from operands (`loops.schedule.Operand`), the output first, to loop statements: a micro-kernel.
Statements = Callable[..., Any]
Emission = Native | PtxAssembly | AcceleratorCode | Statements


# -- what a thread holds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fragment:
    """The part of a tile that one thread holds: its element `n` of `size` is the tile's at `element(lane, n)`, where
    `lane` is the thread's index in its warp. Threads from `lanes` on hold nothing. On a CPU there is one thread, and
    `n` is the lane of a register."""

    tensor: te.Tensor
    scope: Scope
    size: int
    element: Callable[[Any, Any], tuple[Any, ...]]
    lanes: int = 1

    def positions(self) -> tuple[tuple[int, ...], ...]:
        """The tile's element in each lane of a CPU register."""
        return tuple(tuple(int(at) for at in self.element(0, n)) for n in range(self.size))


def vector(tensor: te.Tensor) -> Fragment:
    """A tile as one register, row-major."""

    def element(lane: Any, n: Any) -> tuple[Any, ...]:
        found = []
        for extent in reversed(tensor.shape):
            found.append(n % extent)
            n = n // extent
        return tuple(reversed(found))

    return Fragment(tensor, Scope.REGISTER, math.prod(tensor.shape), element)


def broadcast(tensor: te.Tensor, lanes: int) -> Fragment:
    """A single element in all lanes."""
    if math.prod(tensor.shape) != 1:
        raise IntrinsicError(f"{tensor.name} has {tensor.shape} elements, and one is broadcast")
    return Fragment(tensor, Scope.REGISTER, lanes, lambda lane, n: (0,) * len(tensor.shape))


# -- the intrinsic ----------------------------------------------------------------------------------------------------


class HasFeatures(Protocol):
    @property
    def features(self) -> tuple[str, ...]: ...

    def describe(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Intrinsic:
    """`fragments`: of the output, then of the inputs; without any, a thread holds each whole operand, row-major.

    `emit` may be a function that returns loop statements. It may then also define how the output is set to `value`
    before a reduction (`initialise(out, value)`); otherwise the loops that it replaces do it.
    """

    name: str
    output: te.Tensor
    inputs: tuple[te.Tensor, ...]
    emit: Emission
    initialise: Statements | None = None
    fragments: tuple[Fragment, ...] = ()
    features: tuple[str, ...] = ()  # LLVM's names ("avx2"), or a GPU's ("sm_80")

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise IntrinsicError(f"an intrinsic's name must be letters, digits, _ and '.', got {self.name!r}")
        if not self.fragments:
            whole = tuple(vector(tensor) for tensor in (self.output, *self.inputs))
            object.__setattr__(self, "fragments", whole)
        if tuple(fragment.tensor for fragment in self.fragments) != (self.output, *self.inputs):
            raise self._wrong("it must have a fragment of its output, then one of each input")
        if any(load.source not in self.inputs for load in te.loads(self.body)):
            raise self._wrong("it reads a tensor that is not among its inputs")
        axes = {*self.stage.axes, *self.reduced}
        for load in te.loads(self.body):
            if any(index not in axes for index in load.indices):
                raise self._wrong(f"each index of {load.source.name} must be one of its axes")
        if isinstance(self.emit, LlvmIntrinsic | LlvmAssembly | ExternalSymbol):
            self._check_native(self.emit)

    def _check_native(self, emit: Native) -> None:
        names = {tensor.name for tensor in (self.output, *self.inputs)}
        unknown = [name for name in emit.arguments if name not in names]
        if unknown or len(names) != 1 + len(self.inputs):
            raise self._wrong(f"its arguments must be among {sorted(names)}, got {emit.arguments}")
        missing = [tensor.name for tensor in self.inputs if tensor.name not in emit.arguments]
        if missing:
            raise self._wrong(f"its inputs {missing} are not among the arguments")
        fragment = self.fragments[0]
        if sorted(fragment.positions()) != sorted(vector(self.output).positions()):
            raise self._wrong("its result must hold each element of the output once")

    def _wrong(self, why: str) -> IntrinsicError:
        return IntrinsicError(f"intrinsic {self.name}: {why}")

    @property
    def stage(self) -> te.Compute:
        if not isinstance(self.output, te.Compute):
            raise self._wrong("its output must be a te.compute")
        return self.output

    @property
    def body(self) -> te.Expr:
        reduction = self.stage.reduction
        return self.stage.body if reduction is None else reduction.body

    @property
    def reduced(self) -> tuple[te.Var, ...]:
        reduction = self.stage.reduction
        return () if reduction is None else reduction.axes

    @property
    def accumulates(self) -> bool:
        """Whether it accumulates into its output."""
        return self.stage.reduction is not None

    def fragment(self, name: str) -> Fragment:
        """The fragment of the operand of this name."""
        return next(fragment for fragment in self.fragments if fragment.tensor.name == name)

    @cached_property
    def digest(self) -> str:
        """Distinguishes two declarations of one name: measurements of one say nothing about the other."""
        assert not callable(self.emit), "a function has no text to compare"
        held = [(part.tensor.name, part.scope.value, part.size, part.lanes) for part in self.fragments]
        positions = (
            [part.positions() for part in self.fragments] if not isinstance(self.emit, PtxAssembly) else []
        )
        emitted = (type(self.emit).__name__, *vars(self.emit).values())
        shapes = [(tensor.name, tensor.shape, tensor.dtype) for tensor in (self.output, *self.inputs)]
        return fingerprint(self.name, repr(self.body), shapes, held, positions, emitted, self.features)[
            :_DIGITS
        ]

    # -- on a machine ---------------------------------------------------------------------------------------------

    def missing(self, machine: HasFeatures) -> tuple[str, ...]:
        """The features that it needs and the machine lacks."""
        return tuple(name for name in self.features if name not in machine.features)

    def check_supported(self, machine: HasFeatures) -> None:
        """Raise IntrinsicError if the machine cannot run it."""
        missing = self.missing(machine)
        if missing:
            raise IntrinsicError(
                f"intrinsic {self.name} needs {', '.join(missing)}, which {machine.describe()} lacks",
                remedy="compile for a machine that has these features, or use another intrinsic",
            )


# -- the registry -----------------------------------------------------------------------------------------------------

_registered: dict[str, Intrinsic] = {}
_modules: dict[str, str] = {}  # the module that registers each


def register_intrinsic(intrinsic: Intrinsic, module: str | None = None) -> None:
    """Offer an intrinsic to every compilation of this process whose machine has its features.

    `module`: the module that registers it on import, for worker processes; the caller's by default.
    """
    if isinstance(intrinsic.emit, AcceleratorCode) or callable(intrinsic.emit):
        raise IntrinsicError(
            f"intrinsic {intrinsic.name}: what is registered must be one instruction of LLVM or PTX",
            remedy="give a schedule the micro-kernel itself: schedule.tensorise(loop, intrinsic)",
        )
    needs_gpu = any(name.startswith("sm_") for name in intrinsic.features)
    if isinstance(intrinsic.emit, PtxAssembly) and not needs_gpu:
        raise IntrinsicError(
            f"intrinsic {intrinsic.name}: an instruction of GPUs must name the capability that it needs",
            remedy='add the first one that has it to its features, such as "sm_80"',
        )
    if intrinsic.name in _registered:
        raise IntrinsicError(f"there is an intrinsic {intrinsic.name!r} already")
    _registered[intrinsic.name] = intrinsic
    _modules[intrinsic.name] = module or str(sys._getframe(1).f_globals.get("__name__", "__main__"))


def _all() -> dict[str, Intrinsic]:
    """The registered intrinsics, with those of installed packages."""
    register_installed(ENTRY_POINTS)
    return _registered


def unregister_intrinsic(name: str) -> None:
    """Remove the intrinsic of this name."""
    _registered.pop(name, None)
    _modules.pop(name, None)


def registered_intrinsics(machine: HasFeatures) -> tuple[Intrinsic, ...]:
    """The intrinsics that a machine supports, in order of registration."""
    return tuple(intrinsic for intrinsic in _all().values() if not intrinsic.missing(machine))


def registered() -> tuple[Intrinsic, ...]:
    """All registered intrinsics, whatever they need."""
    return tuple(_registered.values())


def find_intrinsic(name: str) -> Intrinsic | None:
    """The registered intrinsic of this name, whatever it needs."""
    return _all().get(name)


def intrinsic_named(name: str, machine: HasFeatures) -> Intrinsic:
    """The registered intrinsic of this name; raises IntrinsicError if there is none, or if the machine lacks it."""
    found = _all().get(name)
    if found is None:
        raise IntrinsicError(
            f"the intrinsic must be one of {', '.join(_registered) or 'none'}, got {name!r}",
            remedy="register it with tilewright.hw.intrinsics.register_intrinsic",
        )
    found.check_supported(machine)
    return found


def registering_modules() -> tuple[str, ...]:
    """The modules that another process imports to have the same registered intrinsics."""
    return importable_modules({f"intrinsic {name!r}": module for name, module in _modules.items()})
