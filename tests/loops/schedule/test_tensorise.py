"""Intrinsics: what matches, what does not, and the matrix product that they make."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codegen.llvm.native import run_program
from tests.loops import formulas
from tests.loops.schedule.examples import check_meaning, packed, plain_sum
from tests.loops.test_default import random_arrays
from tests.space.spills import spilled_vectors_in_loops
from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import ScheduleError
from tilewright.hw import host
from tilewright.loops.default import default_program
from tilewright.loops.formula import formula_of
from tilewright.loops.ir import For, Kind, Program, Stmt, nest, walk_stmts
from tilewright.loops.schedule import Intrinsic, Operand, Schedule, outer_product

F32 = DType.F32


def dot4() -> Intrinsic:
    """`c += sum(a[k] * b[k], k)` for four elements, written out."""
    a, b = te.Tensor("a", (4,), F32), te.Tensor("b", (4,), F32)
    (k,) = te.reduce_axes([4])
    c = te.compute("c", (), F32, lambda: te.reduce_over("sum", a[k] * b[k], [k]))

    def implement(out: Operand, left: Operand, right: Operand) -> Stmt:
        total = out.load()
        for position in range(4):
            total = te.call("fma", left.load(position), right.load(position), total)
        return out.store(total)

    return Intrinsic("dot4", c, (a, b), implement)


def axpy(width: int) -> Intrinsic:
    """`y[i] = x[i] * s`: no reduction."""
    x, s = te.Tensor("x", (width,), F32), te.Tensor("s", (width,), F32)
    y = te.compute("y", (width,), F32, lambda i: x[i] * s[i])
    lane = te.Var("axpy.v", width)

    def implement(out: Operand, left: Operand, right: Operand) -> Stmt:
        return nest([(lane, Kind.VECTOR)], out.store(left.load(lane) * right.load(lane), lane))

    return Intrinsic("axpy", y, (x, s), implement)


def test_an_intrinsic_of_ones_own() -> None:
    task = formulas.matmul(5, 6, 12)
    schedule = Schedule.of(*task).split("product.r0", 4).tensorise("product.r0.i", dot4())
    check_meaning(schedule, task, native=True)
    later = schedule.split("product.i0", 2, "guard").split("product.r0.o", 2, "guard")
    check_meaning(later, task, native=True)


def test_an_intrinsic_that_is_no_reduction() -> None:
    x, y = te.Tensor("x", (3, 16), F32), te.Tensor("y", (16,), F32)
    task = te.compute("out", (3, 16), F32, lambda i, j: y[j] * x[i, j]), [x, y]
    schedule = Schedule.of(*task).split("out.i1", 8).tensorise("out.i1.i", axpy(8)).parallel("out.i0")
    check_meaning(schedule, task, native=True)


@pytest.mark.parametrize(
    ("misuse", "reason"),
    [
        (
            lambda s: s.tensorise("product.i0", outer_product(6, 2, 8)),
            "its loops are 6 x 16, reduced 4, and the intrinsic's are 6 x 16",
        ),
        (
            lambda s: s.reorder("product.r0", "product.i0", "product.i1").tensorise(
                "product.i0", outer_product(3, 2, 8)
            ),
            "its loops are 6 x 16, and the intrinsic's are 3 x 16",
        ),
        (
            lambda s: s.tensorise("out.i0", outer_product(6, 2, 8)),
            "stage out is no reduction, and the intrinsic is a sum",
        ),
        (lambda s: s.tensorise("out.i1", axpy(16)), "it computes max("),
        (
            lambda s: s.split("product.r0", 3, "guard").tensorise("product.r0.i", dot4()),
            "a guard depends on its loops",
        ),
        (
            lambda s: s.tensorise("product.r0", dot4()).split("product.r0", 2),
            "loop product.r0 belongs to an intrinsic",
        ),
        (
            lambda s: s.compute_at("product", "out.i1").tensorise("out.i1", axpy(16)),
            "it does not hold one stage and nothing else",
        ),
    ],
)
def test_what_it_does_not_compute_is_refused(misuse, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        misuse(Schedule.of(*formulas.matmul(6, 16, 4)))
    assert reason in caught.value.message


def test_a_maximum_is_no_sum() -> None:
    x = te.Tensor("x", (3, 8), F32)
    (k,) = te.reduce_axes([8])
    top = te.compute("top", (3,), F32, lambda i: te.reduce_over("max", x[i, k] * x[i, k], [k]))
    with pytest.raises(ScheduleError, match=r"stage top\.local is a max, and the intrinsic is a sum"):
        Schedule.of(top, [x]).split("top.r0", 4).tensorise("top.r0.i", dot4())


def test_one_operand_may_be_both() -> None:
    x = te.Tensor("x", (3, 8), F32)
    (k,) = te.reduce_axes([8])
    task = te.compute("squares", (3,), F32, lambda i: te.reduce_over("sum", x[i, k] * x[i, k], [k])), [x]
    check_meaning(
        Schedule.of(*task).split("squares.r0", 4).tensorise("squares.r0.i", dot4()), task, native=True
    )


def test_another_expression_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"it computes x\[.*\], and the intrinsic \(a\[r0\] \* b\[r0\]\)"):
        Schedule.of(*plain_sum(3, 24)).split("out.r0", 4).tensorise("out.r0.i", dot4())


def test_what_an_intrinsic_reads_is_declared() -> None:
    a = te.Tensor("a", (4,), F32)
    with pytest.raises(ScheduleError, match="not among its inputs"):
        Intrinsic("bad", te.compute("c", (4,), F32, lambda i: a[i]), (), lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="an index is one of its axes"):
        Intrinsic("bad", te.compute("c", (2,), F32, lambda i: a[i * 2]), (a,), lambda *_: None)  # type: ignore[arg-type]


# -- the matrix product -----------------------------------------------------------------------------------------------


def product(m: int, n: int, k: int, rows: int, vectors: int, lanes: int, *, by_intrinsic: bool) -> Schedule:
    """What `loops/default.py` does by hand: a tile of accumulators in registers, B packed, tiles in parallel."""
    width = vectors * lanes
    schedule = (
        Schedule.of(*formulas.matmul(m, n, k), constants=[1])
        .tile(["out.i0", "out.i1"], [rows, width], tail="shift")
        .reorder("out.i1.o", "out.i0.o")
        .split("out.i1.i", lanes, into=("u", "v"))
        .unroll("out.i0.i")
        .unroll("u")
        .vectorise("v")
        .compute_at("product", "out.i0.o")
        .set_scope("product", "register")
        .reorder("product.r0", "product.i0", "product.i1")
        .pack("b", [k, width])
    )
    if by_intrinsic:
        schedule = schedule.tensorise("product.i0", outer_product(rows, vectors, lanes))
    else:
        schedule = schedule.split("product.i1", lanes).unroll("product.i0").unroll("product.i1.o")
        schedule = schedule.vectorise("product.i1.i")
    return schedule.parallel("out.i1.o")


def shape(program: Program) -> list[tuple[str, int]]:
    """The loops that are not serial, and the reduction's, as they come."""
    return [(s.kind.value, s.var.extent) for s in walk_stmts(program.body) if isinstance(s, For)]


