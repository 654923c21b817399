"""64-bit ARM machines as they are described."""

from __future__ import annotations

import pytest

from tilewright.dtypes import DType
from tilewright.errors import TargetError
from tilewright.hw.arm import aarch64


def test_neon_and_sve() -> None:
    neon, sve = aarch64("neoverse-v1"), aarch64("neoverse-v1", sve_bits=256)
    assert (neon.lanes(DType.F32), sve.lanes(DType.F32)) == (4, 8)
    assert (neon.vscale, sve.vscale) == (0, 2)
    assert "-sve" in neon.feature_string() and "+sve" in sve.feature_string()
    assert neon.triple.startswith("aarch64") and neon.vector_registers == 32 and neon.has_fma
    assert aarch64("neoverse-v2", sve_bits=128).vscale == 1
    # Four pipelines of 128 bits are two of 256.
    assert (neon.throughput.fmas, sve.throughput.fmas) == (4, 2)


def test_products_of_bytes() -> None:
    assert aarch64("neoverse-n1").dot4_bytes == 0
    assert aarch64("neoverse-v1").dot4_bytes == 16  # usdot


def test_lines_and_pages_are_the_cores() -> None:
    assert aarch64("neoverse-n1").line_bytes == 64
    assert (aarch64("apple-m1").line_bytes, aarch64("apple-m1").page_bytes) == (128, 16384)


@pytest.mark.parametrize(
    ("cpu", "bits", "words"),
    [
        ("pentium", 0, "the core must be one of cortex-a76"),
        ("neoverse-n1", 128, "neoverse-n1 has no SVE, got sve_bits=128"),
        ("neoverse-v1", 512, "neoverse-v1 has 256-bit SVE vectors"),
    ],
)
def test_what_there_is_not(cpu: str, bits: int, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        aarch64(cpu, sve_bits=bits)
