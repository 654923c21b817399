"""Schedules of what reads every element about once: windows, sums of columns, upsampled images, borders, gathers,
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
    largest,
    layer_norm,
    machines,
    softmax,
    statements,
    total,
    transposing,
    where_largest,
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
from tilewright.loops.ir import For, Prefetch, Program, Store, Transpose

F32, F16, I8, I64 = DType.F32, DType.F16, DType.I8, DType.I64

PAGES_FOLLOWED, LOADS_FOLLOWED = "icelake-server", "znver4"  # by the hardware prefetcher
PROCESSORS = (PAGES_FOLLOWED, LOADS_FOLLOWED) if host().triple.startswith("x86_64") else (host().cpu,)
both_processors = pytest.mark.skipif(len(PROCESSORS) == 1, reason="they have another instruction set")


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
def test_what_is_bound_by_reading_reads_several_positions(operator: str, planes: int, height: int) -> None:
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


@both_processors
@pytest.mark.parametrize(("cpu", "rows", "level"), [(PAGES_FOLLOWED, 4, 1), (LOADS_FOLLOWED, 8, 2)])
def test_more_rows_are_combined_line_by_line_where_loads_are_followed(
    cpu: str, rows: int, level: int
) -> None:
    inputs = Inputs()
    task = inputs.task(apply("sum", inputs(512, 2048), axes=(0,), keepdims=False))
    program = checked_program(task, replace(with_vectors(64, streams=True), cpu=cpu))
    together = [loop.var.extent for loop in statements(program, For) if loop.var.name == "r"]
    assert set(together) == {rows}
    assert {stmt.level for stmt in statements(program, Prefetch)} == {level}


@pytest.mark.parametrize("cpu", PROCESSORS)
@pytest.mark.parametrize("kind", ["sum", "amax"])
@pytest.mark.parametrize(
    ("shape", "whole"),
    [((4, 70, 128), True), ((4, 33, 512), True), ((4, 33, 528), False), ((4, 40, 120), False), ((70, 128), False)],
    ids=["short", "the longest", "longer", "no whole vectors", "none for a second core"],
)  # fmt: skip
def test_short_rows_behind_each_other_are_read_as_they_lie(
    cpu: str, kind: str, shape: tuple[int, ...], whole: bool
) -> None:
    inputs = Inputs()
    task = inputs.task(apply(kind, inputs(*shape), axes=(len(shape) - 2,), keepdims=False))
    program = check(task, replace(with_vectors(64, streams=True), cpu=cpu, cores=2))
    assert program.decisions.startswith("columns")
    together = max((loop.var.extent for loop in statements(program, For) if loop.var.name == "r"), default=1)
    assert (together == 1) == whole


def test_what_fits_a_cache_is_summed_in_registers() -> None:
    inputs = Inputs()
    task = inputs.task(apply("sum", inputs(20, 256), axes=(0,), keepdims=False))
    assert checked_program(task, host()).decisions.startswith("tiled")


# -- rows that are only read ------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    make=st.sampled_from([total, largest, where_largest]),
    rows=st.integers(1, 9),
    columns=st.integers(60, 700),
    machine=machines,
    cpu=st.sampled_from(PROCESSORS),
)
def test_rows_that_are_only_read(make, rows: int, columns: int, machine: CpuMachine, cpu: str) -> None:
    inputs = Inputs()
    check(inputs.task(make(inputs, rows, columns)), replace(machine, cpu=cpu))


def rows_taken_together(program: Program) -> int:
    return max((loop.var.extent for loop in statements(program, For) if loop.var.name == "w"), default=1)


@both_processors
@pytest.mark.parametrize("make", [total, where_largest, softmax])
def test_rows_are_read_one_after_another_where_loads_are_followed(make) -> None:
    inputs = Inputs()
    task = inputs.task(make(inputs, 64, 1024))
    for cpu, together in ((PAGES_FOLLOWED, 4), (LOADS_FOLLOWED, 1)):
        assert rows_taken_together(checked_program(task, replace(host(), cpu=cpu))) == together


@both_processors
def test_short_rows_wait_for_each_other_on_both() -> None:
    inputs = Inputs()
    task = inputs.task(softmax(inputs, 64, 128))
    for cpu in PROCESSORS:
        assert rows_taken_together(checked_program(task, replace(host(), cpu=cpu))) == 4


@both_processors
@pytest.mark.parametrize("columns", [1024, 1000])
def test_every_line_of_rows_that_are_read_once_is_asked_for_a_page_ahead(columns: int) -> None:
    inputs = Inputs()
    task = inputs.task(total(inputs, 4096, columns))
    program = checked_program(task, replace(with_vectors(64), cpu=LOADS_FOLLOWED))
    blocks = columns // 128  # of eight vectors, in a loop
    assert len(statements(program, Prefetch)) == 8 + -(-(columns - blocks * 128) // 16)
    assert not statements(checked_program(task, replace(with_vectors(64), cpu=PAGES_FOLLOWED)), Prefetch)


# -- upsampled images ------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(
    height=st.integers(1, 6),
    width=st.integers(1, 70),
    factors=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    mode=st.sampled_from(["nearest", "linear", "linear", "cubic"]),
    half_pixel=st.booleans(),
    machine=machines,
)
def test_upsampled_images(
    height: int, width: int, factors: tuple[int, int], mode: str, half_pixel: bool, machine: CpuMachine
) -> None:
    inputs = Inputs()
    sizes = (height * factors[0], width * factors[1])
    coordinates = "half_pixel" if half_pixel else "asymmetric"
    x = inputs(3, height, width)
    check(inputs.task(apply("resize", x, sizes=sizes, mode=mode, coordinates=coordinates)), machine)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("factor", [2, 3, 4])
def test_results_of_the_same_neighbours_are_transposed_in_registers(mode: str, factor: int) -> None:
    inputs = Inputs()
    coordinates = "half_pixel" if mode == "linear" else "asymmetric"
    x = inputs(2, 5, 50)
    task = inputs.task(apply("resize", x, sizes=(5, 50 * factor), mode=mode, coordinates=coordinates))
    assert statements(check(task, with_vectors(64), slow=True), Transpose)


@pytest.mark.parametrize("dtype", [F16, DType.BF16])
@pytest.mark.parametrize(
    "shape,sizes", [((4, 5, 7, 11), (14, 22)), ((17, 9, 33), (9, 99)), ((2, 9, 5, 20), (11, 80))]
)
def test_each_element_of_an_upsampled_image_is_converted_once(
    dtype: DType, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    inputs = Inputs()
    x = apply("cast", inputs(*shape, dtype=dtype), dtype=F32)
    resized = apply("resize", x, sizes=sizes, mode="linear", coordinates="half_pixel")
    program = check(inputs.task(apply("cast", resized, dtype=dtype)), with_vectors(64), slow=True)
    (source, _) = program.params
    reading = [
        s for s in statements(program, Store) if any(load.source == source for load in te.loads(s.value))
    ]
    assert "converted image by image" in program.decisions
    assert [store.buffer.name for store in reading] == ["image"]


@pytest.mark.parametrize("shape", [(2, 40, 40), (64, 200, 200)])
def test_few_or_large_images_are_converted_as_they_are_read(shape: tuple[int, ...]) -> None:
    inputs = Inputs()
    x = apply("cast", inputs(*shape, dtype=F16), dtype=F32)
    sizes = (2 * shape[-2], 2 * shape[-1])
    task = inputs.task(apply("resize", x, sizes=sizes, mode="linear", coordinates="half_pixel"))
    program = checked_program(task, with_vectors(64))
    assert "upsampled" in program.decisions and "image" not in program.decisions


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


def test_no_position_is_looked_up_behind_the_last() -> None:
    """Planes that are transposed, and rows that are put together: the next ones are not prefetched."""
    inputs = Inputs()
    planes = apply("take", inputs(7, 64, 64), inputs(40, dtype=I64), axis=0)
    transposed = inputs.task(apply("permute", planes, axes=(0, 2, 1)))
    more = Inputs()
    rows = apply("take", more(7, 48, 10), more(16, dtype=I64), axis=0)
    together = more.task(apply("add", rows, more(10)))
    for task, words in ((transposed, "transposed"), (together, "staged")):
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
    assert ("delayed by" in program.decisions) == (written >= machine.caches.last and rows > 1)


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
    result = run_program(transposing(32, 32, 32, dtype), [values])
    np.testing.assert_array_equal(result, values.reshape(32, 32).T.reshape(-1))
