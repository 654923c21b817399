"""Executors of tile kernels by kind of device; `tile/executors.py` has the contract.

A slice is a module with a class `Executor` (of no arguments) that is a `TileExecutor`.
"""

from __future__ import annotations

import importlib

from tilewright.tile.executors import TileExecutor, register_executor

_SLICES = {
    "cpu": "tilewright.codegen.llvm.tiles.executor",
    "cuda": "tilewright.codegen.cuda.tiles.executor",
    "gemmini": "tilewright.codegen.gemmini.tiles.executor",
}


def _load(name: str) -> TileExecutor:
    executor: TileExecutor = importlib.import_module(name).Executor()
    return executor


for _kind, _name in _SLICES.items():
    register_executor(_kind, lambda name=_name: _load(name))  # type: ignore[misc]
