"""What a candidate costs before it is measured: at most 2 seconds of a processor and half a gigabyte."""

from __future__ import annotations

import resource
import time

import pytest

from tests.loops.gpu.products import PRODUCTS
from tests.nvrtc import needs_nvrtc
from tests.space.templates.cuda import test_attention
from tests.space.templates.cuda.test_matmul import work_of
from tilewright.codegen.cuda.build import build
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.hw.gpu import H200
from tilewright.space.space import Config
from tilewright.space.template import Applied
from tilewright.space.templates.cuda.matmul import AppliedMatmul

needs_nvrtc()

CPU_SECONDS, KILOBYTES = 2.0, 512 << 10


def config(name: str, **values: int | bool) -> Config:
    return Config.of(name, values)


# Those that took longest of a hundred: elements one by one, sums in parts; many registers.
HEAVIEST: list[tuple[Applied, Config]] = [
    (
        AppliedMatmul(work_of(PRODUCTS[5]), H200),
        config(
            "tensor-core-matmul",
            bm=64,
            bn=64,
            bk=64,
            warps_m=4,
            warps_n=1,
            stages=3,
            split=2,
            persistent=False,
        ),
    ),
    (
        test_attention.applied_to(test_attention.CASES[3].task(), H200),
        config("tensor-core-attention", warps=4, rows=2, keys=32, stages=3),
    ),
]


@pytest.mark.parametrize(("applied", "chosen"), HEAVIEST, ids=["product", "attention"])
def test_a_candidate_is_compiled_within_its_budget(applied: Applied, chosen: Config) -> None:
    assert chosen in applied.space
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    build(tensor_source(applied.program(chosen)), H200, "fast", None)
    assert time.process_time() - began < CPU_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < KILOBYTES
