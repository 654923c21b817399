"""Chains of GEMMs on tensor cores -> CUDA C++: the pipeline of `chain.cuh` with its holes filled."""

from __future__ import annotations

from tilewright.codegen.cuda.build import GpuSource
from tilewright.codegen.cuda.emit import emit_statement, emit_value
from tilewright.codegen.cuda.scalars import c_type
from tilewright.codegen.cuda.tensor_frame import framed, matrix_type, written
from tilewright.codegen.cuda.tensor_gemm import declared, loaders, pipeline_type
from tilewright.loops.gpu.chain import FRAGMENT, SHARED, Follower, TensorChain
from tilewright.loops.gpu.tensor import ROW_PADDING


def chain_source(chain: TensorChain) -> GpuSource:
    t, first = chain.tiles, chain.first
    left, right = loaders(first, "0", str(first.k), chain.table_at)
    at, weights = t.weights_at(chain.widths), []
    for number, follower in enumerate(chain.followers):
        weights += _held_weight(chain, follower, number, at)
        at += t.size * t.columns(follower.k) * t.columns(follower.n)
    sums_at = t.operand_bytes(first.n) if t.persistent else 0
    steps = -(-first.k // t.bk)
    before = [
        f"  using P = {pipeline_type(first, t.computed(first.n))};",
        f"  f32* const sums = reinterpret_cast<f32*>(shared + {sums_at});",
        *(line for number, each in enumerate(chain.followers) for line in _between(chain, each, number)),
    ]
    products = _products(chain)
    columns = t.computed(chain.widths[-1])
    write = written(chain, (chain.m, chain.widths[-1]), (t.bm, columns), 1)
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
    before_kernel = [*declared(first, first.a, "Left"), *declared(first, first.b, "Right")]
    return framed(chain, ["matmul", "chain"], before_kernel, body, chain.blocks, 1)


def _held_weight(chain: TensorChain, follower: Follower, number: int, at: int) -> list[str]:
    """The right operand of a product after the first, copied as a whole. These copies are committed with the next tile
    of the first product's operands, whose wait is a wait for them too."""
    t, b, name = chain.tiles, follower.b, f"weight{number}"
    n, k = t.columns(follower.n), t.columns(follower.k)
    kind = matrix_type(c_type(chain.dtype), b, n, k, False, t.threads, n == follower.n)
    return [
        f"  const unsigned at_{name} = shared_address(shared + {at});",
        f"  {kind} {name}({b.buffer.name} + {emit_value(b.offset)}, 0, 0, {follower.n}, {follower.k});",
        f"  {name}.fetch(at_{name}, 0, 1);",
        f"  {name}.finish(at_{name});",
    ]


def _between(chain: TensorChain, follower: Follower, number: int) -> list[str]:
    """The code that processes two neighbouring sums: rows beyond the end repeat the last one, columns are zero."""
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
        emit_statement(follower.between, chain.params, indent=4).rstrip("\n"),
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
            k = t.columns(follower.k)
            lines += [
                *(["  __syncthreads();"] if number else []),  # the product before has read its operand
                f"  share_left<{t.bm}, {k}, {t.warps_n}>(at_left, {before}, m0, between{number});",
                "  __syncthreads();",
                f"  multiply_shared<{kind}, {weight}, {t.bm}, {k}, {steps}, {t.warps_n}>"
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
