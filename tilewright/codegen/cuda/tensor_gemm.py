"""GEMMs on tensor cores -> CUDA C++: the pipeline of `matmul.cuh` with its holes filled."""

from __future__ import annotations

from tilewright.codegen.cuda.build import GpuSource
from tilewright.codegen.cuda.emit import emit_statement, emit_value
from tilewright.codegen.cuda.scalars import c_type
from tilewright.codegen.cuda.tensor_frame import (
    batch_coordinates,
    bool_text,
    framed,
    matrix_type,
    written,
    written_across,
)
from tilewright.codegen.cuda.tensor_norm import row_statistics, written_normalised
from tilewright.loops.gpu.tensor import (
    ROW_PADDING,
    ComputedOperand,
    Operand,
    ReducedOutput,
    TensorGemm,
    WindowOperand,
)
from tilewright.loops.ir import Stmt

_RASTER = 8  # tiles along m that neighbouring blocks share a column of b with: they meet in L2


def gemm_source(gemm: TensorGemm) -> GpuSource:
    tiles = gemm.tiles
    return framed(
        gemm,
        ["cluster", "matmul"] if tiles.split > 1 else ["matmul"],
        [*declared(gemm, gemm.a, "Left"), *declared(gemm, gemm.b, "Right")],
        _in_turn(gemm) if tiles.persistent else _at_once(gemm),
        gemm.blocks,
        tiles.split,
    )


