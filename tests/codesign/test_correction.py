"""The learned correction: what it was trained on, where it may be asked, and its file."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.codesign.calls import Calls, Fitted
from tilewright.codesign.correction import TARGET, Correction, shipped
from tilewright.codesign.data import Points
from tilewright.codesign.exact import LATENCY, best_mapping, near_optimal
from tilewright.codesign.mapping import Hardware, Mappings
from tilewright.codesign.model import Model
from tilewright.codesign.problem import Layer, Nests
from tilewright.errors import HardwareRangeError, MeasuredDataError
from tilewright.hw.gemmini import GemminiMachine

LAYERS = [Layer.matmul(16 * rows, 16 * depth, 48) for rows in (1, 3, 7, 9) for depth in (2, 5, 8)]


def points(slowdown: float, machine: GemminiMachine) -> Points:
    """Mappings that take `slowdown` times as long as is counted, and a little more with each call."""
    nests = Nests.of(LAYERS)
    mappings = Mappings.joined([best_mapping(layer, machine).mapping for layer in LAYERS])
    hardware = Hardware.of([machine] * len(LAYERS))
    calls = Calls.of(nests, mappings, hardware)
    measured = calls.cycles(Fitted()) * slowdown * np.exp(0.02 * np.log(calls.count))
    return Points(nests, mappings, hardware, {TARGET: measured})


def measured_inputs(rows: Points) -> tuple[Nests, Mappings, Hardware]:
    return rows.nests, rows.mappings, rows.hardware


def test_it_learns_what_the_model_leaves_out() -> None:
    measured = points(1.5, GemminiMachine(dim=8, scratchpad=2048, accumulator=1024))
    learned = Correction.fit(measured, fitted=Fitted())
    predicted = learned.cycles(measured.nests, measured.mappings, measured.hardware)
    error = np.abs(predicted / measured.targets[TARGET] - 1)
    assert error.max() < 0.12  # without what is learned: 0.33 and more
    assert (Calls.of(*measured_inputs(measured)).cycles(Fitted()) < 0.75 * measured.targets[TARGET]).all()
    again = Correction.from_json(learned.to_json())
    assert again.cycles(measured.nests, measured.mappings, measured.hardware) == pytest.approx(
        predicted, rel=1e-3
    )
    assert not learned.valid_for(Hardware.of([GemminiMachine(dim=9)])).any()


def test_too_few_rows_or_several_arrays_are_refused() -> None:
    measured = points(1.5, GemminiMachine(dim=8))
    with pytest.raises(MeasuredDataError, match="10 or more rows"):
        Correction.fit(measured.take(slice(0, 5)))
    mixed = measured.hardware._replace(dim=np.arange(1.0, 13.0))
    with pytest.raises(MeasuredDataError, match="of 12 arrays"):
        Correction.fit(Points(measured.nests, measured.mappings, mixed, measured.targets))


def test_the_shipped_one_makes_mappings_slower_than_the_roofline() -> None:
    machine = GemminiMachine(dim=16, scratchpad=110592, accumulator=16384)
    layers = [Layer.matmul(128, 768, 768), Layer.convolution((16, 16), 256, 256, (3, 3))]
    nests, hardware = Nests.of(layers), Hardware.of([machine] * 2)
    mappings = Mappings.joined([best_mapping(layer, machine).mapping for layer in layers])
    cycles = Model().estimate(nests, mappings, hardware).cycles.value
    corrected = shipped().cycles(nests, mappings, hardware)
    assert shipped().valid_for(hardware).all() and len(shipped().rows) == 1225
    assert ((corrected > cycles) & (corrected < 6 * cycles)).all()


def test_no_mapping_is_faster_than_the_roofline() -> None:
    machine, layer = GemminiMachine(), Layer.convolution((56, 56), 64, 64, (3, 3), padding=((1, 1), (1, 1)))
    mappings, _ = near_optimal(layer, machine, LATENCY, within=0.05)
    rows = np.zeros(len(mappings), int)
    nests, hardware = Nests.of([layer]).take(rows), Hardware.of([machine]).take(rows)
    least = Model().estimate(nests, mappings, hardware).cycles.value
    corrected = shipped().cycles(nests, mappings, hardware)
    assert (corrected >= least).all() and (corrected > least).any()


def test_it_is_not_asked_about_arrays_that_were_not_measured() -> None:
    with pytest.raises(
        HardwareRangeError, match=r"array of 16 rows, and is asked about one of 8\n.*use an array"
    ):
        shipped().check(Hardware.of([GemminiMachine(dim=16), GemminiMachine(dim=8)]))
    shipped().check(Hardware.of([GemminiMachine(dim=16)]))
