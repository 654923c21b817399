"""A pool without Ray: its actors are objects of this process, which answer in threads.

The driver, the messages, seals, turns and refusals are the real ones. What a child process would do is replaced: a
build gives code without contents, and a trial a time that follows from its config.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import msgspec

from tilewright.measure.building import Made
from tilewright.measure.failed import Failed
from tilewright.measure.jobs import Job
from tilewright.measure.measurement import Measurement
from tilewright.measure.pool.actors import Builder, Timer
from tilewright.measure.pool.driver import PoolRunner
from tilewright.measure.pool.turns import Stopwatch
from tilewright.measure.pool.wire import TrialAnswer, TrialRequest, pool_job, request_name
from tilewright.measure.pool.workers import Worker, Workers
from tilewright.measure.single import Built
from tilewright.space.space import Config

LABEL = "cpu:test"
MADE = Made(Built((), (), (), ()), 0.0)
SEED = 7


Trouble = Callable[[TrialRequest, Stopwatch], None]


class Ended(RuntimeError):
    """The actor was ended before it answered."""


class _Child:
    """Stands for the process that builds."""

    greeted = True

    def __init__(self, reply: Made | Failed) -> None:
        self._reply = reply

    def send(self, message: bytes) -> None:
        pass

    def receive(self, seconds: float) -> bytes:
        return msgspec.msgpack.encode(self._reply)


class TestBuilder(Builder):
    """`reply`: of the process that builds."""

    __test__ = False

    def __init__(self, node: str, reply: Made | Failed) -> None:
        super().__init__(node)
        self._child = _Child(reply)  # type: ignore[assignment]


class TestTimer(Timer):
    """`trouble`: is called with each request, and may take its time or raise. `reference`: seconds of the reference
    kernel."""

    __test__ = False

    def __init__(
        self,
        node: str,
        trouble: Trouble = lambda request, watch: None,
        reference: float = 1e-5,
        failure: str = "",
    ) -> None:
        super().__init__(node, LABEL, None, "pseudo")
        self._trouble, self._reference, self._failure = trouble, reference, failure
        self.measured: list[str] = []

    def _measured(self, request: TrialRequest, code: bytes, data: bytes, watch: Stopwatch) -> TrialAnswer:
        self._trouble(request, watch)
        self.measured.append(request.trial)
        config = request.candidate.config
        found = Measurement(config, (seconds_of(request.trial),), 0.0, self._failure)
        return TrialAnswer(request.trial, found, self._reference, 0.5)


def works_a_little(request: TrialRequest, watch: Stopwatch) -> None:
    time.sleep(0.02)


def until(is_so: Callable[[], object]) -> Iterator[None]:
    """Again and again until something is so, which is a failure after a minute."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        yield


def seconds_of(trial: str) -> float:
    return 1e-4 * (1 + int(trial[:6], 16) / 2**24)


class _Method:
    def __init__(self, handle: Handle, name: str, count: int = 1) -> None:
        self._handle, self._name, self._count = handle, name, count

    def options(self, num_returns: int) -> _Method:
        return _Method(self._handle, self._name, num_returns)

    def remote(self, *arguments: Any) -> Any:
        return self._handle.call(self._name, arguments, self._count)


class Handle:
    """An actor as its driver sees it. `make`: starts it, and again after each end."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self.actor, self.starts = make, make(), 1
        self._expected: set[Future[Any]] = set()

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    def call(self, name: str, arguments: tuple[Any, ...], count: int) -> Any:
        futures: list[Future[Any]] = [Future() for _ in range(count)]
        self._expected.update(futures)
        method = getattr(self.actor, name)

        def work() -> None:
            try:
                result = method(*(a.result() if isinstance(a, Future) else a for a in arguments))
                results = result if count > 1 else (result,)
            except BaseException as error:
                results = (error,) * count
            for future, one in zip(futures, results, strict=True):
                if not future.done():
                    future.set_result(one)

        threading.Thread(target=work, daemon=True).start()
        return futures[0] if count == 1 else tuple(futures)

    def restart(self) -> None:
        for future in self._expected:
            if not future.done():
                future.set_result(Ended("it was ended"))
        self.actor, self.starts = self._make(), self.starts + 1


class ThreadWorkers(Workers):
    """`actors`: by name, how each starts."""

    def __init__(self, actors: dict[str, Callable[[], Any]]) -> None:
        super().__init__()
        self.handles = {name: Handle(make) for name, make in actors.items()}

    def _named(self) -> set[str]:
        return set(self.handles)

    def _handle(self, name: str) -> Handle:
        return self.handles[name]

    def restart(self, worker: Worker) -> None:
        self.handles[worker.name].restart()

    def wait(self, references: list[Any], seconds: float) -> list[Any]:
        return list(wait_for(references, seconds, "FIRST_COMPLETED").done) if references else []

    def come(self, references: list[Any], seconds: float) -> list[Any]:
        return list(wait_for(references, seconds).done) if references else []

    def stored(self, data: bytes) -> Any:
        return data

    def answer(self, reference: Any) -> Any:
        return reference.result()


def pool(*timers: Callable[[], Any], builders: tuple[Made | Failed, ...] = (MADE,)) -> ThreadWorkers:
    """Nodes node0, node1, ...: each has one of the timers, and, as long as there are some, a builder."""
    actors: dict[str, Callable[[], Any]] = {
        f"builder/node{n}/0": lambda n=n, reply=reply: TestBuilder(f"node{n}", reply)
        for n, reply in enumerate(builders)
    }
    actors |= {f"timer/node{n}/{LABEL}/0": timer for n, timer in enumerate(timers)}
    return ThreadWorkers(actors)


class Driver(PoolRunner):
    """Its notes are kept, and it does not wait long."""

    def __init__(self, workers: ThreadWorkers, user: str = "tester", **options: Any) -> None:
        self.notes: list[str] = [f"{name} is not used: {why}" for name, why in workers.refresh(20.0).items()]
        super().__init__(workers, 1, user=user, seed=SEED, note=self.notes.append, **options)


def expected(job: Job, configs: list[Config]) -> list[float]:
    """The times that test timers answer."""
    return [seconds_of(request_name("trial", pool_job(job), config, SEED)) for config in configs]


def seconds(runner: PoolRunner, job: Job, configs: list[Config]) -> list[float | None]:
    return [each.seconds for each in runner.measure(job, configs)]
