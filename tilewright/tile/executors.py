"""The contract between the tile language and what runs its kernels on a device.

    kernel[grid](...)  ->  TileProgram + Facts  ->  executor_for(kind).compile(...)  ->  launchable(grid, values)

- The **kind** of a launch is where its tensors are: "cpu" for NumPy arrays and PyTorch tensors on the CPU, else
  PyTorch's name of the device's type. All tensors of a launch are of one kind. An accelerator beside the processor is
  named by the option `target` instead.
- An **executor** compiles programs for one kind. It sees each combination of program, facts and options once: `Kernel`
  keeps what it returns, in memory. What it keeps on disk is its own business (`codegen/cache.py`).
- `compile` returns a **launchable**, or None: the program runs in the interpreter then (a program that prints on a
  device that cannot print). It raises a `TilewrightError` for what the user can change: an unknown option, too much
  memory for tiles.
- A launchable is called with the grid, three sizes, none of them 0, and one value for each parameter of the program in
  its order: the address of the element with index 0 of a tensor, or a Python number of the parameter's type. It
  returns when the work is done, or queued on the stream that the device's other work of the caller is on. The caller
  keeps the tensors alive. A launchable may be called from several threads.
- **Facts** hold for every launch of what was compiled with them. They are found anew at each launch and are part of the
  key, so they are few: see `Facts`.
- **Options** are the caller's `options={...}` of a launch, checked by the executor: threads, warps, stages. They never
  change what a kernel computes.

But for `ACCELERATORS`, nothing in `tile/` names a target. Packages above register an executor for a kind with
`register_executor`; the modules in `_PROVIDERS` do so when they are imported, which the first launch sees to.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tilewright.tile.ir import TileProgram

ACCELERATORS = ("gemmini",)  # beside a processor, whose memory their kernels' tensors are in
_PROVIDERS = ("tilewright.codegen.tiles",)

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """Facts about the arguments besides their types. `disjoint`: no two tensors share an element, a tensor that is
    passed twice included. `divisors`: (parameter, d) where d > 1 divides a tensor's address in bytes or an integer
    argument: a power of two up to 16. These are determined only for executors that request them (`wants_divisors`)."""

    disjoint: bool = False
    divisors: tuple[tuple[str, int], ...] = ()


def are_disjoint(spans: list[tuple[int, int]]) -> bool:
    """Whether no two tensors share a byte; of each, its first address and the one behind it."""
    spans.sort()
    end = -1
    for low, high in spans:
        if low < end and low != high:
            return False
        if high > end:
            end = high
    return True


class Launchable(Protocol):
    def __call__(self, grid: tuple[int, int, int], values: Sequence[Any], /) -> None: ...


class TileExecutor(Protocol):
    wants_divisors: bool

    def compile(self, program: TileProgram, facts: Facts, options: Options) -> Launchable | None:
        """Compile the program for this executor; None if the interpreter must run it."""

    def source(self, program: TileProgram, facts: Facts, options: Options) -> str:
        """The code of the device that `compile` makes, for people: assembly, or CUDA."""


_loaders: dict[str, Callable[[], TileExecutor]] = {}
_executors: dict[str, TileExecutor] = {}


def register_executor(kind: str, load: Callable[[], TileExecutor]) -> None:
    """`load` is called at the first launch on that kind of device. A later registration replaces an earlier one."""
    _loaders[kind] = load
    _executors.pop(kind, None)


def executor_for(kind: str) -> TileExecutor | None:
    """The executor of a kind of device; None where there is none."""
    found = _executors.get(kind)
    if found is not None:
        return found
    if kind not in _loaders:
        for provider in _PROVIDERS:
            importlib.import_module(provider)
    if kind not in _loaders:
        return None
    _executors[kind] = found = _loaders[kind]()
    return found
