"""Tiled contractions of any size: every choice that a tuner would make, drawn at random."""

from __future__ import annotations

import contextlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.loops import formulas
from tests.loops.schedule.examples import check_meaning, conv2d
from tilewright.errors import ScheduleError
from tilewright.loops.schedule import Schedule, outer_product

QUICK = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
LANES = 4


def tail_for(draw: st.DrawFn, extent: int, factor: int) -> str:
    return draw(st.sampled_from(["guard", "shift"] if factor <= extent else ["guard"]))


@st.composite
def products(draw: st.DrawFn) -> tuple[Schedule, tuple[int, int, int]]:
    m, n, k = (draw(st.integers(1, 19)) for _ in range(3))
    rows, vectors = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    width = vectors * LANES
    constants = [1] if draw(st.booleans()) else []
    schedule = Schedule.of(*formulas.matmul(m, n, k), constants=constants)
    if min(m, n, k) == 1:
        return schedule, (m, n, k)
    fits = width <= n
    schedule = schedule.split("out.i0", rows, tail_for(draw, m, rows))
    schedule = schedule.split("out.i1", width, "shift" if fits else "guard")
    around = draw(st.permutations(["out.i0.o", "out.i1.o"]))
    schedule = schedule.reorder(*around, "out.i0.i", "out.i1.i").compute_at("product", around[1])
    rest = [loop for loop in schedule.loops if loop.startswith("product.")]
    inside = ["product.i0"] if "product.i0" in rest else []
    if draw(st.booleans()):
        depth = draw(st.integers(1, 6))
        schedule = schedule.split("product.r0", depth, "guard", into=("ko", "ki"))
        order = ["ko", "ki", *inside, "product.i1"]
    else:
        order = ["product.r0", *inside, "product.i1"]
    schedule = schedule.reorder(*order)
    if fits and draw(st.booleans()):
        schedule = schedule.pack("b", [k, width])
    if constants == [] and "b.packed" in schedule.stages and draw(st.booleans()):
        schedule = schedule.compute_at("b.packed", draw(st.sampled_from(around)))
    if draw(st.booleans()):
        schedule = schedule.cache_read("a", "product")
        schedule = schedule.compute_at("a.of.product", draw(st.sampled_from([*around, order[0]])))
    if fits:
        schedule = schedule.split("out.i1.i", LANES, into=("u", "v")).unroll("u").vectorise("v")
    tensorised = False
    if fits and inside and draw(st.booleans()):
        with contextlib.suppress(ScheduleError):  # a tile that leaves the tensor computes something else
            schedule = schedule.tensorise("product.i0", outer_product(rows, vectors, LANES))
            tensorised = True
    if fits and not tensorised:
        schedule = schedule.split("product.i1", LANES, into=("pu", "pv")).unroll("pu").vectorise("pv")
        schedule = schedule.unroll("product.i0") if inside else schedule
    if fits and draw(st.booleans()):
        schedule = schedule.unroll("out.i0.i").set_scope("product", "register")
    return schedule, (m, n, k)


@QUICK
@given(products())
def test_products_of_any_size(drawn: tuple[Schedule, tuple[int, int, int]]) -> None:
    schedule, sizes = drawn
    check_meaning(schedule, formulas.matmul(*sizes))


@settings(QUICK, max_examples=5)
@given(products())
def test_products_of_any_size_in_machine_code(drawn: tuple[Schedule, tuple[int, int, int]]) -> None:
    schedule, sizes = drawn
    if len(schedule.nest.body) == 1:
        schedule = schedule.parallel(schedule.loops[0])
    check_meaning(schedule, formulas.matmul(*sizes), native=True)


@settings(QUICK, max_examples=8)
@given(st.data())
def test_convolutions_of_any_size(data: st.DataObject) -> None:
    """Rows in tiles, the padded rows they read computed in the tile or in the expression."""
    draw = data.draw
    size, stride = draw(st.integers(3, 9)), draw(st.sampled_from([1, 2]))
    task = conv2d(size, 2, draw(st.sampled_from([4, 5, 8])), stride)
    rows = draw(st.integers(1, -(-size // stride)))
    schedule = Schedule.of(*task, constants=[1]).split(
        "out.i0", rows, draw(st.sampled_from(["guard", "shift"]))
    )
    schedule = schedule.compute_at("conv", "out.i0.o")
    if draw(st.booleans()):
        schedule = schedule.inline("padded")
    else:
        schedule = schedule.compute_at("padded", draw(st.sampled_from(["out.i0.o", "conv.i1"])))
    if "padded" not in schedule.stages or draw(st.booleans()):
        filters = schedule.split("conv.i2", 4, "shift")
        if "padded" not in schedule.stages:
            filters = filters.reorder("conv.i2.o", "conv.r0", "conv.r1", "conv.r2", "conv.i2.i").vectorise(
                "conv.i2.i"
            )
        schedule = filters
    check_meaning(schedule.parallel("out.i0.o"), task, native=draw(st.integers(0, 3)) == 0)
