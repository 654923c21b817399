"""What is known of processors by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewright.hw import Throughput, host
from tilewright.runtime.host import corrected_name


@pytest.mark.parametrize(
    ("cpu", "vector_bytes", "expected"),
    [
        ("icelake-server", 64, (2, 2, 1)),
        ("tigerlake", 64, (1, 2, 1)),
        ("znver4", 64, (1, 1, 0.5)),
        ("znver4", 32, (2, 2, 1)),
        ("znver1", 32, (1, 1, 0.5)),
        ("nobody-knows", 16, (2, 2, 1)),
    ],
)
def test_vectors_wider_than_the_units_take_longer(
    cpu: str, vector_bytes: int, expected: tuple[float, float, float]
) -> None:
    machine = replace(host(), cpu=cpu, vector_bytes=vector_bytes)
    found = machine.throughput
    assert (found.fmas, found.loads, found.stores) == expected
    assert machine.chains == 4 * found.fmas


def test_a_processor_that_nobody_knows_is_a_usual_one() -> None:
    assert replace(host(), cpu="nobody-knows").throughput == Throughput()


@pytest.mark.parametrize(
    ("cpu", "pages"),
    [("icelake-server", True), ("znver2", False), ("znver4", False), ("nobody-knows", True)],
)
def test_what_the_look_ahead_follows(cpu: str, pages: bool) -> None:
    assert replace(host(), cpu=cpu).prefetches_by_page == pages


def test_a_model_number_that_a_hypervisor_changed_is_corrected() -> None:
    """A server core with AMX was called rocketlake, a client core with half its FMAs."""
    amx = frozenset({"avx512f", "amx-tile"})
    assert corrected_name("rocketlake", amx) == "sapphirerapids"
    assert corrected_name("graniterapids", amx) == "graniterapids"
    assert corrected_name("rocketlake", frozenset({"avx512f"})) == "rocketlake"
