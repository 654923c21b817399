"""Every config of the contraction template computes the task: matmuls, convolutions, any epilogue."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.machines import ICE_LAKE
from tests.rewrites.helpers import array
from tests.space.checked import Inputs, error, legal_configs, results, stored_for
from tests.space.spills import spilled_vectors_in_loops
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import Caches, CpuMachine, host
from tilewright.measure.single import SingleKernel
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu.contraction import AppliedContraction, Contraction, even_block
from tilewright.tune.choose import choose, descend

QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


SMALL_CACHE = replace(host(), caches=replace(host().caches, l2=4 << 10))  # results are prefetched


def applied_to(task: Task, machine: CpuMachine | None = None) -> Applied:
    applied = Contraction().apply(Work(task, machine or host()))
    assert applied is not None
    return applied


def with_epilogue(x: Inputs, node: Node) -> Node:
    """bias, residual, relu."""
    bias = x(node.shape[-1], constant=True, dtype=node.dtype)
    added = apply("add", node, apply("broadcast_to", bias, shape=node.shape))
    return apply("relu", apply("add", added, x(*node.shape, dtype=node.dtype)))


def matmul_task(
    m: int, n: int, k: int, batch: tuple[int, ...] = (), *, constant: bool = True, dtype: DType = DType.F32
) -> Task:
    x = Inputs()
    a = x(*batch, m, k, dtype=dtype)
    b = x(*(() if constant else batch), k, n, constant=constant, dtype=dtype)
    return x.task(with_epilogue(x, apply("matmul", a, b)))


def conv_task(
    size: tuple[int, int],
    channels: tuple[int, int],
    window: tuple[int, int],
    stride: int,
    dilation: int,
    pad: tuple[tuple[int, int], tuple[int, int]],
    *,
    batch: int = 1,
    groups: int = 1,
    dtype: DType = DType.F32,
) -> Task:
    x = Inputs()
    image = x(batch, *size, channels[0], dtype=dtype)
    weights = x(*window, channels[0] // groups, channels[1], constant=True, dtype=dtype)
    low, high = (0, pad[0][0], pad[1][0], 0), (0, pad[0][1], pad[1][1], 0)
    if any(low + high):
        image = apply("pad", image, low=low, high=high, interior=(0, 0, 0, 0), value=0.0)
    conv = apply(
        "conv",
        image,
        weights,
        stride=(stride, stride),
        padding=((0, 0), (0, 0)),
        dilation=(dilation, dilation),
        groups=groups,
        layout="channels_last",
    )
    return x.task(with_epilogue(x, conv))


@given(data=st.data(), m=st.integers(1, 40), n=st.integers(2, 120), k=st.integers(2, 70))
@QUICK
def test_matrix_products(data: st.DataObject, m: int, n: int, k: int) -> None:
    task = matmul_task(m, n, k)
    applied = applied_to(task)
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < 1e-5


@given(data=st.data(), m=st.integers(1, 30), n=st.integers(17, 150), k=st.integers(97, 400))
@settings(QUICK, max_examples=12)
def test_pieces_and_panels_that_do_not_divide_it(data: st.DataObject, m: int, n: int, k: int) -> None:
    """Sums long enough for several blocks of K, the last one shorter, and a last panel that is narrower."""
    task = matmul_task(m, n, k)
    applied = applied_to(task, data.draw(st.sampled_from((host(), SMALL_CACHE))))
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < 1e-5


def test_a_length_without_divisors_can_be_cut() -> None:
    cuts = next(
        knob.choices for knob in applied_to(matmul_task(8, 64, 1597)).space.knobs if knob.name == "k_block"
    )
    assert {0, 64, 128, 320} <= set(cuts)


def test_the_last_panel_is_as_wide_as_what_is_left() -> None:
    """66 columns in panels of 64: the second has one vector, which overlaps the first panel."""
    applied = applied_to(matmul_task(24, 66, 64))
    assert isinstance(applied, AppliedContraction)
    values = {"rows": 6, "vectors": 64 // applied.lanes, "unroll": 8, "block": 0, "chunks": 1}
    last = applied.shape_of({**values, "k_block": 0, "prefetch": 0, "stage": False}).last
    assert last is not None and last.vectors == 1 and last.rows > 6


@given(
    data=st.data(),
    m=st.integers(5, 24),
    vectors=st.integers(1, 4),
    columns=st.integers(1, 6),
    k=st.integers(128, 200),
)
@settings(QUICK, max_examples=5)
def test_a_few_columns_behind_whole_vectors(
    data: st.DataObject, m: int, vectors: int, columns: int, k: int
) -> None:
    """They are summed along the taps."""
    lanes = host().lanes(DType.F32)
    assume(columns <= 3 * lanes // 8)
    task = matmul_task(m, vectors * lanes + columns, k)
    applied = applied_to(task)
    assert isinstance(applied, AppliedContraction) and applied.tail == columns
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < 1e-5


def test_infinities_stay_where_they_are_in_a_tail() -> None:
    """What is read beyond the last tap is the next row's, and does not count."""
    task = matmul_task(12, 17, 130)
    program = choose(Work(task, host())).program
    assert any(packing is not None and packing.transforms for packing in program.packings)
    arrays = [array(*node.shape, seed=n) for n, node in enumerate(task.graph.inputs)]
    arrays[0][1, 0] = np.inf
    stored = stored_for(program, arrays)
    found = SingleKernel(program, host(), threads=1)(stored).reshape(12, 17)
    assert not np.isnan(found).any()
    assert np.isfinite(np.delete(found, 1, axis=0)).all()


