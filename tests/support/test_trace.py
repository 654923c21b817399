from __future__ import annotations

import json

import pytest

from tilewright.support.trace import Event, Trace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_spans_nest_and_take_notes() -> None:
    trace = Trace(clock=Clock())
    with trace.span("outer", nodes=3) as outer:
        with trace.span("inner"):
            trace.mark("here", x=1)
        outer.note(after=2)
    assert trace.data() == [
        {"name": "outer", "begin": 1.0, "seconds": 4.0, "depth": 0, "notes": {"nodes": 3, "after": 2}},
        {"name": "inner", "begin": 2.0, "seconds": 2.0, "depth": 1, "notes": {}},
        {"name": "here", "begin": 3.0, "seconds": 0.0, "depth": 2, "notes": {"x": 1}},
    ]


def test_an_exception_ends_the_span_and_goes_on() -> None:
    trace = Trace()
    with pytest.raises(ValueError), trace.span("a"):
        raise ValueError
    assert trace.events[0].notes == {"error": "ValueError"}
    assert trace.events[0].seconds is not None
    with trace.span("b"):
        pass
    assert trace.events[1].depth == 0


def test_listener_hears_everything_in_order() -> None:
    heard: list[tuple[str, str]] = []

    def listener(what: str, event: Event) -> None:
        heard.append((what, event.name))

    trace = Trace(listener)
    with trace.span("a"):
        trace.mark("b")
        trace.add("c", 0.5, worker=1)
    assert heard == [("begin", "a"), ("mark", "b"), ("mark", "c"), ("end", "a")]


def test_chrome_form_is_json_and_in_microseconds() -> None:
    trace = Trace(clock=Clock())
    with trace.span("rewrites.simplify", what=object()):
        unfinished = json.loads(json.dumps(trace.chrome()))
        assert unfinished["traceEvents"][0]["dur"] > 0
    (event,) = json.loads(json.dumps(trace.chrome()))["traceEvents"]
    assert (event["name"], event["cat"], event["ph"]) == ("rewrites.simplify", "rewrites", "X")
    assert (event["ts"], event["dur"]) == (1e6, 2e6)


def test_seconds_by_prefix_counts_nested_spans_once() -> None:
    trace = Trace(clock=Clock())
    with trace.span("pass.a"), trace.span("pass.b"):  # 3 s in all
        pass
    with trace.span("other"):
        pass
    with trace.span("pass.c"):  # 1 s
        pass
    assert trace.seconds("pass.") == 4.0


def test_off_records_nothing() -> None:
    trace = Trace.off()
    with trace.span("a", x=1) as span:
        span.note(y=2)
    trace.mark("b")
    trace.add("c", 1.0)
    assert trace.data() == []
    assert span.notes == {}
    assert trace is Trace.off()
