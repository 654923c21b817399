"""Memory-bound schedules are right for odd sizes: as loop programs, as machine code, with non-temporal stores
too."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.llvm.native import run_program
from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tilewright import te
from tilewright.codegen.llvm import toolchain
from tilewright.codegen.llvm.build import llvm_ir
from tilewright.dtypes import DType
from tilewright.errors import VerificationError
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.hw.caches import Caches
from tilewright.loops.default import default_program
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import (
    Buffer,
    For,
    If,
    Kind,
    Prefetch,
    Program,
    Scope,
    Slide,
    Stmt,
    Store,
    Transpose,
    block,
    nest,
    walk_stmts,
)
from tilewright.loops.verify import verify_program
from tilewright.measure.check import relative_error
from tilewright.measure.single import SingleKernel
from tilewright.space.template import Work
from tilewright.te.index import divisor_of, simplify

F32, F16, I8, I64 = DType.F32, DType.F16, DType.I8, DType.I64
SMALL_CACHES = Caches(l1=1 << 10, l2=8 << 10, l3=1 << 10)  # nearly everything is larger


def with_vectors(size: int, *, streams: bool = False) -> CpuMachine:
    here = host()
    size = min(size, here.vector_bytes)
    caches = SMALL_CACHES if streams else here.caches
    return dataclasses.replace(
        here, vector_bytes=size, vector_registers=32 if size == 64 else 16, caches=caches
    )


machines = st.builds(with_vectors, st.sampled_from([16, 32, 64]), streams=st.booleans())


def checked_program(task: Task, machine: CpuMachine) -> Program:
    formula = Work(task, machine).formula
    assert formula is not None
    program = default_program(formula, machine)
    verify_program(program)
    return program


def check(
    task: Task, machine: CpuMachine, arrays: list[np.ndarray] | None = None, *, slow: bool = False
) -> Program:
    """The default program gives the oracle's result as machine code, on memory that is aligned and on memory that is
    not, in one block and in several; and, if it may be slow, when it is interpreted."""
    program = checked_program(task, machine)
    arrays = arrays or [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    (expected,) = evaluate(task.graph, arrays, precise=True)
    flat = [np.ascontiguousarray(a).reshape(-1) for a in arrays]
    kernel = SingleKernel(program, machine, threads=2)
    results = [kernel(flat), run_program(program, flat, pieces=3, built=kernel.built)]
    if slow:
        results.append(interpret_program(program, flat))
    for result in results:
        got = result.reshape(expected.shape)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        if program.params[-1].dtype.is_float:
            known = ~np.isnan(expected)
            bound = {F16: 1e-3, DType.BF16: 3e-3}.get(program.params[-1].dtype, 2e-6)
            assert relative_error(got[known], expected[known]) <= bound
        else:
            np.testing.assert_array_equal(got, expected)
    return program


def statements(program: Program, kind: type) -> list[object]:
    return [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, kind)]


# -- transposes -----------------------------------------------------------------------------------------------------


@st.composite
def permutations(draw: st.DrawFn) -> Task:
    shape = draw(st.lists(st.integers(1, 37), min_size=2, max_size=4).filter(lambda s: math.prod(s) <= 6000))
    inputs = Inputs()
    x = inputs(*shape, dtype=draw(st.sampled_from([F32, F32, F16, I8, I64])))
    axes = tuple(draw(st.permutations(range(len(shape)))))
    transposed = apply("permute", x, axes=axes)
    if x.dtype is F32 and draw(st.booleans()):
        transposed = apply("add", transposed, inputs(transposed.shape[-1]))
    return inputs.task(transposed)


@settings(max_examples=60, deadline=None)
@given(task=permutations(), machine=machines)
def test_permutations(task: Task, machine: CpuMachine) -> None:
    check(task, machine)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(2, 40), columns=st.integers(2, 40), machine=machines)
def test_matrices_as_loops(rows: int, columns: int, machine: CpuMachine) -> None:
    inputs = Inputs()
    check(inputs.task(apply("permute", inputs(rows, columns), axes=(1, 0))), machine, slow=True)


@pytest.mark.parametrize("shape", [(3, 70), (70, 3), (2, 65), (64, 4), (150, 150)])
def test_tiles_are_transposed_in_registers(shape: tuple[int, int]) -> None:
    inputs = Inputs()
    program = check(inputs.task(apply("permute", inputs(*shape), axes=(1, 0))), with_vectors(64))
    assert statements(program, Transpose)


@pytest.mark.parametrize("dtype", [F32, DType.F64])
def test_matrices_smaller_than_a_vector(dtype: DType) -> None:
    """Every size up to 5 x 5: a short axis may be as wide as the few lanes that the other one allows."""
    for rows in range(1, 6):
        for columns in range(1, 6):
            x = Inputs()
            task = x.task(apply("permute", x(rows, columns, dtype=dtype), axes=(1, 0)))
            check(task, host())


def test_what_is_not_whole_lines_is_put_together_before_it_is_streamed() -> None:
    inputs = Inputs()
    task = inputs.task(apply("permute", inputs(150, 170), axes=(1, 0)))
    program = check(task, with_vectors(64, streams=True))
    assert any(isinstance(s, Store) and s.buffer.scope is Scope.SCRATCH for s in walk_stmts(program.body))


@pytest.mark.skipif(host().vector_bytes < 64, reason="a vector is no line")
@pytest.mark.parametrize(
    "shape",
    [(48, 1024), (48, 464), (48, 928), (64, 928), (2, 32, 768), (2, 64, 160), (2, 48, 304), (3, 112, 32)],
)
def test_each_block_of_a_transposed_matrix_asks_for_the_next(shape: tuple[int, ...]) -> None:
    """Together for every line of what is read, but for those of the first block."""
    inputs, axes = Inputs(), (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    program = check(inputs.task(apply("permute", inputs(*shape), axes=axes)), with_vectors(64, streams=True))
    parallel = program.body
    assert isinstance(parallel, For)
    loops = [s for s in walk_stmts(parallel) if isinstance(s, For) and s.kind is not Kind.VECTOR]
    size = math.prod(shape)
    lines = set()
    for asked in statements(program, Prefetch):
        assert isinstance(asked, Prefetch)
        around = [loop.var for loop in loops if asked in walk_stmts(loop)]
        for values in itertools.product(*(range(var.extent) for var in around)):
            positions = dict(zip(around, map(te.as_index, values), strict=True))
            position = simplify(te.substitute(asked.index, positions))
            assert isinstance(position, te.Const)
            lines.add(int(position.value) // 16)
    missed = set(range(size // 16)) - lines
    height = 16 * len(statements(program, Transpose))
    assert (
        len(missed) <= 32 * height
    )  # a block, in caches so small: runs of 2 KiB in the rows of a tile or two
    rows, columns = shape[-2:]
    assert all(line * 16 // columns < min(rows, height) for line in missed)


@pytest.mark.skipif(host().vector_bytes < 64, reason="a vector is no line")
@pytest.mark.parametrize("shape", [(64, 1024), (48, 1024), (64, 928), (64, 1040)])
def test_lines_are_asked_for_as_they_lie_beside_those_that_are_written(shape: tuple[int, int]) -> None:
    inputs = Inputs()
    task = inputs.task(apply("permute", inputs(*shape), axes=(1, 0)))
    program = checked_program(task, with_vectors(64, streams=True))
    (steps,) = [
        stmt
        for stmt in walk_stmts(program.body)
        if isinstance(stmt, For) and stmt.kind is Kind.UNROLL and any(walk_prefetches(stmt))
    ]
    assert any(isinstance(stmt, Store) and stmt.streamed for stmt in walk_stmts(steps))
    asked = list(walk_prefetches(steps))
    others = dict.fromkeys({var for fetch in asked for var in te.variables(fetch.index)}, te.as_index(0))
    positions = [
        simplify(te.substitute(fetch.index, {**others, steps.var: te.as_index(step)}))
        for step in range(steps.var.extent)
        for fetch in asked
    ]
    values = [position.value for position in positions if isinstance(position, te.Const)]
    assert len(values) == len(positions) == 16 * len(statements(program, Transpose))
    assert values == sorted(set(values))


def walk_prefetches(stmt: Stmt) -> Iterator[Prefetch]:
    return (each for each in walk_stmts(stmt) if isinstance(each, Prefetch))


@pytest.mark.skipif(host().vector_bytes < 64, reason="a vector is no line")
@pytest.mark.parametrize(
    ("shape", "bias", "tiles"),
    [
        ((64, 1024), False, 2),
        ((64, 1024), True, 1),
        ((48, 1024), False, 1),
        ((64, 512), False, 1),
        ((16, 1024), False, 1),
    ],
    ids=["two", "with values of their own", "an odd number", "whole rows", "a single one"],
)
def test_two_tiles_are_written_together(shape: tuple[int, int], bias: bool, tiles: int) -> None:
    inputs = Inputs()
    transposed = apply("permute", inputs(*shape), axes=(1, 0))
    task = inputs.task(apply("add", transposed, inputs(shape[0])) if bias else transposed)
    assert len(statements(check(task, with_vectors(64, streams=True)), Transpose)) == tiles


@st.composite
def odd_matrices(draw: st.DrawFn) -> Task:
    """Turned, several lines long, with rows that begin anywhere in a line."""
    dtype = draw(st.sampled_from([F32, F16, DType.BF16, I64]))
    lanes = 64 // dtype.bytes
    rows, columns = draw(st.integers(4 * lanes, 7 * lanes)), draw(st.integers(lanes, 3 * lanes))
    inputs = Inputs()
    x = inputs(draw(st.sampled_from([1, lanes])), rows, columns, dtype=dtype)
    transposed = apply("permute", x, axes=(0, 2, 1))
    return inputs.task(
        apply("add", transposed, inputs(rows)) if dtype is F32 and draw(st.booleans()) else transposed
    )


@settings(max_examples=6, deadline=None)
@given(task=odd_matrices())
def test_lines_that_begin_in_one_tile_and_end_in_the_next(task: Task) -> None:
    program = check(task, with_vectors(64, streams=True))
    planes, columns, rows = task.graph.outputs[0].shape
    line = 64 // program.params[-1].dtype.bytes
    if rows % line and (planes == 1 or rows * columns % line == 0):
        assert ("lines put together" in program.decisions) == (host().vector_bytes == 64)


@pytest.mark.parametrize(("rows", "columns"), [(70, 2100), (1100, 17), (71, 33)])
def test_lines_across_tiles_in_blocks_and_in_pieces(rows: int, columns: int) -> None:
    inputs = Inputs()
    task = inputs.task(apply("permute", inputs(rows, columns), axes=(1, 0)))
    machine = with_vectors(64, streams=True)
    check(task, machine, slow=rows * columns < 4000)
    check(task, dataclasses.replace(machine, caches=dataclasses.replace(SMALL_CACHES, l2=256 << 10)))


@pytest.mark.skipif(host().vector_bytes < 64, reason="a vector is no line")
@pytest.mark.parametrize("dtype", [F32, F16, DType.BF16])
def test_lines_put_together_are_streamed_one_behind_the_other(dtype: DType) -> None:
    inputs = Inputs()
    task = inputs.task(apply("permute", inputs(150, 170, dtype=dtype), axes=(1, 0)))
    program = checked_program(task, with_vectors(64, streams=True))
    stores = [
        s for s in walk_stmts(program.body) if isinstance(s, Store) and s.buffer.scope is not Scope.REGISTER
    ]
    runs = [(streamed, len(list(run))) for streamed, run in itertools.groupby(stores, lambda s: s.streamed)]
    assert (True, 64 // dtype.bytes) in runs and sum(streamed for streamed, _ in runs) == 1
    text = toolchain.assembly(llvm_ir(program, host(), "fast", "kernel"), host())
    assert text.count("movnt") >= (64 // dtype.bytes if host().triple.startswith("x86_64") else 0)


@pytest.mark.parametrize("dtype", [F32, F16, I8])
def test_a_vector_out_of_two(dtype: DType) -> None:
    lanes, begins = 8, [0, 3, 8]
    x, out = Buffer("x", dtype, 4 * lanes), Buffer("out", dtype, lanes * len(begins))
    first = Buffer("first", dtype, lanes, Scope.REGISTER)
    following = Buffer("behind", dtype, 2 * lanes, Scope.REGISTER)
    lane = te.Var("v", lanes)

    def move(to: Buffer, position: int, source: Buffer, origin: int) -> For:
        return For(lane, Kind.VECTOR, Store(to, lane + position, te.Load(source, (lane + origin,))))

    stmts = [move(following, lanes, x, 2 * lanes)]
    for number, begin in enumerate(begins):
        slide = Slide(first, following, lanes, lanes, begin)
        stmts += [move(first, 0, x, lanes), slide, move(out, number * lanes, first, 0)]
    program = Program("slide", (x, out), block(*stmts))
    verify_program(program)
    values = np.arange(x.size).astype(dtype.numpy)
    expected = np.concatenate([values[lanes + begin :][:lanes] for begin in begins])
    np.testing.assert_array_equal(interpret_program(program, [values]), expected)
    np.testing.assert_array_equal(run_program(program, [values]), expected)


@pytest.mark.parametrize(
    ("position", "begin", "complaint"),
    [(12, 0, "is not a register vector of 8 lanes"), (0, 9, "no vector from 9 on")],
)
def test_an_illegal_slide_is_named(position: int, begin: int, complaint: str) -> None:
    x, out = Buffer("x", F32, 16), Buffer("out", F32, 16)
    first, following = (Buffer(name, F32, 16, Scope.REGISTER) for name in ("first", "behind"))
    with pytest.raises(VerificationError, match=complaint):
        verify_program(Program("p", (x, out), Slide(first, following, position, 8, begin)))


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [F32, I8, F16, DType.F64])
def test_the_transpose_of_any_tile(lanes: int, dtype: DType) -> None:
    for rows, columns in [
        (lanes, lanes),
        (3, lanes),
        (lanes, 3),
        (2, lanes),
        (lanes, 2),
        (4, 2 * lanes),
        (1, lanes),
    ]:
        program = transposing(rows, columns, lanes, dtype)
        verify_program(program)
        values = np.arange(rows * columns).astype(dtype.numpy)
        expected = values.reshape(rows, columns).T.reshape(-1)
        np.testing.assert_array_equal(interpret_program(program, [values]), expected)
        np.testing.assert_array_equal(run_program(program, [values]), expected)


def transposing(rows: int, columns: int, lanes: int, dtype: DType) -> Program:
    size = rows * columns
    x, out = Buffer("x", dtype, size), Buffer("out", dtype, size)
    tile = Buffer("tile", dtype, size, Scope.REGISTER)
    step, lane = te.Var("u", size // lanes), te.Var("v", lanes)
    element = step * lanes + lane
    in_tile = [(step, Kind.UNROLL), (lane, Kind.VECTOR)]
    fill = nest(in_tile, Store(tile, element, te.Load(x, (element,))))
    write = nest(in_tile, Store(out, element, te.Load(tile, (element,))))
    return Program("turn", (x, out), block(fill, Transpose(tile, rows, columns, lanes), write))


@pytest.mark.parametrize(
    ("tile", "complaint"),
    [
        (Transpose(Buffer("t", F32, 16), 4, 4, 4), "is not in registers"),
        (Transpose(Buffer("t", F32, 16, Scope.REGISTER), 4, 8, 4), "not a tile of vectors"),
        (Transpose(Buffer("t", F32, 16, Scope.REGISTER), 3, 5, 4), "not a tile of vectors"),
    ],
)
def test_an_illegal_transpose_is_named(tile: Transpose, complaint: str) -> None:
    x, out = Buffer("x", F32, 16), Buffer("out", F32, 16)
    with pytest.raises(VerificationError, match=complaint):
        verify_program(Program("p", (x, out), tile))


# -- concatenations -------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 23), min_size=1, max_size=3),
    parts=st.lists(st.integers(1, 70), min_size=2, max_size=4),
    data=st.data(),
    machine=machines,
)
def test_concatenations(shape: list[int], parts: list[int], data: st.DataObject, machine: CpuMachine) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    inputs = Inputs()
    nodes = [inputs(*shape[:axis], part, *shape[axis + 1 :]) for part in parts]
    check(inputs.task(apply("concat", *nodes, axis=axis)), machine, slow=math.prod(shape) < 200)


@pytest.mark.parametrize(("axis", "branches"), [(0, 1), (1, 0)])
def test_no_element_of_a_concatenation_is_chosen(axis: int, branches: int) -> None:
    inputs = Inputs()
    parts = [inputs(40, 50), inputs(40, 50)]
    program = checked_program(inputs.task(apply("concat", *parts, axis=axis)), host())
    stores = [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Store)]
    assert not any(isinstance(node, te.Select) for stmt in stores for node in te.walk(stmt.value))
    assert len(statements(program, If)) == branches


# -- rows -----------------------------------------------------------------------------------------------------------


def softmax(inputs: Inputs, rows: int, columns: int) -> Node:
    return apply("softmax", inputs(rows, columns), axis=1)


def layer_norm(inputs: Inputs, rows: int, columns: int) -> Node:
    x = apply("add", inputs(rows, columns), inputs(rows, columns))
    return apply("layer_norm", x, inputs(columns), inputs(columns), dims=1, eps=1e-5)


def group_norm(inputs: Inputs, rows: int, columns: int) -> Node:
    x = apply("permute", inputs(rows, columns, 6), axes=(0, 2, 1))
    return apply("permute", apply("group_norm", x, groups=2, eps=1e-5), axes=(0, 2, 1))


def total(inputs: Inputs, rows: int, columns: int) -> Node:
    x = apply("abs", inputs(rows, columns))  # where a sum cancels, no error is small compared with it
    return apply("sum", x, axes=(1,), keepdims=False)


def largest(inputs: Inputs, rows: int, columns: int) -> Node:
    return apply("amax", inputs(rows, columns), axes=(1,), keepdims=False)


def where_largest(inputs: Inputs, rows: int, columns: int) -> Node:
    return apply("argmax", inputs(rows, columns), axis=1, keepdims=False)


ROWWISE = [softmax, layer_norm, group_norm, total, largest, where_largest]


@settings(max_examples=60, deadline=None)
@given(make=st.sampled_from(ROWWISE), rows=st.integers(1, 9), columns=st.integers(1, 300), machine=machines)
def test_rows_of_any_length(make, rows: int, columns: int, machine: CpuMachine) -> None:
    inputs = Inputs()
    check(inputs.task(make(inputs, rows, columns)), machine, slow=columns < 40)


@pytest.mark.parametrize("vector", [16, 32, 64])
@pytest.mark.parametrize("columns", [3, 5, 7, 9, 12, 15, 24])
@pytest.mark.parametrize("make", [softmax, layer_norm])
def test_rows_shorter_than_a_vector_are_written_to_their_end(make, columns: int, vector: int) -> None:
    """Together they end with a line, which is longer than the vectors of one of them."""
    inputs = Inputs()
    check(inputs.task(make(inputs, 48, columns)), with_vectors(vector, streams=True))


@pytest.mark.parametrize("columns", [3, 16, 37, 200])
@pytest.mark.parametrize("make", [softmax, layer_norm, total, largest])
def test_nan_and_infinity_reach_their_row_alone(make, columns: int) -> None:
    inputs = Inputs()
    task = inputs.task(make(inputs, 5, columns))
    arrays = [array(*node.shape, seed=i) for i, node in enumerate(task.graph.inputs)]
    arrays[0][1, columns - 1] = np.nan
    arrays[0][3, columns // 2] = np.inf
    with np.errstate(all="ignore"):
        check(task, host(), arrays)


def test_exponentials_are_computed_once() -> None:
    inputs = Inputs()
    program = checked_program(inputs.task(softmax(inputs, 64, 1000)), host())
    stores = [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Store)]
    computed = {
        stmt.buffer.name
        for stmt in stores
        if any(isinstance(node, te.Call) and node.op == "exp2_nonpositive" for node in te.walk(stmt.value))
    }
    assert computed == {"kept"}


def test_the_next_row_is_asked_for_where_rows_come_from_afar() -> None:
    def fetches(rows: int) -> int:
        inputs = Inputs()
        return len(statements(checked_program(inputs.task(layer_norm(inputs, rows, 768)), host()), Prefetch))

    assert fetches(1 << 16) > 0
    assert fetches(4) == 0


def test_the_next_group_is_asked_for_while_channels_of_this_one_are_written() -> None:
    inputs = Inputs()
    task = inputs.task(apply("group_norm", inputs(64, 32, 512), inputs(32), inputs(32), groups=4, eps=1e-5))
    program = checked_program(task, host())
    asked = [fetch.index for fetch in statements(program, Prefetch)]
    assert asked
    assert all({"i1i", "i2_t"} <= {var.name for var in te.variables(index)} for index in asked)


def prefetch_levels(task: Task, l1: int) -> set[int]:
    machine = dataclasses.replace(with_vectors(64), caches=Caches(l1=l1, l2=1 << 20, l3=1 << 10))
    found = statements(checked_program(task, machine), Prefetch)
    return {fetch.level for fetch in found if isinstance(fetch, Prefetch)}


@pytest.mark.parametrize(("make", "columns"), [(softmax, 1024), (layer_norm, 512)])
def test_the_next_rows_come_into_the_first_cache_where_it_holds_all_that_is_used_meanwhile(
    make, columns: int
) -> None:
    """About 30 KB: two rows that are prefetched, two that are computed, two that are written, and weights."""
    inputs = Inputs()
    task = inputs.task(make(inputs, 1 << 10, columns))
    assert prefetch_levels(task, l1=48 << 10) == {1}
    assert prefetch_levels(task, l1=32 << 10) == {2}


# -- with non-temporal stores -----------------------------------------------------------------------------------------


def streamed(task: Task, machine: CpuMachine) -> bool:
    stores = statements(checked_program(task, machine), Store)
    return any(isinstance(stmt, Store) and stmt.streamed for stmt in stores)


def test_only_what_no_cache_holds_is_streamed() -> None:
    def sum_of(size: int) -> Task:
        inputs = Inputs()
        return inputs.task(apply("add", inputs(size), inputs(size)))

    assert streamed(sum_of(host().caches.last), host())
    assert not streamed(sum_of(host().caches.last // 8), host())


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 100))
def test_streamed_stores_are_right_wherever_rows_begin(rows: int, columns: int) -> None:
    inputs = Inputs()
    check(inputs.task(apply("add", inputs(rows, columns), inputs(columns))), with_vectors(64, streams=True))


@settings(max_examples=14, deadline=None)
@given(
    make=st.sampled_from([softmax, layer_norm, group_norm]),
    rows=st.sampled_from([16, 32, 48, 16 * 8, 16 * 27]),
    columns=st.integers(17, 270),
)
def test_rows_that_end_within_a_line_are_written_together(make, rows: int, columns: int) -> None:
    inputs = Inputs()
    caches = Caches(l1=1 << 10, l2=1 << 20, l3=1 << 10)
    machine = dataclasses.replace(with_vectors(64), caches=caches, cores=1)
    task = inputs.task(make(inputs, rows, columns))
    check(task, machine)
    if make is not group_norm and columns % machine.lanes(F32):
        program = checked_program(task, machine)
        assert "rows at a time" in program.decisions or "lines of two rows" in program.decisions
        lines = [s for s in statements(program, Store) if isinstance(s, Store) and s.buffer.name == "out"]
        assert all(stmt.streamed for stmt in lines)


@settings(max_examples=10, deadline=None)
@given(
    images=st.integers(1, 5),
    groups=st.sampled_from([1, 2, 6]),
    channels=st.integers(1, 4),
    pixels=st.sampled_from([128, 144, 256, 400]),
    scaled=st.booleans(),
)
def test_groups_of_channels_are_written_a_group_behind(
    images: int, groups: int, channels: int, pixels: int, scaled: bool
) -> None:
    inputs = Inputs()
    count = groups * channels
    weights = (inputs(images, count, pixels), *([inputs(count), inputs(count)] if scaled else []))
    task = inputs.task(apply("group_norm", *weights, groups=groups, eps=1e-5))
    machine = dataclasses.replace(with_vectors(64), caches=dataclasses.replace(SMALL_CACHES, l2=1 << 20))
    program = check(task, machine)
    assert "delayed by a row" in program.decisions or images * groups == 1


def test_a_group_of_rows_is_written_while_the_next_one_is_computed() -> None:
    inputs = Inputs()
    caches = dataclasses.replace(SMALL_CACHES, l2=1 << 20)
    machine = dataclasses.replace(with_vectors(32), caches=caches, cores=1)
    program = check(inputs.task(softmax(inputs, 16 * 8, 70)), machine)
    loops = [s for s in walk_stmts(program.body) if isinstance(s, For) and s.var.name == "turn"]
    written = [{s.buffer.name for s in walk_stmts(loop) if isinstance(s, Store)} for loop in loops]
    assert ["out" in names for names in written] == [False, True]
    assert "kept in register" in program.decisions


def test_the_maximum_of_a_softmax_does_not_look_for_nan() -> None:
    """NaN arrives through the weights; elsewhere the maximum itself has to tell."""

    def looks(make) -> bool:
        inputs = Inputs()
        program = checked_program(inputs.task(make(inputs, 64, 256)), host())
        stores = [s for s in walk_stmts(program.body) if isinstance(s, Store)]
        return any(isinstance(n, te.Call) and n.op == "max" for s in stores for n in te.walk(s.value))

    assert not looks(softmax)
    assert looks(largest)


@pytest.mark.parametrize("shape", [(3, 40, 6, 32), (2, 41, 6, 24)])
def test_short_runs_from_other_pages_are_read_in_turn(shape: tuple[int, ...]) -> None:
    inputs = Inputs()
    wide = (*shape[:2], shape[2] * 8, shape[3])
    task = inputs.task(apply("permute", inputs(*wide), axes=(0, 2, 1, 3)))
    assert "in blocks of" in check(task, with_vectors(64, streams=True)).decisions
    assert "in blocks of" not in checked_program(task, host()).decisions


@given(
    factors=st.lists(st.integers(-40, 40), min_size=3, max_size=3),
    limit=st.integers(-40, 40),
    values=st.lists(st.integers(0, 6), min_size=3, max_size=3),
)
def test_a_divisor_divides_every_value(factors: list[int], limit: int, values: list[int]) -> None:
    axes = [te.Var(f"i{n}", 7) for n in range(3)]
    first = axes[0] * factors[0] + axes[1] * factors[1]
    expr = te.call("min", first, te.as_index(limit)) + axes[2] * factors[2]
    value = min(values[0] * factors[0] + values[1] * factors[1], limit) + values[2] * factors[2]
    divisor = divisor_of(expr)
    assert value == 0 if divisor == 0 else value % divisor == 0
