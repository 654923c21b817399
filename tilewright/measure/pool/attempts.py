"""Items of a driver's work, given to workers; and which of them hang.

A request's time counts only while its worker works on it: not while it waits for its turn, for a process to start, or
for builds of its node to end. The worker knows that time, so the driver asks it about a request that has been away for
longer than the request may take:

    in progress for less         it has what is left of its time
    in progress for longer       it hangs
    not known there              the request or its answer was lost
    no reply                     the worker hangs, or cannot be reached
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tilewright.measure.measurement import Measurement
from tilewright.measure.pool.wire import InProgress
from tilewright.measure.pool.workers import Worker

REPLY_SECONDS = (
    60.0  # for a worker to say what it works on: it does so beside its work, but may be on a busy machine
)
_AGAIN_SECONDS = 1.0  # at least, between two questions to a worker
_LONGEST_SECONDS = 3600.0  # that a request may wait


@dataclass(eq=False)
class Work:
    """A build, trial or race. `name`: the worker's name for the request. `lost`: the workers that failed to do it."""

    name: str
    begin: Callable[[Worker], Any]  # -> a Ray reference to the answer
    done: Callable[[Worker, Any], str]  # takes the answer; "" or what is wrong with the worker
    give_up: Callable[[], None]  # called once no worker is asked any more
    timers: str | None  # the machine whose timers can do it; None: any builder
    seconds: float  # that a worker may work on it
    lost: list[str] = field(default_factory=list)
    rebuild: Callable[[], None] | None = None  # called if the object code that it needs was lost with a node
    failed_on: Worker | None = None  # the device that failed the candidate, until another has too
    failure: str = ""  # how it failed there
    doubted: Worker | None = None  # the device that answered while its speed was another
    is_wanted: bool = True  # otherwise it is not given again

    @property
    def tried(self) -> set[str]:
        """The workers that others are preferred to."""
        return {*self.lost, *(each.name for each in (self.failed_on, self.doubted) if each is not None)}


@dataclass(eq=False)
class OrderedTrial:
    """A trial that was ordered. `found`: its measurement; None until it has ended, or if no node could do it.
    `work`: once it is built. `builds`: how often its object code was lost. `when_ended`: is called then."""

    has_ended: bool = False
    found: Measurement | None = None
    work: Work | None = None
    builds: int = 0
    when_ended: list[Callable[[], None]] = field(default_factory=list)

    def end(self, found: Measurement | None) -> None:
        self.has_ended, self.found = True, found
        for call in self.when_ended:
            call()


@dataclass
class Attempt:
    """Work that was given to a worker. `previous`: earlier work of that worker, which it does first. `look`: when to
    ask the worker about it."""

    work: Work
    worker: Worker
    given: float
    look: float
    previous: Attempt | None = None
    is_answered: bool = False
    has_ended: bool = False
    is_unknown: bool = False  # the worker did not know the request when it was asked last

    @property
    def was_waiting(self) -> bool:
        """Whether the worker had not started it."""
        return self.previous is not None and not self.previous.is_answered


@dataclass(frozen=True)
class _Question:
    worker: Worker
    deadline: float


class Asked(Protocol):
    """The part of `Workers` that is used here."""

    def answer(self, reference: Any) -> Any: ...


class Overdue:
    """Finds attempts that exceed their time limits."""

    def __init__(self, workers: Asked, reply: float = REPLY_SECONDS) -> None:
        self._workers, self._reply = workers, reply
        self._questions: dict[Any, _Question] = {}

    @property
    def references(self) -> list[Any]:
        """The references of expected replies."""
        return list(self._questions)

    def check(self, running: Mapping[Any, Attempt], ready: set[Any]) -> Iterator[tuple[Any, TimeoutError]]:
        """The attempts that hang. `ready`: the references, of answers and of `references`, that have arrived."""
        now = time.monotonic()
        for reference in [each for each in self._questions if each in ready]:
            question = self._questions.pop(reference)
            known = self._known(reference)
            for each, attempt in self._late(running, question.worker, now):
                if each not in ready and (reason := self._reason(attempt, known, now)):
                    yield each, TimeoutError(reason)
        for reference, question in list(self._questions.items()):
            if now > question.deadline:
                del self._questions[reference]
                for each, _ in self._late(running, question.worker, now):
                    if each in ready:
                        continue
                    yield each, TimeoutError(f"no reply within {self._reply:.0f} s")
        asked = {question.worker.name for question in self._questions.values()}
        for worker in {a.worker.name: a.worker for a in running.values() if now > a.look}.values():
            if worker.name not in asked:
                self._questions[worker.ask("in_progress")] = _Question(worker, now + self._reply)

    @staticmethod
    def _late(running: Mapping[Any, Attempt], worker: Worker, now: float) -> list[tuple[Any, Attempt]]:
        return [(ref, a) for ref, a in running.items() if a.worker.name == worker.name and now > a.look]

    def _known(self, reference: Any) -> dict[str, float] | None:
        """Seconds of work by request; None if there was no reply: then the requests fail with the same exception."""
        answer = self._workers.answer(reference)
        if isinstance(answer, BaseException):
            return None
        try:
            return msgspec.msgpack.decode(answer, type=InProgress).seconds
        except (msgspec.MsgspecError, TypeError):
            return {}

    @staticmethod
    def _reason(attempt: Attempt, known: Mapping[str, float] | None, now: float) -> str:
        """The reason to give the attempt up; "" if it continues and is checked again later."""
        work = attempt.work
        if known is None:
            attempt.look = now + _AGAIN_SECONDS
            return ""
        if now - attempt.given > max(_LONGEST_SECONDS, work.seconds):
            return f"no answer within {now - attempt.given:.0f} s"
        if work.name in known:
            left = work.seconds - known[work.name]
            attempt.look, attempt.is_unknown = now + max(left, _AGAIN_SECONDS), False
            return "" if left > 0 else f"no answer within {work.seconds:.0f} s of its work"
        if attempt.is_unknown:
            return "it does not have the request any more, and no answer came"
        attempt.look, attempt.is_unknown = now + _AGAIN_SECONDS, True  # the answer may be on its way
        return ""
