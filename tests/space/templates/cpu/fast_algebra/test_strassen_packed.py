"""Products by seven whose right operand is no constant: right for odd sizes, whatever the config."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.machines import ICE_LAKE
from tests.space.checked import Inputs, error, legal_configs, stored_for
from tests.space.spills import spilled_vectors_in_loops
from tests.space.templates.cpu.images import Image
from tests.space.templates.cpu.test_contraction import matmul_task
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.ir import Prefetch, walk_stmts
from tilewright.measure.single import SingleKernel
from tilewright.measure.validation import make_validation
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.cpu.fast_algebra.strassen_packed import AppliedStrassenPacked, StrassenPacked
from tilewright.tune.choose import choose, descend

QUICK = settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
BOUND = 1e-5


def applied_to(task: Task, machine: CpuMachine | None = None) -> AppliedStrassenPacked:
    applied = StrassenPacked().apply(Work(task, machine or host(), "relaxed"))
    assert isinstance(applied, AppliedStrassenPacked)
    return applied


def product(m: int, n: int, k: int, *, constant: bool = False, dtype: DType = DType.F32) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(m, k, constant=constant, dtype=dtype), x(k, n, dtype=dtype)))


def pixels(size: tuple[int, int], channels: tuple[int, int], **others: tuple[int, int]) -> Task:
    return Image(1, size, channels, (1, 1), **others).task()


@given(
    data=st.data(),
    m=st.integers(24, 100),
    n=st.integers(32, 230),
    k=st.integers(96, 700),
    constant=st.booleans(),
)
@QUICK
def test_any_config_of_any_matrix_product(
    data: st.DataObject, m: int, n: int, k: int, constant: bool
) -> None:
    """Odd numbers of rows, columns, panels and taps; the same bits on one thread and on two."""
    task = product(m, n, k, constant=constant)
    applied = applied_to(task)
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < BOUND
    assert applied.terms(config).arithmetic > 0


@given(
    data=st.data(),
    size=st.tuples(st.integers(6, 15), st.integers(6, 15)),
    channels=st.tuples(st.integers(96, 300), st.integers(24, 90)),
)
@QUICK
def test_any_config_of_a_convolution_of_one_pixel(
    data: st.DataObject, size: tuple[int, int], channels: tuple[int, int]
) -> None:
    task = pixels(size, channels)
    applied = applied_to(task)
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < BOUND


@pytest.mark.parametrize(
    "task",
    [
        matmul_task(128, 256, 256),  # a constant on the right is packed
        product(16, 256, 256),  # too few rows
        product(128, 256, 64),  # too few taps
        product(128, host().lanes(DType.F32), 512),  # one panel
        product(64, 64, 256, dtype=DType.F16),
        pixels((14, 14), (128, 64), stride=(2, 2)),
        Image(2, (14, 14), (128, 64), (1, 1)).task(),
    ],
)
def test_it_declines(task: Task) -> None:
    assert StrassenPacked().apply(Work(task, host(), "relaxed")) is None


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_only_relaxed_numerics_allow_it(numerics: str) -> None:
    assert StrassenPacked().apply(Work(product(256, 768, 768), host(), numerics)) is None


@pytest.mark.parametrize("machine", [host(), ICE_LAKE])
def test_large_images_are_computed_so_and_small_ones_are_not(machine: CpuMachine) -> None:
    assert choose(Work(pixels((28, 28), (512, 256)), machine, "relaxed")).config.template == "strassen_packed"
    assert (
        choose(Work(pixels((7, 7), (512, 256)), machine, "relaxed")).config.template
        == "contraction_transposed"
    )


@pytest.mark.parametrize(("size", "channels"), [(28, (128, 512)), (28, (512, 128)), (14, (1024, 256))])
def test_the_error_is_that_of_a_product_as_usual(size: int, channels: tuple[int, int]) -> None:
    task = pixels((size, size), channels)
    applied = applied_to(task)
    found = descend(applied, Work(task, host(), "relaxed"))
    assert found is not None
    assert error(applied.program(found[1]), task) < 1.5e-6


@pytest.mark.parametrize("task", [pixels((14, 14), (256, 128)), product(61, 96, 200)])
def test_its_validation_allows_for_rows_that_are_added_to_larger_ones(task: Task) -> None:
    applied = applied_to(task)
    found = descend(applied, Work(task, host(), "relaxed"))
    assert found is not None
    program = applied.program(found[1])
    kernel = SingleKernel(program, host())
    for seed in range(3):
        for case in make_validation(task, "relaxed", seed).cases:
            case.error(kernel(stored_for(program, case.inputs)))


def test_lines_of_the_next_pair_are_asked_for_where_the_image_lies() -> None:
    applied = applied_to(pixels((28, 28), (128, 512)))
    values = {"rows": 8, "vectors": 2, "unroll": 8, "block": 0, "chunks": 1, "k_blocks": 1, "prefetch": 1}
    program = applied.program(Config.of(applied.name, values))
    asked = [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Prefetch) and not stmt.written]
    assert {stmt.buffer.name for stmt in asked} == {"x0"}


AVX2 = replace(
    host(), cpu="haswell", features=("avx", "avx2", "fma", "f16c"), vector_bytes=32, vector_registers=16
)


@pytest.mark.parametrize("machine", [host(), AVX2], ids=["host", "avx2"])
@pytest.mark.parametrize("unroll", [4, 8])
def test_no_register_tile_spills(machine: CpuMachine, unroll: int) -> None:
    """The largest tiles of two vectors and of the most; what is smaller has room."""
    applied = applied_to(product(128, 10 * machine.lanes(DType.F32), 384, constant=True), machine)
    largest: dict[int, Config] = {}
    for config in applied.space.configs():
        if (config["unroll"], config["k_blocks"], config["prefetch"]) == (unroll, 2, 1):
            largest[config.int("vectors")] = config  # rows grow
    for config in {largest[2], largest[max(largest)]}:
        assert spilled_vectors_in_loops(applied.program(config), machine) == 0, str(config)
