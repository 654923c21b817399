"""Kernels for tensor cores -> CUDA C++: hand-written pipelines with their holes filled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright import te
from tilewright.codegen.cuda.build import SYMBOL, GpuSource, source_of
from tilewright.codegen.cuda.emit import beginning, emit_statement, emit_value, included
from tilewright.codegen.cuda.scalars import c_type
from tilewright.errors import CodegenError
from tilewright.loops.gemmini.kernel import GemminiKernel
from tilewright.loops.gpu.attention import TensorAttention
from tilewright.loops.gpu.chain import FRAGMENT, SHARED, Follower, TensorChain
from tilewright.loops.gpu.tensor import (
    ROW_PADDING,
    ComputedOperand,
    MatrixOperand,
    Operand,
    ReducedOutput,
    TensorGemm,
    WindowOperand,
)
from tilewright.loops.gpu.thread_index import positions
from tilewright.loops.ir import Program, Stmt
from tilewright.space.tile_operator import TileCall

_RASTER = 8  # tiles along m that neighbouring blocks share a column of b with: they meet in L2
_WRITTEN_AT_ONCE = 4  # vectors of a thread: what the epilogue reads is asked for before the first is needed

Kernel = TensorGemm | TensorAttention | TensorChain


def tensor_source(kernel: Kernel | Program | TileCall | GemminiKernel) -> GpuSource:
    if isinstance(kernel, TileCall):
        raise CodegenError(f"{kernel.name}: tile kernels have code generation of their own")
    if isinstance(kernel, Program):
        return source_of(kernel)
    if isinstance(kernel, GemminiKernel):
        raise CodegenError(f"{kernel.name}: a GPU has no systolic array")
    if isinstance(kernel, TensorChain):
        return _chain(kernel)
    return _gemm(kernel) if isinstance(kernel, TensorGemm) else _attention(kernel)


def _source(
    kernel: Kernel,
    headers: Sequence[str],
    before: Sequence[str],
    body: Sequence[str],
    blocks: int,
    cluster: int,
) -> GpuSource:
    *inputs, output = kernel.params
    pointers = [f"const {c_type(b.dtype)}* __restrict__ {b.name}" for b in inputs]
    pointers.append(f"{c_type(output.dtype)}* __restrict__ {output.name}")
    threads = kernel.tiles.threads
    # Left alone, the compiler weighs registers against blocks; with many small copies it would rather spill.
    small = not isinstance(kernel, TensorAttention) and kernel.small_copies
    bounds = f"{threads}, 1" if small else str(threads)
    together = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    lines = [
        *before,
        f'extern "C" __global__ void {together}__launch_bounds__({bounds}) {SYMBOL}({", ".join(pointers)}) {{',
        "  extern __shared__ __align__(128) unsigned char shared[];",
        *beginning(blocks),
        *body,
        "}",
    ]
    return GpuSource(
        name=kernel.name,
        text="\n".join(
            [*(included(f"{name}.cuh") for name in ("prelude", "tensor_cores", *headers)), *lines, ""]
        ),
        params=kernel.params,
        blocks=blocks,
        threads=threads,
        shared_bytes=kernel.shared_bytes,
        decisions=kernel.decisions,
        packings=() if isinstance(kernel, TensorAttention) else kernel.packings,
    )


def _batch(axes: Sequence[te.Var], number: str) -> list[str]:
    """The batch axes as variables, from the number of the batch."""
    count = math.prod(axis.extent for axis in axes)
    if count == 1:
        return [f"  const int {axis.name} = 0;" for axis in axes]
    coords = positions(te.Var("batch", count), axes)
    return [
        f"  const int batch = {number};",
        *(f"  const int {axis.name} = {emit_value(coord)};" for axis, coord in coords.items()),
    ]


def _write(kernel: Kernel, size: tuple[int, int], tile: tuple[int, int], split: int) -> list[str]:
    """What becomes of the sums: every thread writes vectors, those of a warp next to each other."""
    threads, lanes = kernel.tiles.threads, kernel.lanes
    rows, wide = tile[0] // split, tile[1] // lanes
    vectors = rows * wide
    turns = -(-vectors // threads)
    guards = [
        *([f"i < {vectors}"] if vectors % threads else []),
        *([f"place_m < {size[0]}"] if size[0] % tile[0] else []),
        *([f"place_n < {size[1] // lanes}"] if size[1] % tile[1] else []),
    ]
    return [
        "  __syncthreads();",
        f"#pragma unroll {min(turns, _WRITTEN_AT_ONCE)}",
        f"  for (int turn = 0; turn < {turns}; ++turn) {{",
        f"    const int i = turn * {threads} + threadIdx.x;",
        f"    const int sum_row = {f'part * {rows} + ' if split > 1 else ''}i / {wide};",
        f"    const int sum_vector = i % {wide};",
        f"    const int place_m = m0 + sum_row, place_n = n0 / {lanes} + sum_vector;",
        f"    {'if (' + ' && '.join(guards) + ') ' if guards else ''}{{",
        emit_statement(kernel.write, kernel.params, depth=3).rstrip("\n"),
        "    }",
        "  }",
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

    def emitted(stmt: Stmt, depth: int) -> str:
        return emit_statement(stmt, gemm.params, depth).rstrip("\n")

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

    def emitted(stmt: Stmt, depth: int) -> str:
        return emit_statement(stmt, gemm.params, depth).rstrip("\n")

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


def _bool(value: bool) -> str:
    return "true" if value else "false"


# -- matmuls --------------------------------------------------------------------------------------------------


def _gemm(gemm: TensorGemm) -> GpuSource:
    tiles = gemm.tiles
    return _source(
        gemm,
        ["cluster", "matmul"] if tiles.split > 1 else ["matmul"],
        [*_declared(gemm, gemm.a, "Left"), *_declared(gemm, gemm.b, "Right")],
        _in_turn(gemm) if tiles.persistent else _at_once(gemm),
        gemm.blocks,
        tiles.split,
    )


def _at_once(gemm: TensorGemm) -> list[str]:
    """A tile for each block, or for each cluster, whose blocks sum a part of the depth each."""
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
    left, right = _loaders(gemm, first, end)
    lines = [
        *_coord(gemm, f"blockIdx.x / {t.split}"),
        *part,
        f"  {left[0]} a({left[1]});",
        f"  {right[0]} b({right[1]});",
        f"  using P = {_pipeline(gemm)};",
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
    return [*lines, *_write(gemm, (gemm.m, gemm.n), (t.bm, t.bn), t.split)]


def _in_turn(gemm: TensorGemm) -> list[str]:
    """Several tiles for each block: what the next one reads is on its way while the results of one are written."""
    t = gemm.tiles
    left, right = _loaders(gemm, "0", str(gemm.k))
    return [
        f"  using P = {_pipeline(gemm)};",
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
        *_write(gemm, (gemm.m, gemm.n), (t.bm, t.bn), 1),
        f"  if (number >= {gemm.tile_count}) break;",
        "  }",
    ]


def _sums(gemm: TensorGemm) -> str:
    return f"{c_type(gemm.sums.dtype)}* const sums"


def _coord(gemm: TensorGemm, number: str) -> list[str]:
    """Where the tile of that number begins: neighbours in groups of rows."""
    rows, columns = gemm.rows, gemm.columns
    return [
        f"  const int tile = {number} % {rows * columns};",
        f"  const int group = tile / {_RASTER * columns} * {_RASTER};",
        f"  const int height = min({rows} - group, {_RASTER});",
        f"  const int m0 = (group + tile % {_RASTER * columns} % height) * {gemm.step_m};",
        f"  const int n0 = tile % {_RASTER * columns} / height * {gemm.step_n};",
        *_batch(gemm.batch, f"{number} / {rows * columns}"),
    ]


def _pipeline(gemm: TensorGemm, columns: int | None = None) -> str:
    """`columns`: how many of the tile's are computed, if not all."""
    t = gemm.tiles
    numbers = (t.bm, t.bn, t.bk, t.warps_m, t.warps_n, t.stages)
    (left, _), (right, _) = _loaders(gemm, "0", "0")
    some = f", {columns}" if columns not in (None, t.bn) else ""
    return f"Product<{c_type(gemm.dtype)}, {', '.join(map(str, numbers))}, {left}, {right}{some}>"


