"""The memory planner: never wrong, and close to the lower bound on the shapes of real networks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.runtime.memory import LiveBuffer, plan_memory
from tilewright.runtime.plan import aligned


@st.composite
def buffers(draw: st.DrawFn) -> list[LiveBuffer]:
    result = []
    for _ in range(draw(st.integers(0, 30))):
        first = draw(st.integers(0, 20))
        result.append(LiveBuffer(draw(st.integers(0, 5000)), first, first + draw(st.integers(0, 8))))
    return result


@given(buffers())
def test_live_buffers_never_overlap(given_buffers: list[LiveBuffer]) -> None:
    offsets, report = plan_memory(given_buffers)
    assert len(offsets) == len(given_buffers)
    for index, (mine, at) in enumerate(zip(given_buffers, offsets, strict=True)):
        assert at % 64 == 0
        assert at + mine.size <= report.arena_bytes
        for other, other_at in zip(given_buffers[:index], offsets, strict=False):
            meet = mine.first_step <= other.last_step and other.first_step <= mine.last_step
            if meet and mine.size and other.size:
                assert at + mine.size <= other_at or other_at + other.size <= at
    assert report.lower_bound <= report.arena_bytes <= report.no_reuse


@given(buffers())
def test_it_is_deterministic(given_buffers: list[LiveBuffer]) -> None:
    assert plan_memory(given_buffers) == plan_memory(given_buffers)


class Net:
    """Buffers of a network, by what reads what."""

    def __init__(self) -> None:
        self.lives: list[list[int]] = []
        self.step = 0

    def op(self, size: int, *inputs: int) -> int:
        for index in inputs:
            self.lives[index][2] = self.step
        self.lives.append([size, self.step, self.step])
        self.step += 1
        return len(self.lives) - 1

    def buffers(self) -> list[LiveBuffer]:
        return [LiveBuffer(*life) for life in self.lives]


def quality(net: Net) -> float:
    _, report = plan_memory(net.buffers())
    return report.arena_bytes / report.lower_bound


sizes = st.integers(1, 1 << 22)


@given(st.lists(sizes, min_size=1, max_size=60))
def test_chains(values: list[int]) -> None:
    net = Net()
    last = net.op(values[0])
    for size in values[1:]:
        last = net.op(size, last)
    assert quality(net) <= 1.1


factors = st.sampled_from([0.25, 0.5, 1, 2, 4])


@given(st.lists(st.tuples(factors, factors), min_size=1, max_size=20), st.integers(64, 1 << 22))
def test_residual_networks(blocks: list[tuple[float, float]], width: int) -> None:
    """Bottlenecks and widenings, as in ResNets and transformers."""
    net = Net()
    trunk = net.op(width)
    for middle, inner in blocks:
        branch = net.op(int(width * inner), net.op(int(width * middle), trunk))
        trunk = net.op(width, trunk, net.op(width, branch))
    assert quality(net) <= 1.1


@pytest.mark.parametrize("depth", range(1, 8))
@pytest.mark.parametrize("base", [1 << 20, 3_000_000, 64 * 333 * 7])
@pytest.mark.parametrize("growth", [1, 2])
def test_u_nets(depth: int, base: int, growth: int) -> None:
    """Each level halves both sides and multiplies the channels by `growth`; skips live until the way up."""
    net = Net()
    skips = []
    size = base
    x = net.op(size)
    for _ in range(depth):
        x = net.op(size, net.op(size, x))
        skips.append((x, size))
        size = max(size * growth // 4, 64)
        x = net.op(size, x)
    for skip, size in reversed(skips):
        up = net.op(size, x)
        joined = net.op(2 * size, up, skip)
        x = net.op(size, net.op(size, joined))
    assert quality(net) <= 1.1


def test_reuse_is_reported() -> None:
    offsets, report = plan_memory(
        [LiveBuffer(1000, 0, 1), LiveBuffer(1000, 1, 2), LiveBuffer(1000, 2, 3)], constant_bytes=5
    )
    assert offsets[0] == offsets[2] != offsets[1]
    assert report.arena_bytes == report.lower_bound == 2 * aligned(1000)
    assert report.no_reuse == 3 * aligned(1000)
    assert report.constant_bytes == 5


def test_nothing_and_nonsense() -> None:
    assert plan_memory([])[0] == []
    assert plan_memory([LiveBuffer(0, 3, 4)])[1].arena_bytes == 0
    with pytest.raises(ValueError):
        plan_memory([LiveBuffer(10, 3, 2)])
    with pytest.raises(ValueError):
        plan_memory([LiveBuffer(-1, 2, 2)])
