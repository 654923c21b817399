"""The driver of a pool: gives builds and trials to nodes, again where one fails, and counts each trial once.

    build    any builder, the least busy first
    trial    a timer of the job's machine; its answer is kept there until the driver has it on disk (`acknowledge`)
    again    a node that dies, hangs or is in trouble: the work goes elsewhere, at most twice; what an abandoned
             attempt still answers is dropped. Work that only waited there for its turn was not given yet
    aside    a worker that fails or answers nonsense is left alone for a while, longer each time; one whose reference
             kernel drifts or disagrees with those of its fellows gets no more work, with a reason

`PoolRunner` is what the tuner asks (`measure.measuring.Measuring`), as it asks a local `Runner`.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tilewright.errors import MeasurementError
from tilewright.measure.failed import Failed
from tilewright.measure.jobs import Job, build_request
from tilewright.measure.kernel_build import BuildKernel
from tilewright.measure.kernel_job import KernelJob
from tilewright.measure.measurement import Measurement
from tilewright.measure.pool.attempts import REPLY_SECONDS, Attempt, OrderedTrial, Overdue, Work
from tilewright.measure.pool.racing import comparable
from tilewright.measure.pool.references import DRIFT, ratio_to
from tilewright.measure.pool.waiting import Waiting
from tilewright.measure.pool.wire import (
    BuildAnswer,
    BuildRequest,
    Candidate,
    PoolJob,
    RaceAnswer,
    RaceRequest,
    TrialAnswer,
    TrialRequest,
    encode,
    impossible,
    pool_job,
    request_name,
)
from tilewright.measure.pool.workers import LostObject, Worker, Workers
from tilewright.space.registration import registering_modules
from tilewright.space.space import Config

GIVEN = 3  # times a work item is given out at most: once, and again at most twice
_BUILD_SECONDS, _TRIAL_SECONDS = 120.0, 180.0  # of work on one, after which a worker is taken to hang
_TICK = 0.05
# Between two looks for workers: while some are expected, and otherwise.
_NEWS_SECONDS, _REFRESH_SECONDS = 0.2, 5.0
_DISPUTED = ("wrong", "crash")  # failures that a bad device would cause too: two devices have to agree
_AGREEING = 2  # fellows that a device is compared with, if there are so many
_SECOND_OPINION = "second opinion"
_DRAINING = "draining"
_KEPT_CODE = 512
_KEPT_JOBS = 64
_AHEAD = 2
_FOR_RACES = 0.1  # share of a budget of device time that trials leave to races


@dataclass
class DeviceUse:
    """The use of one device in a run: the number of trials, and the seconds it was busy with trials and races."""

    trials: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Sent:
    """A job as it is sent, and a Ray reference to the tensors of a kernel's launch."""

    job: PoolJob
    data: Any


@dataclass(frozen=True)
class BuiltCode:
    """The object code of a config: sealed, in the pool's object store."""

    reference: Any
    seal: bytes


_Key = tuple[Job, Config]