def _loaders(
    gemm: TensorGemm, first: str, end: str, table_at: int | None = None
) -> tuple[tuple[str, str], tuple[str, str]]:
    """For each operand: the type of the object that loads its tiles, and the expression that creates it.

    `table_at`: the offset of a gathered operand's table; None: behind the tiles."""
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
        switches = f"{_bool(operand.transposed)}, {_bool(left)}, {operand.lanes}, {t.threads}"
        return f"Computed<{kind}, {outer}, {t.bk}, {switches}, {name}>"
    whole = extent % outer == 0 and (gemm.step_m if left else gemm.step_n) == outer
    return _matrix_type(kind, operand, outer, t.bk, left, t.threads, whole)


def _matrix_type(
    kind: str, operand: MatrixOperand, outer: int, depth: int, left: bool, threads: int, whole: bool
) -> str:
    switches = f"{_bool(operand.transposed)}, {_bool(left)}, {operand.lanes}, {threads}, {operand.pitch}"
    return f"Matrix<{kind}, {outer}, {depth}, {switches}, {_bool(whole)}>"


def _declared(gemm: TensorGemm, operand: Operand, name: str) -> list[str]:
    """What the type of an operand's loader is made of."""
    if isinstance(operand, WindowOperand):
        return _window(operand)
    return _source_of_chunks(gemm, operand, name) if isinstance(operand, ComputedOperand) else []


