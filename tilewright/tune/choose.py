"""Choose the config of a task without measuring: the least predicted time over all trusted candidates.

On CPUs, sketches are not trusted, nor is the default program if there is a template. In a trial on ten tasks, the
model would have chosen a sketch for three (a depthwise convolution, a layer norm, a sum over rows) and been wrong
each time, by 7 to 20%; for no task was a sketch faster than the choice made here. Measuring finds the tasks where
sketches help. `space/catalog.py` says which candidates other machines trust.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from tilewright.cost.predictor import Predictor, all_seconds, counted, nominal
from tilewright.errors import SpaceError, TilewrightError
from tilewright.loops.ir import Program
from tilewright.runtime.plan import PREDICTED, Origin
from tilewright.space import registration
from tilewright.space.candidates import Candidates
from tilewright.space.catalog import catalog
from tilewright.space.guard import GuardedApplied
from tilewright.space.implementation import Implementation
from tilewright.space.space import Config, Knob, Value, combinations
from tilewright.space.template import Applied, Batched, Work
from tilewright.space.templates.default import DEFAULT
from tilewright.support.batch import narrowed


@dataclass(frozen=True)
class Choice:
    """The implementation chosen for a task. `seconds`: measured if it was tuned, otherwise predicted; None if
    unknown."""

    implementation: Implementation
    config: Config
    seconds: float | None
    origin: Origin = PREDICTED  # where it came from

    @property
    def program(self) -> Program:
        """The program, for a choice that is one loop program."""
        return self.implementation.program


def choose(work: Work, *, sketches: bool = True, templates: bool = True) -> Choice:
    """Return the candidate with the least predicted time. `sketches`, `templates`: whether these may be chosen."""
    some = catalog(work.machine.kind).trusted(work, sketches, templates)
    while (best := best_among(work, some)) is not None:
        seconds, config, applied = best
        try:
            implementation = Candidates(work, only=(applied,)).implementation(config)
        except TilewrightError:
            if not isinstance(applied, GuardedApplied):
                raise
            some = [
                each for each in some if each is not applied
            ]  # a user's template that cannot build its own config
            continue
        origin = Origin("default") if config == DEFAULT else PREDICTED
        return Choice(implementation, config, seconds, origin)
    if work.formula is None:
        raise SpaceError(f"no template computes {work.task.label}, and it has no default program")
    return Choice(implementation_of(work, DEFAULT), DEFAULT, None, Origin("default"))


def implementation_of(work: Work, config: Config) -> Implementation:
    return Candidates.of(work).implementation(config)


Best = tuple[float, Config, Applied]  # predicted seconds, config, template


def best_of(work: Work) -> Best | None:
    """The best over all trusted templates; None if none applies."""
    return best_among(work, catalog(work.machine.kind).trusted(work))


def best_among(work: Work, some: Iterable[Applied]) -> Best | None:
    best: Best | None = None
    predictor = nominal(work.machine)
    for applied in some:
        found = _descended(applied, work, predictor)
        if found is not None and math.isfinite(found[0]) and (best is None or found[0] < best[0]):
            best = (*found, applied)
    return best


def _descended(applied: Applied, work: Work, predictor: Predictor) -> tuple[float, Config] | None:
    """The descent, once per task: rewrites, choices and searches all start from it."""
    key = work.task, work.machine, work.numerics, applied.space.template, registration.changes()
    if key not in _known:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = descend(applied, work, predictor)
    found = _known[key]
    # Rates may have been measured since.
    return found if found is None or found[1] in applied.space else descend(applied, work, predictor)


_MAX_KNOWN = 4096
_known: dict[object, tuple[float, Config] | None] = {}


def ranked(applied: Applied, work: Work) -> list[tuple[float, Config]]:
    """Every config of a template with its predicted seconds, the fastest first."""
    predictor = nominal(work.machine)
    configs = list(applied.space.configs())
    seconds = all_seconds(applied, configs, predictor)
    if seconds is None:
        found = [(_predicted(applied, config, work, predictor), config) for config in configs]
    else:
        found = list(zip(seconds.tolist(), configs, strict=True))
    return sorted(found, key=lambda each: (each[0], str(each[1])))


def descend(applied: Applied, work: Work, predictor: Predictor | None = None) -> tuple[float, Config] | None:
    """Return (predicted seconds, config) by coordinate descent: starting at the first legal config, set each group of
    knobs to its best values until no group changes."""
    predictor = predictor or nominal(work.machine)
    space = applied.space
    start = space.first
    if start is None:
        return None
    look: _Look = (
        _AllAtOnce(applied, predictor)
        if isinstance(applied, Batched) and space.batched
        else _OneByOne(applied, work, predictor)
    )
    best = (_predicted(applied, start, work, predictor), start)
    groups = space.groups()
    settled = 0  # groups unchanged since they were last set
    for group in itertools.cycle(groups):
        if settled == len(groups):
            break
        settled += 1
        found = look(best[1], group)
        if found is not None and found[0] < best[0]:
            best, settled = found, 1
    return best


# Finds the best config that differs from another only in some knobs: (predicted seconds, config); None if there is none
# that is new.
_Look = Callable[[Config, tuple[Knob, ...]], "tuple[float, Config] | None"]


class _OneByOne:
    def __init__(self, applied: Applied, work: Work, predictor: Predictor) -> None:
        self._applied, self._work, self._predictor = applied, work, predictor
        # Groups share knobs, and rounds repeat most configs of the previous one.
        self._asked: set[tuple[tuple[str, Value], ...]] = set()

    def __call__(self, base: Config, group: tuple[Knob, ...]) -> tuple[float, Config] | None:
        space, names = self._applied.space, [knob.name for knob in group]
        best: tuple[float, Config] | None = None
        for combination in itertools.product(*(knob.choices for knob in group)):
            values = {**dict(base.values), **dict(zip(names, combination, strict=True))}
            items = tuple(values.items())
            if items in self._asked:
                continue
            self._asked.add(items)
            if not space.legal(values):
                continue
            config = Config(space.template, items)
            seconds = _predicted(self._applied, config, self._work, self._predictor)
            if best is None or seconds < best[0]:
                best = seconds, config
        return best


class _AllAtOnce:
    def __init__(self, applied: Batched, predictor: Predictor) -> None:
        self._applied, self._predictor = applied, predictor
        self._columns: dict[tuple[Knob, ...], dict[str, np.ndarray]] = {}

    def __call__(self, base: Config, group: tuple[Knob, ...]) -> tuple[float, Config] | None:
        if group not in self._columns:
            self._columns[group] = combinations(group)
        columns = self._columns[group]
        space, values = self._applied.space, {**dict(base.values), **columns}
        count = len(next(iter(columns.values())))
        legal = np.flatnonzero(np.broadcast_to(space.legal(values), (count,)))
        if not legal.size:
            return None
        some = narrowed(values, legal)
        try:
            seconds = np.broadcast_to(self._predictor(self._applied.terms_of(some)), legal.shape)
        except TilewrightError:  # a user's template
            return None
        at = int(seconds.argmin())
        found = {name: some[name][at].item() for name in columns}
        return float(seconds[at]), Config.of(space.template, {**dict(base.values), **found})


def _predicted(applied: Applied, config: Config, work: Work, predictor: Predictor) -> float:
    """Infinite if a user's template cannot predict it."""
    try:
        return predictor(counted(applied, config, work.machine)[0])
    except TilewrightError:
        return math.inf
