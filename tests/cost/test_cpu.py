"""The analytical model: what it must say whatever its constants are."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tilewright.cost.cpu import seconds
from tilewright.hw import host
from tilewright.space.template import Terms

TERMS = Terms(
    arithmetic=1e6,
    loads=5e5,
    stores=1e4,
    branches=1e4,
    from_l2=1e6,
    from_l3=1e5,
    from_memory=1e6,
    iterations=8,
)


@given(
    st.sampled_from(
        ["arithmetic", "loads", "stores", "branches", "from_l2", "from_l3", "from_memory", "scalar"]
    ),
    st.floats(1.0, 100.0),
)
def test_more_of_anything_never_takes_less_time(term: str, factor: float) -> None:
    more = replace(TERMS, **{term: getattr(TERMS, term) * factor + (factor if term == "scalar" else 0)})
    assert seconds(more, host(), 2) >= seconds(TERMS, host(), 2)


def test_threads_divide_the_work_and_uneven_iterations_do_not() -> None:
    one, two = seconds(TERMS, host(), 1), seconds(TERMS, host(), 2)
    assert 1.9 < one / two < 2.01
    three = seconds(replace(TERMS, iterations=3), host(), 2)  # two of three iterations on one thread
    assert 1.3 < three / two < 1.4
    assert seconds(replace(TERMS, iterations=1), host(), 2) == one


def test_iterations_enough_for_threads_to_balance_are_a_little_better() -> None:
    few, some, enough, more = (seconds(replace(TERMS, iterations=n), host(), 2) for n in (2, 8, 16, 1000))
    assert enough < some < few < 1.1 * enough
    assert enough == more


def test_what_is_prefetched_hides_behind_the_arithmetic() -> None:
    hidden = replace(TERMS, prefetched=TERMS.from_memory)
    assert seconds(hidden, host(), 2) < seconds(TERMS, host(), 2)
    slow = replace(TERMS, from_memory=1e9)
    assert seconds(replace(slow, prefetched=1e9), host(), 2) > 1e9 / 2 / 50e9, "bandwidth is still a bound"


def test_more_loads_than_multiply_adds_are_a_bound_of_their_own() -> None:
    usual = replace(host(), cpu="nobody-knows")  # multiplies as many vectors in a cycle as it loads
    few = replace(TERMS, loads=0.2 * TERMS.arithmetic)
    many = replace(TERMS, loads=1.2 * TERMS.arithmetic)
    assert seconds(many, usual, 2) > 1.4 * seconds(few, usual, 2)


def test_units_narrower_than_vectors_take_longer_for_them() -> None:
    """By cycles: the arithmetic doubles, what comes from the caches does not."""
    wide, narrow = (replace(host(), cpu=cpu, vector_bytes=64) for cpu in ("icelake-server", "icelake-client"))
    computing = Terms(arithmetic=1e6, loads=4e5, iterations=8)
    assert 1.7 < seconds(computing, narrow, 2) / seconds(computing, wide, 2) < 2
    moving = Terms(arithmetic=1e4, loads=1e4, from_l3=1e7, iterations=8)
    assert seconds(moving, narrow, 2) < 1.1 * seconds(moving, wide, 2)
