"""The third level of features: how a kernel is assigned to a tensor instruction.

An assignment has 15 features of data movement (which fragments an instruction holds, where they come from and how they
get there) and 5 of computation (the instruction and how often a warp issues it), as in ATFormer. They are read off
the knobs of the templates that multiply on tensor cores, so that no kernel has to be made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np

from tilewright.dtypes import DType
from tilewright.space.space import Value

_MMA = (16, 8)  # rows and columns of the result of `mma.sync`
_WARP = 32

MOVEMENT = (
    "left_fragment",
    "right_fragment",
    "result_fragment",
    "operand_bytes",
    "result_bytes",
    "left_through_shared",
    "right_through_shared",
    "matrix_loads",
    "left_transposed",
    "right_transposed",
    "asynchronous",
    "step_bytes",
    "stages",
    "fetched_ahead",
    "results_through_shared",
)
COMPUTATION = ("tensor_instruction", "rows", "columns", "depth", "issues")
ASSIGNMENT: tuple[str, ...] = (*MOVEMENT, *COMPUTATION)


@dataclass(frozen=True)
class Assignment:
    """Fragments in elements of a thread, tiles in bytes, the instruction's rows, columns and depth, and how many a
    warp issues in a step of the main loop. 0: it does not apply."""

    left_fragment: float = 0.0
    right_fragment: float = 0.0
    result_fragment: float = 0.0
    operand_bytes: float = 0.0
    result_bytes: float = 0.0
    left_through_shared: bool = False
    right_through_shared: bool = False
    matrix_loads: bool = False
    left_transposed: bool = False
    right_transposed: bool = False
    asynchronous: bool = False
    step_bytes: float = 0.0
    stages: float = 0.0
    fetched_ahead: bool = False
    results_through_shared: bool = False
    tensor_instruction: bool = False
    rows: float = 0.0
    columns: float = 0.0
    depth: float = 0.0
    issues: float = 0.0

    def features(self) -> np.ndarray:
        """In the order of ASSIGNMENT; magnitudes as logarithms, so that a flag stays 0 or 1."""
        return np.log2(1 + np.array(astuple(self), float))


NONE = Assignment()


def _tiled(
    size: int,
    warp: tuple[int, int],
    block: tuple[int, int, int],
    depth: int,
    stages: int,
    transposed: tuple[bool, bool],
    ahead: bool = False,
) -> Assignment:
    rows, columns = _MMA
    return Assignment(
        left_fragment=rows * depth / _WARP,
        right_fragment=columns * depth / _WARP,
        result_fragment=rows * columns / _WARP,
        operand_bytes=size,
        result_bytes=4,
        left_through_shared=True,
        right_through_shared=True,
        matrix_loads=True,
        left_transposed=transposed[0],
        right_transposed=transposed[1],
        asynchronous=True,
        step_bytes=float(size * (block[0] + block[1]) * block[2]),
        stages=stages,
        fetched_ahead=ahead,
        results_through_shared=True,
        tensor_instruction=True,
        rows=rows,
        columns=columns,
        depth=depth,
        issues=math.prod(warp) * block[2] / (rows * columns * depth),
    )


def of_knobs(template: str, values: Mapping[str, Value], dtype: DType) -> Assignment:
    """The assignment of a config of the templates that multiply on tensor cores; NONE for others."""
    found = {name: int(value) for name, value in values.items() if isinstance(value, int)}
    if {"bm", "bn", "bk", "wm", "wn", "instruction_k", "stages"} <= found.keys():
        return _tiled(
            dtype.bytes,
            (found["wm"], found["wn"]),
            (found["bm"], found["bn"], found["bk"]),
            found["instruction_k"],
            found["stages"],
            (False, False),
            bool(found.get("prefetch", 0)),
        )
    if {"bm", "bn", "bk", "warps_m", "warps_n", "stages"} <= found.keys():
        warp = found["bm"] // found["warps_m"], found["bn"] // found["warps_n"]
        block = found["bm"], found["bn"], found["bk"]
        return _tiled(dtype.bytes, warp, block, 32 // dtype.bytes, found["stages"], (False, False))
    if template == "tensor-core-attention" and {"warps", "rows", "keys", "stages"} <= found.keys():
        queries = 16 * found["warps"] * found["rows"]
        return _tiled(
            2,
            (16 * found["rows"], found["keys"]),
            (queries, found["keys"], 64),
            16,
            found["stages"],
            (False, False),
        )
    return NONE