def _at_once(gemm: TensorGemm) -> list[str]:
    """A tile for each block, or for each cluster, whose blocks sum a part of k each."""
    t = gemm.tiles
    steps = -(-gemm.k // t.bk)
    first, count, end = "0", str(steps), str(gemm.k)
    part = []
    if t.split > 1:
        part = [
            f"  const int part = blockIdx.x % {t.split};",
            f"  const int first = {steps} * part / {t.split}, steps = {steps} * (part + 1) / {t.split} - first;",
        ]
        first, count, end = f"first * {t.bk}", "steps", f"min({gemm.k}, (first + steps) * {t.bk})"
    left, right = loaders(gemm, first, end)
    lines = [
        *_coord(gemm, f"blockIdx.x / {t.split}"),
        *part,
        *([] if gemm.statistics is None else row_statistics(gemm, gemm.statistics)),
        f"  {left[0]} a({left[1]});",
        f"  {right[0]} b({right[1]});",
        f"  using P = {pipeline_type(gemm)};",
        f"  {_sums(gemm)} = reinterpret_cast<P::Total*>(shared);",
        "  P::begin(shared, a, b);",
        f"  P::finish(shared, sums, a, b, {count}, [] {{}});",
    ]
    if t.split > 1:
        pitch = t.bn + ROW_PADDING
        lines.append(f"  add_parts<{t.split}, {t.bm}, {t.bn}, {pitch}, {t.threads}>(sums, part);")
    if gemm.reduced is not None:
        combine = _write_along if gemm.reduced.along else _write_reduced
        return [*lines, *combine(gemm, gemm.reduced)]
    if gemm.normalised is not None:
        return [*lines, *written_normalised(gemm, gemm.normalised)]
    return [*lines, *_written(gemm, t.split)]


def _in_turn(gemm: TensorGemm) -> list[str]:
    """Several tiles for each block: what the next one reads is on its way while the results of one are written."""
    t = gemm.tiles
    left, right = loaders(gemm, "0", str(gemm.k))
    return [
        f"  using P = {pipeline_type(gemm)};",
        *(
            line
            for name, (kind, arguments) in (("left", left), ("right", right))
            for line in (
                f"  const auto {name} = [&](int number) {{",
                *_coord(gemm, "number"),
                f"  return {kind}({arguments});",
                "  };",
            )
        ),
        f"  {_sums(gemm)} = reinterpret_cast<P::Total*>(shared + {t.stage_bytes});",
        "  int number = blockIdx.x;",
        "  auto a = left(number);",
        "  auto b = right(number);",
        "  P::begin(shared, a, b);",
        "  while (true) {",
        "  const int current = number;",
        "  number += gridDim.x;",
        f"  P::finish(shared, sums, a, b, {-(-gemm.k // t.bk)}, [&] {{",
        f"    if (number < {gemm.tile_count}) {{",
        "      a = left(number);",
        "      b = right(number);",
        "      P::begin(shared, a, b);",
        "    }",
        "  });",
        *_coord(gemm, "current"),
        *_written(gemm, 1),
        f"  if (number >= {gemm.tile_count}) break;",
        "  }",
    ]


def _written(gemm: TensorGemm, split: int) -> list[str]:
    t = gemm.tiles
    return written_across(gemm) if gemm.across else written(gemm, (gemm.m, gemm.n), (t.bm, t.bn), split)


def _sums(gemm: TensorGemm) -> str:
    return f"{c_type(gemm.sums.dtype)}* const sums"


def _coord(gemm: TensorGemm, number: str) -> list[str]:
    """The position of the tile with that number: consecutive tiles are in groups of rows."""
    rows, columns = gemm.rows, gemm.columns
    return [
        f"  const int tile = {number} % {rows * columns};",
        f"  const int group = tile / {_RASTER * columns} * {_RASTER};",
        f"  const int height = min({rows} - group, {_RASTER});",
        f"  const int m0 = (group + tile % {_RASTER * columns} % height) * {gemm.step_m};",
        f"  const int n0 = tile % {_RASTER * columns} / height * {gemm.step_n};",
        *batch_coordinates(gemm.batch, f"{number} / {rows * columns}"),
    ]


def pipeline_type(gemm: TensorGemm, columns: int | None = None) -> str:
    """`columns`: how many of the tile's are computed, if not all."""
    t = gemm.tiles
    numbers = (t.bm, t.bn, t.bk, t.warps_m, t.warps_n, t.stages)
    (left, _), (right, _) = loaders(gemm, "0", "0")
    some = f", {columns}" if columns not in (None, t.bn) else ""
    return f"Product<{c_type(gemm.dtype)}, {', '.join(map(str, numbers))}, {left}, {right}{some}>"


def loaders(
    gemm: TensorGemm, first: str, end: str, table_at: int | None = None
) -> tuple[tuple[str, str], tuple[str, str]]:
    """The type of the object that loads each operand's tiles, and the expression that creates it. `table_at`: the
    offset of a gathered operand's table; None: after the tiles."""
    at = gemm.tiles.shared_bytes if table_at is None else table_at
    table = f"shared + {at}, " if isinstance(gemm.a, WindowOperand) else ""
    at_a, at_b = _begin(gemm.a, "Left"), _begin(gemm.b, "Right")
    return (
        (_loader(gemm, gemm.a, True), f"{table}{at_a}, m0, {first}, {gemm.m}, {end}"),
        (_loader(gemm, gemm.b, False), f"{at_b}, n0, {first}, {gemm.n}, {end}"),
    )


def _begin(operand: Operand, name: str) -> str:
    if isinstance(operand, ComputedOperand):
        return (
            f"{name}{{{', '.join([*(b.name for b in operand.buffers), *(x.name for x in operand.batch)])}}}"
        )
    return f"{operand.buffer.name} + {emit_value(operand.offset)}"


def _loader(gemm: TensorGemm, operand: Operand, left: bool) -> str:
    t, kind = gemm.tiles, c_type(gemm.dtype)
    outer, extent = (t.bm, gemm.m) if left else (t.bn, gemm.n)
    if isinstance(operand, WindowOperand):
        return f"Gathered<{kind}, {outer}, {t.bk}, {operand.lanes}, {t.threads}, Window>"
    if isinstance(operand, ComputedOperand):
        name = "Left" if left else "Right"
        switches = f"{bool_text(operand.transposed)}, {bool_text(left)}, {operand.lanes}, {t.threads}"
        return f"Computed<{kind}, {outer}, {t.bk}, {switches}, {name}>"
    whole = extent % outer == 0 and (gemm.step_m if left else gemm.step_n) == outer
    return matrix_type(kind, operand, outer, t.bk, left, t.threads, whole)


def declared(gemm: TensorGemm, operand: Operand, name: str) -> list[str]:
    """The declarations that the type of an operand's loader consists of."""
    if isinstance(operand, WindowOperand):
        return _window(operand)
    return _source_of_chunks(gemm, operand, name) if isinstance(operand, ComputedOperand) else []


def _source_of_chunks(gemm: TensorGemm, operand: ComputedOperand, name: str) -> list[str]:
    """The struct that reads and computes an operand's elements, several neighbours at a time."""

    def arrays(of: str, constant: str) -> list[str]:
        return [
            f"    {constant}{c_type(b.dtype)} (&{b.name})[{b.size}] = {of}.{b.name};" for b in operand.kept
        ]

    inside = "true" if operand.inside is None else emit_value(operand.inside)
    values = c_type(operand.value.dtype)
    return [
        f"struct {name} {{",
        *(f"  const {c_type(buffer.dtype)}* {buffer.name};" for buffer in operand.buffers),
        *(f"  int {axis.name};" for axis in operand.batch),
        "  struct Chunk {",
        *(f"    {c_type(b.dtype)} {b.name}[{b.size}];" for b in operand.kept),
        "  };",
        "  __device__ bool read(Chunk& into, int outer, int at_k) const {",
        f"    if (!({inside})) return false;",
        *arrays("into", ""),
        emit_statement(operand.read, gemm.params, indent=2).rstrip("\n"),
        "    return true;",
        "  }",
        f"  __device__ static void compute(const Chunk& from, {values} (&value)[{operand.lanes}]) {{",
        *arrays("from", "const "),
        emit_statement(operand.compute, gemm.params, indent=2).rstrip("\n"),
        "  }",
        "};",
    ]


def _window(operand: WindowOperand) -> list[str]:
    """The functions that the pipeline calls for each row of a gathered operand and for each index along k."""
    inside = "true" if operand.inside is None else emit_value(operand.inside)
    seen = [f"({emit_value(bit)} ? {1 << n}u : 0u)" for n, bit in enumerate(operand.seen)]
    needed = [f"1u << ({emit_value(bit)})" for bit in operand.needed]
    row = "1u << 31"
    return [
        "struct Window {",
        f"  __device__ static int row(int place_m) {{ return {emit_value(operand.row)}; }}",
        "  __device__ static unsigned seen(int place_m) {",
        f"    return {inside} ? {' | '.join([row, *seen])} : 0u;",
        "  }",
        f"  __device__ static int k_offset(int place_k) {{ return {emit_value(operand.k_offset)}; }}",
        f"  __device__ static unsigned needed(int place_k) {{ return {' | '.join([row, *needed])}; }}",
        "};",
    ]


def _write_reduced(gemm: TensorGemm, reduced: ReducedOutput) -> list[str]:
    """Threads share the columns of a tile, and, where they are more, the rows of each column; then the first of them
    takes in what the others have, in their order."""
    t, lanes = gemm.tiles, gemm.lanes
    wide = t.bn // lanes
    groups = max(1, t.threads // wide)
    across = t.threads // groups
    inside = " && ".join(
        [
            *(["sum_vector < " + str(wide)] if wide % across else []),
            *([f"place_n < {gemm.n // lanes}"] if gemm.n % t.bn else []),
        ]
    )
    kind, total = c_type(reduced.total.dtype), reduced.total.name

    def emitted(stmt: Stmt, indent: int) -> str:
        return emit_statement(stmt, gemm.params, indent).rstrip("\n")

    joined = [
        "    __syncthreads();",
        "#pragma unroll",
        f"    for (int v = 0; v < {lanes}; ++v) parts[threadIdx.x * {lanes} + v] = {total}[v];",
        "    __syncthreads();",
        f"    for (int group = 1; group < {groups}; ++group) {{",
        f"      const int other = (group * {across} + threadIdx.x % {across}) * {lanes};",
        "      if (own == 0) {",
        emitted(reduced.join, 4),
        "      }",
        "    }",
    ]
    return [
        "  __syncthreads();",
        f"  {kind}* const parts = reinterpret_cast<{kind}*>(shared);",
        f"  const int part = m0 / {reduced.size}, own = threadIdx.x / {across};",
        f"  for (int first = 0; first < {wide}; first += {across}) {{",
        f"    const int sum_vector = first + threadIdx.x % {across}, place_n = n0 / {lanes} + sum_vector;",
        f"    {kind} {total}[{lanes}];",
        emitted(reduced.begin, 2),
        f"    for (int sum_row = own; sum_row < {reduced.size}; sum_row += {groups}) {{",
        "      const int place_m = m0 + sum_row;",
        f"      {f'if ({inside}) ' if inside else ''}{{",
        emitted(reduced.add, 4),
        "      }",
        "    }",
        *(joined if groups > 1 else []),
        f"    if (own == 0{f' && {inside}' if inside else ''}) {{",
        emitted(reduced.write, 3),
        "    }",
        "  }",
    ]


def _write_along(gemm: TensorGemm, reduced: ReducedOutput) -> list[str]:
    """Neighbouring threads share a row, vector by vector, and combine what they have within their warp."""
    t, lanes = gemm.tiles, gemm.lanes
    wide = reduced.size // lanes
    across = next(count for count in (32, 16, 8, 4, 2, 1) if count <= wide)
    rows = t.threads // across
    inside = " && ".join(
        [
            *([f"sum_row < {t.bm}"] if t.bm % rows else []),
            *([f"place_m < {gemm.m}"] if gemm.m % t.bm else []),
        ]
    )
    kind, total, name = c_type(reduced.total.dtype), reduced.total.name, reduced.kind.capitalize()

    def emitted(stmt: Stmt, indent: int) -> str:
        return emit_statement(stmt, gemm.params, indent).rstrip("\n")

    return [
        "  __syncthreads();",
        f"  const int part = n0 / {reduced.size}, own = threadIdx.x % {across};",
        f"  for (int first = 0; first < {t.bm}; first += {rows}) {{",
        f"    const int sum_row = first + threadIdx.x / {across}, place_m = m0 + sum_row;",
        f"    {kind} {total}[{lanes}];",
        emitted(reduced.begin, 2),
        f"    {f'if ({inside}) ' if inside else ''}{{",
        f"      for (int sum_vector = own; sum_vector < {wide}; sum_vector += {across}) {{",
        f"        const int place_n = n0 / {lanes} + sum_vector;",
        emitted(reduced.add, 4),
        "      }",
        "    }",
        "#pragma unroll",
        f"    for (int v = 1; v < {lanes}; ++v) {total}[0] = {name}()({total}[0], {total}[v]);",
        f"    {total}[0] = combined<{across}, {name}>({total}[0]);",
        f"    if (own == 0{f' && {inside}' if inside else ''}) {{",
        emitted(reduced.write, 3),
        "    }",
        "  }",
    ]
