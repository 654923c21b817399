"""A discrete-event simulation of a pool: where do the driver, the builders or the object store become the limit?

Builders and devices each do one thing at a time, and have a second work item waiting beside it, as the real driver
gives it to them. The driver, one process, spends some time on every message; on a node, taking a message up costs time
of its own. The object store moves one object file at a time. Devices fail now and then: what they had is given to
another, and they come back after a while.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Costs:
    """Seconds. `driver`: for each of a trial's four messages (build and trial, out and back). `idle`: the share of its
    time that the driver spends otherwise, while nothing waits for it. `node`: of a device's time, for each trial
    besides `trial` itself. `transfer`: of the object store, for a candidate's code."""

    build: float = 0.15
    trial: float = 1.0
    driver: float = 0.0004
    idle: float = 0.0
    node: float = 0.001
    transfer: float = 0.0001
    failures: float = 0.0  # for each second of a device's work
    back: float = 5.0  # until a device that failed returns


@dataclass(frozen=True)
class Result:
    seconds: float
    rate: float  # trials a second
    driver_busy: float  # share of the time
    store_busy: float
    given_again: int


def simulated(
    devices: int,
    builders: int,
    trials: int,
    costs: Costs | None = None,
    *,
    ahead: int = 4,
    built: int = 0,
    seed: int = 0,
) -> Result:
    """`ahead`: built candidates for each device that may wait for it. `built`: how many are there from the start."""
    costs = costs or Costs()
    random = Random(seed)
    now, done, again, number = 0.0, 0, 0, 0
    driver_free = driver_used = store_free = store_used = 0.0
    unbuilt, ready = trials - built, built
    idle_builders, building = builders, 0
    queues = [deque[float]() for _ in range(devices)]  # of each device: when its messages arrive
    is_busy, is_up = [False] * devices, [True] * devices
    free_slots: deque[int] = deque(device for _ in range(2) for device in range(devices))
    events: list[tuple[float, int, str, int]] = []

    def message() -> float:
        """When the driver has dealt with the next one."""
        nonlocal driver_free, driver_used
        driver_free = max(now, driver_free) + costs.driver
        driver_used += costs.driver
        return driver_free

    def moved(when: float) -> float:
        """When the object store has moved a candidate's code."""
        nonlocal store_free, store_used
        store_free = max(when, store_free) + costs.transfer
        store_used += costs.transfer
        return store_free

    def push(when: float, what: str, device: int = -1) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (when, number, what, device))

    def begin(device: int) -> None:
        """A device takes up what waits for it."""
        if is_busy[device] or not is_up[device] or not queues[device]:
            return
        is_busy[device] = True
        start = max(now, queues[device].popleft())
        length = costs.node + costs.trial
        fails = random.expovariate(costs.failures) if costs.failures else length
        push(start + min(fails, length), "timed" if fails >= length else "failed", device)

    def give_out() -> None:
        nonlocal unbuilt, idle_builders, building, ready
        while unbuilt and idle_builders and ready + building < ahead * devices:
            unbuilt, idle_builders, building = unbuilt - 1, idle_builders - 1, building + 1
            push(message() + costs.build, "built")
        for _ in range(len(free_slots)):
            if not ready:
                break
            device = free_slots.popleft()
            if not is_up[device]:
                free_slots.append(device)
                continue
            ready -= 1
            queues[device].append(moved(message()))
            begin(device)

    give_out()
    while done < trials:
        now, _, what, device = heapq.heappop(events)
        if what == "built":
            message()
            idle_builders, building, ready = idle_builders + 1, building - 1, ready + 1
        elif what == "back":
            is_up[device] = True
        else:
            message()
            is_busy[device] = False
            free_slots.append(device)
            if what == "timed":
                done += 1
            else:  # with what waited there
                ready += 1 + len(queues[device])
                again += 1
                free_slots.extend([device] * len(queues[device]))
                queues[device].clear()
                is_up[device] = False
                push(now + costs.back, "back", device)
            begin(device)
        give_out()
    seconds = max(now, driver_free)
    share = driver_used / seconds
    return Result(seconds, trials / seconds, share + costs.idle * (1 - share), store_used / seconds, again)
