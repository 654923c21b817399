"""Kernels of the tile language on the simulated Gemmini: answers against the tile interpreter, and cycles with one
buffer for each tile and with the two that the pipelining pass gives it, beside those of the same matmul as a layer of a
model, whose program overlaps loads with the computes of any step before them.

python benchmarks/gemmini_tiles.py                  # the cycle-level simulator
python benchmarks/gemmini_tiles.py --rtl            # with Verilator: the RTL's cycles and memory, too
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import tilewright
import tilewright.tile as tl
from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import Placement, layer_words, matmul
from tilewright.codegen.gemmini.rtl import Rtl
from tilewright.codegen.gemmini.tiles.executor import Compiled, launch
from tilewright.hw.gemmini import GemminiMachine
from tilewright.loops.gemmini.tiling import default_tiling
from tilewright.runtime.gemmini import Functional

SIZES = (  # of the matmul, and its blocks
    (64, 64, 256, 32, 32, 32),
    (128, 128, 128, 64, 64, 32),
    (128, 128, 512, 64, 64, 64),
    (196, 128, 256, 64, 64, 64),
    (100, 60, 200, 32, 32, 64),
)
DRAM_BYTES = 1 << 18


@tilewright.kernel
def layer(x, w, bias, out, M, N, K, scale, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore
    row, col = tl.program_id(0) * BM, tl.program_id(1) * BN
    left = tl.make_block_ptr(x, (M, K), (K, 1), (row, 0), (BM, BK), (1, 0))
    right = tl.make_block_ptr(w, (K, N), (N, 1), (0, col), (BK, BN), (1, 0))
    start = tl.make_block_ptr(bias, (M, N), (0, 1), (row, col), (BM, BN), (1, 0))
    sums = tl.load(start, boundary_check=(0, 1))
    for _ in range(0, K, BK):  # type: ignore
        a = tl.load(left, boundary_check=(0, 1))
        b = tl.load(right, boundary_check=(0, 1))
        sums = tl.dot(a, b, sums)
        left = tl.advance(left, (0, BK))
        right = tl.advance(right, (BK, 0))
    scaled = tl.round(tl.maximum(sums, 0).to(tl.float32) * scale)
    result = tl.minimum(tl.maximum(scaled, -128.0), 127.0).to(tl.int8)
    to = tl.make_block_ptr(out, (M, N), (N, 1), (row, col), (BM, BN), (1, 0))
    tl.store(to, result, boundary_check=(0, 1))


def on_rtl(rtl: Rtl, found: Compiled) -> str:
    dram = np.random.default_rng(0).integers(0, 256, found.dram_bytes).astype(np.uint8)
    result = rtl.run(found.program, dram)
    Functional(rtl.machine, dram).run(found.program)
    same = "equal" if np.array_equal(dram, result.dram) else "DIFFERENT"
    return f"{result.cycles:,} ({same})"


def as_layer(m: int, n: int, k: int) -> int:
    """The cycles of the same matmul as `compile` makes it of a model's layer."""
    machine = GemminiMachine()
    found = matmul(m, n, k, bias=True, relu=True, scale=0.002)
    words = layer_words(found, default_tiling(found, machine), machine, Placement(64, 64, 64, 64))
    return simulate(words, machine).total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rtl", action="store_true", help="run the programs with two buffers on the RTL")
    given = parser.parse_args()
    print(
        "| M, N, K | blocks | instructions | one buffer | two | array busy | as a layer | interpreter |",
        end="",
    )
    print(" RTL |" if given.rtl else "")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |" + (" ---: |" if given.rtl else ""))
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        rtl = Rtl(GemminiMachine(), Path(folder), dram_bytes=DRAM_BYTES) if given.rtl else None
        for m, n, k, bm, bn, bk in SIZES:
            rng = np.random.default_rng(m + n + k)
            x, w = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((m, k), (k, n)))
            bias = rng.integers(-(2**16), 2**16, n).astype(np.int32)
            expected, out = np.zeros((m, n), np.int8), np.zeros((m, n), np.int8)
            grid = -(-m // bm), -(-n // bn)
            arguments = (m, n, k, 0.002, bm, bn, bk)
            layer.interpret[grid](x, w, bias, expected, *arguments)
            layer[grid](x, w, bias, out, *arguments, options={"target": "gemmini"})
            one, two = (launch(layer, grid, x, w, bias, out, *arguments, stages=stages) for stages in (1, 2))
            same = "equal" if np.array_equal(out, expected) else "DIFFERENT"
            row = (
                f"| {m}, {n}, {k} | {bm}, {bn}, {bk} | {len(two.program):,} | {one.cycles.total:,} |"
                f" {two.cycles.total:,} | {two.cycles.share('execute'):.0%} | {as_layer(m, n, k):,} | {same} |"
            )
            row += f" {on_rtl(rtl, two)} |" if rtl is not None else ""
            wrong |= "DIFFERENT" in row
            print(row, flush=True)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
