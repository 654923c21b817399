"""Tasks of several stages, small and with odd extents, and random schedules for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from tests.codegen.llvm.native import run_program
from tests.loops import formulas
from tests.loops.test_default import random_arrays
from tests.te.bounds import assert_within_bounds
from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import ScheduleError
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Program, Scope
from tilewright.loops.schedule import Schedule, outer_product
from tilewright.loops.schedule.nest import find_leaf, find_tile, leaves
from tilewright.loops.schedule.trace import PRIMITIVES
from tilewright.te.interpret import interpret

F32 = DType.F32
Task = tuple[te.Tensor, list[te.Tensor]]


def chain(rows: int = 5, columns: int = 12) -> Task:
    x, y = te.Tensor("x", (rows, columns), F32), te.Tensor("y", (columns,), F32)
    shape = (rows, columns)
    scaled = te.compute("scaled", shape, F32, lambda i, j: x[i, j] * y[j])
    moved = te.compute("moved", shape, F32, lambda i, j: scaled[i, j] + 1.0)
    return te.compute("out", shape, F32, lambda i, j: te.call("max", moved[i, j], scaled[i, j])), [x, y]


def conv2d(size: int = 7, channels: int = 2, filters: int = 5, stride: int = 1) -> Task:
    """3 x 3, padded by one: the padding is a stage of its own, and so are the bias and the ReLU."""
    x = te.Tensor("x", (channels, size, size), F32)
    w, b = te.Tensor("w", (channels, 3, 3, filters), F32), te.Tensor("b", (filters,), F32)

    def inside(index: te.Expr) -> list[te.Expr]:
        return [te.call("le", te.as_index(1), index), te.call("lt", index, te.as_index(size + 1))]

    def pad(c: te.Expr, i: te.Expr, j: te.Expr) -> te.Expr:
        condition = te.all_of([*inside(i), *inside(j)])
        assert condition is not None
        return te.select(condition, x[c, i - 1, j - 1], 0.0)

    padded = te.compute("padded", (channels, size + 2, size + 2), F32, pad)
    c, p, q = te.reduce_axes([channels, 3, 3])
    out = -(-size // stride)
    conv = te.compute(
        "conv",
        (out, out, filters),
        F32,
        lambda i, j, f: te.reduce_over(
            "sum", padded[c, i * stride + p, j * stride + q] * w[c, p, q, f], [c, p, q]
        ),
    )
    relu = te.compute("out", conv.shape, F32, lambda i, j, f: te.call("max", conv[i, j, f] + b[f], 0))
    return relu, [x, w, b]


def plain_sum(rows: int = 3, columns: int = 22) -> Task:
    """The output itself is a reduction."""
    x = te.Tensor("x", (rows, columns), F32)
    (r,) = te.reduce_axes([columns])
    return te.compute("out", (rows,), F32, lambda i: te.reduce_over("sum", x[i, r], [r])), [x]


TASKS: dict[str, Callable[[], Task]] = {
    "matmul": lambda: formulas.matmul(7, 12, 5),
    "matmul_f64": lambda: formulas.matmul(4, 9, 6, DType.F64),
    "conv2d": conv2d,
    "conv2d_strided": lambda: conv2d(stride=2),
    "chain": chain,
    "plain_sum": plain_sum,
    "softmax": lambda: formulas.softmax(3, 11, 1),
    "softmax_first": lambda: formulas.softmax(9, 4, 0),
    "group_statistics": formulas.group_statistics,
    "padded": formulas.padded,
    "gathered": formulas.gathered,
    "window": formulas.window,
    "first_largest": formulas.first_largest,
    "f16": lambda: formulas.halves(DType.F16),
    "any_true": formulas.any_true,
}


def packed(program: Program, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The inputs as the program wants them."""
    packings = [*program.packings, *[None] * (len(arrays) - len(program.packings))]
    return [a if p is None else p.pack(a) for a, p in zip(arrays, packings, strict=True)]


def check_meaning(schedule: Schedule, task: Task, *, native: bool = False) -> Program:
    """The scheduled program computes what the expressions say."""
    output, inputs = task
    program = schedule.program()
    arrays = random_arrays(inputs)
    expected = interpret(output, dict(zip(inputs, arrays, strict=True)))
    given = packed(program, arrays)
    results = [interpret_program(program, given)]
    if native:
        results.append(run_program(program, given, numerics="strict", pieces=3))
    for got in results:
        if output.dtype.is_float:
            assert_within_bounds(got, output, dict(zip(inputs, arrays, strict=True)))
        else:
            np.testing.assert_array_equal(got.reshape(expected.shape), expected)
    return program


# -- random schedules -------------------------------------------------------------------------------------------------


def tensors(schedule: Schedule) -> list[str]:
    local = [leaf.target.name for _, leaf in leaves(schedule.nest.body)]
    return [*(tile.name for tile in schedule.nest.inputs), *local]


OFTEN = ["split", "reorder", "vectorise", "compute_at"]
ON_PROCESSORS = [name for name in PRIMITIVES if name != "bind"]  # which makes a schedule for a GPU


