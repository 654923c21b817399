"""How each task is computed on a GPU: as raced, and remembered; by the rule where nothing else is known."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import msgspec

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda.pieces import build_piece, code_of
from tilewright.cost import gpu as cost
from tilewright.db.database import Database
from tilewright.db.record import Decision, Key, Record
from tilewright.errors import DeviceError, MeasurementError, TilewrightError
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.measure.gpu_calibration import rated
from tilewright.measure.gpu_ways import Answer, Finished, Question, Refused, Running, Tried, Trying
from tilewright.measure.process import Child, Dead, Failed
from tilewright.runtime.plan import Origin
from tilewright.space.sketches.cuda import SKETCHES
from tilewright.space.space import Config
from tilewright.space.templates.cuda import TEMPLATES
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor.candidates import candidate_ways
from tilewright.space.vendor.pieces import Way, ours
from tilewright.support.trace import Trace
from tilewright.tune.allocate import Objective
from tilewright.tune.effort import Tuning
from tilewright.tune.gpu_known import GpuMemory, Pairs, by_rule, description
from tilewright.tune.gpu_rule import cut_ways
from tilewright.tune.gpu_sums import Pair, parted
from tilewright.tune.interrupt import interruptible
from tilewright.tune.known import COMPLETE

_MOST = 16  # candidates of one task
_FROM_TEMPLATES = 4  # of them, those of our own templates
_FROM_SKETCHES = 2  # of sketches, where there is no template
# Until a candidate that is being prepared counts as hanging: a library may search for long the first time, and the
# oracle may take its time. How long a run may take is said with it.
_ANSWER_SECONDS = 60.0
_MEMORY = 1 << 46  # bytes of address space, of which a card's driver takes much
_AHEAD = 6  # tasks whose kernels are compiled while one is raced
_VENDOR_FLOPS, _VENDOR_BYTES, _VENDOR_START = 6e14, 3.5e12, 3e-6  # what a library reaches, roughly
_HOPELESS = 1.6  # times that, at which one config of a template is enough
_MOST_REHEARSED = 12  # winners that are held against the rule's choice inside the models
_TURNS = 9
_GAIN = 0.99  # of the rule's choice, that another must take at most to replace it
_RANKED, _DRAWN = 6, 2  # candidates of a further round: the best expected, and some at random
_PATIENCE = 2  # further rounds in a row that gain nothing


# The models with these ways, ready: the seconds of one run of all of them. DeviceError where they find no room.
Models = Callable[[Mapping[str, Way]], Callable[[], float]]


def _share(one: Callable[[], float], other: Callable[[], float]) -> float:
    """What one takes of the other's time, by turns."""
    return statistics.median(one() / other() for _ in range(_TURNS))


