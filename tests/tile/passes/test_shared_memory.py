"""Shared memory of random code: live buffers never overlap, and barriers keep threads that run freely in order."""

from __future__ import annotations

import random

import pytest

from tilewright.tile.passes.barriers import steps_after_barriers
from tilewright.tile.passes.shared_memory import (
    CodeNode,
    GlobalAccess,
    Lifespan,
    ProgramPart,
    ProgramStep,
    Resource,
    SharedBuffer,
    allocate,
    live_together,
)


class _Code:
    """Random nodes in which a buffer is written before it is read."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.buffers: list[SharedBuffer] = []

    def nodes(self, depth: int, known: list[SharedBuffer]) -> list[CodeNode]:
        known, made = list(known), []
        for _ in range(self.random.randint(1, 4)):
            choice = self.random.random()
            if choice < 0.25 and depth:
                loop = self.random.random() < 0.6
                parts = [ProgramPart([], self.nodes(depth - 1, known)) for _ in range(1 if loop else 2)]
                made.append(Lifespan(loop, parts))
            elif choice < 0.6 or not known:
                buffer = SharedBuffer(f"b{len(self.buffers)}", self.random.choice([16, 100, 256, 1000]))
                self.buffers.append(buffer)
                known.append(buffer)
                made.append(ProgramStep(["write"], writes=(buffer,)))
            else:
                made.append(ProgramStep(["read"], reads=(self.random.choice(known),)))
        return made


def traces(nodes: list[CodeNode], chosen: random.Random) -> list[ProgramStep]:
    """The steps of one run."""
    found: list[ProgramStep] = []
    for node in nodes:
        if isinstance(node, ProgramStep):
            found.append(node)
        elif node.loop:
            for _ in range(chosen.randint(0, 3)):
                for part in node.parts:
                    found += traces(part.nodes, chosen)
        else:
            found += traces(chosen.choice(node.parts).nodes, chosen)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_what_is_read_was_not_overwritten(seed: int) -> None:
    nodes = _Code(seed).nodes(3, [])
    offsets, total = allocate(nodes)
    for run in range(10):
        memory: dict[int, SharedBuffer] = {}
        for step in traces(nodes, random.Random(run)):
            for buffer in step.writes:
                assert isinstance(buffer, SharedBuffer) and offsets[buffer] + buffer.bytes <= total
                memory.update(
                    (byte, buffer) for byte in range(offsets[buffer], offsets[buffer] + buffer.bytes)
                )
            for buffer in step.reads:
                assert isinstance(buffer, SharedBuffer)
                assert all(
                    memory[byte] is buffer for byte in range(offsets[buffer], offsets[buffer] + buffer.bytes)
                )


@pytest.mark.parametrize("seed", range(40))
def test_no_two_conflicting_steps_without_a_barrier(seed: int) -> None:
    nodes = _Code(seed).nodes(3, [])
    offsets, _ = allocate(nodes)

    def conflict(a: Resource, b: Resource) -> bool:
        assert isinstance(a, SharedBuffer) and isinstance(b, SharedBuffer)
        return offsets[a] < offsets[b] + b.bytes and offsets[b] < offsets[a] + a.bytes

    behind = steps_after_barriers(nodes, conflict)
    for run in range(10):
        since: list[ProgramStep] = []
        for step in traces(nodes, random.Random(run)):
            if step in behind:
                since = []
            for other in since:
                pairs = [(a, b) for a in step.reads for b in other.writes]
                pairs += [(a, b) for a in step.writes for b in (*other.reads, *other.writes)]
                assert not any(conflict(a, b) for a, b in pairs)
            since.append(step)


def test_buffers_that_never_live_together_share_memory() -> None:
    one, two = SharedBuffer("one", 256), SharedBuffer("two", 256)
    apart = [
        ProgramStep([], writes=(one,)),
        ProgramStep([], reads=(one,)),
        ProgramStep([], writes=(two,)),
        ProgramStep([], reads=(two,)),
    ]
    assert allocate(apart)[1] == 256
    crossed = [apart[0], apart[2], apart[1], apart[3]]
    offsets, total = allocate(crossed)
    assert total == 512 and set(live_together(crossed, offsets)) == {one, two}


def test_a_thread_may_come_back_to_its_own_addresses_in_one_iteration_only() -> None:
    access = GlobalAccess(frozenset({"x"}), key="pointer")

    def conflict(a: Resource, b: Resource) -> bool:
        assert isinstance(a, GlobalAccess) and isinstance(b, GlobalAccess)
        return a.key is None or a.key != b.key

    steps = [ProgramStep([], reads=(access,)), ProgramStep([], writes=(access,))]
    assert not steps_after_barriers(steps, conflict)
    assert steps_after_barriers([Lifespan(True, [ProgramPart([], list(steps))])], conflict)
