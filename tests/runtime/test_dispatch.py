from __future__ import annotations

import threading
import time

import pytest

from tilewright.runtime.dispatch import Policy, VariantTable


def compiled(table: VariantTable[str], keys: list[object]) -> list[object]:
    """The keys whose variant was made, in order."""
    made: list[object] = []
    for key in keys:
        table.get(key, lambda key=key: made.append(key) or f"variant {key}")
    return made


def test_the_first_shapes_are_compiled_at_once() -> None:
    assert compiled(VariantTable(), [1, 2, 3, 4]) == [1, 2, 3, 4]


def test_later_ones_when_they_come_again() -> None:
    table: VariantTable[str] = VariantTable(Policy(limit=16, eager=2, patience=2, worth=0))
    assert compiled(table, [1, 2, 3, 4, 5, 4, 4, 1]) == [1, 2, 4]
    assert table.get(4, lambda: "never") == "variant 4"
    assert table.get(6, lambda: "never") is None


def test_never_more_than_the_limit() -> None:
    table: VariantTable[str] = VariantTable(Policy(limit=5, eager=3, patience=2, worth=0))
    assert len(compiled(table, list(range(100)) * 4)) == 5
    assert len(table) == 5
    assert compiled(table, list(range(5))) == []  # what is there stays there


def test_a_shape_is_compiled_when_its_calls_took_as_long_as_that_would() -> None:
    table: VariantTable[str] = VariantTable(Policy(limit=9, eager=1, patience=2))

    def make() -> str:
        time.sleep(0.02)
        return "made"

    table.get("first", make)
    for _ in range(10):
        assert table.get("brief", make) is None
        table.waited("brief", 1e-6)
    assert table.get("long", make) is None
    table.waited("long", 60.0)
    assert table.get("long", make) == "made"
    assert table.get("brief", make) is None
    table.waited("nobody asked", 60.0)
    assert table.get("nobody asked", make) is None  # its first time


def test_the_list_of_waiting_shapes_is_bounded() -> None:
    table: VariantTable[str] = VariantTable(Policy(limit=9, eager=0, patience=3))
    compiled(table, list(range(5000)))
    assert len(table._waiting) <= 1024


def test_threads_that_want_one_shape_compile_it_once() -> None:
    table: VariantTable[int] = VariantTable()
    made: list[int] = []

    def make() -> int:
        time.sleep(0.05)
        made.append(1)
        return 7

    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(table.get("a", make))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1] and results == [7] * 6


def test_clear() -> None:
    table: VariantTable[str] = VariantTable()
    compiled(table, [1, 2])
    table.clear()
    assert len(table) == 0 and compiled(table, [1]) == [1]


def test_variants_that_are_there_already() -> None:
    table: VariantTable[str] = VariantTable(Policy(limit=1, eager=1))
    table.add("a", "first")
    table.add("b", "second")  # more than the limit: they cost nothing
    table.add("a", "another")
    assert table.variants() == ("first", "second")
    assert table.find("a") == "first" and table.find("c") is None
    assert compiled(table, ["c", "c"]) == []


def test_a_failure_to_make_one_is_the_callers_and_leaves_nothing() -> None:
    table: VariantTable[str] = VariantTable()

    def broken() -> str:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        table.get("a", broken)
    assert len(table) == 0 and table.get("a", lambda: "made") == "made"
