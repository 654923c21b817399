"""Work that waits for a worker, and which worker gets it: the one with the least to do that has not tried it yet.

Giving work out costs as much as there is to give. While all workers of a kind are busy, what waits for them is not
looked at, however much that is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator

from tilewright.measure.pool.attempts import Work
from tilewright.measure.pool.workers import Worker

PER_WORKER = 2  # requests in flight: one that runs, one that is there when it ends

Able = Callable[["str | None"], "list[Worker]"]  # the workers for the timings of a machine; None: for builds


class Waiting:
    """Work in order of arrival. `load`: the requests in flight of each worker, by name."""

    def __init__(self) -> None:
        self._queues: dict[str | None, deque[Work]] = {}  # by `Work.timers`
        self.load: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return any(self._queues.values())

    @property
    def kinds(self) -> list[str | None]:
        """The machines for whose timers some work waits; None for builders."""
        return [kind for kind, queue in self._queues.items() if queue]

    def add(self, work: Work, *, first: bool = False) -> None:
        """`first`: before what waits already. What was forgotten is not added again."""
        if not work.is_wanted:
            return
        queue = self._queues.setdefault(work.timers, deque())
        if first:
            queue.appendleft(work)
        else:
            queue.append(work)

    def forget(self, works: Collection[Work]) -> None:
        for work in works:
            work.is_wanted = False
        self._queues = {
            kind: deque(work for work in queue if work not in works) for kind, queue in self._queues.items()
        }

    def clear(self) -> None:
        self._queues.clear()
        self.load.clear()

    def given(self, able: Able) -> Iterator[tuple[Work, Worker]]:
        """Take out the work for which a worker has room. Its load is raised; the caller lowers it at the end."""
        for kind in self.kinds:
            queue, workers = self._queues[kind], able(kind)
            room = [worker for worker in workers if self.load[worker.name] < PER_WORKER]
            passed: list[Work] = []  # only workers that have tried it have room
            while queue and room:
                work = queue.popleft()
                free = _untried(work, workers, room) if work.tried else room
                if not free:
                    passed.append(work)
                    continue
                worker = min(free, key=lambda each: self.load[each.name])
                self.load[worker.name] += 1
                if self.load[worker.name] >= PER_WORKER:
                    room.remove(worker)
                yield work, worker
            queue.extendleft(reversed(passed))


def _untried(work: Work, workers: list[Worker], room: list[Worker]) -> list[Worker]:
    """Those with room that have not tried it; if all workers have tried it, any of them but the one that failed the
    candidate: it cannot confirm itself while there is another."""
    left_out = work.tried
    if all(worker.name in left_out for worker in workers):
        left_out = {work.failed_on.name} if work.failed_on is not None and len(workers) > 1 else set()
    return [worker for worker in room if worker.name not in left_out]
