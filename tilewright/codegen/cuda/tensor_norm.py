"""Norms of rows around a GEMM on tensor cores -> CUDA C++: statistics before its loop, and a norm of its results."""

from __future__ import annotations

from tilewright.codegen.cuda.emit import emit_statement
from tilewright.codegen.cuda.scalars import c_type
from tilewright.loops.gpu.tensor import NormalisedOutput, NormReduction, RowStatistics, TensorGemm
from tilewright.loops.ir import Stmt

_WARP = 32
_MIN_THREADS = 4  # threads of a row: what they load at once is whole sectors
_UNROLLED = 4  # vectors of a thread that are loaded before the first is needed


def row_statistics(gemm: TensorGemm, statistics: RowStatistics) -> list[str]:
    """The statistics of the tile's rows, in shared memory behind the tiles. Rows beyond the end repeat the last one."""
    t, at = gemm.tiles, int(gemm.tiles.shared_bytes)
    across = min(_WARP, max(_MIN_THREADS, t.threads // t.bm))
    rows = t.threads // across
    tables = []
    for table in statistics.tables:
        kind = c_type(table.dtype)
        tables.append(f"  {kind}* const {table.name} = reinterpret_cast<{kind}*>(shared + {at});")
        at += table.size * table.dtype.bytes
    last = f"min(m0 + sum_row, {gemm.m - 1})" if gemm.m % t.bm else "m0 + sum_row"
    return [
        *tables,
        f"  for (int first_row = 0; first_row < {t.bm}; first_row += {rows}) {{",
        f"    const int own = threadIdx.x % {across}, sum_row = first_row + threadIdx.x / {across};",
        f"    const int place_m = {last};",
        *(
            line
            for each in statistics.passes
            for line in _reduced(gemm, each, "at_k", statistics.length, across, [])
        ),
        "    if (own == 0) {",
        _emitted(gemm, statistics.keep, 3),
        "    }",
        "  }",
        "  __syncthreads();",
    ]


def written_normalised(gemm: TensorGemm, normalised: NormalisedOutput) -> list[str]:
    """Neighbouring threads share a row, and each comes back to its own vectors: nothing is exchanged but the
    reductions' results."""
    t, lanes = gemm.tiles, gemm.lanes
    wide = gemm.n // lanes
    across = next(count for count in (32, 16, 8, 4, 2, 1) if count <= wide)
    rows = t.threads // across
    guards = [
        *([f"sum_row < {t.bm}"] if t.bm % rows else []),
        *([f"place_m < {gemm.m}"] if gemm.m % t.bm else []),
    ]
    inside = f"if ({' && '.join(guards)}) " if guards else ""
    each_vector = [
        f"      for (int sum_vector = own; sum_vector < {wide}; sum_vector += {across}) {{",
        "        const int place_n = sum_vector;",
    ]

    def over_vectors(stmt: Stmt) -> list[str]:
        return [f"    {inside}{{", *each_vector, _emitted(gemm, stmt, 4), "      }", "    }"]

    return [
        "  __syncthreads();",
        f"  for (int first_row = 0; first_row < {t.bm}; first_row += {rows}) {{",
        f"    const int own = threadIdx.x % {across}, sum_row = first_row + threadIdx.x / {across};",
        "    const int place_m = m0 + sum_row;",
        *over_vectors(normalised.keep),
        *(
            line
            for each in normalised.passes
            for line in _reduced(gemm, each, "sum_vector", gemm.n, across, guards)
        ),
        *over_vectors(normalised.write),
        "  }",
    ]


def _reduced(
    gemm: TensorGemm, reduction: NormReduction, vector: str, length: int, across: int, guards: list[str]
) -> list[str]:
    """One reduction along the row: each thread's vectors, their lanes, then the threads."""
    lanes, total, result = reduction.lanes, reduction.total, reduction.result
    kind, combine = c_type(total.dtype), f"{reduction.kind.capitalize()}()"
    inside = f"if ({' && '.join(guards)}) " if guards else ""
    return [
        f"    {kind} {total.name}[{lanes}];",
        _emitted(gemm, reduction.begin, 2),
        f"    {inside}{{",
        f"#pragma unroll {_UNROLLED}",
        f"      for (int {vector} = own; {vector} < {length // lanes}; {vector} += {across}) {{",
        *(["        const int place_n = sum_vector;"] if vector == "sum_vector" else []),
        _emitted(gemm, reduction.add, 4),
        "      }",
        "    }",
        *(
            [
                "#pragma unroll",
                f"    for (int v = 1; v < {lanes}; ++v) {total.name}[0] = {combine}({total.name}[0], {total.name}[v]);",
            ]
            if lanes > 1
            else []
        ),
        f"    const {kind} {result.name}[1] = {{combined<{across}, {reduction.kind.capitalize()}>({total.name}[0])}};",
    ]


def _emitted(gemm: TensorGemm, stmt: Stmt, indent: int) -> str:
    return emit_statement(stmt, gemm.params, indent).rstrip("\n")