def random_step(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """One step with arguments that exist; whether it is legal, the primitive says (ScheduleError)."""
    loop = st.sampled_from(schedule.loops) if schedule.loops else st.just("none")
    stage = st.sampled_from(schedule.stages)
    tensor = st.sampled_from(tensors(schedule))
    factor = st.sampled_from([1, 2, 3, 4, 5, 8])
    tail = st.sampled_from(["exact", "guard", "shift", "narrow"])
    name = draw(st.sampled_from([*ON_PROCESSORS, *OFTEN, *OFTEN]))
    if name == "split":
        return schedule.split(draw(loop), draw(factor), draw(tail))
    if name == "fuse":
        outer = draw(loop)
        position = schedule.loops.index(outer)
        return schedule.fuse(outer, schedule.loops[(position + 1) % len(schedule.loops)])
    if name == "reorder":
        return schedule.reorder(*draw(st.lists(loop, min_size=1, max_size=3, unique=True)))
    if name == "tile":
        loops = draw(st.lists(loop, min_size=1, max_size=2, unique=True))
        return schedule.tile(loops, [draw(factor) for _ in loops], draw(tail))
    if name == "vectorise":
        chosen, lanes = draw(loop), draw(st.sampled_from([2, 4]))
        with contextlib.suppress(ScheduleError):
            schedule = schedule.split(chosen, lanes, draw(tail))
            around = [each.name for each in find_leaf(schedule.nest, chosen.partition(".i")[0])[0]]
            schedule = schedule.reorder(
                *[each for each in around if each != f"{chosen}.i"][-1:], f"{chosen}.i"
            )
        return schedule.vectorise(f"{chosen}.i" if f"{chosen}.i" in schedule.loops else chosen)
    if name in ("unroll", "parallel", "rfactor", "vthread"):
        method: Callable[[str], Schedule] = getattr(schedule, name)
        return method(draw(loop))
    if name == "compute_at":
        output = [each.name for each in find_leaf(schedule.nest, schedule.nest.output.name)[0]]
        return schedule.compute_at(draw(stage), draw(st.sampled_from(output or ["none"]) | loop))
    if name == "store_at":
        return schedule.store_at(draw(stage), draw(loop), draw(loop))
    if name in ("stream", "transpose"):
        method = getattr(schedule, name)
        return method(draw(stage))
    if name == "inline":
        return schedule.inline(draw(stage))
    if name == "cache_read":
        chosen = draw(tensor)
        rank = len(find_tile(schedule.nest, chosen).shape)
        order = draw(st.none() | st.permutations(range(rank)))
        return schedule.cache_read(chosen, draw(stage), order=order)
    if name == "cache_write":
        return schedule.cache_write(draw(stage))
    if name == "set_scope":
        return schedule.set_scope(draw(stage), draw(st.sampled_from(["register", "scratch"])))
    if name == "pack":
        chosen = draw(tensor)
        tile = next(
            tile
            for tile in [*schedule.nest.inputs, *(leaf.target for _, leaf in leaves(schedule.nest.body))]
            if tile.name == chosen
        )
        return schedule.pack(chosen, [draw(st.sampled_from([extent, 4, 2])) for extent in tile.shape])
    if name == "tensorise":
        return schedule.tensorise(draw(loop), outer_product(draw(st.sampled_from([2, 4])), 1, 4))
    if name == "pipeline":
        return schedule.pipeline(draw(tensor), draw(st.sampled_from([2, 3, 4])))
    if name == "swizzle":
        return schedule.swizzle(draw(tensor))
    if name == "widen":
        return schedule.widen(draw(tensor), draw(st.sampled_from([0, 4])))
    if name == "pad":
        chosen = draw(stage)
        leaf = find_leaf(schedule.nest, chosen)[1]
        ranks = len(leaf.target.shape), len(leaf.reduced)
        return schedule.pad(chosen, *([draw(factor) for _ in range(rank)] for rank in ranks))
    assert name == "prefetch", f"no arguments are drawn for {name}"
    spread = draw(st.none() | loop)
    return schedule.prefetch(draw(loop), draw(tensor), draw(st.sampled_from([1, 3])), spread=spread)


@st.composite
def schedules(draw: st.DrawFn, start: Schedule, steps: int = 14) -> Schedule:
    """A schedule of legal steps. Tiles that do not fit registers in the end go to scratch memory."""
    schedule = start
    for _ in range(draw(st.integers(0, steps))):
        try:
            schedule = random_step(draw, schedule)
        except ScheduleError:
            continue
    try:
        schedule.program()
    except ScheduleError:
        if any(step.primitive in ("vthread", "transpose") for step in schedule.trace):
            return start
        for _, leaf in leaves(schedule.nest.body):
            if leaf.target.scope is Scope.REGISTER:
                try:
                    schedule = schedule.set_scope(leaf.stage, "scratch")
                except ScheduleError:  # a reduction across its lanes
                    return start
    return schedule
