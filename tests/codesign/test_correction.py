"""The learned correction: what it was trained on, where it may be asked, and its file."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.codesign.correction import TARGET, Correction, features, shipped
from tilewright.codesign.data import Points
from tilewright.codesign.exact import best_mapping
from tilewright.codesign.mapping import Hardware
from tilewright.codesign.network import joined
from tilewright.codesign.problem import Layer, Nests
from tilewright.errors import MeasuredDataError
from tilewright.hw.gemmini import GemminiMachine

LAYERS = [Layer.matmul(16 * rows, 16 * depth, 48) for rows in (1, 3, 7, 9) for depth in (2, 5, 8)]


def points(slowdown: float, machine: GemminiMachine) -> Points:
    """Mappings that take `slowdown` times as long as the model says where DRAM's loops run often."""
    nests = Nests.of(LAYERS)
    mappings = joined([best_mapping(layer, machine).mapping for layer in LAYERS])
    hardware = Hardware.of([machine] * len(LAYERS))
    raw, cycles = features(nests, mappings, hardware)
    return Points(nests, mappings, hardware, {TARGET: cycles * slowdown * np.exp(0.1 * raw[:, 0])})


def test_it_learns_what_the_model_leaves_out() -> None:
    measured = points(1.5, GemminiMachine(dim=8, scratchpad=2048, accumulator=1024))
    learned = Correction.fit(measured)
    predicted = learned.cycles(measured.nests, measured.mappings, measured.hardware)
    error = np.abs(predicted / measured.targets[TARGET] - 1)
    assert error.max() < 0.05
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


# Rows of the training set (DOSA repository, BSD 2-Clause, copyright 2022 Charles Hong) are predicted within the error
# that leaving layers out has shown.
def test_the_shipped_one_makes_mappings_slower_than_the_roofline() -> None:
    machine = GemminiMachine(dim=16, scratchpad=110592, accumulator=16384)
    layers = [Layer.matmul(128, 768, 768), Layer.convolution((16, 16), 256, 256, (3, 3))]
    nests, hardware = Nests.of(layers), Hardware.of([machine] * 2)
    mappings = joined([best_mapping(layer, machine).mapping for layer in layers])
    _, cycles = features(nests, mappings, hardware)
    corrected = shipped().cycles(nests, mappings, hardware)
    assert shipped().valid_for(hardware).all() and len(shipped().rows) == 74
    assert ((corrected > cycles) & (corrected < 6 * cycles)).all()
