"""Schedules of what reads every element about once: windows, sums of columns, images enlarged, borders, rows looked up,
rows written behind. Right for odd sizes and types, on one thread and on two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.llvm.native import run_program
from tests.loops.test_memory_bound import (
    check,
    checked_program,
    layer_norm,
    machines,
    softmax,
    statements,
    turning,
    with_vectors,
)
from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.hw.caches import Caches
from tilewright.loops.ir import Prefetch, Store, Transpose

F32, F16, I8, I64 = DType.F32, DType.F16, DType.I8, DType.I64

PAGES_FOLLOWED, LOADS_FOLLOWED = "icelake-server", "znver4"  # by the look-ahead
PROCESSORS = (PAGES_FOLLOWED, LOADS_FOLLOWED) if host().triple.startswith("x86_64") else (host().cpu,)


# -- elements a few places apart ------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(30, 200),
    start=st.integers(0, 3),
    step=st.integers(2, 5),
    dtype=st.sampled_from([F32, F16, I8, I64]),
    machine=machines,
)
def test_every_few_elements(
    rows: int, columns: int, start: int, step: int, dtype: DType, machine: CpuMachine
) -> None:
    inputs = Inputs()
    x = inputs(rows, columns, dtype=dtype)
    check(inputs.task(apply("slice", x, starts=(0, start), stops=(rows, columns), steps=(1, step))), machine)


@st.composite
def pools(draw: st.DrawFn) -> Task:
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    attrs = {
        "kernel": kernel,
        "stride": (draw(st.integers(1, 3)), draw(st.integers(1, 5))),
        "padding": tuple(draw(st.integers(0, size // 2)) for size in kernel),
        "ceil_mode": draw(st.booleans()),
        "layout": "channels_first",
    }
    inputs = Inputs()
    x = inputs(2, draw(st.integers(1, 3)), draw(st.integers(4, 9)), draw(st.integers(4, 90)))
    if draw(st.booleans()):
        return inputs.task(apply("max_pool", x, dilation=(1, 1), **attrs))
    return inputs.task(apply("avg_pool", x, count_include_pad=draw(st.booleans()), divisor=None, **attrs))


@settings(max_examples=16, deadline=None)
@given(task=pools(), machine=machines, cpu=st.sampled_from(PROCESSORS))
def test_windows_along_an_image(task: Task, machine: CpuMachine, cpu: str) -> None:
    check(task, replace(machine, cpu=cpu))


@pytest.mark.parametrize("operator", ["max_pool", "avg_pool"])
@pytest.mark.parametrize(("planes", "height"), [(16, 16), (3, 17)])
def test_what_is_bound_by_reading_reads_several_places(operator: str, planes: int, height: int) -> None:
    inputs = Inputs()
    attrs = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "ceil_mode": False}
    attrs |= {"dilation": (1, 1)} if operator == "max_pool" else {"count_include_pad": False, "divisor": None}
    x = inputs(2, planes, height, 112)
    pooled = apply(operator, apply("exp", x), layout="channels_first", **attrs)
    machine = replace(with_vectors(64, streams=True), cpu=PROCESSORS[0])
    program = check(inputs.task(apply("sub", pooled, inputs(planes, 1, 1))), machine)
    assert program.decisions.startswith("pooled")
    assert ("places" in program.decisions) == (planes == 16)
    assert statements(program, Prefetch)


@pytest.mark.skipif(LOADS_FOLLOWED not in PROCESSORS, reason="no such processor of this instruction set")
@pytest.mark.parametrize("operator", ["max_pool", "avg_pool"])
@pytest.mark.parametrize(("kernel", "at_once"), [(2, True), (3, True), (4, False)])
def test_loads_that_are_followed_take_small_windows_at_once(
    operator: str, kernel: int, at_once: bool
) -> None:
    inputs = Inputs()
    padding = (kernel // 2, kernel // 2)
    attrs = {"kernel": (kernel, kernel), "stride": (2, 2), "padding": padding, "ceil_mode": True}
    attrs |= {"dilation": (1, 1)} if operator == "max_pool" else {"count_include_pad": False, "divisor": None}
    pooled = apply(operator, inputs(2, 16, 9, 110), layout="channels_first", **attrs)
    machine = replace(with_vectors(64, streams=True), cpu=LOADS_FOLLOWED)
    program = check(inputs.task(apply("sub", pooled, inputs(16, 1, 1))), machine, slow=True)
    assert program.decisions.startswith("pooled") and "streamed" in program.decisions
    assert ("at once" in program.decisions) == at_once
    assert bool(statements(program, Prefetch)) != at_once


def test_windows_over_a_part_of_rows_ask_for_nothing_else() -> None:
    inputs = Inputs()
    attrs = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "ceil_mode": False}
    ends = {"starts": (0, 0, 0, 0), "stops": (1, 16, 8, 112), "steps": (1, 1, 1, 1)}
    part = apply("slice", inputs(1, 16, 8, 1000), **ends)
    task = inputs.task(apply("max_pool", part, layout="channels_first", **attrs))
    program = check(task, replace(with_vectors(64, streams=True), cpu=PROCESSORS[0]))
    assert program.decisions.startswith("pooled") and "streamed" in program.decisions
    assert not statements(program, Prefetch)


@pytest.mark.parametrize("cpu", PROCESSORS)
@pytest.mark.parametrize("streams", [False, True])
def test_nan_wins_in_its_windows_alone(cpu: str, streams: bool) -> None:
    inputs = Inputs()
    attrs = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "ceil_mode": False}
    task = inputs.task(apply("max_pool", inputs(2, 8, 9, 70), layout="channels_first", **attrs))
    x = array(2, 8, 9, 70)
    x[0, 0, 0, 0] = x[1, 7, 8, 69] = x[0, 0, 4, 33] = np.nan
    program = check(task, replace(with_vectors(64, streams=streams), cpu=cpu), [x])
    assert ("streamed" in program.decisions) == streams


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_only_windows_that_overlap_are_summed_in_tiles_of_several_rows(stride: int) -> None:
    inputs = Inputs()
    attrs = {"kernel": (3, 3), "stride": (stride, stride), "padding": (0, 0), "dilation": (1, 1)}
    image = inputs(1, 33, 33, 64)
    task = inputs.task(apply("max_pool", image, ceil_mode=False, layout="channels_last", **attrs))
    of_one_row = checked_program(task, with_vectors(64)).decisions.startswith("tiled: 1 x")
    assert of_one_row == (stride == 3)


# -- sums of columns ------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(["sum", "amax", "mean"]),
    groups=st.integers(1, 3),
    rows=st.integers(20, 40),
    columns=st.integers(300, 700),
    dtype=st.sampled_from([F32, F16]),
    size=st.sampled_from([16, 32, 64]),
)
def test_columns(kind: str, groups: int, rows: int, columns: int, dtype: DType, size: int) -> None:
    inputs = Inputs()
    x = inputs(groups, rows, columns, dtype=dtype)
    task = inputs.task(apply(kind, x, axes=(1,), keepdims=False))
    program = check(task, with_vectors(size, streams=True))
    assert program.decisions.startswith("columns")


@settings(max_examples=6, deadline=None)
@given(
    name=st.sampled_from(["argmax", "argmin"]),
    rows=st.integers(9, 40),
    columns=st.integers(300, 700),
    values=st.sampled_from([(0.0, 1.0), (0.0, -np.inf, np.inf), (0.0, 1.0, np.nan), (-np.inf,), (np.inf,)]),
    dtype=st.sampled_from([F32, F16, DType.I32]),
    size=st.sampled_from([16, 32, 64]),
    seed=st.integers(0, 1000),
)
def test_the_place_of_an_extreme_is_found_along_with_it(
    name: str, rows: int, columns: int, values: tuple[float, ...], dtype: DType, size: int, seed: int
) -> None:
    inputs = Inputs()
    task = inputs.task(apply(name, inputs(rows, columns, dtype=dtype), axis=0, keepdims=False))
    drawn = np.random.default_rng(seed).choice(values if dtype.is_float else (0, 1, 2), (rows, columns))
    program = check(task, with_vectors(size, streams=True), [drawn.astype(dtype.numpy)])
    assert program.decisions.startswith(f"columns: {name[3:]} of {rows} and its place")


def test_columns_as_loops() -> None:
    inputs = Inputs()
    x = inputs(17, 161)
    for reduced in (apply("sum", x, axes=(0,), keepdims=False), apply("argmin", x, axis=0, keepdims=False)):
        program = check(inputs.task(reduced), with_vectors(64, streams=True), slow=True)
        assert program.decisions.startswith("columns")


def test_what_fits_a_cache_is_summed_in_registers() -> None:
    inputs = Inputs()
    task = inputs.task(apply("sum", inputs(20, 256), axes=(0,), keepdims=False))
    assert checked_program(task, host()).decisions.startswith("tiled")


# -- images enlarged ------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(
    height=st.integers(1, 6),
    width=st.integers(1, 70),
    factors=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    mode=st.sampled_from(["nearest", "linear", "linear", "cubic"]),
    half_pixel=st.booleans(),
    machine=machines,
)
def test_enlarged_images(
    height: int, width: int, factors: tuple[int, int], mode: str, half_pixel: bool, machine: CpuMachine
) -> None:
    inputs = Inputs()
    sizes = (height * factors[0], width * factors[1])
    coordinates = "half_pixel" if half_pixel else "asymmetric"
    x = inputs(3, height, width)
    check(inputs.task(apply("resize", x, sizes=sizes, mode=mode, coordinates=coordinates)), machine)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("factor", [2, 3, 4])
def test_results_of_the_same_neighbours_are_turned_in_registers(mode: str, factor: int) -> None:
    inputs = Inputs()
    coordinates = "half_pixel" if mode == "linear" else "asymmetric"
    x = inputs(2, 5, 50)
    task = inputs.task(apply("resize", x, sizes=(5, 50 * factor), mode=mode, coordinates=coordinates))
    assert statements(check(task, with_vectors(64), slow=True), Transpose)


# -- rows put together, rows looked up, rows written behind ------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    shape=st.lists(st.integers(2, 40), min_size=2, max_size=3),
    low=st.integers(0, 2),
    high=st.integers(0, 3),
    dtype=st.sampled_from([F32, F16, I8]),
    streams=st.booleans(),
)
def test_borders(shape: list[int], low: int, high: int, dtype: DType, streams: bool) -> None:
    inputs = Inputs()
    x = inputs(4, *shape, dtype=dtype)
    ends = {"low": (0, *[low] * len(shape)), "high": (0, *[high] * len(shape))}
    task = inputs.task(apply("pad", x, interior=(0,) * len(x.shape), value=1 if dtype is I8 else 1.0, **ends))
    check(task, with_vectors(64, streams=streams))


@pytest.mark.parametrize(("width", "asked"), [(62, True), (1024, False)])
def test_what_lies_between_rows_is_not_asked_for(width: int, asked: bool) -> None:
    inputs = Inputs()
    part = apply("slice", inputs(64, width), starts=(0, 1), stops=(64, 61), steps=(1, 1))
    program = check(inputs.task(part), with_vectors(64, streams=True))
    assert "staged" in program.decisions
    assert bool(statements(program, Prefetch)) == asked


def test_an_only_row_with_a_border() -> None:
    inputs = Inputs()
    padded = apply("pad", inputs(250), low=(3,), high=(3,), interior=(0,), value=0.5)
    check(inputs.task(padded), with_vectors(64, streams=True))


@pytest.mark.parametrize("streams", [True, False])
def test_no_vector_asks_whether_it_is_in_a_border(streams: bool) -> None:
    inputs = Inputs()
    ends = {"low": (0, 1, 3), "high": (0, 2, 3), "interior": (0, 0, 0)}
    task = inputs.task(apply("pad", inputs(16, 30, 90), value=0.5, **ends))
    program = check(task, with_vectors(64, streams=streams))
    stored = [stmt.value for stmt in statements(program, Store) if isinstance(stmt, Store)]
    assert not any(isinstance(node, te.Select) for value in stored for node in te.walk(value))


@pytest.mark.parametrize("images", [(16, 1), (1, 16)])
def test_a_single_row_that_begins_with_a_line_beside_rows_that_do_not(images: tuple[int, int]) -> None:
    inputs = Inputs()
    parts = [inputs(count, 17, 329) for count in images]
    check(inputs.task(apply("tanh", apply("concat", *parts, axis=0))), with_vectors(32, streams=True))


def test_short_rows_are_put_together_before_they_are_streamed() -> None:
    inputs = Inputs()
    x = inputs(16, 30, 96)
    ends = {"low": (0, 1, 1), "high": (0, 1, 1), "interior": (0, 0, 0)}
    program = check(inputs.task(apply("pad", x, value=0.0, **ends)), with_vectors(64, streams=True))
    assert "staged" in program.decisions
    assert any(isinstance(s, Store) and s.streamed for s in statements(program, Store))


def test_rows_that_are_looked_up_are_asked_for_ahead() -> None:
    inputs = Inputs()
    table, which = inputs(50, 96), inputs(70, dtype=I64)
    task = inputs.task(apply("take", table, which, axis=0))
    numbers = np.random.default_rng(0).integers(0, 50, 70)
    program = check(task, with_vectors(64, streams=True), [array(50, 96), numbers])
    assert statements(program, Prefetch)


def test_where_not_all_rows_are_looked_up_none_is_asked_for() -> None:
    inputs = Inputs()
    table, which, others = inputs(50, 96), inputs(70, dtype=I64), inputs(40, 96)
    task = inputs.task(apply("concat", apply("take", table, which, axis=0), others, axis=0))
    numbers = np.random.default_rng(0).integers(0, 50, 70)
    program = check(task, with_vectors(64, streams=True), [array(50, 96), numbers, array(40, 96)])
    assert not statements(program, Prefetch)


def test_rows_that_follow_each_other_where_one_was_looked_up_are_not_asked_for() -> None:
    inputs = Inputs()
    table, which = inputs(5, 16, 16, 128), inputs(6, dtype=I64)
    task = inputs.task(apply("permute", apply("take", table, which, axis=0), axes=(0, 2, 1, 3)))
    numbers = np.random.default_rng(0).integers(0, 5, 6)
    program = check(task, with_vectors(64, streams=True), [array(5, 16, 16, 128), numbers])
    assert not statements(program, Prefetch)


def test_no_place_is_looked_up_behind_the_last() -> None:
    """Of planes that are turned, and of rows that are put together: the next ones are not asked for."""
    inputs = Inputs()
    planes = apply("take", inputs(7, 64, 64), inputs(40, dtype=I64), axis=0)
    turned = inputs.task(apply("permute", planes, axes=(0, 2, 1)))
    more = Inputs()
    rows = apply("take", more(7, 48, 10), more(16, dtype=I64), axis=0)
    together = more.task(apply("add", rows, more(10)))
    for task, words in ((turned, "transposed"), (together, "staged")):
        arrays = [array(*node.shape, seed=i) for i, node in enumerate(task.graph.inputs)]
        arrays[1] = np.random.default_rng(0).integers(0, 7, task.graph.inputs[1].shape)
        assert words in check(task, with_vectors(64, streams=True), arrays).decisions


@pytest.mark.parametrize("make", [softmax, layer_norm])
@pytest.mark.parametrize(("rows", "columns"), [(1, 208), (7, 128), (48, 208)])
def test_rows_are_written_while_the_next_are_computed(make, rows: int, columns: int) -> None:
    inputs = Inputs()
    task = inputs.task(make(inputs, rows, columns))
    arrays = [array(*node.shape, seed=i) for i, node in enumerate(task.graph.inputs)]
    arrays[0][rows // 2, columns - 1] = np.nan
    machine = with_vectors(64, streams=True)
    with np.errstate(all="ignore"):
        program = check(task, machine, arrays)
    written = rows * columns * 4
    assert ("behind" in program.decisions) == (written >= machine.caches.last and rows > 1)


@settings(max_examples=6, deadline=None)
@given(
    make=st.sampled_from([softmax, layer_norm]),
    groups=st.integers(1, 3),
    columns=st.integers(65, 209).filter(lambda n: n % 16),
)
def test_lines_that_two_rows_share_wait_for_the_second(make, groups: int, columns: int) -> None:
    inputs = Inputs()
    rows = 16 * groups
    task = inputs.task(make(inputs, rows, columns))
    arrays = [array(*node.shape, seed=i) for i, node in enumerate(task.graph.inputs)]
    arrays[0][rows // 2, columns - 1] = arrays[0][rows - 1, 0] = np.nan
    machine = with_vectors(64, streams=True)
    with np.errstate(all="ignore"):
        program = check(task, machine, arrays)
    if machine.vector_bytes == 64:
        assert "lines of two rows" in program.decisions
        assert all(stmt.streamed for stmt in statements(program, Store) if stmt.buffer.name == "out")


@pytest.mark.parametrize("rows", [16, 17])
def test_what_only_a_part_of_a_row_has_is_not_kept_of_all_of_it(rows: int) -> None:
    inputs = Inputs()
    powers, others, more = apply("exp", inputs(rows, 40)), inputs(rows, 37), inputs(rows, 37)
    total = apply("sum", apply("concat", powers, others, axis=1), axes=(1,), keepdims=True)
    task = inputs.task(apply("add", apply("concat", powers, more, axis=1), total))
    assert "kept" not in check(task, with_vectors(64, streams=True)).decisions


@pytest.mark.parametrize("make", [softmax, layer_norm])
@pytest.mark.parametrize("columns", [65, 72])
def test_lines_that_two_rows_share_as_loops(make, columns: int) -> None:
    inputs = Inputs()
    program = check(inputs.task(make(inputs, 16, columns)), with_vectors(64, streams=True), slow=True)
    assert ("lines of two rows" in program.decisions) == (host().vector_bytes == 64)


def test_rows_that_never_end_with_a_line_together_are_written_one_by_one() -> None:
    inputs = Inputs()
    program = check(inputs.task(softmax(inputs, 17, 197)), with_vectors(64, streams=True))
    assert "lines of two rows" not in program.decisions


@pytest.mark.parametrize("dtype", [F16, F32, DType.F64])
@pytest.mark.parametrize("second_cache", [256 << 10, 1280 << 10, 4 << 20])
@pytest.mark.parametrize("columns", [32000, 65528, 65536, 102400, 262144])
def test_what_is_kept_of_long_rows_has_room(columns: int, second_cache: int, dtype: DType) -> None:
    caches = Caches(l1=48 << 10, l2=second_cache, l3=1 << 20)
    machine = replace(with_vectors(64), caches=caches)
    inputs = Inputs()
    x = inputs(64, columns, dtype=dtype)
    peak = apply("amax", x, axes=(1,), keepdims=True)
    exp = apply("exp", apply("sub", x, peak))
    total = apply("sum", exp, axes=(1,), keepdims=True)
    program = checked_program(inputs.task(apply("div", exp, total)), machine)
    assert "streamed" in program.decisions


@pytest.mark.parametrize("dtype", [F16, I8])
def test_squares_of_thirty_two(dtype: DType) -> None:
    values = (np.arange(1024) % 127).astype(dtype.numpy)
    result = run_program(turning(32, 32, 32, dtype), [values])
    np.testing.assert_array_equal(result, values.reshape(32, 32).T.reshape(-1))
