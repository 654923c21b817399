"""Every config of the template that computes Winograd's inner-product trick computes its task, within the bounds of
fp32."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.machines import ICE_LAKE, ZEN_4
from tests.rewrites.helpers import array
from tests.space.checked import Inputs, error, legal_configs, same_on_two_threads, stored_for
from tests.space.spills import spilled_vectors_in_loops
from tests.space.templates.cpu.test_contraction import conv_task, matmul_task
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.ir import Prefetch, walk_stmts
from tilewright.measure.check import relative_error
from tilewright.measure.single import SingleKernel
from tilewright.measure.validation import make_validation
from tilewright.runtime.paired import GROUP
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.cpu.fast_algebra.paired import MAX_UNCERTIFIED, AppliedPaired, Paired
from tilewright.space.templates.cpu.fast_algebra.row_gemm import row_gemm_of
from tilewright.space.templates.cpu.gemm import gemm_of
from tilewright.tune.choose import choose, descend

pytestmark = pytest.mark.skipif(host().vector_registers < 32, reason="its register tiles want 32 vectors")
QUICK = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
BOUND = 1e-5
SMALL_CACHE = replace(host(), caches=replace(host().caches, l2=4 << 10))  # the next block is prefetched
LANES = host().lanes(DType.F32)


def applied_to(task: Task, machine: CpuMachine | None = None) -> AppliedPaired:
    """Also where it does not pay: what it computes is right everywhere."""
    work = Work(task, machine or host())
    sums = row_gemm_of(gemm_of(work.formula))
    assert sums is not None
    return AppliedPaired(work, sums, max_uncertified=math.inf)


def some_config(applied: AppliedPaired, **values: int) -> Config:
    return next(c for c in applied.space.configs() if all(c[name] == v for name, v in values.items()))


@given(
    data=st.data(),
    m=st.integers(6, 100),
    vectors=st.integers(3, 9),
    columns=st.integers(0, 15),
    k=st.integers(32, 500),
)
@QUICK
def test_any_config_of_any_matrix_product(
    data: st.DataObject, m: int, vectors: int, columns: int, k: int
) -> None:
    """Odd numbers of rows, columns and taps, and what comes after the product; the same bits on one thread and two."""
    task = matmul_task(m, vectors * LANES + columns, k)
    applied = applied_to(task, data.draw(st.sampled_from((host(), SMALL_CACHE))))
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < BOUND
    assert applied_to(task, ZEN_4).terms(config).arithmetic > 0


@pytest.mark.parametrize(("m", "k"), [(61, 100), (100, 401)])
def test_blocks_that_do_not_divide_the_rows_agree_on_every_bit(m: int, k: int) -> None:
    """The last one is moved back: which rows of it are summed in pairs differs from the one before it."""
    task = matmul_task(m, 4 * LANES + 1, k)
    applied = applied_to(task)
    config = some_config(applied, rows=6, block=3, chunks=2)
    shape = applied.shape_of(dict(config.values))
    assert shape.blocks > 1 and m % shape.block and shape.block % shape.rows == 0
    program = applied.program(config)
    stored = stored_for(
        program, [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    )
    results = [same_on_two_threads(program, stored) for _ in range(3)]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def product(m: int, n: int, k: int) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(m, k), x(k, n, constant=True)))


def computed(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Their product in pairs."""
    (m, k), n = left.shape, right.shape[1]
    applied = applied_to(product(m, n, k))
    program = applied.program(some_config(applied, rows=6, block=2, prefetch=0))
    return same_on_two_threads(program, stored_for(program, [left, right])).reshape(m, n)


