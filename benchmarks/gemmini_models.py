"""Quantised models on the simulated Gemmini: answers against the host's, and hot layers on the RTL.

python benchmarks/gemmini_models.py                     # ResNet-18 at 224x224 and BERT-tiny at 128 tokens
python benchmarks/gemmini_models.py --rtl 3             # with Verilator: the three longest programs of each, too
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tilewright
from gemmini_rtl import DRAM_BYTES
from tilewright.codegen.gemmini.rtl import Rtl
from tilewright.hw.gemmini import GemminiMachine
from tilewright.runtime.gemmini import Functional
from tilewright.runtime.gemmini.kernel import AcceleratorKernel
from tilewright.testing.quantised import quantised
from tilewright.zoo.bert import BERT_TINY, Bert
from tilewright.zoo.resnet import RESNET18, ResNet


def models(size: int) -> dict[str, tuple[torch.nn.Module, tuple[Any, ...]]]:
    torch.manual_seed(0)
    ids = torch.randint(0, BERT_TINY.vocabulary, (1, BERT_TINY.tokens))
    return {
        "ResNet-18": (ResNet(RESNET18).eval(), (torch.randn(1, 3, size, size),)),
        "BERT-tiny": (Bert(BERT_TINY).eval(), (ids,)),
    }


def checked(name: str, net: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[str, list[AcceleratorKernel]]:
    """A row of the table, and the programs of the model, the longest first."""
    model = quantised(net, [inputs])
    began = time.perf_counter()
    found = tilewright.compile(model, target="gemmini")
    compiled = time.perf_counter()
    result = found(*inputs)
    ended = time.perf_counter()
    same = torch.equal(result, tilewright.compile(model, target="cpu")(*inputs))
    with torch.no_grad():
        expected = net(*inputs)
    error = float((result - expected).norm() / expected.norm())
    steps = [step for step in found.plan.steps if step.kernel in found.executor.accelerated]
    kernels = [found.executor.accelerated[step.kernel] for step in steps]
    instructions = sum(kernel.header.instructions for kernel in kernels)
    cycles = sum(kernel.header.cycles for kernel in kernels)
    row = (
        f"| {name} | {len(steps)} of {len(found.plan.steps)} | {instructions:,} | {cycles:,} | {error:.1%}"
        f" | {'equal' if same else 'DIFFERENT'} | {compiled - began:.0f} s | {ended - compiled:.0f} s |"
    )
    distinct = {kernel.symbol: kernel for kernel in kernels}
    return row, sorted(distinct.values(), key=lambda kernel: -kernel.header.cycles)


def on_rtl(rtl: Rtl, kernel: AcceleratorKernel) -> str:
    """One image's program with random operands, on the RTL and on the functional simulator."""
    rng = np.random.default_rng(0)
    dram = rng.integers(0, 256, kernel.header.dram_bytes).astype(np.uint8)
    result = rtl.run(kernel.program, dram)
    Functional(rtl.machine, dram).run(kernel.program)
    same = "equal" if np.array_equal(dram, result.dram) else "DIFFERENT"
    predicted = kernel.header.cycles // kernel.header.images
    return f"{len(kernel.program):,} instructions: {result.cycles:,} cycles, {predicted:,} simulated; DRAM {same}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--rtl", type=int, default=0, help="programs of each model that run on the RTL too")
    parser.add_argument("--model", choices=("ResNet-18", "BERT-tiny"), help="this one alone")
    parser.add_argument("--folder", type=Path, help="keeps what Verilator builds")
    given = parser.parse_args()
    print(
        "| model | kernels | instructions | cycles | from the float model | host's integers | compile | run |"
    )
    print("| --- | --- | ---: | ---: | ---: | --- | ---: | ---: |")
    programs = {}
    wrong = False
    for name, (net, inputs) in models(given.size).items():
        if given.model not in (None, name):
            continue
        row, programs[name] = checked(name, net, inputs)
        wrong |= "DIFFERENT" in row
        print(row, flush=True)
    if given.rtl:
        hot = [(name, kernel) for name, kernels in programs.items() for kernel in kernels[: given.rtl]]
        largest = max(kernel.header.dram_bytes for _, kernel in hot)
        with tempfile.TemporaryDirectory() as folder:
            # At least as much as for layers, so that one build in --folder serves both.
            size = max(DRAM_BYTES, 1 << largest.bit_length())
            rtl = Rtl(GemminiMachine(), given.folder or Path(folder), dram_bytes=size)
            for name, kernel in hot:
                line = on_rtl(rtl, kernel)
                wrong |= "DIFFERENT" in line
                print(f"{name} on the RTL: {line}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
