"""A discrete-event simulation of a pool: where do the driver or the builders become the limit?

Builders and devices each do one thing at a time; the driver, one process, spends some time on every message. Devices
fail now and then: what they had is given to another, and they come back after a while.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Costs:
    """Seconds. `driver`: for each of a trial's four messages (build and trial, out and back)."""

    build: float = 0.15
    trial: float = 0.1
    driver: float = 0.0004
    failures: float = 0.0  # for each second of a device's work
    back: float = 5.0  # until a device that failed returns


@dataclass(frozen=True)
class Result:
    seconds: float
    rate: float  # trials a second
    driver_busy: float  # share of the time
    given_again: int


def simulated(
    devices: int, builders: int, trials: int, costs: Costs | None = None, ahead: int = 4, seed: int = 0
) -> Result:
    """`ahead`: built candidates for each device that may wait for it."""
    costs = costs or Costs()
    random = Random(seed)
    now, driver_free, driver_used, done, again = 0.0, 0.0, 0.0, 0, 0
    unbuilt, built = trials, deque[int]()
    idle_builders, idle_devices = builders, devices
    in_flight = 0
    events: list[tuple[float, int, str]] = []
    number = 0

    def message() -> float:
        """When the driver has dealt with the next one."""
        nonlocal driver_free, driver_used
        driver_free = max(now, driver_free) + costs.driver
        driver_used += costs.driver
        return driver_free

    def push(when: float, what: str) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (when, number, what))

    def give_out() -> None:
        nonlocal unbuilt, idle_builders, idle_devices, in_flight
        while unbuilt and idle_builders and len(built) + in_flight < ahead * devices:
            unbuilt, idle_builders, in_flight = unbuilt - 1, idle_builders - 1, in_flight + 1
            push(message() + costs.build, "built")
        while built and idle_devices:
            built.popleft()
            idle_devices -= 1
            start = message()
            fails = random.expovariate(costs.failures) if costs.failures else costs.trial
            push(start + min(fails, costs.trial), "timed" if fails >= costs.trial else "failed")

    give_out()
    while done < trials:
        now, _, what = heapq.heappop(events)
        if what == "built":
            message()
            idle_builders, in_flight = idle_builders + 1, in_flight - 1
            built.append(1)
        elif what == "timed":
            message()
            idle_devices += 1
            done += 1
        elif what == "failed":
            message()
            built.appendleft(1)
            again += 1
            push(now + costs.back, "back")
        else:
            idle_devices += 1
        give_out()
    seconds = max(now, driver_free)
    return Result(seconds, trials / seconds, driver_used / seconds, again)