@pytest.mark.parametrize("columns", [1, 6])
def test_sums_along_the_taps_stay_in_registers(columns: int) -> None:
    task = matmul_task(48, 48 + columns, 200)
    applied = applied_to(task)
    found = descend(applied, Work(task, host()))
    assert found is not None
    assert spilled_vectors_in_loops(applied.program(found[1]), host()) == 0


@given(data=st.data(), m=st.integers(1, 4), n=st.integers(2, 200), k=st.integers(2, 200))
@settings(QUICK, max_examples=12)
def test_few_rows(data: st.DataObject, m: int, n: int, k: int) -> None:
    """Products that take as long as reading the weight: its vectors are stored apart."""
    constant = data.draw(st.booleans())
    task = matmul_task(m, n, k, constant=constant)
    applied = applied_to(task)
    assert isinstance(applied, AppliedContraction) and applied.vectors_separate is constant
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < 1e-5


@given(
    data=st.data(), batch=st.integers(1, 3), m=st.integers(1, 20), n=st.integers(2, 50), k=st.integers(2, 40)
)
@QUICK
def test_batches_with_weights_from_outside(data: st.DataObject, batch: int, m: int, n: int, k: int) -> None:
    task = matmul_task(m, n, k, (batch,), constant=False)
    applied = applied_to(task)
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < 1e-5


@given(data=st.data(), m=st.integers(20, 60), n=st.integers(17, 150), k=st.integers(97, 300))
@settings(QUICK, max_examples=8)
def test_panels_that_are_copied(data: st.DataObject, m: int, n: int, k: int) -> None:
    """With a weight that is not constant, the last panel may be narrower, and the last block of K shorter."""
    task = matmul_task(m, n, k, constant=False)
    applied = applied_to(task)
    values = dict(data.draw(legal_configs(applied.space)).values) | {"copy": True}
    assume(applied.space.legal(values))
    assert error(applied.program(Config.of(applied.space.template, values)), task) < 1e-5


def test_a_panel_is_copied_where_many_rows_pass_it() -> None:
    """Then it does not matter where a caller's tensor begins."""
    for rows, copied in ((1, False), (256, True)):
        task = matmul_task(rows, 784, 128, constant=False)
        found = descend(applied_to(task), Work(task, host()))
        assert found is not None and dict(found[1].values)["copy"] is copied


@pytest.mark.parametrize("size", [1024, 2048])
def test_large_products_leave_room_in_the_second_cache(size: int) -> None:
    """Panels that come by displace what is not used often: with three quarters of it full, 5% of the time is lost."""
    task = matmul_task(size, size, size)
    applied = applied_to(task, ICE_LAKE)
    assert isinstance(applied, AppliedContraction)
    found = descend(applied, Work(task, ICE_LAKE))
    assert found is not None
    shape = applied.shape_of(dict(found[1].values))
    assert shape.block * size * 4 <= ICE_LAKE.caches.l2 // 2 and shape.blocks > 1