@dataclass
class GpuTuner:
    """Races the ways of tasks in a process of its own; another one is ready to take its place. What is known already is
    not measured again. `gpu_seconds`: for how long the card was asked to race; `replaced`: of each process that was
    lost, the seconds until another one went on. `models`: all that is tuned, as it would run; None: nobody runs it.
    `pairs`: of its tasks. `objective`: a model that is fast enough gets no more of the budget; `each_model`: the
    seconds of each with these ways. `clock`: by which the budget ends."""

    machine: GpuMachine
    ordinal: int
    numerics: str
    libraries: frozenset[str]
    tuning: Tuning
    trace: Trace
    serve: str = "tilewright.measure.gpu_ways:serve"
    models: Models | None = None
    pairs: Pairs | None = None
    objective: Objective | None = None
    each_model: Callable[[Mapping[str, Way]], Sequence[float]] | None = None
    clock: Callable[[], float] = time.monotonic
    trials: int = 0
    gpu_seconds: float = 0.0
    replaced: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._child, self._spare = (Child(self.serve, _MEMORY) for _ in range(2))
        self._begun = self.clock()

    def tune(self, tasks: Mapping[str, tuple[Task, int]]) -> dict[str, Way]:
        """The heaviest first; what the budget does not reach is chosen by the rule. So is what Ctrl-C cuts short."""
        self._begun = self.clock()
        end = self._begun + self.tuning.seconds
        rule = by_rule({key: task for key, (task, _) in tasks.items()}, self.memory)
        chosen = dict(rule)
        path: Path | None = self.tuning.db
        with (
            Database.open(path) as database,
            ThreadPoolExecutor(os.cpu_count() or 1) as pool,
            interruptible(),
        ):
            unknown = self._begin(database, tasks, chosen)
            why = "exhausted" if unknown else "known"
            if unknown:  # they import what they need while kernels are compiled
                self._child.start()
                self._spare.start()
            tried = {key: rule[key] for key in unknown}
            try:
                why = self._race_all(database, tasks, unknown, rule, chosen, pool, end) or why
                pairs = self._pairs_of(chosen)
                raced = {} if why == "met" else self._raced_pairs(database, pairs, pool, end)
                self._close()
                self._join(database, pairs, raced, chosen, end)
                self._take_back(database, tasks, tried, chosen, pairs, end)
            except KeyboardInterrupt:
                why = "interrupted"
                self._join(database, self._pairs_of(chosen), {}, chosen, end)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self._close()
                self.trace.mark("tune.end", why=why)
        return chosen

    def _begin(
        self, database: Database, tasks: Mapping[str, tuple[Task, int]], chosen: dict[str, Way]
    ) -> list[str]:
        """Takes what is known; the tasks that are left, the heaviest first."""
        unknown, told = [], []
        for key, (task, count) in tasks.items():
            decision = database.decision(self._key(task))
            known = self.memory.way(task, decision)
            if known is not None:
                chosen[key] = known
            enough = self.tuning.effort != "full" or (decision is not None and decision.effort == COMPLETE)
            is_known = known is not None and enough
            if not is_known:
                unknown.append(key)
            seconds = _weight(task, 1) if known is None or decision is None else decision.seconds
            told.append(
                {"key": key, "label": task.label, "calls": count, "seconds": seconds, "known": is_known}
            )
        self.trace.mark("tune.begin", budget=self.tuning.seconds, effort=self.tuning.effort, tasks=told)
        return sorted(unknown, key=lambda key: -_weight(*tasks[key]))

    def _race_all(
        self,
        database: Database,
        tasks: Mapping[str, tuple[Task, int]],
        unknown: Sequence[str],
        rule: Mapping[str, Way],
        chosen: dict[str, Way],
        pool: ThreadPoolExecutor,
        end: float,
    ) -> str:
        """Why it ended, if not because all of them were raced."""
        left = deque(unknown)
        ready: deque[tuple[str, list[Way], list[Future[None]]]] = deque()
        wanted = self._wanted(tasks, chosen) if left else set()
        while left or ready:
            if self.clock() >= end:
                return "budget"
            while left and len(ready) < _AHEAD:
                key = left.popleft()
                if key in wanted:
                    ways = self._candidates(tasks[key][0], chosen[key], rule[key])
                    ready.append((key, ways, [pool.submit(self._built, way) for way in ways]))
            if not ready:
                break
            key, ways, builds = ready.popleft()
            if key not in wanted:
                for build in builds:
                    build.cancel()
            elif len(ways) == 1:
                chosen[key] = replace(chosen[key], origin=Origin("only"))
            elif self._are_built(builds, end):
                before = chosen[key].config
                chosen[key] = self._round(database, key, tasks[key][0], ways, pool, end) or chosen[key]
                if chosen[key].config != before:
                    wanted = self._wanted(tasks, chosen)
        return "" if wanted or not unknown else "met"

    def _wanted(self, tasks: Mapping[str, tuple[Task, int]], chosen: Mapping[str, Way]) -> set[str]:
        """The tasks of the models that are not fast enough yet: these are run to see."""
        goals = () if self.objective is None else self.objective.goals
        if self.each_model is None or all(goal.latency is None for goal in goals):
            return set(tasks)
        try:
            taken = self.each_model(chosen)
        except DeviceError:  # no memory for them
            return set(tasks)
        late = [
            goal
            for goal, seconds in zip(goals, taken, strict=True)
            if goal.latency is None or seconds > goal.latency
        ]
        return {key for goal in late for key in goal.calls}

    def _round(
        self,
        database: Database,
        key: str,
        task: Task,
        ways: Sequence[Way],
        pool: ThreadPoolExecutor,
        end: float,
    ) -> Way | None:
        """The fastest of these, with effort "full" of others too; None where all failed."""
        with self.trace.span("tune.round", task=key, label=task.label) as span:
            trials, failures = self.trials, self.failures.copy()
            found = self._raced(database, task, ways, end)
            if found is not None and self.tuning.effort == "full":
                found = self._further(database, task, found, {way.config for way in ways}, pool, end)
            decision = database.decision(self._key(task))
            if decision is not None:
                span.note(
                    best=decision.seconds,
                    before=decision.default_seconds or decision.seconds,
                    trials=self.trials - trials,
                    gain=0.0,
                    done=True,
                    failures=dict(self.failures - failures),
                )
        return found

    def _further(
        self,
        database: Database,
        task: Task,
        best: Way,
        tried: set[Config],
        pool: ThreadPoolExecutor,
        end: float,
    ) -> Way:
        """More configs of templates and sketches: those that are expected to be the fastest, and some that the seed
        draws, until two rounds in a row have gained less than 1%."""
        work = GpuWork(task, rated(self.machine), self.numerics)
        left = [
            each.config
            for each in cost.rank(work, templates=(*TEMPLATES, *SKETCHES))
            if each.config not in tried
        ]
        rng = Random(f"{self.tuning.seed} {task.key}")
        limit, idle = self.tuning.preset.trials - len(tried), 0
        while left and limit > 0 and idle < _PATIENCE:
            drawn = [left.pop(0) for _ in range(min(len(left), _RANKED))]
            drawn += [left.pop(rng.randrange(len(left))) for _ in range(min(len(left), _DRAWN))]
            ways = [best, *(ours(task, config) for config in drawn)]
            since = database.decision(self._key(task))
            if not self._are_built([pool.submit(self._built, way) for way in ways[1:]], end):
                return best
            found = self._raced(database, task, ways, end, since)
            if self.clock() >= end or found is None:
                return best
            idle = idle + 1 if found.config == best.config else 0
            best, limit = found, limit - len(drawn)
        decision, now = database.decision(self._key(task)), time.time()
        if decision is not None:
            database.decide(msgspec.structs.replace(decision, effort=COMPLETE, when=now))
        return replace(best, origin=Origin("tuned", now))

    def _close(self) -> None:
        self._child.close()
        self._spare.close()

    def _take_back(
        self,
        database: Database,
        tasks: Mapping[str, tuple[Task, int]],
        rule: Mapping[str, Way],
        chosen: dict[str, Way],
        pairs: Mapping[str, Pair],
        end: float,
    ) -> None:
        """What is faster alone need not be so between its neighbours: of each winner, the heaviest first, the models
        with it take turns with the models with the rule's choice in its place, joined with nothing."""
        winners = [key for key, way in rule.items() if chosen[key].config != way.config]
        if self.models is None or not winners or self.clock() > end:
            return
        with self.trace.span("rehearse", winners=len(winners)) as span:
            taken_back, began = 0, time.monotonic()
            try:
                standing = self.models(chosen)
                for key in winners[:_MOST_REHEARSED]:
                    if self.clock() > end:
                        break
                    joint = [each for each, pair in pairs.items() if pair.product == key and each in chosen]
                    others = {each: way for each, way in chosen.items() if each not in joint}
                    before = self.models({**others, key: rule[key]})
                    if _share(before, standing) > _GAIN:
                        continue
                    for each in joint:
                        del chosen[each]
                        self._part(database, pairs[each])
                    now = time.time()
                    standing, taken_back = before, taken_back + 1
                    chosen[key] = replace(rule[key], origin=Origin("tuned", now))
                    decision = database.decision(self._key(tasks[key][0]))
                    if decision is not None:
                        code = code_of(rule[key], self.machine, self.numerics)
                        changes = {"config": rule[key].config, "code": code, "when": now}
                        database.decide(msgspec.structs.replace(decision, **changes))
            except DeviceError:  # no memory for two of them: then what won alone stays
                span.note(stopped=True)
            self.gpu_seconds += time.monotonic() - began
            span.note(taken_back=taken_back)

    # -- pairs of tasks -----------------------------------------------------------------------------------------------

    def _pairs_of(self, ways: Mapping[str, Way]) -> Mapping[str, Pair]:
        return {} if self.pairs is None else self.pairs(ways)

    def _raced_pairs(
        self, database: Database, pairs: Mapping[str, Pair], pool: ThreadPoolExecutor, end: float
    ) -> dict[str, Way | None]:
        """Of each pair of which nothing is remembered, the fastest way to compute it as one; None where all failed."""
        best: dict[str, Way | None] = {}
        for key, pair in pairs.items():
            if self._is_settled(database, pair):
                continue
            if self.clock() >= end:
                break
            self._child.start()
            self._spare.start()
            if not self._are_built([pool.submit(self._built, way) for way in pair.ways], end):
                break
            best[key] = self._raced(database, pair.task, pair.ways, end)
        return best

    def _is_settled(self, database: Database, pair: Pair) -> bool:
        """Whether it is remembered that its tasks are better apart, or how they are joined."""
        return self.memory.is_settled(pair, database.decision(self._key(pair.task)))

    def _part(self, database: Database, pair: Pair) -> None:
        """Remember that its tasks are better apart."""
        decision = database.decision(self._key(pair.task))
        if decision is not None:
            config = parted(decision.config)
            database.decide(msgspec.structs.replace(decision, config=config, when=time.time()))

    def _join(
        self,
        database: Database,
        pairs: Mapping[str, Pair],
        raced: Mapping[str, Way | None],
        chosen: dict[str, Way],
        end: float,
    ) -> None:
        """Which pairs are joined: as is remembered; those that were raced now as the analytical model expects, unless
        the models are faster otherwise; all others as it expects."""
        for key, pair in pairs.items():
            if key not in raced:
                known = self._remembered(database, pair.task)
                if known is not None:
                    chosen[key] = known
                elif pair.pays and not self._is_settled(database, pair):
                    chosen[key] = pair.ways[0]
        left = {key: way for key, way in raced.items() if way is not None}
        if left and self.models is not None and self.clock() < end:
            with self.trace.span("join", pairs=len(left)) as span:
                began = time.monotonic()
                try:
                    standing = self.models(chosen)
                    while left and self.clock() < end:
                        key, way = next(iter(left.items()))
                        one = self.models({**chosen, key: way})
                        if _share(one, standing) <= (1 / _GAIN if pairs[key].pays else _GAIN):
                            standing, chosen[key] = one, way
                        else:
                            self._part(database, pairs[key])
                        del left[key]
                except DeviceError:  # no memory for two of them
                    span.note(stopped=True)
                self.gpu_seconds += time.monotonic() - began
        for key, way in left.items():
            if pairs[key].pays:
                chosen[key] = way
            else:
                self._part(database, pairs[key])

    # -- one task -----------------------------------------------------------------------------------------------------

    def _candidates(self, task: Task, first: Way, rule: Way) -> list[Way]:
        """What is chosen so far and the rule's choice, then those of templates and sketches, then the libraries'
        others."""
        found = {first.config: first, rule.config: rule}
        rates = rated(self.machine)
        work = GpuWork(task, rates, self.numerics)
        ranked = cost.rank(work, most=_FROM_TEMPLATES)
        if ranked and found and ranked[0].seconds > _HOPELESS * _vendor_seconds(task):
            ranked = ranked[:1]
        sketched = cost.rank(work, most=1 if ranked else _FROM_SKETCHES, templates=SKETCHES)
        if ranked and sketched and sketched[0].seconds > _HOPELESS * ranked[0].seconds:
            sketched = []
        ranked += sketched
        ways = candidate_ways(task, self.machine, self.numerics, self.libraries)
        pairs = [way for _, way in cut_ways(task, rates, self.numerics)]
        for way in (*(ours(task, each.config) for each in ranked), *pairs, *ways):
            found.setdefault(way.config, way)
        return list(found.values())[:_MOST]

    def _built(self, way: Way) -> None:
        """Machine code into the cache, where the process that measures finds it. What fails here fails there too."""
        cache = ObjectCache.default()
        for piece in way.pieces:
            if piece.call is None:
                try:
                    build_piece(piece, self.machine, self.numerics, cache)
                except TilewrightError:
                    return

    def _are_built(self, builds: Sequence[Future[None]], end: float) -> bool:
        """Whether all of them are before the budget ends."""
        left = end - self.clock()
        wait(builds, timeout=None if math.isinf(left) else max(0.0, left))
        if self.clock() >= end:
            return False
        for build in builds:
            build.result()
        return True

    def _raced(
        self,
        database: Database,
        task: Task,
        ways: Sequence[Way],
        end: float,
        since: Decision | None = None,
    ) -> Way | None:
        """The fastest, None where all failed; where the budget ends before that is known, the first that did not.
        `since`: the decision for the first of them, which others have lost against before."""
        with self.trace.span("race", label=task.label, ways=len(ways)):
            results = self._race(task, [way.config for way in ways], end)
        key = self._key(task)
        records = []
        for way in ways:
            if way.config not in results:
                continue
            result = results[way.config]
            tried = isinstance(result, Tried)
            records.append(
                Record(
                    key=key,
                    label=task.label,
                    text=task.text,
                    constants=tuple(sorted(task.constants)),
                    machine=description(self.machine),
                    config=way.config,
                    times=result.times if isinstance(result, Tried) else (),
                    error=result.error if isinstance(result, Tried) else None,
                    failure="" if tried else _failed(result).kind,
                    message="" if tried else _failed(result).message,
                )
            )
        database.add(records)
        self.trials += len(records)
        self.failures.update(record.failure for record in records if record.failure)
        if len(records) < len(ways):
            return next(way for way in ways if not isinstance(results.get(way.config), Refused))
        times = {
            config: statistics.median(result.times)
            for config, result in results.items()
            if isinstance(result, Tried)
        }
        if not times:
            return None
        first = ways[0]
        best = min(ways, key=lambda way: times.get(way.config, float("inf")))
        default = times.get(first.config)
        if default is not None and times[best.config] > _GAIN * default:
            best = first
        decision = Decision(
            key=key,
            config=best.config,
            seconds=times[best.config],
            effort=self.tuning.effort,
            budget=self.tuning.seconds if math.isfinite(self.tuning.seconds) else self.clock() - self._begun,
            trials=len(ways) if since is None else since.trials + len(ways) - 1,
            default_seconds=default if since is None else since.default_seconds,
            code=code_of(best, self.machine, self.numerics),
        )
        database.decide(decision)
        return replace(best, origin=Origin("tuned", decision.when))

    def _race(self, task: Task, configs: list[Config], end: float) -> dict[Config, Tried | Refused]:
        """A time or a failure of each; of some, where the budget ends. After a death, the rest are asked for again, of
        another process."""
        results: dict[Config, Tried | Refused] = {}
        left = list(configs)
        lost = None  # when the last process was
        while left:
            question = Question(
                task.text,
                tuple(sorted(task.constants)),
                self.machine,
                self.numerics,
                tuple(sorted(self.libraries)),
                self.ordinal,
                tuple(left),
            )
            self._child.send(msgspec.msgpack.encode(question))
            guilty, patience, began = None, _ANSWER_SECONDS, None
            try:
                while True:
                    message = self._child.receive(max(0.0, min(patience, end - self.clock())))
                    answer = msgspec.msgpack.decode(message, type=Answer)
                    began = began or time.monotonic()
                    if lost is not None:
                        self.replaced.append(began - lost)
                        lost = None
                    if isinstance(answer, Finished):
                        return results
                    if isinstance(answer, Trying | Running):
                        guilty = answer.number
                        patience = answer.seconds if isinstance(answer, Running) else _ANSWER_SECONDS
                        continue
                    results[left[answer.number]] = answer
                    if isinstance(answer, Refused) and answer.failed.astray:
                        break
            except Dead as death:
                if self.clock() >= end:
                    return results
                if guilty is None:
                    raise MeasurementError(f"a process to measure in does not start: {death}") from None
                results[left[guilty]] = Refused(guilty, death.failed)
            finally:
                self.gpu_seconds += 0.0 if began is None else time.monotonic() - began
            lost = time.monotonic()
            left = [config for config in left if config not in results]
            self._replace()
        return results

    def _replace(self) -> None:
        """The other process takes over at once. The lost one is gone by then, and starts again as its spare."""
        self._child.close()
        self._child, self._spare = self._spare, self._child
        self._spare.start()

    # -- what is remembered -------------------------------------------------------------------------------------------

    @property
    def memory(self) -> GpuMemory:
        return GpuMemory(self.machine, self.numerics, self.libraries)

    def _remembered(self, database: Database, task: Task) -> Way | None:
        """The decision for a task, where it still holds."""
        return self.memory.way(task, database.decision(self._key(task)))

    def _key(self, task: Task) -> Key:
        return self.memory.key(task)


def _failed(result: Tried | Refused) -> Failed:
    assert isinstance(result, Refused)
    return result.failed


def _vendor_seconds(task: Task) -> float:
    return max(task.flops / _VENDOR_FLOPS, task.bytes / _VENDOR_BYTES) + _VENDOR_START


def _weight(task: Task, count: int) -> float:
    return count * (task.flops / 5e14 + task.bytes / 3e12 + 2e-6)
