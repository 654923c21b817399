"""What is counted from a program's statements."""

from __future__ import annotations

import pytest

from tests.space.checked import Inputs
from tilewright import te
from tilewright.cost.program import terms_of
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.loops.default import default_program
from tilewright.loops.ir import Buffer, Kind, Program, Scope, Store, block, nest
from tilewright.space.template import Terms, Work

LANES = host().vector_bytes // 4


def counted(x: Inputs, output: Node) -> Terms:
    work = Work(x.task(output), host())
    assert work.formula is not None
    return terms_of(default_program(work.formula, host()), host())


def test_elementwise_work_is_counted_in_vectors() -> None:
    x = Inputs()
    terms = counted(x, apply("add", x(64, LANES), x(64, LANES)))
    assert (terms.loads, terms.stores, terms.arithmetic) == (128, 64, 64)
    assert terms.from_l3 == 4 * 64 * LANES * 4  # two read, and what is written is read first


def test_functions_are_longer_than_sums() -> None:
    plain, function = Inputs(), Inputs()
    added = counted(plain, apply("relu", plain(64, 64)))
    assert counted(function, apply("exp", function(64, 64))).arithmetic > 8 * added.arithmetic


def test_every_step_of_a_reduction_counts() -> None:
    x = Inputs()
    terms = counted(x, apply("amax", x(10, 8 * LANES), axes=(0,), keepdims=False))
    assert terms.loads == 80 and terms.stores == 8


def test_what_does_not_lie_together_is_read_one_by_one() -> None:
    def loads(stride: int, layout: str) -> float:
        inputs, window = Inputs(), {"kernel": (2, 2), "stride": (stride, stride), "padding": (0, 0)}
        x = inputs(1, 32, 16 * stride, 16 * stride)
        pool = apply("max_pool", x, **window, dilation=(1, 1), ceil_mode=False, layout=layout)
        return counted(inputs, pool).loads

    assert loads(5, "channels_first") >= 8 * loads(5, "channels_last")
    assert 2 * loads(2, "channels_last") <= loads(2, "channels_first") < 8 * loads(2, "channels_last")


def test_a_transposition_takes_more_than_its_traffic() -> None:
    copy, turn = Inputs(), Inputs()
    plain = counted(copy, apply("relu", copy(64, 64)))
    transposed = counted(turn, apply("permute", turn(64, 64), axes=(1, 0)))
    assert transposed.from_l3 == plain.from_l3
    assert transposed.arithmetic + transposed.scalar > 4 * plain.arithmetic


@pytest.mark.parametrize("parts", [2, 3])
def test_branches_share_the_cases(parts: int) -> None:
    x = Inputs()
    terms = counted(x, apply("concat", *(x(8, 6 * LANES) for _ in range(parts)), axis=0))
    assert terms.stores == parts * 48


def test_what_does_not_fit_a_cache_is_brought_in_again() -> None:
    """A product whose second operand is larger than L1, and then than the second."""

    def transposed_product(columns: int) -> Terms:
        x = Inputs()
        return counted(x, apply("matmul", x(64, 64), x(64, columns)))

    caches = host().caches
    small = transposed_product(caches.l1 // 4 // 64 // 8)
    large = transposed_product(4 * caches.l1 // 4 // 64)
    assert small.from_l2 == 0.0
    assert large.from_l2 / large.arithmetic > small.from_l2 / small.arithmetic


def test_constants_come_from_memory() -> None:
    x = Inputs()
    task = x.task(apply("matmul", x(4, 64), x(64, 32, constant=True)))
    formula = Work(task, host()).formula
    assert formula is not None
    program = default_program(formula, host())
    plain, constant = terms_of(program, host()), terms_of(program, host(), task.constants)
    assert constant.from_memory == 64 * 32 * 4 and plain.from_memory == 0
    assert plain.from_l3 - constant.from_l3 == 64 * 32 * 4


@pytest.mark.parametrize("chains", [1, 2, 16])
def test_sums_wait_for_the_ones_before_them(chains: int) -> None:
    x, out = Buffer("x", DType.F32, 64 * chains * LANES), Buffer("out", DType.F32, chains * LANES)
    sums = Buffer("sums", DType.F32, chains * LANES, Scope.REGISTER)
    k, chain, lane = te.Var("k", 64), te.Var("c", chains), te.Var("v", LANES)
    position = chain * LANES + lane
    tile = [(chain, Kind.UNROLL), (lane, Kind.VECTOR)]
    total = te.call("add", te.Load(sums, (position,)), te.Load(x, (k * (chains * LANES) + position,)))
    body = block(
        nest(tile, Store(sums, position, te.const(0.0, DType.F32))),
        nest([(k, Kind.SERIAL), *tile], Store(sums, position, total)),
        nest(tile, Store(out, position, te.Load(sums, (position,)))),
    )
    # Four cycles each: with as many of them at once as begin in that time, none waits.
    assert terms_of(Program("sums", (x, out), body), host()).arithmetic == 64 * max(chains, host().chains)