def drawn(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def exact(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return left.astype(np.float64) @ right.astype(np.float64)


@given(
    sizes=st.tuples(st.integers(12, 40), st.integers(3 * LANES, 5 * LANES), st.integers(32, 300)),
    seed=st.integers(0, 1000),
    magnitude=st.integers(0, 12),
)
@QUICK
def test_rows_and_columns_are_as_exact_as_each_by_itself(
    sizes: tuple[int, int, int], seed: int, magnitude: int
) -> None:
    """Whatever their sizes are: an error is small compared with the product of a row's length and a column's."""
    m, n, k = sizes
    rng = np.random.default_rng(seed)
    of_rows, of_columns = (10.0 ** rng.uniform(-magnitude, magnitude, size) for size in (m, n))
    left = (drawn(m, k, seed) * of_rows[:, None]).astype(np.float32)
    right = (drawn(k, n, seed + 1) * of_columns).astype(np.float32)
    off = np.abs(computed(left, right) - exact(left, right))
    lengths = np.outer(np.linalg.norm(left, axis=1), np.linalg.norm(right, axis=0))
    assert (off <= 3e-7 * lengths).all()


def error_beside_plain_sums(left: np.ndarray, right: np.ndarray) -> float:
    plain = np.zeros((len(left), right.shape[1]), np.float32)
    for tap in range(len(right)):
        plain += left[:, tap, None] * right[tap]
    reference = exact(left, right)
    return relative_error(computed(left, right), reference) / relative_error(plain, reference)


@pytest.mark.parametrize("mean", [0.5, 3.0, -20.0])
@pytest.mark.parametrize("k", [256, 3072])
def test_a_mean_costs_little(mean: float, k: int) -> None:
    """Corrections that all have one sign would be far larger than the result."""
    left, right = (drawn(18, k, 0) + mean).astype(np.float32), drawn(k, 3 * LANES, 1)
    assert error_beside_plain_sums(left, right) < 2.5


@pytest.mark.parametrize("period", [2, 4, 16, 32, 64, 512])
def test_so_does_what_repeats_itself(period: int) -> None:
    """Numbers at every second place, or the same ones in every head or at every pixel of a window."""
    repeated = np.random.default_rng(period).random(period) < 0.5
    repeated[0], repeated[1] = True, False
    left = np.tile(np.where(repeated, 1.0, 0.0).astype(np.float32), (18, 3072 // period))
    assert error_beside_plain_sums(left, drawn(3072, 3 * LANES, 1)) < 4


def test_what_is_not_finite_stays_where_a_matmul_has_it() -> None:
    """The tile of such a row or column runs the plain loop, on numbers that are not scaled."""
    left, right = drawn(30, 80, 0), drawn(80, 3 * LANES, 1)
    left[7, 3], left[20, 79], left[21, 0], right[50, 5], right[3, 9] = np.nan, np.inf, 3e38, np.nan, 0.0
    right[0] = np.abs(right[0]) + 1
    result = computed(left, right)
    with np.errstate(all="ignore"):
        expected = exact(left, right).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(result), np.isinf(expected))
    finite = np.isfinite(expected) & (np.abs(expected) < 1e3)
    assert relative_error(result[finite], expected[finite]) < 1e-6


@given(seed=st.integers(0, 1000), exponent=st.integers(-20, 20))
@settings(QUICK, max_examples=8)
def test_powers_of_two_change_no_other_bit(seed: int, exponent: int) -> None:
    """Rows and columns are scaled by powers of two: what is larger by one has the same digits."""
    left, right = drawn(12, 64, seed), drawn(64, 3 * LANES, seed + 1)
    factor = np.float32(2.0**exponent)
    np.testing.assert_array_equal(computed(left * factor, right), computed(left, right) * factor)
    np.testing.assert_array_equal(computed(left, right * factor), computed(left, right) * factor)


@pytest.mark.parametrize("factor", [32, 1024, 4096])
def test_balanced_outliers_cost_no_digits(factor: int) -> None:
    """Channels that training has made larger, with weights as much smaller."""
    left, right = drawn(40, 768, 0), drawn(768, 4 * LANES, 1)
    plain = error_beside_plain_sums(left, right)
    left[:, [3, 100, 400]] *= factor
    right[[3, 100, 400]] /= factor
    assert error_beside_plain_sums(left, right) < 1.5 * max(plain, 1.0)


def test_a_mel_filter_bank_of_a_falling_spectrum_keeps_every_digit() -> None:
    """A power spectrum that falls by six decades, times triangles: what a logarithm is taken of afterwards."""
    spectrum = (drawn(20, 257, 0) ** 2 * 10.0 ** np.linspace(3, -3, 257)).astype(np.float32)
    centres = np.linspace(0, 256, 4 * LANES + 2)
    positions = np.arange(257)[:, None]
    rising = (positions - centres[:-2]) / (centres[1:-1] - centres[:-2])
    falling = (centres[2:] - positions) / (centres[2:] - centres[1:-1])
    filters = np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
    reference = exact(spectrum, filters)
    assert (np.abs(computed(spectrum, filters) - reference) <= 1e-6 * reference).all()


@pytest.mark.parametrize("tiny", [0.0, 1e-30, 1e-42])
def test_rows_of_zeros_give_zeros_and_tiny_ones_do_no_harm(tiny: float) -> None:
    left, right = drawn(12, 64, 0), drawn(64, 3 * LANES, 1)
    left[[2, 5, 6]] *= np.float32(tiny)
    right[:, 3] = 0.0
    result = computed(left, right)
    assert np.abs(result[[2, 5, 6]]).max() <= 100 * tiny
    assert relative_error(result, exact(left, right)) < 1e-6


@pytest.mark.parametrize(("taps", "pairs"), [(64, 32), (65, 33), (66, 34), (72, 40), (73, 40), (80, 40)])
def test_pairs_of_zeros_are_left_out(taps: int, pairs: int) -> None:
    applied = applied_to(product(60, 4 * LANES, taps))
    assert applied.shape_of(dict(some_config(applied).values)).pairs == pairs


def test_two_thirds_of_the_multiplications_are_done() -> None:
    task = matmul_task(128, 768, 768)
    found = descend(applied_to(task, ZEN_4), Work(task, ZEN_4))
    assert found is not None
    plain = 128 * 768 * 768 / ZEN_4.lanes(DType.F32)
    assert 2 / 3 * plain < applied_to(task, ZEN_4).terms(found[1]).arithmetic < 0.75 * plain


@given(
    data=st.data(),
    size=st.tuples(st.integers(5, 13), st.integers(5, 13)),
    channels=st.tuples(st.integers(2, 5), st.integers(3 * LANES, 5 * LANES)),
    window=st.sampled_from(((1, 1), (3, 3), (2, 3), (1, 5))),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    pad=st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2),
    batch=st.integers(1, 2),
)
@QUICK
def test_any_config_of_any_convolution(
    data: st.DataObject, size, channels, window, stride, dilation, pad, batch
) -> None:
    """Windows with gaps and borders; every pixel of the result is a row."""
    channels = (channels[0] * GROUP, channels[1])
    reach = [dilation * (taps - 1) for taps in window]
    task = conv_task(
        (size[0] + reach[0], size[1] + reach[1]), channels, window, stride, dilation, pad, batch=batch
    )
    applied = applied_to(task)
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < BOUND
    assert applied_to(task, ZEN_4).terms(config).arithmetic > 0


def strided(size: int, channels: int, outputs: int, window: int) -> Task:
    edge = window // 2
    return conv_task((size, size), (channels, outputs), (window, window), 2, 1, ((edge, edge), (edge, edge)))


@pytest.mark.parametrize("sizes", [(56, 128, 128, 3), (14, 512, 512, 3), (56, 256, 512, 1)])
def test_convolutions_that_no_other_algorithm_takes_are_computed_so(sizes: tuple[int, int, int, int]) -> None:
    assert choose(Work(strided(*sizes), ZEN_4)).config.template == "paired"
    assert choose(Work(strided(*sizes), ICE_LAKE)).config.template != "paired"


def test_a_border_of_another_value_than_zero_is_not_for_it() -> None:
    x = Inputs()
    image, weights = x(1, 9, 9, 32), x(3, 3, 32, 64, constant=True)
    edge = (0, 1, 1, 0)
    image = apply("pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=1.0)
    attrs = {"stride": (2, 2), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    task = x.task(apply("conv", image, weights, layout="channels_last", **attrs))
    assert Paired().apply(Work(task, ZEN_4)) is None


def activations(m: int, n: int, k: int) -> Task:
    """A product of two tensors that are computed."""
    x = Inputs()
    return x.task(apply("matmul", x(m, k), x(k, n)))


def heads(batch: int) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(batch, 64, 256), x(batch, 256, 64, constant=True)))


def read_twice() -> Task:
    """A weight that something else reads, too: its packed order would be wrong there."""
    x = Inputs()
    a, w = x(64, 128), x(128, 128, constant=True)
    part = apply("slice", w, starts=(0, 0), stops=(64, 128), steps=(1, 1))
    return x.task(apply("add", apply("matmul", a, w), part))


@pytest.mark.parametrize(
    "task",
    [
        product(4, 512, 512),  # reading the weight is all there is to do
        product(128, 512, 16),  # too few taps
        product(128, 2 * LANES, 512),  # too few panels
        matmul_task(64, 64, 256, dtype=DType.F16),
        activations(64, 64, 256),
        heads(3),
        read_twice(),
        strided(28, 40, 64, 3),  # groups that two windows would share
        conv_task((14, 14), (64, 128), (3, 3), 2, 1, ((1, 1), (1, 1)), groups=2),
    ],
)
def test_it_declines(task: Task) -> None:
    assert Paired().apply(Work(task, ZEN_4)) is None


def test_it_is_for_machines_that_add_beside_and_not_for_strict_numerics() -> None:
    task = matmul_task(256, 768, 768)
    assert Paired().apply(Work(task, ZEN_4)) is not None
    assert Paired().apply(Work(task, ZEN_4, "strict")) is None
    assert Paired().apply(Work(task, ICE_LAKE)) is None


@pytest.mark.parametrize("size", [(1024, 1024, 1024), (128, 768, 768), (784, 256, 128), (30, 669, 1041)])
def test_products_are_computed_so_where_it_pays(size: tuple[int, int, int]) -> None:
    assert choose(Work(matmul_task(*size), ZEN_4)).config.template == "paired"
    assert choose(Work(matmul_task(*size), ICE_LAKE)).config.template != "paired"


@pytest.mark.parametrize("size", [(784, 128, 64), (3136, 64, 64), (3136, 64, 576)])
def test_few_columns_are_not_worth_scaling_rows_that_may_lack_a_certificate(
    size: tuple[int, int, int],
) -> None:
    """Without a certificate such a kernel takes over 5% longer than the plain template; relaxed numerics need none."""
    task = product(*size)
    assert Paired().apply(Work(task, ZEN_4)) is None
    assert Paired().apply(Work(task, ZEN_4, "relaxed")) is not None
    relaxed = choose(Work(task, ZEN_4, "relaxed")).config
    applied = applied_to(task, ZEN_4)
    assert applied.uncertified_time(applied.shape_of(dict(relaxed.values))) > MAX_UNCERTIFIED


# Rows of convolutions: of 7x7 results, 14x14 and so on.
CONVOLUTIONS = [
    conv_task((image, image), (channels, outputs), (window, window), stride, 1, ((edge, edge), (edge, edge)))
    for image, channels, outputs, window, stride in (
        *((14, 512, 512, 3, 2), (56, 256, 512, 1, 2), (14, 256, 256, 3, 1), (7, 2048, 512, 1, 1)),
        *((7, 512, 2048, 1, 1), (28, 128, 512, 1, 1), (19, 96, 256, 1, 1), (9, 64, 128, 1, 1)),
    )
    for edge in (window // 2,)
]


@pytest.mark.parametrize("task", CONVOLUTIONS, ids=lambda task: str([i.shape for i in task.graph.inputs]))
def test_a_convolution_is_offered_only_where_some_tile_is_within_5_percent(task: Task) -> None:
    """Rows of a partial register tile are computed too."""
    applied = applied_to(task, ZEN_4)
    shapes = [applied.shape_of(dict(config.values)) for config in applied.space.configs()]
    assert shapes
    rows = applied.row.extent
    least = min(
        applied.uncertified_time(shape) * shape.blocks * shape.tiles * shape.rows / rows for shape in shapes
    )
    offered = Paired().apply(Work(task, ZEN_4)) is not None
    assert offered == (least <= MAX_UNCERTIFIED)


@pytest.mark.parametrize(("rows", "offered"), [(7, False), (12, True), (19, False), (20, True), (49, True)])
def test_rows_that_fill_no_tile_are_not_offered(rows: int, offered: bool) -> None:
    """Of 7 rows a tile of 6 computes 12, of 19 one of 10 computes 20."""
    task = product(rows, 1024, 512)
    assert (Paired().apply(Work(task, ZEN_4)) is not None) == offered
    assert Paired().apply(Work(task, ZEN_4, "relaxed")) is not None


@given(m=st.integers(20, 3000), vectors=st.integers(3, 48), k=st.integers(32, 2000), data=st.data())
@QUICK
def test_every_config_that_is_offered_is_fast_without_a_certificate(
    m: int, vectors: int, k: int, data: st.DataObject
) -> None:
    """Measuring and scaling rows is within 5% of the plain loop, and a smaller share of more columns."""
    work = Work(product(m, vectors * LANES, k), ZEN_4)
    offered = Paired().apply(work)
    assume(isinstance(offered, AppliedPaired))
    config = data.draw(legal_configs(offered.space))
    shape = offered.shape_of(dict(config.values))
    tiles = shape.chunks * shape.blocks * shape.tiles
    multiplied = tiles * shape.per_chunk * (shape.pairs * offered.instructions(shape) + 2.0 * shape.rows)
    scaled = offered.terms(config).arithmetic - multiplied
    assert 0 < scaled <= 0.05 * tiles * shape.rows * shape.per_chunk * k  # the FMAs of the plain loop
    wider = applied_to(product(m, 2 * vectors * LANES, k), ZEN_4)
    assert (
        wider.uncertified_time(wider.shape_of(dict(config.values))) <= offered.uncertified_time(shape) + 1e-9
    )


def test_the_next_panel_and_the_next_blocks_rows_are_asked_for() -> None:
    applied = applied_to(matmul_task(512, 3 * LANES, 128), SMALL_CACHE)
    for prefetch, expected in ((0, {"x0"}), (1, {"x0", "x1"})):
        program = applied.program(some_config(applied, rows=12, block=2, chunks=1, prefetch=prefetch))
        asked = {s.buffer.name for s in walk_stmts(program.body) if isinstance(s, Prefetch)}
        assert asked == expected


@pytest.mark.parametrize("size", [(128, 768, 768), (197, 2304, 768), (127, 769, 511), (784, 64, 576)])
def test_the_error_is_that_of_a_product_as_usual(size: tuple[int, int, int]) -> None:
    task = matmul_task(*size)
    applied = applied_to(task)
    assert error(applied.program(some_config(applied, rows=9, block=4)), task) < 1.0e-6


def then(m: int, n: int, k: int, *operators: str) -> Task:
    x = Inputs()
    node: Node = apply("matmul", x(m, k), x(k, n, constant=True))
    for name in operators:
        node = apply(name, node, **({"approximate": "none"} if name == "gelu" else {}))
    return x.task(node)


@pytest.mark.parametrize(
    "task",
    [
        matmul_task(128, 256, 256),
        then(61, 96, 200, "gelu"),
        then(20, 50, 50, "relu"),
        strided(9, 32, 64, 3),
        strided(12, 96, 50, 1),
    ],
)
def test_it_passes_its_validation(task: Task) -> None:
    """As it is drawn when candidates are measured: what fails there is never chosen."""
    applied = applied_to(task)
    program = applied.program(some_config(applied, rows=9))
    kernel = SingleKernel(program, host())
    for seed in range(3):
        for case in make_validation(task, "fast", seed).cases:
            case.error(kernel(stored_for(program, case.inputs)))


def test_no_register_tile_spills() -> None:
    """The largest one; what is smaller has room. On a core whose additions run beside its FMAs, which is where pairs
    pay: LLVM orders them otherwise for Intel's, and spills."""
    machine = replace(host(), cpu="znver4")
    applied = applied_to(matmul_task(128, 4 * LANES, 384))
    for prefetch in (0, 1):
        config = [c for c in applied.space.configs() if c["prefetch"] == prefetch][-1]  # rows grow
        assert spilled_vectors_in_loops(applied.program(config), machine) == 0, str(config)


@pytest.mark.parametrize(("cpu", "line"), [("znver4", 16), ("apple-m1", 32)])
def test_the_next_block_is_prefetched_by_lines_of_the_machine(cpu: str, line: int) -> None:
    """As many lines as the block has, whatever their length."""
    applied = applied_to(product(64, 96, 64), replace(SMALL_CACHE, cpu=cpu))
    seen = set()
    for config in applied.space.configs():
        shape = applied.shape_of(dict(config.values))
        if not shape.prefetches_data:
            continue
        covered = shape.per_chunk * shape.prefetched_lines * line
        assert 0 <= covered - shape.rows * GROUP < shape.per_chunk * line
        program = applied.program(config)
        ahead = [
            s for s in walk_stmts(program.body) if isinstance(s, Prefetch) and s.buffer == program.params[0]
        ]
        assert len(ahead) % shape.prefetched_lines == 0 and ahead
        seen.add(shape.prefetched_lines)
    assert seen
