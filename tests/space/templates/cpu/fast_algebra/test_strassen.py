"""Every config of the template that multiplies by seven products computes its task, within the bounds of fp32."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.machines import ICE_LAKE
from tests.programs import ZEN4
from tests.rewrites.helpers import array
from tests.space.checked import Inputs, error, legal_configs, same_on_two_threads, stored_for
from tests.space.spills import spilled_vectors_in_loops
from tests.space.templates.cpu.test_contraction import matmul_task, with_epilogue
from tilewright import te
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.ir import Prefetch, walk_stmts
from tilewright.measure.single import SingleKernel
from tilewright.measure.validation import make_validation
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.cpu.fast_algebra.strassen import AppliedStrassen, Strassen
from tilewright.space.templates.cpu.fast_algebra.strassen_nest import PRODUCTS, StrassenNest, prefetches_data
from tilewright.te.index import simplify
from tilewright.tune.choose import choose, descend

QUICK = settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
BOUND = 1e-5
_PER_LINE = 16  # elements of a cache line
SMALL_CACHE = replace(host(), caches=replace(host().caches, l2=4 << 10))  # the next block is prefetched


def applied_to(task: Task, machine: CpuMachine | None = None) -> AppliedStrassen:
    applied = Strassen().apply(Work(task, machine or host(), "relaxed"))
    assert isinstance(applied, AppliedStrassen)
    return applied


@given(
    data=st.data(),
    m=st.integers(24, 100),
    vectors=st.integers(2, 13),
    columns=st.integers(0, 15),
    k=st.integers(96, 700),
)
@QUICK
def test_any_config_of_any_matrix_product(
    data: st.DataObject, m: int, vectors: int, columns: int, k: int
) -> None:
    """Odd numbers of rows, panels and taps; columns that no panel has; the same bits on one thread and on two."""
    task = matmul_task(m, vectors * host().lanes(DType.F32) + columns, k)
    applied = applied_to(task, data.draw(st.sampled_from((host(), SMALL_CACHE))))
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < BOUND
    assert applied.terms(config).arithmetic > 0


@pytest.mark.parametrize(("m", "k"), [(61, 400), (100, 401), (121, 399)])
def test_blocks_that_do_not_divide_the_rows_agree_on_every_bit(m: int, k: int) -> None:
    """The last one is moved back: rows that it shares with the one before it are paired otherwise there."""
    lanes = host().lanes(DType.F32)
    task = matmul_task(m, 4 * lanes, k)
    applied = applied_to(task)
    values = {"rows": 4, "vectors": 1, "unroll": 4, "block": 3, "chunks": 2, "k_blocks": 2, "prefetch": 0}
    config = next(
        c for c in applied.space.configs() if all(c[name] == value for name, value in values.items())
    )
    assert applied.shape_of(values).blocks > 1 and m % applied.shape_of(values).block
    program = applied.program(config)
    stored = stored_for(
        program, [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    )
    results = [same_on_two_threads(program, stored) for _ in range(3)]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_seven_eighths_of_the_multiplications_are_done() -> None:
    task = matmul_task(128, 768, 768)
    applied = applied_to(task)
    found = descend(applied, Work(task, host(), "relaxed"))
    assert found is not None
    plain = 128 * 768 * 768 / host().lanes(DType.F32)
    assert 0.875 * plain < applied.terms(found[1]).arithmetic < 0.95 * plain


def test_a_convolution_of_one_pixel_is_one_too() -> None:
    x = Inputs()
    image, weights = x(1, 14, 14, 96), x(1, 1, 96, 64, constant=True)
    attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    task = x.task(with_epilogue(x, apply("conv", image, weights, layout="channels_last", **attrs)))
    applied = applied_to(task)
    config = next(applied.space.configs())
    assert error(applied.program(config), task) < BOUND


def activations(m: int, n: int, k: int) -> Task:
    """A product of two tensors that are computed."""
    x = Inputs()
    return x.task(apply("matmul", x(m, k), x(k, n)))


def heads(batch: int) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(batch, 64, 256), x(batch, 256, 64, constant=True)))


@pytest.mark.parametrize(
    "task",
    [
        matmul_task(4, 512, 512),  # reading the weight is all there is to do
        matmul_task(128, 512, 64),  # too few taps
        matmul_task(128, host().lanes(DType.F32), 512),  # one panel
        matmul_task(64, 64, 256, dtype=DType.F16),
        activations(64, 64, 256),
        heads(3),
    ],
)
def test_it_declines(task: Task) -> None:
    assert Strassen().apply(Work(task, host(), "relaxed")) is None


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_only_relaxed_numerics_allow_it(numerics: str) -> None:
    task = matmul_task(256, 768, 768)
    assert Strassen().apply(Work(task, host(), numerics)) is None


@pytest.mark.parametrize("machine", [ZEN4, ICE_LAKE], ids=["zen4", "ice-lake"])
def test_large_products_are_computed_so_and_small_ones_are_not(machine: CpuMachine) -> None:
    large = "paired" if machine.independent_adds else "strassen"
    assert choose(Work(matmul_task(1024, 1024, 1024), machine, "relaxed")).config.template == large
    assert choose(Work(matmul_task(32, 64, 96), machine, "relaxed")).config.template != "strassen"


@given(
    k=st.integers(96, 400),
    rows=st.sampled_from((4, 8)),
    block=st.integers(2, 4),
    k_blocks=st.sampled_from((1, 2, 3)),
    at=st.integers(0, 8),
)
@QUICK
def test_the_next_piece_of_the_rows_is_asked_for(
    k: int, rows: int, block: int, k_blocks: int, at: int
) -> None:
    """Every line of it, during this one: of the same block, or the first one of the next block."""
    applied = applied_to(matmul_task(256, 32, k), SMALL_CACHE)
    values = {
        "rows": rows, "vectors": 1, "unroll": 8, "block": block, "chunks": 1, "k_blocks": k_blocks, "prefetch": 0
    }  # fmt: skip
    assume(applied.space.legal(values))
    config, shape = Config.of(applied.name, values), applied.shape_of(values)
    asked = {s.buffer.name for s in walk_stmts(applied.program(config).body) if isinstance(s, Prefetch)}
    assert asked == ({"x0"} if prefetches_data(applied.gemm, shape, applied.machine) else set())

    nest = StrassenNest(applied._plain_nest(shape), shape, applied.machine)
    now, following = divmod(at, k_blocks), divmod(at + 1, k_blocks)
    assume(following[0] < shape.blocks - 1)  # the last may be moved back
    steps = PRODUCTS * shape.tiles * (shape.k_block // shape.unroll)
    lines = set()
    for pair, step in itertools.product(range(shape.per_chunk), range(steps)):
        values_now = {nest.block: now[0], nest.k_block: now[1], nest.pair: pair}
        for prefetch in nest._next_rows(te.as_index(step), steps):
            assert isinstance(prefetch, Prefetch)
            indices = {var: te.as_index(value) for var, value in values_now.items()}
            position = simplify(te.substitute(prefetch.index, indices))
            assert isinstance(position, te.Const)
            lines.add(int(position.value) // _PER_LINE)
    first_row, first_k = following[0] * shape.block, following[1] * 2 * shape.k_block
    wanted = {
        ((first_row + row) * k + first_k + tap) // _PER_LINE
        for row in range(shape.block)
        for tap in range(2 * shape.k_block)
    }
    assert wanted <= lines


@pytest.mark.parametrize("size", [(128, 768, 768), (197, 2304, 768), (127, 769, 511), (784, 64, 576)])
def test_the_error_is_that_of_a_product_as_usual(size: tuple[int, int, int]) -> None:
    m, n, k = size
    task = matmul_task(m, n, k)
    applied = applied_to(task)
    found = descend(applied, Work(task, host(), "relaxed"))
    assert found is not None
    assert error(applied.program(found[1]), task) < 1.5e-6


def with_gelu(m: int, n: int, k: int) -> Task:
    x = Inputs()
    return x.task(apply("gelu", apply("matmul", x(m, k), x(k, n, constant=True)), approximate="none"))


@pytest.mark.parametrize("task", [matmul_task(128, 256, 256), with_gelu(61, 96, 200)])
def test_its_validation_allows_for_rows_that_are_added_to_larger_ones(task: Task) -> None:
    """As it is drawn when candidates are measured: what fails there is never chosen."""
    applied = applied_to(task)
    found = descend(applied, Work(task, host(), "relaxed"))
    assert found is not None
    program = applied.program(found[1])
    kernel = SingleKernel(program, host())
    for seed in range(3):
        for case in make_validation(task, "relaxed", seed).cases:
            case.error(kernel(stored_for(program, case.inputs)))


AVX2 = replace(
    host(), cpu="haswell", features=("avx", "avx2", "fma", "f16c"), vector_bytes=32, vector_registers=16
)


@pytest.mark.parametrize("machine", [host(), AVX2], ids=["host", "avx2"])
@pytest.mark.parametrize("unroll", [4, 8])
def test_no_register_tile_spills(machine: CpuMachine, unroll: int) -> None:
    """The largest tiles of two vectors and of the most; what is smaller has room."""
    task = matmul_task(128, 10 * machine.lanes(DType.F32), 384)
    applied = applied_to(task, machine)
    largest: dict[int, Config] = {}
    for config in applied.space.configs():
        if (config["unroll"], config["k_blocks"], config["prefetch"]) == (unroll, 2, 1):
            largest[config.int("vectors")] = config  # rows grow
    for config in {largest[2], largest[max(largest)]}:
        assert spilled_vectors_in_loops(applied.program(config), machine) == 0, str(config)


def test_another_reader_of_the_weight_leaves_it_where_it_is() -> None:
    """The packed order would be wrong for it."""
    x = Inputs()
    a, w = x(64, 128), x(128, 128, constant=True)
    product = apply(
        "add", apply("matmul", a, w), apply("slice", w, starts=(0, 0), stops=(64, 128), steps=(1, 1))
    )
    assert Strassen().apply(Work(x.task(product), host(), "relaxed")) is None
