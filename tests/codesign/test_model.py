"""The model of cycles and energy: counted by hand, by simulation of the loops, and its derivatives by differences."""

from __future__ import annotations

from itertools import product as tuples

import numpy as np
import pytest

from tilewright.codesign.mapping import Hardware, Mappings
from tilewright.codesign.model import BOUNDS, COORDINATES, Model
from tilewright.codesign.problem import LOOPS, RELEVANT, Layer, Nests
from tilewright.codesign.quantity import Quantity, largest, whole
from tilewright.hw.gemmini import GemminiMachine

SHARP = Model(sliding=False, rounded=False)


def batch_of(texts: list[str], stride: int = 1, dim: int = 8) -> tuple[Nests, Mappings, Hardware]:
    mappings = Mappings.parse(texts)
    layers = [Layer(tuple(map(int, row)), (stride, stride)) for row in mappings.padded()]  # type: ignore[arg-type]
    return Nests.of(layers), mappings, Hardware.of([GemminiMachine(dim=dim)] * len(texts))


def random_texts(rng: np.random.Generator, count: int) -> list[str]:
    def loops(names: str, sizes: list[int]) -> str:
        shuffled = rng.permutation(list(names))
        return "".join(f" {name}{rng.choice(sizes)}" for name in shuffled)

    return [
        f"L3[WIO]{loops(LOOPS, [1, 1, 2, 3])} - L2[WI]{loops('PKC', [1, 1, 2])} K{rng.integers(1, 4)}X"
        f" - L1[O]{loops('RSPQCK', [1, 1, 2])} C{rng.integers(1, 4)}X - L0[W]{loops('PQ', [1, 2])}"
        for _ in range(count)
    ]


# -- traffic, by running the loops ------------------------------------------------------------------------------------


def fetched(mappings: Mappings, index: int, tensor: str, level: int) -> int:
    """How often a tile changes when the loops of this level and above are run one iteration at a time."""
    loops = [
        (loop, int(mappings.factors[index, where, loop]), where)
        for where in range(3, level - 1, -1)
        for loop in mappings.order[index, where]
    ]
    count, last = 0, None
    for point in tuples(*(range(factor) for _, factor, _ in loops)):
        tile = [value for value, (loop, _, _) in zip(point, loops, strict=True) if loop in RELEVANT[tensor]]
        count, last = count + (tile != last), tile
    return count


def test_traffic_is_that_of_the_loops_when_they_run() -> None:
    texts = random_texts(np.random.default_rng(1), 25)
    nests, mappings, hardware = batch_of(texts)
    found = SHARP.estimate(nests, mappings, hardware).accesses
    for index in range(len(texts)):
        inner = mappings.factors[index, :3].prod(axis=0)
        inner[LOOPS.index("C")] *= mappings.rows[index]
        inner[LOOPS.index("K")] *= mappings.columns[index]
        r, s, p, q, c, k, n = inner
        weights = r * s * c * k * fetched(mappings, index, "weights", 3)
        inputs = (p + r - 1) * (q + s - 1) * c * n * fetched(mappings, index, "inputs", 3)
        array = mappings.rows[index] * mappings.columns[index]
        fills = array * fetched(mappings, index, "weights", 1)
        macs = mappings.padded()[index].prod()
        assert found["DRAM", "weights"].value[index] == pytest.approx(weights)
        assert found["DRAM", "inputs"].value[index] == pytest.approx(inputs)
        assert found["scratchpad", "weights"].value[index] == pytest.approx(fills + weights)
        assert found["registers", "weights"].value[index] == pytest.approx(macs + fills)
        tile = mappings.factors[index, :2].prod(axis=0)[[2, 3, 5, 6]].prod() * mappings.columns[index]
        stored = tile * fetched(mappings, index, "outputs", 2)
        whole_output = mappings.padded()[index, [2, 3, 5, 6]].prod()
        assert found["DRAM", "outputs"].value[index] == pytest.approx(2 * stored - whole_output)
        updates = macs / mappings.rows[index]
        assert found["accumulator", "outputs"].value[index] == pytest.approx(
            2 * updates + stored - whole_output
        )


def test_windows_that_overlap_are_read_once() -> None:
    """Along P, 4 windows of 3 outputs and 3 taps: 5 columns at first, then 3 new ones each. A loop inside ends that."""
    texts = [
        "L3[WIO] P4 - L2[WI] - L1[O] R3 P3 C2X - L0[W]",
        "L3[WIO] P4 K2 - L2[WI] - L1[O] R3 P3 C2X - L0[W]",
        "L3[WIO] K2 P4 - L2[WI] - L1[O] R3 P3 C2X - L0[W]",
    ]
    found = Model().estimate(*batch_of(texts)).accesses["DRAM", "inputs"].value
    assert found == pytest.approx([2 * (5 + 3 * 3), 2 * 4 * 5, 2 * 2 * (5 + 3 * 3)])
    apart = Model().estimate(*batch_of(texts[:1], stride=4)).accesses["DRAM", "inputs"].value
    assert apart == pytest.approx([2 * 4 * (2 * 4 + 3)])


