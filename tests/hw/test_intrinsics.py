"""Intrinsics as they are declared and registered; what they compute is tested where they are used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.hw.declared import ABSENT, FMA, assembly, fma, pmaddwd
from tilewright import te
from tilewright.dtypes import DType
from tilewright.errors import IntrinsicError
from tilewright.hw import host
from tilewright.hw.gpu import A100, H200
from tilewright.hw.intrinsics import (
    ExternalSymbol,
    Intrinsic,
    LlvmIntrinsic,
    broadcast,
    find_intrinsic,
    intrinsic_named,
    register_intrinsic,
    registered_intrinsics,
    registering_modules,
    unregister_intrinsic,
    vector,
)
from tilewright.hw.memory import Scope
from tilewright.hw.tensor_cores import multiply

F32 = DType.F32
AVX2 = replace(host(), features=tuple(sorted({*host().features, "avx2", "fma"})))


def test_what_an_intrinsic_reads_is_declared() -> None:
    a = te.Tensor("a", (4,), F32)
    with pytest.raises(IntrinsicError, match="not among its inputs"):
        Intrinsic("bad", te.compute("c", (4,), F32, lambda i: a[i]), (), lambda *_: None)
    with pytest.raises(IntrinsicError, match="each index of a must be one of its axes"):
        Intrinsic("bad", te.compute("c", (2,), F32, lambda i: a[i * 2]), (a,), lambda *_: None)
    with pytest.raises(IntrinsicError, match=r"its output must be a te\.compute"):
        Intrinsic("bad", a, (), lambda *_: None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "an instruction"}, "name must be letters"),
        ({"emit": LlvmIntrinsic("llvm.fma", ("a", "b", "d"))}, "arguments must be among"),
        ({"emit": LlvmIntrinsic("llvm.fma", ("a", "c"))}, r"inputs \['b'\] are not among the arguments"),
        ({"fragments": FMA.fragments[:2]}, "a fragment of its output, then one of each input"),
        (
            {"fragments": (replace(FMA.fragments[0], size=4), *FMA.fragments[1:])},
            "each element of the output",
        ),
    ],
)
def test_each_mistake_of_a_declaration_is_named(changes: dict, words: str) -> None:
    with pytest.raises(IntrinsicError, match=words):
        replace(FMA, **changes)


def test_fragments() -> None:
    matrix = te.Tensor("m", (2, 3), F32)
    assert vector(matrix).positions() == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    assert broadcast(te.Tensor("s", (1,), F32), 4).positions() == ((0,),) * 4
    with pytest.raises(IntrinsicError, match="one is broadcast"):
        broadcast(matrix, 4)
    assert pmaddwd().fragment("a").positions()[:4] == ((0,), (1,), (0,), (1,))
    mma = multiply(16, DType.F16)
    held = mma.fragments[1]
    rows, _ = held.element(np.arange(32)[:, None], np.arange(held.size)[None])
    assert held.scope is Scope.REGISTER and rows.max() == 15


def test_a_digest_tells_declarations_apart() -> None:
    same = fma("fma_8xf32", assembly("vfmadd231ps $2, $1, $0"))
    assert same.digest == FMA.digest
    others = [
        fma("fma_8xf32", assembly("vfmadd213ps $2, $1, $0")),
        fma("fma_8xf32", FMA.emit, ("avx2",)),
        fma("fma_8xf32", ExternalSymbol("fmaf", ("a", "b", "c"))),
        replace(
            FMA, fragments=(*FMA.fragments[:2], replace(FMA.fragments[2], element=lambda _, n: (7 - n,)))
        ),
    ]
    assert len({FMA.digest, *(other.digest for other in others)}) == 5


def test_only_what_a_machine_has_is_offered() -> None:
    register_intrinsic(FMA)
    register_intrinsic(ABSENT)
    try:
        assert registered_intrinsics(AVX2) == (FMA,)
        assert registered_intrinsics(replace(AVX2, features=())) == ()
        assert intrinsic_named("fma_8xf32", AVX2) is FMA
        with pytest.raises(IntrinsicError, match=r"absent_8xf32 needs a-feature-of-tomorrow, which .* lacks"):
            intrinsic_named("absent_8xf32", AVX2)
        with pytest.raises(
            IntrinsicError, match=r"the intrinsic must be one of fma_8xf32, absent_8xf32, got 'other'"
        ):
            intrinsic_named("other", AVX2)
        assert registering_modules() == (__name__,)
        with pytest.raises(IntrinsicError, match="already"):
            register_intrinsic(FMA)
    finally:
        for each in (FMA, ABSENT):
            unregister_intrinsic(each.name)
    assert find_intrinsic("fma_8xf32") is None


def test_what_is_more_than_an_instruction_is_not_registered() -> None:
    with pytest.raises(IntrinsicError, match="must be one instruction of LLVM or PTX"):
        register_intrinsic(replace(FMA, emit=lambda *_: None))


def test_tensor_cores_need_a_card() -> None:
    mma = multiply(16, DType.BF16)
    assert mma.missing(A100) == mma.missing(H200) == ()
    assert mma.missing(host()) == ("sm_80",)
