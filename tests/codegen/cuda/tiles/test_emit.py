"""CUDA text of tile programs: two goldens, what moves through shared memory, errors; and NVRTC takes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.codegen.cuda.tiles.cases import MAKERS, Case
from tests.tile import kernels
from tilewright.codegen.cuda.tiles.emit import emit_tile_program
from tilewright.codegen.cuda.tiles.executor import Executor, checked_options
from tilewright.errors import MissingDependencyError, OptionError, SharedMemoryError
from tilewright.hw.gpu import H200
from tilewright.tile.executors import Facts

Golden = Callable[[str, str], None]
HALF, SINGLE = np.zeros((128, 128), np.float16), np.zeros((128, 128), np.float32)


def divisible(*names: str) -> Facts:
    return Facts(True, tuple((name, 16) for name in names))


def test_softmax_is_the_golden(golden: Golden) -> None:
    program = kernels.softmax.program(SINGLE, SINGLE, 128, 128, BLOCK=512)
    golden(
        "softmax.cu", emit_tile_program(program, divisible("x", "out", "stride", "columns"), H200, 4).kernel
    )


def test_a_matmul_is_the_golden(golden: Golden) -> None:
    program = kernels.batched_matmul.program(HALF, HALF, SINGLE, 128, 128, 128, BM=32, BN=32, BK=32)
    golden(
        "batched_matmul.cu",
        emit_tile_program(program, divisible("a", "b", "out", "M", "N", "K"), H200, 4, stages=3).kernel,
    )


def test_the_weights_of_attention_stay_in_registers() -> None:
    """The result of the first dot is the first operand of the second as it is: only the result changes its layout."""
    program = kernels.attention.program(HALF, HALF, HALF, HALF, 128, 0.25, D=64, BM=64, BN=64, CAUSAL=False)
    made = emit_tile_program(program, divisible("q", "k", "v", "out", "length"), H200, 4)
    assert made.conversions == ("f16[64, 64]",)
    assert "in_register(" in made.kernel


def test_a_row_that_is_broadcast_is_loaded_where_it_is_needed() -> None:
    program = kernels.add_row.program(SINGLE, SINGLE[0], SINGLE, 128, 128, BM=8, BN=128)
    made = emit_tile_program(program, divisible("x", "row", "out", "columns"), H200, 4)
    assert made.conversions == () and made.shared_bytes == 0 and made.barriers == 0
    assert made.kernel.count("get_global<4>") == 2 and "put_global<4>" in made.kernel


def test_without_divisors_accesses_are_single() -> None:
    program = kernels.add_row.program(SINGLE, SINGLE[0], SINGLE, 128, 128, BM=8, BN=128)
    made = emit_tile_program(program, Facts(True), H200, 4)
    assert "get_global<1>" in made.kernel and "get_global<4>" not in made.kernel


def test_tensors_that_may_overlap_get_a_barrier() -> None:
    program = kernels.add_row.program(SINGLE, SINGLE[0], SINGLE, 128, 128, BM=8, BN=128)
    assert emit_tile_program(program, Facts(disjoint=False), H200, 4).barriers == 1


def test_too_much_shared_memory_shows_the_line() -> None:
    program = kernels.matmul_gelu.program(
        HALF, HALF, SINGLE[0], SINGLE, 128, 128, 128, BM=256, BN=256, BK=256
    )
    with pytest.raises(
        SharedMemoryError, match=r"262144 bytes of shared memory .* NVIDIA H200 has 232448"
    ) as caught:
        emit_tile_program(program, Facts(True), H200, 8)
    assert (
        "tl.dot(" in str(caught.value) and "^" in str(caught.value) and "smaller blocks" in str(caught.value)
    )


def test_stages_that_nobody_asked_for_make_room() -> None:
    """Three would be too much; as an option of the user's they are an error."""
    program = kernels.matmul_gelu.program(
        HALF, HALF, SINGLE[0], SINGLE, 128, 128, 128, BM=256, BN=256, BK=128
    )
    executor = Executor(H200)
    assert "await_copies<" not in executor.source(program, Facts(True), {"warps": 8})
    with pytest.raises(SharedMemoryError, match="stages of an operand of dot"):
        executor.source(program, divisible("a", "b", "M", "N", "K"), {"warps": 8, "stages": 3})


@pytest.mark.parametrize("options", [{"warps": 3}, {"warps": 64}, {"stages": 0}, {"threads": 2}])
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        checked_options(options)


@pytest.mark.parametrize("case", [make() for make in MAKERS], ids=lambda case: case.name)
def test_nvrtc_takes_it(case: Case) -> None:
    """For sm_90a, without a card; nothing is spilled, and no array is left in local memory."""
    pytest.importorskip(
        "cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'tilewright[cuda]'"
    )
    made = case.launch()
    executor = Executor(H200)
    executor.cache = None
    try:
        _, compiled, symbol = executor.build(made.program, made.facts, {"warps": made.warps, "stages": 3})
    except MissingDependencyError as error:
        pytest.skip(str(error))
    assert symbol.encode() in compiled.cubin
    assert compiled.resources.spilled_bytes == 0 and compiled.resources.stack_bytes == 0