@given(extent=st.integers(1, 3000), size=st.integers(1, 3000), unit=st.integers(1, 14))
def test_blocks_are_even(extent: int, size: int, unit: int) -> None:
    whole = min(extent, -(-size // unit) * unit)
    block = even_block(extent, whole, unit)
    blocks = -(-extent // block)
    assert 1 <= block <= whole and blocks == -(-extent // whole)
    assert blocks * block - extent < blocks * unit, "less than a register tile of each is done again"


@given(
    data=st.data(),
    size=st.tuples(st.integers(5, 15), st.integers(5, 15)),
    channels=st.tuples(st.integers(2, 20), st.integers(2, 40)),
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    pad=st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2),
)
@QUICK
def test_convolutions(data: st.DataObject, size, channels, window, stride, dilation, pad) -> None:
    task = conv_task(size, channels, window, stride, dilation, pad)
    applied = Contraction().apply(Work(task, host()))
    if applied is None:
        assert (
            stride == dilation == 2
        )  # the data moves along 2 y + 2 ky in a way that is none of its own steps
        return
    config = data.draw(legal_configs(applied.space))
    assert error(applied.program(config), task) < 1e-5


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.I8])
@pytest.mark.parametrize("padding", [0, 1])
def test_other_types(dtype: DType, padding: int) -> None:
    x = Inputs()
    image = x(1, 6, 7, 16, dtype=dtype)
    weights = x(3, 3, 16, 24, constant=True, dtype=dtype)
    if padding:
        edge = (0, padding, padding, 0)
        image = apply(
            "pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=0 if dtype.is_integer else 0.0
        )
    attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    task = x.task(apply("conv", image, weights, layout="channels_last", **attrs))
    work = Work(task, host())
    result, reference = results(choose(work).program, task)
    if dtype.is_integer:
        assert (result == reference).all()
    else:
        assert error(choose(work).program, task) < (5e-4 if dtype is DType.F16 else 4e-3)


def test_grouped_convolution() -> None:
    task = conv_task((9, 11), (8, 32), (3, 3), 1, 1, ((1, 1), (1, 1)), groups=2, batch=2)
    work = Work(task, host())
    found = descend(applied_to(task), work)
    assert found is not None
    assert error(applied_to(task).program(found[1]), task) < 1e-5


def test_infinity_and_nan_stay_where_they_belong() -> None:
    """The border of zeros is not multiplied with anything from outside the image."""
    import numpy as np

    from tilewright.measure.single import SingleKernel

    task = conv_task((6, 6), (4, 16), (3, 3), 1, 1, ((1, 1), (1, 1)))
    program = choose(Work(task, host())).program
    arrays = [np.zeros(n.shape, np.float32) for n in task.graph.inputs]
    arrays[0][0, 2, 2, 0] = np.nan
    arrays[1][...] = 1
    stored = stored_for(program, arrays)
    out = SingleKernel(program, host())(stored).reshape(task.output.shape)
    expected = np.zeros((6, 6), bool)
    expected[1:4, 1:4] = True
    assert (np.isnan(out[0, :, :, 0]) == expected).all()


@pytest.mark.parametrize("op", ["add", "softmax"])
def test_it_declines_what_is_no_product(op: str) -> None:
    x = Inputs()
    node = apply(op, x(8, 32), x(8, 32)) if op == "add" else apply(op, x(8, 32), axis=1)
    assert Contraction().apply(Work(x.task(node), host())) is None


def test_a_choice_is_made_without_building_anything() -> None:
    task = matmul_task(128, 768, 768)
    choice = choose(Work(task, host()))
    expected = "paired" if host().independent_adds else "contraction"
    assert choice.config is not None and choice.config.template == expected
    assert choice.seconds is not None and 1e-4 < choice.seconds < 1e-2


def test_no_register_tile_spills() -> None:
    """Of the configs that the model likes, none keeps a vector on the stack inside its innermost loop."""
    for task in (matmul_task(128, 768, 768), conv_task((14, 14), (64, 128), (3, 3), 1, 1, ((1, 1), (1, 1)))):
        applied = applied_to(task)
        found = descend(applied, Work(task, host()))
        assert found is not None
        assert spilled_vectors_in_loops(applied.program(found[1]), host()) == 0


def test_rows_whole_pages_apart_displace_each_other() -> None:
    """More of them than L1 has ways come from the second one again for each element."""
    machine = replace(host(), caches=Caches(l1=32 << 10), vector_bytes=64, vector_registers=32)

    def from_l2(rows: int, length: int) -> float:
        applied = applied_to(matmul_task(56, 64, length), machine)
        values = dict(next(iter(applied.space.configs())).values)
        terms = applied.terms(Config.of("contraction", {**values, "rows": rows, "vectors": 2}))
        assert terms is not None
        return terms.from_l2

    lines = 56 * 64 // 32 * 1024 * 64  # one for each element of each register tile
    assert from_l2(14, 1024) - from_l2(8, 1024) > 0.6 * lines > from_l2(14, 1008) - from_l2(8, 1008)


@pytest.mark.parametrize(("rows", "vectors"), [(6, 4), (5, 5)])
def test_no_register_tile_with_overlapping_vectors_spills(rows: int, vectors: int) -> None:
    """One panel whose last vector overlaps the one before it; results that are prefetched."""
    from tests.space.spills import spilled_vectors_in_loops

    machine = SMALL_CACHE
    columns = vectors * machine.lanes(DType.F32) - 3
    applied = applied_to(matmul_task(30, columns, 192), machine)
    values = {"rows": rows, "vectors": vectors, "unroll": 8, "block": 0, "chunks": 1, "k_block": 96}
    config = Config.of(applied.space.template, {**values, "prefetch": 0, "stage": False})
    if not applied.space.legal(dict(config.values)):
        pytest.skip("too few registers for such a tile")
    assert spilled_vectors_in_loops(applied.program(config), host()) == 0