class PoolRunner:
    """Measures configs on the devices of a pool. `user`: devices are shared fairly among users. `seed`: of the
    validation inputs. `note`: called with problems of nodes. `patience`: seconds of work on a trial after which its
    timer is considered hanging; `reply`: seconds for a worker to report what it works on. `budget`: seconds of the
    devices' time in total; afterwards nothing more is measured. `is_over`: whether the run ends for another reason."""

    def __init__(
        self,
        workers: Workers,
        threads: int,
        *,
        user: str,
        seed: int,
        note: Callable[[str], None] | None = None,
        patience: float = _TRIAL_SECONDS,
        reply: float = REPLY_SECONDS,
        budget: float | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.patience, self.budget, self._is_over = patience, budget, is_over
        self.workers, self.threads, self.user, self.seed = workers, threads, user, seed
        self._note = note or (lambda message: None)
        self._waiting = Waiting()
        self._running: dict[Any, Attempt] = {}
        self._overdue = Overdue(workers, reply)
        self._last: dict[str, Attempt] = {}  # by worker: what it was given last
        self._sent: OrderedDict[Job, _Sent] = OrderedDict()
        self._code: dict[_Key, BuiltCode | Measurement] = {}
        self._ordered: dict[_Key, list[Callable[[], None]]] = {}  # builds, and what is called when they end
        self._trials: dict[_Key, OrderedTrial] = {}  # that were ordered, and not returned yet
        self._answered_by: dict[_Key, tuple[str, Worker]] = {}  # not acknowledged yet: trial, timer
        self._refreshed = time.monotonic()
        self._slower: set[str] = set()  # devices that became slower and have no fellow
        self.given_again = 0
        self.use: dict[str, DeviceUse] = {}  # by device
        self._used_seconds = 0.0  # by all of them

    def __enter__(self) -> PoolRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget unfinished work. Nodes finish the requests that they have started."""
        self._waiting.clear()
        self._running.clear()
        self._ordered.clear()
        self._trials.clear()

    @property
    def ahead(self) -> int:
        return _AHEAD

    @property
    def devices(self) -> int:
        """How many devices time at once."""
        return len(self.workers.timers())

    @property
    def spent(self) -> bool:
        """Whether nothing is left of the budget for trials, or the run is over."""
        return self._is_spent(1.0 - _FOR_RACES)

    def _is_spent(self, share: float = 1.0) -> bool:
        if self._is_over():
            return True
        return self.budget is not None and self._used_seconds >= share * self.budget

    # -- what the tuner asks --------------------------------------------------------------------------------------

    def expect(self, job: Job) -> None:
        """Prepare for jobs. Timers create a job's inputs at its first trial."""

    def prepare(self, job: Job, configs: Sequence[Config], *, best: float | None = None) -> None:
        """Measure configs as soon as they are built, while others are waited for."""
        for config in configs:
            self._order_trial((job, config), best)
        self._dispatch()

    def prepared(self, job: Job, configs: Sequence[Config]) -> list[Measurement]:
        """The prepared configs that have been measured; the others are forgotten."""
        if self._running:
            self._take_answers()
        return self.measure(job, configs, deadline=0.0)

    def build(self, job: Job, configs: Sequence[Config], deadline: float | None = None) -> None:
        """Wait until these are built, or every builder has failed."""
        unbuilt = set()
        for config in configs:
            self._order_build(job, config)
            if (ordered := self._ordered.get((job, config))) is not None:
                unbuilt.add(config)
                ordered.append(partial(unbuilt.discard, config))
        self._work_off(lambda: not unbuilt, deadline)

    def measure(
        self,
        job: Job,
        configs: Sequence[Config],
        *,
        best: float | None = None,
        deadline: float | None = None,
    ) -> list[Measurement]:
        """Measure configs as `Runner.measure` does. A trial that no node could do is missing from the result."""
        trials = {config: self._order_trial((job, config), best) for config in configs}
        unended = {config for config, trial in trials.items() if not trial.has_ended}
        for config in unended:
            trials[config].when_ended.append(partial(unended.discard, config))
        self._work_off(lambda: not unended, deadline, lambda: self.spent)
        for config in trials:
            del self._trials[job, config]
        if unended:
            self._waiting.forget({trial.work for trial in trials.values() if trial.work is not None})
        self._forget_code()
        found = (trials[config].found for config in configs)
        return [each for each in found if each is not None]

    def race(
        self, job: Job, configs: Sequence[Config], seconds: float, *, deadline: float | None = None
    ) -> list[list[float]]:
        """Time configs interleaved, each on one device. The first config runs on all of these devices, which makes
        their times comparable. What is not timed before `deadline` has no times."""
        self.build(job, configs, deadline)
        running = [config for config in configs if isinstance(self._code.get((job, config)), BuiltCode)]
        if not running:
            return [[] for _ in configs]
        devices = max(1, len(self.workers.timers(self._as_sent(job).job.described)))
        anchor, others = running[0], running[1:]
        groups = [[anchor, *others[start::devices]] for start in range(min(devices, max(1, len(others))))]
        raced: list[Mapping[Config, tuple[float, ...]]] = []
        unbuilt = [(group, 1) for group in groups]  # and how often it was built
        ordered: set[Work] = set()

        def rebuild(group: list[Config], built: int) -> None:
            if built == GIVEN:
                raced.append({})
                return
            for config in group:
                self._rebuild(job, config)
            unbuilt.append((group, built + 1))

        def is_done() -> bool:
            for group, built in list(unbuilt):
                if any((job, config) in self._ordered for config in group):
                    continue
                unbuilt.remove((group, built))
                able = [config for config in group if isinstance(self._code.get((job, config)), BuiltCode)]
                if not able:
                    raced.append({})
                    continue
                work = self._race(job, able, seconds * len(able) / len(running), raced)
                work.rebuild = partial(rebuild, able, built)
                ordered.add(work)
                self._waiting.add(work, first=True)  # before trials of later rounds
            return len(raced) == len(groups)

        self._work_off(is_done, deadline, self._is_spent)
        if len(raced) < len(groups):
            self._waiting.forget(ordered)
        times = comparable(raced, anchor)
        self._forget_code()
        return [times.get(config, []) for config in configs]

    def acknowledge(self, job: Job, measured: Sequence[Measurement]) -> None:
        """Tell the timers that these results are on disk, so that they need not keep them."""
        trials: dict[str, list[str]] = {}
        workers: dict[str, Worker] = {}
        for each in measured:
            answered = self._answered_by.pop((job, each.config), None)
            if answered is not None:
                trial, worker = answered
                workers[worker.name] = worker
                trials.setdefault(worker.name, []).append(trial)
        for name, worker in workers.items():
            worker.tell("acknowledge", trials[name])

    # -- kinds of work --------------------------------------------------------------------------------------------

    def _order_build(self, job: Job, config: Config) -> None:
        key = (job, config)
        if key in self._code or key in self._ordered:
            return
        self._ordered[key] = []
        modules = tuple(registering_modules())
        asked = build_request(job, config, modules)
        if isinstance(asked, Failed):  # the user's function of the grid fails here
            del self._ordered[key]
            self._code[key] = Measurement(config, failure=asked.kind, message=asked.message)
            return
        grid = asked.grid if isinstance(asked, BuildKernel) else (1, 1, 1)
        sent = self._as_sent(job).job
        name = request_name("build", sent, config, self.seed)
        request = encode(BuildRequest(name, self.user, sent, config, modules, grid))
        code: list[Any] = []

        def begin(worker: Worker) -> Any:
            answer, made = worker.build(request)
            code[:] = [made]
            return answer

        def done(worker: Worker, answer: bytes) -> str:
            built = msgspec.msgpack.decode(answer, type=BuildAnswer)
            if built.trouble:
                return built.trouble
            if built.failure:
                self._code[key] = Measurement(config, failure=built.failure, message=built.message)
            else:
                self._code[key] = BuiltCode(code[0], built.seal)
            end()
            return ""

        def end() -> None:
            for call in self._ordered.pop(key, ()):
                call()

        self._waiting.add(Work(name, begin, done, end, None, _BUILD_SECONDS))

    def _rebuild(self, job: Job, config: Config) -> None:
        """Its object code is lost."""
        self._code.pop((job, config), None)
        self._order_build(job, config)

    def _order_trial(self, key: _Key, best: float | None) -> OrderedTrial:
        if key not in self._trials:
            self._trials[key] = trial = OrderedTrial()
            self._build_for(key, trial, best)
        return self._trials[key]

    def _build_for(self, key: _Key, trial: OrderedTrial, best: float | None) -> None:
        self._order_build(*key)
        begin = partial(self._begin_trial, key, trial, best)
        if (ordered := self._ordered.get(key)) is not None:
            ordered.append(begin)
        else:
            begin()

    def _begin_trial(self, key: _Key, trial: OrderedTrial, best: float | None) -> None:
        if self._trials.get(key) is not trial:
            return  # it is not wanted any more
        code = self._code.get(key)
        if not isinstance(code, BuiltCode):
            trial.end(code)  # that it does not compile; None: no builder could build it
            return

        def rebuild() -> None:
            trial.builds += 1
            if trial.builds < GIVEN:
                self._code.pop(key, None)
                self._build_for(key, trial, best)
            else:
                trial.end(None)

        trial.work = self._trial(*key, code, best, trial)
        trial.work.rebuild = rebuild
        self._waiting.add(trial.work)

    def _trial(
        self, job: Job, config: Config, code: BuiltCode, best: float | None, trial: OrderedTrial
    ) -> Work:
        sent = self._as_sent(job)
        name = request_name("trial", sent.job, config, self.seed)
        candidate = Candidate(config, code.seal)
        request = encode(TrialRequest(name, self.user, sent.job, candidate, self.seed, best))

        def begin(worker: Worker) -> Any:
            return worker.ask("trial", request, code.reference, sent.data)

        def done(worker: Worker, answer: bytes) -> str:
            reply = msgspec.msgpack.decode(answer, type=TrialAnswer)
            if reply.trouble:
                return reply.trouble
            if reply.trial != name or reply.measurement is None or reply.measurement.config != config:
                return "it answered another question"
            measured = reply.measurement
            if not measured.failure and not measured.times:
                return "it answered neither a time nor a failure"
            if wrong := impossible(measured.times, measured.build_seconds, reply.reference, reply.busy):
                return wrong
            self._used(worker, 1, reply.busy)
            if self._changed_speed(worker, reply.reference) and work.doubted is None:
                work.doubted = worker
                return second_opinion(worker)
            if measured.failure in _DISPUTED and work.failed_on is None and self._fellows(worker):
                work.failed_on, work.failure = worker, measured.failure
                return second_opinion(worker)
            if work.failed_on is not None and not measured.failure:
                reason = f"it failed a candidate ({work.failure}) that is right on {worker.name}"
                self._set_aside(work.failed_on, reason, for_good=work.failure == "wrong")
            self._answered_by[job, config] = name, worker
            trial.end(measured)
            return ""

        def second_opinion(worker: Worker) -> str:
            worker.tell("acknowledge", [name])  # it would give this answer again
            return _SECOND_OPINION

        work = Work(name, begin, done, lambda: trial.end(None), sent.job.described, self.patience)
        return work

    def _race(
        self,
        job: Job,
        configs: Sequence[Config],
        seconds: float,
        raced: list[Mapping[Config, tuple[float, ...]]],
    ) -> Work:
        codes = [self._code[job, config] for config in configs]
        candidates = tuple(Candidate(c, code.seal) for c, code in zip(configs, codes, strict=True))  # type: ignore[union-attr]
        sent = self._as_sent(job)
        name = request_name("race", sent.job, tuple(configs), self.seed)
        request = encode(RaceRequest(name, self.user, sent.job, candidates, self.seed, seconds))

        def begin(worker: Worker) -> Any:
            references = [code.reference for code in codes]  # type: ignore[union-attr]
            return worker.ask("race", request, sent.data, *references)

        def done(worker: Worker, answer: bytes) -> str:
            reply = msgspec.msgpack.decode(answer, type=RaceAnswer)
            if reply.trouble:
                return reply.trouble
            if len(reply.times) != len(configs):
                return "it answered another question"
            if wrong := impossible([each for times in reply.times for each in times], reply.busy):
                return wrong
            self._used(worker, 0, reply.busy)
            raced.append(dict(zip(configs, reply.times, strict=True)))
            return ""

        give_up = partial(raced.append, dict.fromkeys(configs, ()))
        return Work(name, begin, done, give_up, sent.job.described, self.patience + seconds)

    def _as_sent(self, job: Job) -> _Sent:
        """The job as it is sent. The tensors of a launch are put into the pool's object store only once."""
        found = self._sent.pop(job, None)
        if found is None:
            data = Path(job.spec.data).read_bytes() if isinstance(job, KernelJob) else b""
            found = _Sent(pool_job(job, data), self.workers.stored(data) if data else data)
        self._sent[job] = found
        while len(self._sent) > _KEPT_JOBS:
            self._sent.popitem(last=False)
        return found

    def _used(self, worker: Worker, trials: int, seconds: float) -> None:
        use = self.use.setdefault(worker.device, DeviceUse())
        use.trials += trials
        use.seconds += seconds
        self._used_seconds += seconds

    # -- giving work out ------------------------------------------------------------------------------------------

    def _work_off(
        self,
        is_done: Callable[[], bool],
        deadline: float | None,
        is_spent: Callable[[], bool] = lambda: False,
    ) -> None:
        """Give work out and take answers, until `is_done` or, with a `deadline`, until then or until `is_spent`."""
        while not is_done():
            if deadline is not None and (is_spent() or time.monotonic() > deadline):
                return
            self._dispatch()
            if not self._running and self._waiting:
                self._stuck()
            self._take_answers()
            if time.monotonic() - self._refreshed > (
                _NEWS_SECONDS if self.workers.has_news else _REFRESH_SECONDS
            ):
                self._refresh()

    def _dispatch(self) -> None:
        """Give waiting work to workers that have room."""
        for work, worker in self._waiting.given(self._able):
            last = self._last.get(worker.name)
            previous = None if last is None or last.has_ended else last
            now = time.monotonic()
            attempt = Attempt(work, worker, now, now + work.seconds, previous)
            self._last[worker.name] = attempt
            self._running[work.begin(worker)] = attempt

    def _able(self, timers: str | None) -> list[Worker]:
        return self.workers.builders() if timers is None else self.workers.timers(timers)

    def _answers(self) -> Iterable[tuple[Attempt, Any]]:
        """Attempts that ended, each with its answer or the exception that took its place."""
        ready = self.workers.wait([*self._running, *self._overdue.references], _TICK)
        hanging = dict(self._overdue.check(self._running, set(ready)))
        for reference in ready:
            if (attempt := self._running.pop(reference, None)) is not None:
                yield attempt, self.workers.answer(reference)
        for reference, error in hanging.items():
            yield self._running.pop(reference), error

    def _take_answers(self) -> None:
        for attempt, answer in self._answers():
            self._take(attempt, answer)

    def _take(self, attempt: Attempt, answer: Any) -> None:
        worker, work = attempt.worker, attempt.work
        self._waiting.load[worker.name] -= 1
        if isinstance(answer, LostObject) and work.rebuild is not None:
            attempt.is_answered = attempt.has_ended = True
            if work.is_wanted:
                self.given_again += 1
                work.rebuild()
            return
        attempt.is_answered, attempt.has_ended = not isinstance(answer, BaseException), True
        if isinstance(answer, BaseException):
            trouble = f"{type(answer).__name__}: {answer}".splitlines()[0]
        else:
            try:
                trouble = work.done(worker, answer)
            except (msgspec.DecodeError, msgspec.ValidationError, TypeError) as error:
                trouble = f"it answered nonsense: {error}"
        if not trouble:
            self.workers.forgive(worker)
            return
        if trouble == _SECOND_OPINION:
            self._waiting.add(work)
            return
        if trouble == _DRAINING:
            self._set_aside(worker, "it is being drained", for_good=True)
        else:
            if isinstance(answer, TimeoutError):
                self.workers.restart(worker)
            if not attempt.was_waiting:
                work.lost.append(worker.name)
            self._set_aside(worker, trouble, for_good=False)
        if len(work.lost) < GIVEN:
            self.given_again += work.is_wanted
            self._waiting.add(work)
        else:
            self._note(f"given up after {GIVEN} attempts: {trouble}")
            work.give_up()

    def _stuck(self) -> None:
        """No known worker can do the waiting work: refresh the list of workers. Raises MeasurementError if none can."""
        self._refresh()
        for kind in self._waiting.kinds:
            if self._able(kind):
                return
            if (pause := self.workers.next_back) is not None:
                time.sleep(min(pause, _REFRESH_SECONDS) + _TICK)
                return
            what = "builds" if kind is None else "times kernels for this device"
            aside = "; ".join(f"{name}: {reason}" for name, reason in self.workers.aside.items())
            raise MeasurementError(
                f"no node of the pool {what} any more" + (f" ({aside})" if aside else ""),
                remedy="look at `tilewright pool ls`, and let nodes join: tilewright pool join ADDRESS",
            )

    def _refresh(self) -> None:
        self._refreshed = time.monotonic()
        for name, reason in self.workers.refresh(0.0).items():
            self._note(f"{name} is not used: {reason}")
        while self.workers.warnings:
            self._note(self.workers.warnings.pop(0))

    # -- devices that cannot be trusted ---------------------------------------------------------------------------

    def _set_aside(self, worker: Worker, reason: str, *, for_good: bool = True) -> None:
        if worker.name not in self.workers.aside:
            self.workers.set_aside(worker, reason, for_good=for_good)
            self._note(f"{worker.name} on {worker.host} is set aside: {reason}")

    def _fellows(self, worker: Worker) -> list[Worker]:
        return [each for each in self.workers.timers(worker.machine) if each.name != worker.name]

    def _changed_speed(self, worker: Worker, reference: float) -> bool:
        """Compare a device's reference kernel with its first times, and with those of other devices of its label.
        Returns whether another device should measure this trial again. A device that became much slower than they are
        is set aside, and one that is much faster. The only one of its label, with none away, is used, with a note."""
        if not reference:
            return False
        seen, fellows = worker.references, self._fellows(worker)
        is_only = not fellows and not self.workers.are_away(worker.hello.label)
        seen.add(reference)
        others = [each.references.now for each in fellows if each.references.are_known]
        is_comparable = len(others) >= min(_AGREEING, len(fellows))
        ratio = ratio_to(others, seen.now) if others and is_comparable and seen.are_known else 0.0
        where, slower = f"{worker.name} on {worker.host}", f"it became {seen.change:.2f}x slower"
        if seen.change > DRIFT and (ratio or not others):
            reason = f"{slower}: its clock or its load changed"
            if not is_only:
                self._set_aside(worker, reason)
            elif worker.name not in self._slower:
                self._slower.add(worker.name)
                self._note(f"{where}: {reason}. No other device can do its work")
        elif ratio:
            self._set_aside(worker, f"its reference kernel takes {ratio:.2f}x the time of its fellows'")
        elif not 1.0 / DRIFT <= seen.change <= DRIFT and is_comparable:
            how = (
                f"it became {1 / seen.change:.2f}x faster"
                if seen.change < 1.0
                else f"like its fellows, {slower}"
            )
            self._note(f"{where}: {how} than at first")
            seen.begin_anew()
        expected = seen.usual or (statistics.median(others) if others and is_comparable else reference)
        is_off = not expected / DRIFT <= reference <= DRIFT * expected
        return not is_only and (is_off or worker.name in self.workers.aside)

    def _forget_code(self) -> None:
        for key in list(self._code)[:-_KEPT_CODE]:
            del self._code[key]
