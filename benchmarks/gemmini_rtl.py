"""Gemmini's simulators against its RTL in Verilator: every byte of DRAM, and the cycles.

python benchmarks/gemmini_rtl.py --programs 10000       # random programs, a machine of 4x4 PEs
python benchmarks/gemmini_rtl.py --layers               # every layer of ResNet-50, cropped, on 16x16 PEs
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import Layer, Pooling, layer_program, matmul
from tilewright.codegen.gemmini.rtl import Rtl
from tilewright.hw.gemmini import GemminiMachine
from tilewright.loops.gemmini.tiling import default_tiling, with_bias_stored
from tilewright.runtime.gemmini import Functional
from tilewright.testing.gemmini import layer_memory, layer_results, random_program

SMALL = GemminiMachine(dim=4, scratchpad=512, accumulator=1024)
LARGE = GemminiMachine()
DRAM_BYTES = 1 << 20  # of the RTL that runs layers
RECORDED = Path(__file__).parents[1] / "tests/codegen/gemmini/rtl_cycles.json"
_AT_ONCE = 500
_HEAD = """| layer | shape (cropped) | instructions | RTL cycles | simulated | error | use of the array | DRAM |
| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |"""
_MAX_PIXELS, _MAX_CHANNELS = 14, 256  # that a layer is cropped to


def random_programs(rtl: Rtl, count: int) -> list[tuple[int, bool, int, int]]:
    """Of each seed: whether all of DRAM is equal, the RTL's cycles, and the simulator's."""
    found = []
    for first in range(0, count, _AT_ONCE):
        seeds = range(first, min(first + _AT_ONCE, count))
        programs = [random_program(np.random.default_rng(seed), rtl.machine) for seed in seeds]
        for seed, (program, dram), result in zip(seeds, programs, rtl.run_all(programs), strict=True):
            expected = dram.copy()
            Functional(rtl.machine, expected).run(program)
            cycles = simulate(program, rtl.machine).total
            found.append((seed, np.array_equal(expected, result.dram), result.cycles, cycles))
    return found


def resnet50() -> list[tuple[str, Layer]]:
    """The distinct layers: of each stage the first block, with its shortcut, and a later one with its residual."""
    layers = [
        ("stem", Layer(224, 224, 3, 64, (7, 7), 2, (3, 3, 3, 3), pooling=Pooling(3, 2, 1))),
    ]
    width, size, before = 64, 56, 64
    for stage in range(1, 5):
        out, stride = 4 * width, 1 if stage == 1 else 2
        layers += [
            (f"layer{stage}.0.conv1", Layer(size, size, before, width)),
            (f"layer{stage}.0.conv2", Layer(size, size, width, width, (3, 3), stride, (1, 1, 1, 1))),
            (f"layer{stage}.0.downsample", Layer(size, size, before, out, (1, 1), stride, relu=False)),
        ]
        size //= stride
        layers += [
            (f"layer{stage}.0.conv3", Layer(size, size, width, out, residual=1.5)),
            (f"layer{stage}.1.conv1", Layer(size, size, out, width)),
            (f"layer{stage}.1.conv2", Layer(size, size, width, width, (3, 3), 1, (1, 1, 1, 1))),
        ]
        width, before = 2 * width, out
    layers.append(("fc", matmul(1, 1000, 2048, full=True)))
    plain = {"layer1.0.downsample", "layer2.0.downsample", "layer3.0.downsample", "layer4.0.downsample", "fc"}
    return [
        (
            name,
            replace(
                layer, bias=True, bias_rows=2, relu=name not in plain, scale=1.0 if layer.full else 0.002
            ),
        )
        for name, layer in layers
    ]


def cropped(layer: Layer) -> Layer:
    """What the RTL simulates in seconds: fewer pixels and channels, everything else as it is."""
    return replace(
        layer,
        height=min(layer.height, _MAX_PIXELS * layer.stride),
        width=min(layer.width, _MAX_PIXELS * layer.stride),
        in_channels=min(layer.in_channels, _MAX_CHANNELS),
        out_channels=min(layer.out_channels, _MAX_CHANNELS),
    )


def check_layer(name: str, layer: Layer, rtl: Rtl) -> tuple[bool, str]:
    """Whether RTL, functional simulator and NumPy agree; a row of the table."""
    layer = with_bias_stored(cropped(layer), rtl.machine)
    dram, at, size = layer_memory(layer, np.random.default_rng(len(name)))
    tiling = default_tiling(layer, rtl.machine)
    program = layer_program(layer, tiling, rtl.machine, at)
    expected = layer_results(layer, dram, at)
    cycles = simulate(program, rtl.machine, rtl.timing)
    result = rtl.run(program, dram)
    Functional(rtl.machine, dram).run(program)
    same = np.array_equal(dram, result.dram)
    same &= np.array_equal(dram[at.results : at.results + size], expected)
    kernel = "x".join(map(str, layer.kernel))
    shape = (
        f"{layer.height}x{layer.width}x{layer.in_channels} -> {layer.out_channels}, {kernel}/{layer.stride}"
    )
    error = cycles.total / result.cycles - 1
    use = layer.macs / rtl.machine.pes / result.cycles
    return same, (
        f"| {name} | {shape} | {len(program):,} | {result.cycles:,} | {cycles.total:,} | {error:+.2%} | {use:.2f}"
        f" | {'equal' if same else 'DIFFERENT'} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--programs", type=int, default=0)
    parser.add_argument("--layers", action="store_true", help="of ResNet-50, cropped")
    parser.add_argument("--record", action="store_true", help="cycles for the tests, which need no Verilator")
    parser.add_argument("--folder", type=Path, help="keeps what Verilator builds")
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        kept = given.folder or Path(folder)
        if given.programs:
            found = random_programs(Rtl(SMALL, kept), given.programs)
            different = [seed for seed, same, _, _ in found if not same]
            errors = [abs(cycles / rtl - 1) for _, _, rtl, cycles in found]
            print(f"{given.programs:,} random programs: {len(different)} mismatches", *different[:10])
            print(f"cycle-level simulator: {sum(e > 0 for e in errors)} differ, at most {max(errors):.2%}")
            wrong += len(different)
        if given.record:
            cycles = [rtl for _, _, rtl, _ in random_programs(Rtl(SMALL, kept), 60)]
            RECORDED.write_text(json.dumps(cycles) + "\n")
        if given.layers:
            rtl = Rtl(LARGE, kept, dram_bytes=DRAM_BYTES)
            print(_HEAD)
            for name, layer in resnet50():
                same, row = check_layer(name, layer, rtl)
                wrong += not same
                print(row, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
