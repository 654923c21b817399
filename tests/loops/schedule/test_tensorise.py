"""Intrinsics: what matches, what does not, and the matmul that they make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.codegen.llvm.native import run_program
from tests.hw.declared import FMA, pmaddwd
from tests.loops import formulas
from tests.loops.schedule.examples import check_meaning, packed, plain_sum
from tests.loops.test_default import random_arrays
from tests.space.spills import spilled_vectors_in_loops
from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import IntrinsicError, ScheduleError
from tilewright.hw import host
from tilewright.hw.intrinsics import PtxAssembly, register_intrinsic, unregister_intrinsic
from tilewright.loops.default import default_program
from tilewright.loops.formula import formula_of
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import For, Invoke, Kind, Program, Stmt, nest, walk_stmts
from tilewright.loops.schedule import (
    Intrinsic,
    IntrinsicOperand,
    Schedule,
    from_json,
    outer_product,
    replay,
    to_json,
)
from tilewright.loops.text import print_program

F32 = DType.F32


def dot4() -> Intrinsic:
    """`c += sum(a[k] * b[k], k)` for four elements, written out."""
    a, b = te.Tensor("a", (4,), F32), te.Tensor("b", (4,), F32)
    (k,) = te.reduce_axes([4])
    c = te.compute("c", (), F32, lambda: te.reduce_over("sum", a[k] * b[k], [k]))

    def implement(out: IntrinsicOperand, left: IntrinsicOperand, right: IntrinsicOperand) -> Stmt:
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

    def implement(out: IntrinsicOperand, left: IntrinsicOperand, right: IntrinsicOperand) -> Stmt:
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


def test_an_instruction_is_one_statement_of_the_program() -> None:
    task = formulas.matmul(5, 16, 12)
    schedule = Schedule.of(*task).split("product.i1", 8).reorder("product.i1.o", "product.r0", "product.i1.i")
    schedule = schedule.tensorise("product.i1.i", FMA)
    program = schedule.program()
    (invoked,) = [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Invoke)]
    assert [slot.is_run for slot in invoked.operands] == [True, False, True]
    assert invoked.operands[1].offsets == (0,) * 8
    assert f"fma_8xf32@{FMA.digest} product[" in print_program(program)
    check_meaning(schedule, task, native=not FMA.missing(host()))


@pytest.mark.skipif(bool(pmaddwd().missing(host())), reason="needs AVX2")
@pytest.mark.parametrize("order", ["together", "apart"])
def test_what_an_instruction_does_not_add_is_added(order: str) -> None:
    """Pairs of 16-bit integers, next to each other in memory or not: by LLVM's own intrinsic."""
    together = order == "together"
    a = te.Tensor("a", (3, 24), DType.I16)
    b = te.Tensor("b", (16, 24) if together else (24, 16), DType.I16)
    (k,) = te.reduce_axes([24])

    def element(i: te.Expr, j: te.Expr) -> te.Expr:
        right = b[j, k] if together else b[k, j]
        return te.reduce_over("sum", te.cast(a[i, k], DType.I32) * te.cast(right, DType.I32), [k])

    out = te.compute("out", (3, 16), DType.I32, element)
    schedule = Schedule.of(out, [a, b]).split("out.r0", 2).split("out.local.i1", 8)
    schedule = schedule.reorder("out.local.i1.o", "out.r0.o", "out.local.i1.i", "out.r0.i")
    program = schedule.tensorise("out.local.i1.i", pmaddwd()).program()
    rng = np.random.default_rng(0)
    left, right = (rng.integers(-3000, 3000, tensor.shape).astype(np.int16) for tensor in (a, b))
    exact = left.astype(np.int32) @ (right.T if together else right).astype(np.int32)
    np.testing.assert_array_equal(interpret_program(program, [left, right]).reshape(3, 16), exact)
    np.testing.assert_array_equal(run_program(program, [left, right]).reshape(3, 16), exact)


def test_a_registered_intrinsic_goes_by_its_name() -> None:
    with_features = replace(host(), features=tuple(sorted({*host().features, *FMA.features})))
    start = Schedule.of(*formulas.matmul(4, 8, 6)).reorder("product.r0", "product.i1")
    register_intrinsic(FMA)
    try:
        schedule = start.tensorise("product.i1", "fma_8xf32", with_features)
        assert str(replay(from_json(to_json(schedule.trace)), start)) == str(schedule)
        with pytest.raises(IntrinsicError, match=r"needs avx2, fma, which .* lacks"):
            start.tensorise("product.i1", "fma_8xf32", replace(host(), features=()))
    finally:
        unregister_intrinsic("fma_8xf32")
    with pytest.raises(IntrinsicError, match="got 'fma_8xf32'"):
        start.tensorise("product.i1", "fma_8xf32", with_features)


def test_an_instruction_of_a_gpu_is_refused() -> None:
    ptx = Intrinsic("ptx", FMA.output, FMA.inputs, PtxAssembly("fma"), fragments=FMA.fragments)
    schedule = Schedule.of(*formulas.matmul(4, 8, 6)).reorder("product.r0", "product.i1")
    with pytest.raises(ScheduleError, match="ptx is an instruction of a GPU"):
        schedule.tensorise("product.i1", ptx).program()


# -- the matmul -----------------------------------------------------------------------------------------------


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
