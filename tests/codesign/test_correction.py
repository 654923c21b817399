"""The learned correction: what it was trained on, where it may be asked, and its file."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright.codesign.calls import Calls, Fitted
from tilewright.codesign.correction import TARGET, Correction, shipped
from tilewright.codesign.data import Points
from tilewright.codesign.exact import LATENCY, best_mapping, near_optimal
from tilewright.codesign.library import library_mapping
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


# Rows that ran on Gemmini's RTL in FireSim, of the DOSA repository (BSD 2-Clause, copyright 2022 Charles Hong).
@pytest.mark.parametrize(
    ("mapped", "layer", "text", "scratchpad", "accumulator", "measured"),
    [
        (
            "found",
            Layer.matmul(128, 768, 768),
            "L3[WIO] K48 - L2[WI] K16X - L1[O] C48 P16 C16X - L0[W] P8",
            110592,
            4096,
            566626,
        ),
        (
            "found",
            Layer((3, 3, 56, 56, 64, 64, 1)),
            "L3[WIO] Q14 P2 - L2[WI] K16X - L1[O] K4 S3 R3 C4 Q2 P2 C16X - L0[W] Q2 P14",
            130048,
            8192,
            472892,
        ),
        (
            "found",
            Layer((1, 1, 14, 14, 1024, 256, 1)),
            "L3[WIO] P2 K16 - L2[WI] K16X - L1[O] C64 Q2 C16X - L0[W] Q7 P7",
            130048,
            8192,
            281428,
        ),
        (
            "found",
            Layer((3, 3, 4, 4, 256, 36, 1)),
            "L3[WIO] - L2[WI] K12X - L1[O] K3 S3 R3 C16 P2 C16X - L0[W] Q4 P2",
            267264,
            12544,
            25773,
        ),
        (
            "random",
            Layer((3, 3, 108, 108, 3, 64, 1), stride=(2, 2)),
            "L3[WIO] R3 K8 Q12 C3 P3 - L2[WI] K8X - L1[O] S3 Q9 P3 - L0[W] P12",
            1048576,
            262144,
            5856966,
        ),
    ],
)
def test_the_shipped_one_knows_measured_rows(
    mapped: str, layer: Layer, text: str, scratchpad: int, accumulator: int, measured: float
) -> None:
    hardware = Hardware(np.array([16.0]), np.array([float(scratchpad)]), np.array([float(accumulator)]))
    cycles = shipped().cycles(Nests.of([layer]), Mappings.parse([text]), hardware, mapped)
    assert cycles[0] == pytest.approx(measured, rel=0.1)


def test_the_shipped_one_knows_what_the_library_takes() -> None:
    layers = [Layer.matmul(128, 768, 768), Layer((3, 3, 56, 56, 64, 64, 1)), Layer((3, 3, 4, 4, 256, 36, 1))]
    machine = GemminiMachine()
    tilings = Mappings.joined([library_mapping(layer, machine) for layer in layers])
    given = Nests.of(layers), tilings, Hardware.of([machine] * 3)
    measured = [370440.0, 537803.0, 28334.0]
    assert shipped().cycles(*given, "automatic") == pytest.approx(measured, rel=0.1)


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