# Rows of Timeloop's data set (DOSA repository, BSD 2-Clause, copyright 2022 Charles Hong): array, scratchpad words,
# words of an accumulator column, stride, mapping, cycles, microjoules.
TIMELOOP = [
    (
        32,
        2048,
        128,
        2,
        "L3[WIO] P28 R7 Q56 K8 - L2[WI] N1 K4X - L1[O] K2 S7 Q2 P2 C3X - L0[W] P2",
        10436608,
        3057.01,
    ),
    (
        32,
        2048,
        128,
        2,
        "L3[WIO] P28 Q56 K8 S7 - L2[WI] N1 K4X - L1[O] K2 R7 Q2 C3X - L0[W] P4",
        9834496,
        2318.097536,
    ),
]


@pytest.mark.parametrize("row", TIMELOOP)
def test_rows_of_timeloop(row: tuple[int, int, int, int, str, int, float]) -> None:
    dim, scratchpad, column, stride, text, cycles, microjoules = row
    nests, mappings, _ = batch_of([text], stride)
    hardware = Hardware(np.array([dim]), np.array([scratchpad]), np.array([column * dim]))
    found = Model().estimate(nests, mappings, hardware)
    assert found.cycles.value[0] == cycles
    assert found.microjoules.value[0] == pytest.approx(microjoules, rel=1e-3)


def test_the_slowest_part_decides() -> None:
    texts = [
        "L3[WIO] K8 - L2[WI] K8X - L1[O] C8 P8 C8X - L0[W] P8",
        "L3[WIO] K64 C64 - L2[WI] K8X - L1[O] C8X - L0[W]",
    ]
    found = SHARP.estimate(*batch_of(texts))
    assert [BOUNDS[index] for index in found.bound_by] == ["PE array", "DRAM"], found.parts
    assert found.cycles.value == pytest.approx([8 * 8 * 8 * 8, found.parts["DRAM"].value[1]])
    assert (found.edp.value == found.cycles.value * found.microjoules.value).all()


# -- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["cycles", "microjoules", "edp"])
def test_derivatives_are_those_of_finite_differences(what: str) -> None:
    """At factors that are not whole, where loops count in part and windows overlap."""
    rng = np.random.default_rng(3)
    nests, mappings, hardware = batch_of(random_texts(rng, 40), stride=2)
    nests = nests._replace(stride=rng.choice([1.0, 2.0], nests.stride.shape))
    model = Model(smoothing=0.1, rounded=False)
    start = np.concatenate(
        [
            np.log(mappings.factors.reshape(40, 28)) + rng.uniform(0.05, 0.6, (40, 28)),
            np.log(np.stack([mappings.rows, mappings.columns, *hardware], axis=1)),
        ],
        axis=1,
    )

    def at(point: np.ndarray, gradients: bool = False) -> Quantity:
        values = np.exp(point)
        moved = Mappings(values[:, :28].reshape(40, 4, 7), values[:, 28], values[:, 29], mappings.order)
        found = model.estimate(nests, moved, Hardware(*values[:, 30:].T), gradients=gradients)
        quantity: Quantity = getattr(found, what)
        return quantity

    exact = at(start, gradients=True)
    assert exact.gradient is not None and exact.gradient.shape == (40, len(COORDINATES))
    assert (exact.value == at(start).value).all()
    step = 1e-6
    for coordinate in range(len(COORDINATES)):
        aside = np.zeros(len(COORDINATES))
        aside[coordinate] = step
        slope = (at(start + aside).value - at(start - aside).value) / (2 * step)
        close = np.isclose(exact.gradient[:, coordinate], slope, rtol=1e-4, atol=1e-5 * exact.value)
        # A step across a kink of min or clip has no derivative; there are few of them.
        assert close.mean() >= 0.97, COORDINATES[coordinate]
    used = [COORDINATES[index] for index in range(len(COORDINATES)) if exact.gradient[:, index].any()]
    assert len(used) >= (30 if what == "cycles" else 33)


def test_between_whole_factors_there_is_no_jump() -> None:
    """From K1 to K2 in DRAM, inside a loop that the weights do not move with."""
    nests, mappings, hardware = batch_of(["L3[WIO] P4 K2 - L2[WI] K2X - L1[O] C4 C2X - L0[W] P2"])
    steps = np.linspace(0.0, 1.0, 401)
    factors = np.repeat(mappings.factors, len(steps), axis=0)
    factors[:, 3, LOOPS.index("K")] = 2.0**steps
    many = Mappings(
        factors,
        *(np.repeat(each, len(steps), axis=0) for each in (mappings.rows, mappings.columns, mappings.order)),
    )
    rows = np.zeros(len(steps), int)
    found = SHARP.estimate(nests.take(rows), many, hardware.take(rows)).accesses["DRAM", "weights"].value
    assert found[0] == pytest.approx(16) and found[-1] == pytest.approx(16 * 2 * 4)
    assert np.abs(np.diff(np.log(found))).max() < 0.01


def test_the_smooth_maximum_is_close_and_above() -> None:
    parts = [Quantity(np.array([3.0, 5.0])), Quantity(np.array([4.0, 5.0])), Quantity(np.array([1e-9, 1.0]))]
    sharp, smooth = largest(parts).value, largest(parts, 0.05).value
    assert (sharp == [4.0, 5.0]).all()
    assert (smooth >= sharp).all() and (smooth <= sharp * 3**0.05).all()


def test_whole_blocks_forgive_rounding_and_nothing_else() -> None:
    found = whole(Quantity(np.array([128.0 * (1 + 1e-12), 128.1, 1.0])), 64).value
    assert (found == [128.0, 192.0, 64.0]).all()
