"""What threads combine: groups of a power of two, or of whole warps, in one order."""

from __future__ import annotations

import numpy as np
import pytest

from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import VerificationError
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Buffer, Combine, For, Kind, Program, Scope, Store, block, nest
from tilewright.loops.verify import verify_program


def sums(threads: int, group: int) -> Program:
    """Each element becomes the sum of its group."""
    x, out = (Buffer(name, DType.F32, threads) for name in ("x", "out"))
    kept = Buffer("kept", DType.F32, 1, Scope.REGISTER)
    thread, zero = te.Var("t", threads), te.as_index(0)
    body = block(
        For(thread, Kind.THREAD, Store(kept, zero, te.Load(x, (thread,)))),
        Combine("sum", kept, 0, group),
        For(thread, Kind.THREAD, Store(out, thread, te.Load(kept, (zero,)))),
    )
    return Program("sums", (x, out), nest([(te.Var("b", 1), Kind.PARALLEL)], body))


@pytest.mark.parametrize(("threads", "group"), [(64, 1), (64, 16), (128, 64), (96, 96), (448, 224)])
def test_each_thread_has_what_its_group_comes_to(threads: int, group: int) -> None:
    program = sums(threads, group)
    verify_program(program)
    x = np.arange(threads, dtype=np.float32)
    expected = np.repeat(x.reshape(-1, group).sum(1), group)
    np.testing.assert_array_equal(interpret_program(program, [x]), expected)


@pytest.mark.parametrize(("threads", "group"), [(96, 48), (128, 96), (64, 128), (64, 0)])
def test_other_groups_are_refused(threads: int, group: int) -> None:
    with pytest.raises(VerificationError, match=f"groups of {group} among {threads} threads"):
        verify_program(sums(threads, group))


def test_warps_are_added_in_order() -> None:
    """Halves with halves within each of them: as on a card, to the bit."""
    x = np.float32(10.0) ** np.random.default_rng(0).integers(-4, 5, 96).astype(np.float32)
    total = np.float32(0)
    for warp in x.reshape(3, 32):
        while len(warp) > 1:
            warp = warp[: len(warp) // 2] + warp[len(warp) // 2 :]
        total = total + warp[0]
    assert (interpret_program(sums(96, 96), [x]) == total).all()