@pytest.mark.parametrize("by_intrinsic", [False, True])
def test_a_matrix_product_by_primitives(by_intrinsic: bool) -> None:
    machine = host()
    lanes = machine.lanes(F32)
    rows, vectors = (6, 2) if machine.vector_registers == 16 else (14, 2)
    task = formulas.matmul(64, 256, 128)
    schedule = product(64, 256, 128, rows, vectors, lanes, by_intrinsic=by_intrinsic)
    program = schedule.program()
    arrays = random_arrays(task[1])
    a, b, bias = (array.astype(np.float64) for array in arrays)
    got = run_program(program, packed(program, arrays)).reshape(64, 256)
    np.testing.assert_allclose(got, np.maximum(a @ b + bias, 0), rtol=1e-4, atol=1e-4)

    tile = [("unroll", rows), ("unroll", vectors), ("vector", lanes)]
    tiles = [("parallel", 256 // (vectors * lanes)), ("serial", -(-64 // rows))]
    assert shape(program) == [*tiles, *tile, ("serial", 128), *tile, *tile]

    assert spilled_vectors_in_loops(program, machine) == 0


def test_a_tile_of_too_many_accumulators_is_seen_to_spill() -> None:
    machine = host()
    rows = machine.vector_registers
    program = product(64, 256, 128, rows, 2, machine.lanes(F32), by_intrinsic=False).program()
    assert spilled_vectors_in_loops(program, machine) > 0


def test_it_has_the_shape_of_the_one_made_by_hand() -> None:
    """The accumulators' loops and the packing are those of the default program."""
    machine = host()
    task = formulas.matmul(64, 256, 128)
    by_hand = default_program(formula_of(*task, constants=[1]), machine)
    kinds = [s for s in walk_stmts(by_hand.body) if isinstance(s, For)]
    extents = {s.var.name: s.var.extent for s in kinds if s.kind is not Kind.SERIAL}
    rows, vectors, lanes = extents["m"], extents.get("u", 1), extents["v"]
    ours = product(64, 256, 128, rows, vectors, lanes, by_intrinsic=False).program()
    inner = [loop for loop in shape(by_hand) if loop[0] in ("unroll", "vector")]
    assert [loop for loop in shape(ours) if loop[0] in ("unroll", "vector") and loop[1] > 1] == inner
    arrays = random_arrays(task[1])
    assert by_hand.packings[1] is not None and ours.packings[1] is not None
    np.testing.assert_array_equal(by_hand.packings[1].pack(arrays[1]), ours.packings[1].pack(arrays[1]))
    np.testing.assert_array_equal(
        run_program(ours, packed(ours, arrays)), run_program(by_hand, packed(by_hand, arrays))
    )