def _source_of_chunks(gemm: TensorGemm, operand: ComputedOperand, name: str) -> list[str]:
    """How the elements of an operand are read and computed, a piece of neighbours at a time."""

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
        "  __device__ bool read(Chunk& into, int outer, int depth) const {",
        f"    if (!({inside})) return false;",
        *arrays("into", ""),
        emit_statement(operand.read, gemm.params, depth=2).rstrip("\n"),
        "    return true;",
        "  }",
        f"  __device__ static void compute(const Chunk& from, {values} (&value)[{operand.lanes}]) {{",
        *arrays("from", "const "),
        emit_statement(operand.compute, gemm.params, depth=2).rstrip("\n"),
        "  }",
        "};",
    ]


def _window(operand: WindowOperand) -> list[str]:
    """The rows of a gathered operand: what the pipeline asks of each, and of each place in the depth."""
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
        f"  __device__ static int depth(int place_k) {{ return {emit_value(operand.k_offset)}; }}",
        f"  __device__ static unsigned needed(int place_k) {{ return {' | '.join([row, *needed])}; }}",
        "};",
    ]


# -- chains of matmuls ------------------------------------------------------------------------------------------------


def _chain(chain: TensorChain) -> GpuSource:
    t, first = chain.tiles, chain.first
    left, right = _loaders(first, "0", str(first.k), chain.table_at)
    at, weights = t.weights_at(chain.widths), []
    for number, follower in enumerate(chain.followers):
        weights += _held_weight(chain, follower, number, at)
        at += t.size * t.columns(follower.k) * t.columns(follower.n)
    sums_at = t.operand_bytes(first.n) if t.persistent else 0
    steps = -(-first.k // t.bk)
    before = [
        f"  using P = {_pipeline(first, t.computed(first.n))};",
        f"  f32* const sums = reinterpret_cast<f32*>(shared + {sums_at});",
        *(line for number, each in enumerate(chain.followers) for line in _between(chain, each, number)),
    ]
    products = _products(chain)
    columns = t.computed(chain.widths[-1])
    write = _write(chain, (chain.m, chain.widths[-1]), (t.bm, columns), 1)
    if not t.persistent:
        body = [
            f"  const int m0 = blockIdx.x * {t.bm}, n0 = 0;",
            *before,
            f"  {left[0]} a({left[1]});",
            f"  {right[0]} b({right[1]});",
            "  P::begin(shared, a, b);",
            *weights,
            "  f32 sums0[P::MS][P::NS * 2][4];",
            f"  P::accumulate(shared, sums0, a, b, {steps});",
            *products,
            *write,
        ]
    else:
        body = [
            "  const int n0 = 0;",
            *before,
            *(
                line
                for name, (kind, arguments) in (("left", left), ("right", right))
                for line in (
                    f"  const auto {name} = [&](int number) {{",
                    f"    const int m0 = number * {t.bm};",
                    f"    return {kind}({arguments});",
                    "  };",
                )
            ),
            "  int number = blockIdx.x;",
            "  auto a = left(number);",
            "  auto b = right(number);",
            "  P::begin(shared, a, b);",
            *weights,
            "  while (true) {",
            f"  const int m0 = number * {t.bm};",
            "  number += gridDim.x;",
            "  f32 sums0[P::MS][P::NS * 2][4];",
            f"  P::accumulate(shared, sums0, a, b, {steps});",
            f"  if (number < {chain.tile_count}) {{",
            "    a = left(number);",
            "    b = right(number);",
            "    P::begin(shared, a, b);",
            "  }",
            *products,
            *write,
            f"  if (number >= {chain.tile_count}) break;",
            "  }",
        ]
    declared = [*_declared(first, first.a, "Left"), *_declared(first, first.b, "Right")]
    return _source(chain, ["matmul", "chain"], declared, body, chain.blocks, 1)


def _held_weight(chain: TensorChain, follower: Follower, number: int, at: int) -> list[str]:
    """The right operand of a product after the first, copied as a whole. These copies are committed with the next tile
    of the first product's operands, whose wait is a wait for them too."""
    t, b, name = chain.tiles, follower.b, f"weight{number}"
    outer, depth = t.columns(follower.n), t.columns(follower.k)
    kind = _matrix_type(c_type(chain.dtype), b, outer, depth, False, t.threads, outer == follower.n)
    return [
        f"  const unsigned at_{name} = shared_address(shared + {at});",
        f"  {kind} {name}({b.buffer.name} + {emit_value(b.offset)}, 0, 0, {follower.n}, {follower.k});",
        f"  {name}.fetch(at_{name}, 0, 1);",
        f"  {name}.finish(at_{name});",
    ]


def _between(chain: TensorChain, follower: Follower, number: int) -> list[str]:
    """What becomes of two neighbouring sums: rows beyond the end are those of the last one, columns are zero."""
    lanes, total, value = follower.lanes, follower.sum.name, follower.value.name
    sums = "low, high" if lanes == 2 else "e ? high : low"
    row = f"min(row, {chain.m - 1})" if chain.m % chain.tiles.bm else "row"
    inside = f"if (column + e < {follower.k}) " if follower.k != chain.tiles.computed(follower.k) else ""
    return [
        f"  const auto between{number} = [&](f32 low, f32 high, int row, int column) {{",
        f"    const int place_m = {row};",
        "    f32 both[2] = {0.0f, 0.0f};",
        "#pragma unroll",
        f"    for (int e = 0; e < 2; e += {lanes}) {{",
        f"      const int place_n = {f'column / {lanes}' if lanes > 1 else 'column + e'};",
        f"      const f32 {total}[{lanes}] = {{{sums}}};",
        f"      f32 {value}[{lanes}];",
        f"      {inside}{{",
        emit_statement(follower.between, chain.params, depth=4).rstrip("\n"),
        f"        for (int v = 0; v < {lanes}; ++v) both[e + v] = {value}[v];",
        "      }",
        "    }",
        f"    return packed<{c_type(chain.dtype)}>(both[0], both[1]);",
        "  };",
    ]


def _products(chain: TensorChain) -> list[str]:
    """The products after the first; the sums of the last go to shared memory."""
    t, kind = chain.tiles, c_type(chain.dtype)
    ms = t.bm // t.warps_m // FRAGMENT
    lines = []
    shared = t.resident == SHARED
    if shared:
        lines.append("  const unsigned at_left = shared_address(sums);")
    for number, follower in enumerate(chain.followers):
        last = number == len(chain.followers) - 1
        steps = -(-follower.k // FRAGMENT)
        ns = t.computed(follower.n) // t.warps_n // 8
        before, weight = f"sums{number}", f"decltype(weight{number})"
        lines.append(f"  f32 sums{number + 1}[{ms}][{ns}][4];")
        if shared:
            depth = t.columns(follower.k)
            lines += [
                *(["  __syncthreads();"] if number else []),  # the product before has read its operand
                f"  share_left<{t.bm}, {depth}, {t.warps_n}>(at_left, {before}, m0, between{number});",
                "  __syncthreads();",
                f"  multiply_shared<{kind}, {weight}, {t.bm}, {depth}, {steps}, {t.warps_n}>"
                f"(sums{number + 1}, at_left, at_weight{number});",
                *(["  __syncthreads();"] if last else []),
            ]
        else:
            lines += [
                f"  unsigned left{number}[{ms}][{steps}][4];",
                f"  keep_left(left{number}, {before}, m0, between{number});",
                f"  multiply_kept<{kind}, {weight}>(sums{number + 1}, left{number}, at_weight{number});",
            ]
    pitch = t.computed(chain.widths[-1]) + ROW_PADDING
    return [*lines, f"  store_sums<{t.warps_n}>(sums, {pitch}, sums{len(chain.followers)});"]


# -- attention --------------------------------------------------------------------------------------------------------


def _attention(attention: TensorAttention) -> GpuSource:
    t, kind = attention.tiles, c_type(attention.dtype)
    width, values = attention.padded
    blocks = -(-attention.queries // t.queries)
    tile = f"blockIdx.x % {blocks}"
    if attention.causal:  # those that see most keys begin first
        tile = f"{blocks - 1} - {tile}"
    operands = [
        ("q", attention.q, width, t.queries, attention.width, f"m0, {attention.width}, {attention.queries}"),
        ("k", attention.k, width, t.keys, attention.width, f"0, {attention.width}, {attention.keys}"),
        ("v", attention.v, values, t.keys, attention.values, f"0, {attention.values}, {attention.keys}"),
    ]
    plain = attention.mask is None and 0 < attention.scale <= 1
    numbers = (t.warps, t.rows, t.keys, width, values, t.stages, _bool(attention.causal), _bool(plain))
    body = [
        f"  const int m0 = ({tile}) * {t.queries}, n0 = 0;",
        *_batch(attention.batch, f"blockIdx.x / {blocks}"),
        *(
            f"  Matrix<{kind}, {outer}, {rows}, true, false, {o.lanes}, {t.threads}, {o.pitch},"
            f" {_bool(outer == extent)}> {name}({o.buffer.name} + {emit_value(o.offset)}, 0, {where});"
            for name, o, outer, rows, extent, where in operands
        ),
        "  const auto mask = [&](f32 value, int place_m, int place_k) {",
        *_mask(attention),
        "  };",
        f"  Attention<{kind}, {', '.join(map(str, numbers))}, decltype(q), decltype(k), decltype(v)>::run(shared,"
        f" q, k, v, m0, {attention.queries}, {attention.keys}, {attention.scale!r}f, mask);",
        "  f32* const sums = reinterpret_cast<f32*>(shared);",
        *_write(attention, (attention.queries, attention.values), (t.queries, values), 1),
    ]
    heads = math.prod(axis.extent for axis in attention.batch)
    return _source(attention, ["attention"], [], body, blocks * heads, 1)


def _mask(attention: TensorAttention) -> list[str]:
    if attention.mask is None:
        return ["    return value;"]
    return [
        "    const f32 score[1] = {value};",
        "    f32 masked[1];",
        emit_statement(attention.mask, attention.params, depth=2).rstrip("\n"),
        "    return masked[0];",
    ]
