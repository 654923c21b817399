"""The cycle-level simulator: cycles that the RTL took, and what must hold of any program."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import Buffers, Tiling, layer_program, matmul
from tilewright.errors import InstructionError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_timing import GemminiTiming
from tilewright.runtime.gemmini import make
from tilewright.runtime.gemmini.unroll import unrolled
from tilewright.testing.gemmini import layer_memory, random_program

SMALL = GemminiMachine(dim=4, scratchpad=512, accumulator=1024)
MEASURED = json.loads(Path(__file__).with_name("rtl_cycles.json").read_text())


def test_cycles_are_those_of_the_rtl() -> None:
    """Recorded by `python benchmarks/gemmini_rtl.py --record`."""
    for seed, cycles in enumerate(MEASURED):
        program, _ = random_program(np.random.default_rng(seed), SMALL)
        assert simulate(program, SMALL).total == cycles, f"seed {seed}"


def test_a_program_is_no_faster_than_its_busiest_unit() -> None:
    for seed in range(20):
        program, _ = random_program(np.random.default_rng(seed), SMALL)
        found = simulate(program, SMALL)
        assert found.instructions >= len(program)
        assert found.total >= found.busy["load"] + found.busy["store"]  # they share a bus
        assert 0 < found.share("execute") <= 1 or not found.busy["execute"]


def test_loops_take_as_long_as_their_instructions_and_the_steps_they_pass_over() -> None:
    program, _ = random_program(np.random.default_rng(4), SMALL, length=400)
    plain = unrolled(program, SMALL)
    assert len(plain) > len(program)
    assert simulate(plain, SMALL).total <= simulate(program, SMALL).total


def test_a_second_buffer_hides_loads() -> None:
    machine = GemminiMachine()
    layer = matmul(256, 64, 512, scale=0.01)
    _, at, _ = layer_memory(layer, np.random.default_rng(0))
    one, two = (
        simulate(
            layer_program(
                layer, Tiling(1, 128, 2, 2, buffers=Buffers(buffers, buffers, buffers)), machine, at
            ),
            machine,
        )
        for buffers in (1, 2)
    )
    assert one.busy == two.busy and two.total < one.total


@pytest.mark.parametrize(("name", "less", "more"), [("dram_latency", 8, 200), ("load_entries", 8, 1)])
def test_slower_parts_take_longer(name: str, less: int, more: int) -> None:
    program, _ = random_program(np.random.default_rng(1), SMALL)
    fast, slow = (simulate(program, SMALL, GemminiTiming(**{name: value})).total for value in (less, more))
    assert fast < slow


def test_a_program_that_cannot_run_has_no_cycles() -> None:
    with pytest.raises(InstructionError, match="config_ld must come before"):
        simulate([make("mvin", rows=1, cols=1)], SMALL)
