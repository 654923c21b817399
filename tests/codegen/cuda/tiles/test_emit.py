"""CUDA text of tile programs: three goldens, what moves through shared memory, errors; and NVRTC takes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.codegen.cuda.tiles.cases import MAKERS, Case
from tests.nvrtc import needs_nvrtc
from tests.tile import kernels
from tilewright.codegen.cuda.tiles.emit import TileSource, emit_tile_program
from tilewright.codegen.cuda.tiles.executor import Executor, checked_options
from tilewright.codegen.cuda.toolchain import compile_source
from tilewright.errors import OptionError, SharedMemoryError
from tilewright.hw.gpu import A100, H200, GpuMachine
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


def matmul(bm: int, bn: int, bk: int, warps: int, machine: GpuMachine = H200, **less: int) -> TileSource:
    """`less`: what divides arguments, other than 16."""
    program = kernels.matmul_gelu.program(HALF, HALF, HALF[0], HALF, 128, 128, 128, BM=bm, BN=bn, BK=bk)
    names = ("a", "b", "bias", "out", "M", "N", "K")
    facts = Facts(True, tuple((name, less.get(name, 16)) for name in names))
    return emit_tile_program(program, facts, machine, warps, stages=3)


def test_a_large_dot_is_a_warpgroups_and_its_operands_come_in_boxes() -> None:
    made = matmul(128, 128, 64, 8)
    assert made.dots == ("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16",) and made.unbulked == ()
    boxes = [(each.parameter, each.box.rows, each.box.columns) for each in made.maps]
    assert boxes == [(0, 128, 64), (1, 64, 64)]
    a, b = made.maps
    values = [10, 20, 0, 0, 7, 8, 9]  # a, b, bias, out, M, N, K
    assert [each.of(values) for each in (a.rows, a.columns, a.stride)] == [7, 9, 9]
    assert [each.of(values) for each in (b.rows, b.columns, b.stride)] == [9, 8, 8]
    assert "__grid_constant__ TensorMap map1" in made.kernel and "__syncthreads" not in _loop(made.kernel)


def test_a_matmul_by_warpgroups_and_bulk_copies_is_the_golden(golden: Golden) -> None:
    made = matmul(128, 64, 64, 4)
    assert made.dots[0].startswith("wgmma") and len(made.maps) == 2
    golden("matmul_gelu.cu", made.kernel)


def _loop(kernel: str) -> str:
    """The text of the loop that multiplies."""
    return (
        kernel.split("await_phase(")[1]
        .split("end_barrier", maxsplit=1)[0]
        .rsplit("await_multiplications_64", 1)[0]
    )


@pytest.mark.parametrize(
    ("sizes", "machine", "why"),
    [
        ((128, 128, 64, 8), A100, "sm_80 has no warpgroup instructions"),
        ((128, 128, 64, 2), H200, "a warpgroup has 4 warps, the block 2"),
        ((32, 128, 64, 4), H200, "a warpgroup has 64 rows, the tile 32"),
        ((64, 64, 64, 8), H200, "8 warps are more than a tile of 64 x 64 has work for"),
        ((64, 8, 64, 4), H200, "rows of shared memory need 16 elements at least"),
    ],
)
def test_why_a_dot_is_not_a_warpgroups(
    sizes: tuple[int, int, int, int], machine: GpuMachine, why: str
) -> None:
    made = matmul(*sizes, machine)
    assert made.dots == (f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 ({why})",) and not made.maps


def test_why_operands_do_not_come_in_boxes() -> None:
    assert matmul(128, 128, 64, 8, N=4).unbulked == (
        "its rows are not known to begin at multiples of 16 bytes",
    )
    # What no thread can copy ahead is stored in every iteration: its multiplications end there.
    stored = matmul(128, 128, 64, 8, b=2)
    assert len(stored.maps) == 1 and "await_multiplications_but_one" not in stored.kernel
    program = kernels.batched_matmul.program(HALF, HALF, SINGLE, 128, 128, 128, BM=64, BN=64, BK=32)
    made = emit_tile_program(program, divisible("a", "b", "out", "M", "N", "K"), H200, 4, stages=3)
    assert made.unbulked == ("it has no block pointer",) and made.dots[0].startswith("wgmma")
    program = kernels.matmul_gelu.program(HALF, HALF, HALF[0], HALF, 128, 128, 128, BM=64, BN=64, BK=32)
    made = emit_tile_program(program, divisible("a", "b", "M", "N", "K"), H200, 4, 3, bulk_copies=False)
    assert made.unbulked == ("tensor maps are disabled",) and "copy_async<16>" in made.kernel


@pytest.mark.parametrize("sizes", [(128, 128, 64, 8), (128, 256, 64, 8)])
def test_large_tiles_do_not_spill(sizes: tuple[int, int, int, int]) -> None:
    needs_nvrtc()
    compiled = compile_source(matmul(*sizes).text, "sm_90a", exact_division=True)
    assert compiled.resources.spilled_bytes == 0 and "serial" not in compiled.warnings


@pytest.mark.parametrize("options", [{"warps": 3}, {"warps": 64}, {"stages": 0}, {"threads": 2}])
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        checked_options(options)


@pytest.mark.parametrize("case", [make() for make in MAKERS], ids=lambda case: case.name)
def test_nvrtc_takes_it(case: Case) -> None:
    """For sm_90a, without a card; nothing is spilled, and no array is left in local memory."""
    needs_nvrtc()
    made = case.launch()
    executor = Executor(H200)
    executor.cache = None
    _, compiled, symbol = executor.build(made.program, made.facts, {"warps": made.warps, "stages": 3})
    assert symbol.encode() in compiled.cubin
    assert compiled.resources.spilled_bytes == 0 and compiled.resources.stack_bytes == 0
