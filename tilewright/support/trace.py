"""The event trace: names, durations and data of events, for the report and the progress display.

    with trace.span("rewrites.fold-constants", nodes=120) as span:
        ...
        span.note(after=100)

A trace is passed explicitly; there is no global one. Code without a trace passes `Trace.off()`, whose spans cost
almost nothing. A trace belongs to one thread; work elsewhere is added with `add`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Listener = Callable[[str, "Event"], None]  # listener("begin" | "end" | "mark", event)


@dataclass
class Event:
    """One span of time. `begin` is in seconds from the start of the trace; `seconds` is None while it runs; `depth`
    is the number of enclosing spans."""

    name: str
    begin: float
    depth: int
    seconds: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def note(self, **notes: Any) -> None:
        """Add data to the event: plain data only (numbers, texts, lists and dicts of these)."""
        self.notes.update(notes)


class Trace:
    """Collects events in the order in which they begin."""

    def __init__(
        self, listener: Listener | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.events: list[Event] = []
        self._listener = listener
        self._clock = clock
        self._start = clock()
        self._depth = 0

    @staticmethod
    def off() -> Trace:
        """A trace that records nothing."""
        return _OFF

    @contextmanager
    def span(self, name: str, **notes: Any) -> Iterator[Event]:
        """Time the body. An exception ends the span, with its kind in the notes, and propagates."""
        event = Event(name, self._now(), self._depth, notes=notes)
        self.events.append(event)
        self._depth += 1
        self._tell("begin", event)
        try:
            yield event
        except BaseException as error:
            event.note(error=type(error).__name__)
            raise
        finally:
            self._depth -= 1
            event.seconds = self._now() - event.begin
            self._tell("end", event)

    def mark(self, name: str, **notes: Any) -> None:
        """Record an event without a duration."""
        event = Event(name, self._now(), self._depth, 0.0, notes)
        self.events.append(event)
        self._tell("mark", event)

    def add(self, name: str, seconds: float, **notes: Any) -> None:
        """Record an event that was timed elsewhere (a worker process) and just ended."""
        event = Event(name, self._now() - seconds, self._depth, seconds, notes)
        self.events.append(event)
        self._tell("mark", event)

    def data(self) -> list[dict[str, Any]]:
        """The events as plain data, for reports and records."""
        return [
            {"name": e.name, "begin": e.begin, "seconds": e.seconds, "depth": e.depth, "notes": dict(e.notes)}
            for e in self.events
        ]

    def chrome(self) -> dict[str, Any]:
        """The events in the Trace Event Format, which chrome://tracing and Perfetto open once dumped as JSON."""
        now = self._now()
        return {
            "displayTimeUnit": "ms",
            "traceEvents": [
                {
                    "name": e.name,
                    "cat": e.name.split(".", 1)[0],
                    "ph": "X",
                    "ts": e.begin * 1e6,
                    "dur": (now - e.begin if e.seconds is None else e.seconds) * 1e6,
                    "pid": 0,
                    "tid": 0,
                    "args": _printable(e.notes),
                }
                for e in self.events
            ],
        }

    def seconds(self, prefix: str) -> float:
        """The time in spans whose name begins with `prefix`, without counting nested spans twice."""
        total, covered = 0.0, -1.0
        for event in self.events:
            if event.seconds is not None and event.name.startswith(prefix) and event.begin >= covered:
                total += event.seconds
                covered = event.begin + event.seconds
        return total

    def _now(self) -> float:
        return self._clock() - self._start

    def _tell(self, what: str, event: Event) -> None:
        if self._listener is not None:
            self._listener(what, event)


class _Off(Trace):
    """A trace that records nothing; its only event discards notes."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)

    @contextmanager
    def span(self, name: str, **notes: Any) -> Iterator[Event]:
        yield _FORGETFUL

    def mark(self, name: str, **notes: Any) -> None:
        pass

    def add(self, name: str, seconds: float, **notes: Any) -> None:
        pass


class _Forgetful(Event):
    def note(self, **notes: Any) -> None:
        pass


def _printable(notes: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None), list, dict)
    return {key: value if isinstance(value, plain) else str(value) for key, value in notes.items()}


_FORGETFUL = _Forgetful("", 0.0, 0, 0.0)
_OFF = _Off()
