"""What is known of cores by name, and that it changes no fingerprint."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import msgspec
import pytest

from tilewright.hw import Caches, CpuMachine, host
from tilewright.hw.cores import CORES, USUAL, core_of
from tilewright.measure.calibration import machine_key

RECORDED = CpuMachine(
    triple="x86_64-unknown-linux-gnu",
    cpu="znver4",
    features=("avx", "avx2", "avx512f", "fma"),
    absent=("avx512fp16",),
    vector_bytes=64,
    vector_registers=32,
    has_fma=True,
    cores=8,
    caches=Caches(32 << 10, 1 << 20, 32 << 20, l2_cores=1, l3_cores=8),
)


def test_a_core_that_is_not_in_the_table_is_a_usual_one() -> None:
    machine = replace(host(), cpu="nobody-knows")
    assert machine.core is USUAL
    assert (machine.line_bytes, machine.page_bytes, machine.fma_latency) == (64, 4096, 4.0)


@pytest.mark.parametrize("cpu", ["znver1", "znver3", "znver5", "znver9"])
def test_zen_has_a_stride_prefetcher(cpu: str) -> None:
    assert core_of(cpu).prefetcher == "stride"


def test_lines_and_pages_differ() -> None:
    machine = replace(host(), cpu="apple-m1", vector_bytes=16)
    assert (machine.line_bytes, machine.page_bytes) == (128, 16384)
    assert machine.throughput.fmas == 4


@pytest.mark.parametrize("name", sorted(CORES))
def test_a_row_makes_sense(name: str) -> None:
    core = CORES[name]
    assert core.line_bytes in (32, 64, 128, 256) and core.page_bytes % core.line_bytes == 0
    assert core.fma_latency >= 1 and core.hertz > 1e8


def test_the_table_is_no_part_of_a_fingerprint() -> None:
    # Databases and calibrations are found by this key: it changes only if all of them are to be measured again.
    assert machine_key(RECORDED) == "34cd9a9b3b5d1d35f73ab0267d594117"


def test_a_machine_that_an_older_version_wrote_is_read() -> None:
    written = msgspec.json.decode(msgspec.json.encode(asdict(RECORDED)))
    assert set(written) == {field.name for field in fields(CpuMachine)}
    assert msgspec.convert(written, CpuMachine) == RECORDED
