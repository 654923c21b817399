"""Cycles counted from the calls that a mapping makes Gemmini execute."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.codesign.baselines import random_mappings
from tilewright.codesign.calls import Calls, Constants, Fitted, fit
from tilewright.codesign.mapping import Hardware, Mappings
from tilewright.codesign.problem import Layer, Nests
from tilewright.hw.gemmini import GemminiMachine

MACHINE = GemminiMachine()
CONV = Layer((3, 3, 28, 28, 256, 256, 1))


def calls_of(layer: Layer, *texts: str) -> Calls:
    rows = np.zeros(len(texts), int)
    hardware = Hardware.of([MACHINE]).take(rows)
    return Calls.of(Nests.of([layer]).take(rows), Mappings.parse(texts), hardware)


# Rows that ran on Gemmini's RTL, of the DOSA repository (BSD 2-Clause, copyright 2022 Charles Hong).
@pytest.mark.parametrize(
    ("layer", "text", "measured"),
    [
        # bound by computing
        (
            Layer((3, 3, 28, 28, 256, 256, 1)),
            "L3[WIO] K16 - L2[WI] K16X - L1[O] S3 R3 C16 Q4 P7 C16X - L0[W] Q7 P4",
            1867158,
        ),
        (
            Layer((3, 3, 27, 27, 128, 128, 1)),
            "L3[WIO] K8 P3 - L2[WI] K16X - L1[O] S3 R3 C8 Q27 C16X - L0[W] P9",
            439613,
        ),
        # by issuing calls of a few words
        (
            Layer((1, 1, 56, 56, 64, 128, 1)),
            "L3[WIO] K8 Q56 P2 C64 - L2[WI] K16X - L1[O] P2 - L0[W] P14",
            14443519,
        ),
        # a matmul on a corner of the array, in tiles of a block
        (
            Layer.matmul(128, 128, 128),
            "L3[WIO] P8 C8 K8 - L2[WI] K4X - L1[O] K4 C4 P2 C4X - L0[W] P8",
            4137502,
        ),
        # an image of 60x6 takes as long as one of 60x60
        (
            Layer((3, 3, 60, 6, 64, 128, 1)),
            "L3[WIO] P4 K16 C2 - L2[WI] K8X - L1[O] S3 R3 C4 Q6 C8X - L0[W] P15",
            4196045,
        ),
    ],
)
def test_measured_rows(layer: Layer, text: str, measured: float) -> None:
    assert calls_of(layer, text).cycles(Fitted())[0] == pytest.approx(measured, rel=0.15)


def test_borders_have_calls_of_their_own() -> None:
    calls = calls_of(CONV, "L3[WIO] P3 Q2 K16 - L2[WI] K16X - L1[O] S3 R3 C16 P10 C16X - L0[W] Q20")
    sizes = [size for size in calls.sizes if size.calls[0]]
    assert [float(size.calls[0]) for size in sizes] == [32, 32, 16, 16]
    assert [(float(size.width[0]), float(size.height[0])) for size in sizes] == [
        (10, 20),
        (10, 8),
        (8, 20),
        (8, 8),
    ]
    pixels = sum(float((size.calls * size.width * size.height)[0]) for size in calls.sizes)
    assert pixels == 28 * 28 * 16


def test_the_last_tile_of_channels_ends_with_the_layer_and_stores() -> None:
    """The library's tile of 176 channels: 256 are one whole tile, and one of 80."""
    calls = calls_of(CONV, "L3[WIO] K16 C2 - L2[WI] K16X - L1[O] S3 R3 C11 P28 C16X - L0[W] Q28")
    sizes = [size for size in calls.sizes if size.calls[0]]
    assert [float(size.calls[0]) for size in sizes] == [16, 16]
    assert [float(size.weights[0]) for size in sizes] == [9 * 176, 9 * 80]
    assert [float(size.runs[0]) for size in sizes] == [9 * 11 * 28, 9 * 5 * 28]
    assert [float(size.stores[0]) for size in sizes] == [0, 1]
    # In output channels too: 256 in tiles of 96 are 6, 6 and 4 blocks.
    wide = calls_of(CONV, "L3[WIO] K3 - L2[WI] K16X - L1[O] S3 R3 K6 C16 P28 C16X - L0[W] Q28")
    assert sum(float((size.calls * size.runs)[0]) for size in wide.sizes) == 9 * 16 * 16 * 28


def test_each_word_of_weights_costs_once() -> None:
    text = "L3[WIO] K16 P7 - L2[WI] K16X - L1[O] S3 R3 C16 P4 C16X - L0[W] Q28"
    constants = Fitted().convolution
    dearer = Fitted(convolution=constants._replace(weight_word=constants.weight_word + 1.0))
    calls = calls_of(CONV, text)
    assert (calls.cycles(dearer) - calls.cycles(Fitted()))[0] == pytest.approx(9 * 256 * 256)


@given(st.integers(0, 10_000))
def test_no_mapping_is_faster_than_its_macs_or_its_calls(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mappings = random_mappings(CONV, 20, MACHINE.dim, rng)
    rows = np.zeros(20, int)
    calls = Calls.of(Nests.of([CONV]).take(rows), mappings, Hardware.of([MACHINE]).take(rows))
    cycles = calls.cycles(Fitted())
    assert (cycles >= CONV.macs / calls.side**2 * (1 - 1e-9)).all()
    assert (cycles >= calls.count * Fitted().convolution.issue).all()


def test_a_fit_finds_the_constants_of_rows_and_leaves_others_alone() -> None:
    true = Constants(400.0, 0.5, 3.0, 2.5, 0.5, 8.0, 20.0, 0.1)
    rng = np.random.default_rng(1)
    mappings = random_mappings(CONV, 300, MACHINE.dim, rng)
    rows = np.zeros(300, int)
    calls = Calls.of(Nests.of([CONV]).take(rows), mappings, Hardware.of([MACHINE]).take(rows))
    found = fit(calls, calls.cycles(Fitted(convolution=true)))
    assert found.matmul == Fitted().matmul
    assert found.convolution.issue + found.convolution.between == pytest.approx(420.0, rel=0.05)
    errors = np.log(calls.cycles(found) / calls.cycles(Fitted(convolution=true)))
    before = np.log(calls.cycles(Fitted()) / calls.cycles(Fitted(convolution=true)))
    assert np.abs(errors).mean() < 0.03 < np.abs(before).mean()
    assert all(value > 0 for one in astuple(found) for value in one)
