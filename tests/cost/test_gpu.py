"""The analytical model of GPUs: what must hold of it whatever its constants, and how well it ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.space.checked import Inputs
from tilewright.cost.bounds import least_seconds
from tilewright.cost.gpu import seconds
from tilewright.dtypes import DType
from tilewright.errors import InternalError
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import A10, A100, H200, L4, GpuMachine
from tilewright.space.sketches.cuda.tensorised import Tensorised
from tilewright.space.space import Config
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda import TEMPLATES
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.space.terms import GpuTerms, Roofline, Terms, TileGrid
from tilewright.tune.choose import best_among, best_of, ranked


def product(m: int, n: int, k: int) -> Task:
    """relu(x w' + b) + residual."""
    x = Inputs()
    a, weight, bias, residual = (x(*shape, dtype=DType.F16) for shape in ((m, k), (n, k), (n,), (m, n)))
    total = apply("matmul", a, apply("permute", weight, axes=(1, 0)))
    row = apply("broadcast_to", apply("reshape", bias, shape=(1, n)), shape=(m, n))
    return x.task(apply("add", apply("relu", apply("add", total, row)), residual))


def convolution(batch: int, size: int, inside: int, outside: int, window: int, stride: int) -> Task:
    """relu(conv(x, w) + b + residual), channels last."""
    x = Inputs()
    image, weight = (
        x(batch, size, size, inside, dtype=DType.F16),
        x(window, window, inside, outside, dtype=DType.F16),
    )
    bias, edge = x(outside, dtype=DType.F16), (0, window // 2, window // 2, 0)
    image = apply("pad", image, low=edge, high=edge, interior=(0, 0, 0, 0), value=0.0)
    steps: dict[str, Any] = {"stride": (stride, stride), "dilation": (1, 1), "padding": ((0, 0), (0, 0))}
    total = apply("conv", image, weight, bias, groups=1, layout="channels_last", **steps)
    return x.task(apply("relu", apply("add", total, x(*total.shape, dtype=DType.F16))))


def attention(batch: int, heads: int, length: int, width: int) -> Task:
    x = Inputs()
    operands = [x(batch, heads, length, width, dtype=DType.F16) for _ in range(3)]
    return x.task(apply("attention", *operands, scale=width**-0.5, causal=False))


BUILDERS: dict[str, Callable[..., Task]] = {"product": product, "conv": convolution, "attention": attention}
MEASURED = json.loads((Path(__file__).parent / "gpu_measured.json").read_text())


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(map(str, row["task"])))
def test_it_ranks_what_was_measured(row: dict[str, Any]) -> None:
    """On an H200, of 40 kernels of each task: how much slower than the best are its first choice and first eight."""
    kind, *sizes = row["task"]
    work = GpuWork(BUILDERS[kind](*sizes), H200)
    (applied,) = (found for template in TEMPLATES if (found := template.apply(work)) is not None)
    times = {}
    for *values, us in row["trials"]:
        config = Config.of(applied.space.template, dict(zip(row["knobs"], values, strict=True)))
        terms = applied.terms(config)
        assert terms is not None
        times[config] = (seconds(terms, H200) * 1e6, us)
    order = sorted(times.values())
    best = min(us for _, us in order)
    assert order[0][1] <= 1.35 * best
    assert min(us for _, us in order[:8]) <= 1.12 * best
    assert 0.5 < order[0][0] / order[0][1] < 2, "the seconds themselves"


def terms_of(task: Task, machine: GpuMachine, count: int = 24) -> list[GpuTerms]:
    applied = TensorCores().apply(GpuWork(task, machine))
    assert applied is not None
    rng = Random(0)
    configs = [applied.space.sample(rng) for _ in range(count)]
    found = [applied.terms(config) for config in configs if config is not None]
    return [terms for terms in found if isinstance(terms, GpuTerms)]


@pytest.mark.parametrize("shape", [(512, 768, 3072), (16, 4096, 4096), (4096, 4096, 64)])
def test_a_better_card_is_never_slower(shape: tuple[int, int, int]) -> None:
    better = [
        replace(H200, memory_bytes_per_second=2 * H200.memory_bytes_per_second),
        replace(H200, l2_bytes_clock=2 * H200.l2_bytes_clock),
        replace(H200, tensor_flops_clock=2 * H200.tensor_flops_clock),
    ]
    for terms in terms_of(product(*shape), H200):
        now = seconds(terms, H200)
        assert 0 < now < math.inf
        assert all(seconds(terms, machine) <= now for machine in better)


def test_more_stages_hide_more() -> None:
    """Where shared memory is no limit, a load that is issued earlier is waited for less."""
    for terms in terms_of(product(512, 768, 3072), H200):
        small = replace(terms, shared_bytes=1024)
        times = [seconds(replace(small, stages=stages), H200) for stages in (2, 3, 4, 8)]
        assert times == sorted(times, reverse=True)


def test_what_does_not_fit_takes_for_ever() -> None:
    terms = terms_of(product(64, 64, 64), H200)[0]
    assert seconds(replace(terms, shared_bytes=300 << 10), H200) == math.inf


def test_the_least_is_chosen_and_always_the_same() -> None:
    work = GpuWork(product(512, 768, 3072), A100)
    applied = TensorCores().apply(work)
    assert applied is not None
    times = ranked(applied, work)
    assert [each for each, _ in times] == sorted(each for each, _ in times)
    assert ranked(applied, work) == times
    descended = best_among(work, [applied])
    assert descended is not None and descended[0] <= 1.05 * times[0][0], "a descent ends near the least"
    best = best_of(work)
    assert best is not None and best[0] <= descended[0] and best[1] in best[2].space
    large, small = (
        best_of(GpuWork(product(*shape), H200)) for shape in ((4096, 4096, 4096), (16, 8192, 8192))
    )
    assert large is not None and large[1].int("bm") * large[1].int("bn") >= 64 * 128
    assert small is not None and small[1].int("bm") == 16


def test_what_no_template_computes_is_left_to_the_default_program() -> None:
    x = Inputs()
    work = GpuWork(x.task(apply("relu", x(8, 8, dtype=DType.F16))), H200)
    best = best_of(work)
    assert best is not None and best[1].template == "default"
    assert best_among(work, [found for t in TEMPLATES if (found := t.apply(work)) is not None]) is None


@pytest.mark.parametrize("unit", ["scalar", "tensor16", "tf32"])
def test_a_call_takes_longer_the_more_it_does_and_the_fewer_blocks_it_has(unit: str) -> None:
    call = Roofline(1e10, 1e8, unit, is_call=True)
    now = seconds(call, H200)
    assert seconds(replace(call, flops=1e12), H200) > now and seconds(replace(call, bytes=1e10), H200) > now
    assert seconds(replace(call, flops=1e12, busy=0.5), H200) > seconds(replace(call, flops=1e12), H200)
    assert seconds(replace(call, is_call=False), H200) != now
    assert seconds((call, call), H200) == pytest.approx(2 * now), "several kernels run one after another"


def test_terms_of_a_processor_are_refused() -> None:
    with pytest.raises(InternalError, match="expected GPU terms"):
        seconds(Terms(1.0), H200)


# -- the register pipeline --------------------------------------------------------------------------------------------

PIPELINED = json.loads((Path(__file__).parents[2] / "benchmarks/results/pipelining.json").read_text())["rows"]


def small_product(m: int, n: int, k: int, batch: int = 1) -> Task:
    x = Inputs()
    a, b = x(batch, m, k, dtype=DType.F16), x(batch, n, k, dtype=DType.F16)
    return x.task(apply("matmul", a, apply("permute", b, axes=(0, 2, 1))))


MATMULS = {
    "BERT FC2: 512 x 768 x 3072": (512, 768, 3072),
    "ResNet-50 FC: 1024 x 64 x 2048": (1024, 64, 2048),
    "1024 x 1024 x 1024": (1024, 1024, 1024),
    "4096 x 4096 x 4096": (4096, 4096, 4096),
    "long K: 256 x 256 x 8192": (256, 256, 8192),
    "GPT-2 SV: 12 of 1024 x 64 x 1024": (1024, 64, 1024, 12),
}


def test_tiles_stages_and_levels_are_ranked_together() -> None:
    """Of 45 generated kernels of each shape on an H200, with and without a pipeline in shared memory and registers."""
    shares = []
    for row in PIPELINED:
        if row["shape"] not in MATMULS:
            continue
        applied = Tensorised().apply(GpuWork(small_product(*MATMULS[row["shape"]]), H200))
        assert applied is not None
        times = []
        for kind, trials in row["trials"].items():
            for trial in trials if kind != "template" else ():
                terms = applied.terms(Config.of(applied.space.template, trial["config"]))
                assert terms is not None
                times.append((seconds(terms, H200), trial["us"]))
        best = min(us for _, us in times)
        shares.append(best / min(times)[1])
        assert best / min(us for _, us in sorted(times)[:10]) >= 0.9, row["shape"]
    assert len(shares) == len(MATMULS)
    assert math.exp(sum(map(math.log, shares)) / len(shares)) >= 0.85, shares


def test_a_register_pipeline_is_never_slower_and_helps_where_warps_are_few() -> None:
    applied = Tensorised().apply(GpuWork(small_product(1024, 1024, 1024), H200))
    assert applied is not None
    for config in applied.space.configs():
        terms = applied.terms(config)
        assert isinstance(terms, GpuTerms) and terms.inner is not None
        if terms.inner.stages > 1 or terms.stages == 1:
            continue
        ahead = [replace(terms, inner=replace(terms.inner, stages=2, fused=fused)) for fused in (False, True)]
        plain, inner, fused = (seconds(each, H200) for each in (terms, *ahead))
        assert fused <= inner <= plain, config


def test_concurrent_blocks_load_their_working_set() -> None:
    """Six rows of four tiles, in groups of three rows: neighbouring blocks share rows and columns."""
    grid = TileGrid(6, 4, 3, 10.0, 1.0)
    assert grid.loaded(1) == 11 and grid.loaded(3) == 31 and grid.loaded(12) == 34
    assert grid.loaded(24) == 64 and grid.loaded(48) == 128, "two batches have nothing in common"


def test_the_least_time_of_a_kernel_has_the_launch_of_its_machine() -> None:
    assert least_seconds(0.0, 0.0, H200) == H200.launch_seconds


@pytest.mark.parametrize(
    ("machine", "flops"), [(A10, 31.2e12), (A100, 19.5e12), (L4, 30.3e12), (H200, 66.9e12)]
)
def test_the_least_time_follows_the_float32_rate_of_the_machine(machine: GpuMachine, flops: float) -> None:
    assert least_seconds(flops, 0.0, machine) - machine.launch_seconds == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(("machine", "peak"), [(A10, 125e12), (A100, 312e12), (L4, 121e12), (H200, 1070e12)])
def test_a_librarys_call_is_no_faster_than_the_tensor_cores(machine: GpuMachine, peak: float) -> None:
    """A large call reaches the same share of each card's own peak."""
    call = Roofline(peak, 1.0, "tensor16", is_call=True)
    assert 0.7 < 1 / seconds(call, machine) < 0.8
