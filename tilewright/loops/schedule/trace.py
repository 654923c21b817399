"""The trace of a schedule as plain data: it can be stored, changed and replayed.

A `TraceStep` is a primitive's name and its arguments: names of loops and stages, numbers, lists of them. In JSON a
trace is a list of objects, `{"primitive": "split", "loop": "out.i0", "factor": 8}`.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from tilewright.errors import ScheduleError
from tilewright.hw.intrinsics import Intrinsic, find_intrinsic
from tilewright.loops.schedule import (
    caches,
    kinds,
    layout,
    padding,
    pipeline,
    prefetch,
    reductions,
    restructure,
    stages,
    stores,
    tensorise,
)
from tilewright.loops.schedule.nest import Nest
from tilewright.loops.schedule.rules import check

PRIMITIVES: dict[str, Callable[..., Nest]] = {
    primitive.__name__: primitive
    for primitive in (
        restructure.split,
        restructure.fuse,
        restructure.reorder,
        restructure.tile,
        kinds.vectorise,
        kinds.unroll,
        kinds.parallel,
        kinds.bind,
        kinds.vthread,
        stages.compute_at,
        stages.store_at,
        stages.inline,
        caches.cache_read,
        caches.cache_write,
        caches.set_scope,
        reductions.rfactor,
        layout.pack,
        padding.pad,
        padding.widen,
        tensorise.tensorise,
        prefetch.prefetch,
        pipeline.pipeline,
        pipeline.swizzle,
        stores.stream,
        stores.transpose,
    )
}


@dataclass(frozen=True)
class TraceStep:
    primitive: str
    arguments: tuple[tuple[str, Any], ...]  # by name; missing ones have their defaults

    def __str__(self) -> str:
        return f"{self.primitive}({', '.join(f'{name}={value!r}' for name, value in self.arguments)})"

    def to_data(self) -> dict[str, Any]:
        return {"primitive": self.primitive, **{name: _listed(value) for name, value in self.arguments}}


Trace = tuple[TraceStep, ...]


def step(primitive: str, arguments: Mapping[str, Any]) -> TraceStep:
    """Make a step, after checking that the primitive exists and takes these arguments."""
    if primitive not in PRIMITIVES:
        raise ScheduleError(f"the primitive must be one of {', '.join(PRIMITIVES)}, got {primitive}")
    known = _parameters(primitive)
    for name, value in arguments.items():
        if name not in known or name == "nest":
            raise ScheduleError(f"{primitive} takes no argument {name}")
        if not _fits(value, known[name].annotation):
            raise ScheduleError(f"{primitive}: {name} cannot be {value!r}")
    for name, parameter in known.items():
        if name != "nest" and parameter.default is inspect.Parameter.empty and name not in arguments:
            raise ScheduleError(f"{primitive} needs an argument {name}")
    kept = {
        name: tuple(value) if isinstance(value, (list, tuple)) else value
        for name, value in arguments.items()
        if value != known[name].default
    }
    return TraceStep(primitive, tuple(kept.items()))


@cache
def _parameters(primitive: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(PRIMITIVES[primitive], eval_str=True).parameters


def apply(nest: Nest, done: TraceStep, declared: Mapping[str, Intrinsic]) -> Nest:
    """Apply one step to the nest; `declared` are intrinsics by name, in addition to registered ones."""
    arguments = dict(done.arguments)
    if done.primitive == "tensorise":
        name = arguments["intrinsic"]
        found = declared.get(name) or find_intrinsic(name)
        if found is None:
            raise ScheduleError(
                f"tensorise: no intrinsic {name} was declared; there are: {', '.join(declared) or 'none'}"
            )
        arguments["intrinsic"] = found
    changed = PRIMITIVES[done.primitive](nest, **arguments)
    check(changed)
    return changed


def summary(trace: Iterable[TraceStep]) -> str:
    """The primitives that were used, as text for `Program.decisions`."""
    counts = Counter(done.primitive for done in trace)
    used = ", ".join(name if count == 1 else f"{name} x {count}" for name, count in counts.items())
    return f"scheduled: {used or 'nothing'}"


def to_json(trace: Iterable[TraceStep]) -> str:
    return json.dumps([each.to_data() for each in trace])


def from_json(text: str) -> Trace:
    """Parse and check the steps of a trace; raises ScheduleError if the text is not a trace."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ScheduleError(f"a trace is JSON: {error}") from None
    if not isinstance(data, list) or not all(isinstance(each, dict) and "primitive" in each for each in data):
        raise ScheduleError("a trace is a list of objects, each with a primitive")
    return tuple(
        step(str(each["primitive"]), {name: value for name, value in each.items() if name != "primitive"})
        for each in data
    )


def _fits(value: Any, annotation: Any) -> bool:
    """Whether plain data has the type of a primitive's parameter; an intrinsic is given by name."""
    if annotation is Intrinsic:
        return isinstance(value, str)
    if annotation is bool:
        return isinstance(value, bool)
    if annotation in (int, str):
        return isinstance(value, annotation) and not isinstance(value, bool)
    if get_origin(annotation) is Sequence:
        (item,) = get_args(annotation)
        return isinstance(value, (list, tuple)) and all(_fits(each, item) for each in value)
    if annotation is type(None):
        return value is None
    return any(_fits(value, option) for option in get_args(annotation))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
