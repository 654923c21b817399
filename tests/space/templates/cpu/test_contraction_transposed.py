"""Channels-first convolutions by way of the weight's channels: right for odd sizes, whatever the config."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.space.checked import Inputs, error, stored_for
from tests.space.spills import spilled_vectors_in_loops
from tests.space.templates.cpu.chains import machines, some_config
from tests.space.templates.cpu.images import Image, Pair, images
from tilewright.cost import cpu
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.hw import CpuMachine, host
from tilewright.measure.single import SingleKernel
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.cpu.contraction_transposed import ContractionTransposed
from tilewright.tune.choose import descend

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@given(image=images(depthwise=False), machine=machines(), data=st.data())
@QUICK
def test_every_config_is_right(image: Image, machine: CpuMachine, data: st.DataObject) -> None:
    task = image.task()
    applied = ContractionTransposed().apply(Work(task, machine))
    if applied is None:  # nothing to turn, or the data moves in a way that is none of its own steps
        assert 1 in task.output.shape[2:] or image.stride != (1, 1)
        return
    config = some_config(data.draw, applied.space)
    assert error(applied.program(config), task) < 1e-5
    assert cpu.seconds(applied.terms(config), machine) > 0


@given(m=st.integers(4, 50), n=st.integers(2, 70), k=st.integers(2, 70), data=st.data())
@settings(QUICK, max_examples=10)
def test_a_constant_times_a_matrix(m: int, n: int, k: int, data: st.DataObject) -> None:
    x = Inputs()
    task = x.task(apply("matmul", x(m, k, constant=True), x(k, n)))
    applied = ContractionTransposed().apply(Work(task, host()))
    assert applied is not None
    assert error(applied.program(some_config(data.draw, applied.space)), task) < 1e-5


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_other_types(dtype: DType, numerics: str) -> None:
    task = Image(1, (9, 11), (12, 20), (3, 3), low=(1, 1), high=(1, 1), dtype=dtype).task()
    work = Work(task, host(), numerics)
    applied = ContractionTransposed().apply(work)
    assert applied is not None
    found = descend(applied, work)
    assert found is not None
    bound = 1e-3 if dtype is DType.F16 else 8e-3
    assert error(applied.program(found[1]), task, numerics=numerics) < bound


def test_nan_reaches_exactly_the_windows_that_see_it() -> None:
    task = Image(1, (6, 9), (4, 16), (3, 3), low=(1, 1), high=(1, 1)).task()
    work = Work(task, host())
    applied = ContractionTransposed().apply(work)
    assert applied is not None
    program = applied.program(next(iter(applied.space.configs())))
    arrays = [np.zeros(node.shape, np.float32) for node in task.graph.inputs]
    arrays[0][0, 1, 2, 8] = np.nan
    arrays[1][...] = 1
    stored = stored_for(program, arrays)
    out = SingleKernel(program, host())(stored).reshape(task.output.shape)
    touched = {tuple(position) for position in np.argwhere(np.isnan(out[0, 3]))}
    assert touched == {(y, x) for y in (1, 2, 3) for x in (7, 8)}


def test_it_declines_weights_that_are_not_known_and_what_is_contiguous_along_them() -> None:
    x = Inputs()
    task = x.task(apply("matmul", x(8, 32), x(32, 40)))
    assert ContractionTransposed().apply(Work(task, host())) is None
    y = Inputs()
    task = y.task(apply("matmul", y(8, 32), y(32, 40, constant=True)))
    assert ContractionTransposed().apply(Work(task, host())) is None


@pytest.mark.parametrize(
    "image",
    [
        Image(1, (14, 14), (256, 1024), (1, 1)),
        Image(1, (14, 14), (64, 128), (3, 3), (2, 2), low=(1, 1), high=(1, 1)),
        Image(1, (56, 56), (3, 64), (7, 7), (2, 2), low=(3, 3), high=(3, 3)),
        Image(1, (224, 224), (3, 64), (7, 7), (2, 2), low=(3, 3), high=(3, 3)),
    ],
)
def test_no_register_tile_spills(image: Image) -> None:
    work = Work(image.task(), host())
    applied = ContractionTransposed().apply(work)
    assert applied is not None
    found = descend(applied, work)
    assert found is not None
    assert spilled_vectors_in_loops(applied.program(found[1]), host()) == 0


@pytest.mark.parametrize(("window", "stride"), [((7, 7), (2, 2)), ((3, 3), (1, 1)), ((5, 5), (2, 2))])
@pytest.mark.parametrize(("rows", "vectors"), [(6, 4), (14, 2)])
def test_elements_that_windows_share_take_no_register(
    window: Pair, stride: Pair, rows: int, vectors: int
) -> None:
    """However tall the tile, and whatever of the window is written out."""
    applied = ContractionTransposed().apply(Work(Image(1, (40, 60), (3, 64), window, stride).task(), host()))
    assert applied is not None
    values = {"rows": rows, "vectors": vectors, "unroll": 8, "block": 2, "chunks": 1, "k_block": 0}
    config = Config.of("contraction_transposed", {**values, "prefetch": 0, "stage": True})
    assert applied.space.legal(dict(config.values)) or host().vector_registers < 32
    if applied.space.legal(dict(config.values)):
        assert spilled_vectors_in_loops(applied.program(config), host()) == 0
