"""The third level of features: how a kernel is assigned to a tensor instruction.

An assignment has 15 features of data movement (which fragments an instruction holds, where they come from and how they
get there) and 5 of computation (the instruction and how often a warp issues it), as in ATFormer. They are read off a
kernel, or off the knobs of a template that has one instruction, which needs no kernel to be made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np

from tilewright.dtypes import DType
from tilewright.loops.gpu.attention import TensorAttention
from tilewright.loops.gpu.tensor import MatrixOperand, TensorGemm
from tilewright.loops.ir import Await, Copy, Invoke, Program, Scope, Warp, walk_stmts
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


def of_kernel(kernel: object) -> Assignment:
    """The assignment of a kernel that was made; NONE without a tensor instruction."""
    if isinstance(kernel, TensorGemm):
        t = kernel.tiles
        left, right = (getattr(kernel, name, None) for name in ("a", "b"))
        return _tiled(
            t.size,
            (t.bm // t.warps_m, t.bn // t.warps_n),
            (t.bm, t.bn, t.bk),
            32 // t.size,
            t.stages,
            (_is_transposed(left), _is_transposed(right)),
        )
    if isinstance(kernel, TensorAttention):
        tiles = kernel.tiles
        return _tiled(
            2,
            (16 * tiles.rows, tiles.keys),
            (tiles.queries, tiles.keys, kernel.width),
            16,
            tiles.stages,
            (False, False),
        )
    return of_program(kernel) if isinstance(kernel, Program) else NONE


def _is_transposed(operand: object) -> bool:
    return isinstance(operand, MatrixOperand) and operand.transposed


def of_program(program: Program) -> Assignment:
    """Count the instructions of a program: the multiplication, the loads of its operands, and the copies that these
    read."""
    multiplications: list[Warp] = []
    loads: list[Warp] = []
    copied, pending = 0.0, 0
    invoked: Invoke | None = None
    for stmt in walk_stmts(program.body):
        if isinstance(stmt, Warp):
            (multiplications if "mma" in stmt.instruction.name else loads).append(stmt)
        elif isinstance(stmt, Copy):
            copied += stmt.lanes * stmt.buffer.dtype.bytes
        elif isinstance(stmt, Await):
            pending = max(pending, stmt.pending)
        elif isinstance(stmt, Invoke):
            invoked = invoked or stmt
    if invoked is not None and not multiplications:
        result, *operands = invoked.intrinsic.fragments
        sizes = [float(each.size) for each in (*operands, result)]
        left, right = (sizes[0], sizes[1]) if len(operands) > 1 else (sizes[0], 0.0)
        dtype = operands[0].tensor.dtype
        return Assignment(
            left, right, float(result.size), dtype.bytes, result.tensor.dtype.bytes, columns=result.size
        )
    if not multiplications:
        return NONE
    instruction = multiplications[0].instruction
    result, left_fragment, right_fragment = instruction.fragments
    depth = left_fragment.tensor.shape[-1]
    names = [load.instruction.name for load in loads]
    shared = any(load.operands[1][0].scope is Scope.SCRATCH for load in loads)
    return Assignment(
        left_fragment=left_fragment.size,
        right_fragment=right_fragment.size,
        result_fragment=result.size,
        operand_bytes=left_fragment.tensor.dtype.bytes,
        result_bytes=result.tensor.dtype.bytes,
        left_through_shared=shared,
        right_through_shared=shared,
        matrix_loads=any("ldmatrix" in name for name in names),
        left_transposed=any(".trans" in name for name in names[:1]),
        right_transposed=any(".trans" in name for name in names[-1:]),
        asynchronous=copied > 0,
        step_bytes=copied,
        stages=pending + 2,
        fetched_ahead=False,
        results_through_shared=shared,
        tensor_instruction=True,
        rows=_MMA[0],
        columns=_MMA[1],
        depth=depth,
        issues=float(len(multiplications)),
    )


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


# -- without making the kernel ----------------------------------------------------------------------------------------


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
