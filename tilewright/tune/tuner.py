"""The tuning loop: rounds of measurements, each for the task with the most to gain, and a final comparison of
winners.

    take the decisions of the database; if all tasks are decided, measure nothing
    for every other task, learn from the measurements of earlier runs as if they were made now
    until the budget is spent or no more than 1% is expected:
        choose the task with the largest expected gain, and ask its search for a few configs
        build, check and time them, interleaved with the best so far; store the records; tell the search
    run the fastest configs of each task inside the models, interleaved with the unmeasured choice
        (`confirm_in_model.py`; alone, if no model can run), and store the decision

An interrupt ends the measuring: the best so far is returned, and the next run continues from there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from tilewright.db.database import Database
from tilewright.db.record import Decision
from tilewright.measure.measurement import Measurement
from tilewright.measure.measuring import Measuring
from tilewright.measure.runner import Runner
from tilewright.runtime.plan import Origin
from tilewright.space.space import Config
from tilewright.support.fingerprint import fingerprint
from tilewright.support.trace import Trace
from tilewright.tune.allocate import ALLOCATIONS, Goal, Objective, TaskStanding, next_task
from tilewright.tune.choose import Choice
from tilewright.tune.confirm_in_model import Models, comparison_seconds, confirm_in_model
from tilewright.tune.effort import CONVERGED, Tuning
from tilewright.tune.experience import PastRecords
from tilewright.tune.interrupt import Shield, interruptible
from tilewright.tune.known import COMPLETE, origin_of
from tilewright.tune.task_state import BETTER, TaskState
from tilewright.tune.tunable import Tunable

_HOPELESS = 3.0  # factor of the best time above which a config is left out of a comparison
_INTERLEAVED_SECONDS = 0.05  # for each config in a round's interleaved timing
_RACE_SECONDS = 0.4
_RACE_OVERHEAD = 0.6  # seconds, until it has been measured
_MAX_RESERVED = 0.3  # share of the budget kept for final comparisons
_NEAR = 1.1  # factor of the best time alone within which a config may be the best in a model
_BUILD_SECONDS = 0.2  # for a kernel, until some have been built
# Trials of prepared rounds for each of several devices: one runs, one is there, one is compiled.
_PER_DEVICE = 3
_MIN_ROUNDS = 3  # of a task, however many devices there are: a search learns between rounds
_CACHED_SECONDS = 0.03  # for a kernel that is in the cache from its trial


def tune(
    tunables: Mapping[str, tuple[Tunable, int]],
    tuning: Tuning,
    *,
    threads: int,
    trace: Trace,
    objective: Objective | None = None,
    runner: Callable[[int], Measuring] = Runner,
    models: Models | None = None,
    alone: frozenset[str] = frozenset(),
    timed: frozenset[str] = frozenset(),
) -> dict[str, Choice]:
    """Return a choice for each of `tunables`, by key, within the budget of `tuning`. Each tunable comes with the
    number of its calls.

    - `objective`: what to minimise, if not the time of one model that makes these calls.
    - `runner`: makes a runner with this many threads.
    - `models`: the models, for the confirmation of winners.
    - `alone`: keys that no model calls.
    - `timed`: keys that are measured even if they have only one candidate, and before the others.
    """
    calls = {key: count for key, (_, count) in tunables.items()}
    objective = objective or Objective((Goal(calls),))
    deadline = time.monotonic() + tuning.seconds
    with Database.open(tuning.db) as database, interruptible() as shield:
        some = {key: tunable for key, (tunable, _) in tunables.items()}
        run = _Run(
            some, calls, objective, tuning, threads, database, deadline, shield, trace, models, alone, timed
        )
        return run.choices(runner)


@dataclass(frozen=True)
class _Round:
    """A started round: the configs of one tunable, the seconds expected of each, and the seconds spent on proposing
    them."""

    key: str
    configs: list[Config]
    predicted: Mapping[Config, float]
    seconds: float


@dataclass(frozen=True)
class _Known:
    decision: Decision
    choice: Choice


class _Run:
    def __init__(
        self,
        tunables: Mapping[str, Tunable],
        calls: Mapping[str, int],
        objective: Objective,
        tuning: Tuning,
        threads: int,
        database: Database,
        deadline: float,
        shield: Shield,
        trace: Trace,
        models: Models | None,
        alone: frozenset[str],
        timed: frozenset[str],
    ) -> None:
        self.alone, self.timed = alone, timed
        self.tunables, self.calls, self.objective, self.models = tunables, calls, objective, models
        self.tuning, self.threads, self.database = tuning, threads, database
        self.begun, self.deadline = time.monotonic(), deadline
        self.shield, self.trace = shield, trace
        self.past = PastRecords(database)
        self.unmeasured = f"unmeasured in {fingerprint(sorted(tunables))}"
        self.states: dict[str, TaskState] = {}
        self.chosen: dict[str, Choice] = {}
        self._asked = 0  # trials of all started rounds
        self._round_seconds = 0.0  # the typical duration of a round, once there was one
        self._race_seconds = _RACE_SECONDS + _RACE_OVERHEAD
        self._build_seconds = _BUILD_SECONDS

    def choices(self, runner: Callable[[int], Measuring]) -> dict[str, Choice]:
        why = "known"
        try:
            with self.shield():
                known = self._known()
                self.chosen = {key: one.choice for key, one in known.items()}
                self.states = {
                    key: TaskState(tunable, self.tuning, self.past, timed=key in self.timed)
                    for key, tunable in self.tunables.items()
                    if key not in known
                }
            self._begin(known)
            if self.states:
                why = self._measure(known, runner)
        except KeyboardInterrupt:
            why = "interrupted"
        with self.shield(ignoring=True):
            self.trace.mark("tune.end", why=why)
            for key, state in self.states.items():
                if key not in self.chosen:
                    best = state.unconfirmed
                    choice = state.choice(best, state.times.get(best))
                    if best in state.times:
                        choice = replace(choice, origin=Origin("tuned", time.time()))
                    self.chosen[key] = choice
            return {key: self.chosen[key] for key in self.tunables}

    # -- what is known
    # ------------------------------------------------------------------------------------------------

    def _known(self) -> dict[str, _Known]:
        """The decisions that are as good as those that this run would make."""
        decided = self._decided()
        if len(decided) == len(self.tunables) and self._is_met(
            {key: one.decision.seconds for key, one in decided.items()}
        ):
            return decided
        return {
            key: one for key, one in decided.items() if serves(one.decision, self.tuning, self.unmeasured)
        }

    def _is_met(self, best: Mapping[str, float]) -> bool:
        return not any(self.objective.weight(key, best) for key in best)

    def _decided(self) -> dict[str, _Known]:
        """The decisions of earlier runs whose kernels have not changed."""
        found = {}
        for key, tunable in self.tunables.items():
            decision = self.database.decision(tunable.key)
            if decision is None or (key in self.timed and not decision.trials):
                continue
            choice = tunable.known(decision)
            if choice is not None:
                found[key] = _Known(decision, choice)
        return found

    def _begin(self, known: Mapping[str, _Known]) -> None:
        tasks = [
            {
                "key": key,
                "label": tunable.label,
                "layer": tunable.layer,
                "calls": self.calls[key],
                "seconds": known[key].decision.seconds
                if key in known
                else self.states[key].standing.predicted,
                "known": key in known,
            }
            for key, tunable in self.tunables.items()
        ]
        tuning = self.tuning
        self.trace.mark(
            "tune.begin",
            budget=tuning.seconds,
            effort=tuning.effort,
            cost_model=tuning.cost_model,
            tasks=tasks,
        )

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _measure(self, known: Mapping[str, _Known], make_runner: Callable[[int], Measuring]) -> str:
        """Run the rounds, and return why they ended."""
        for state in self.states.values():
            state.resume(self.database.records(state.key))
        standings = {key: state.standing for key, state in self.states.items()}
        decided = {key: one.decision.seconds for key, one in known.items()}
        with make_runner(self.threads) as runner:
            why = ""
            if runner.ahead:
                self._build_seconds = _CACHED_SECONDS
            begun: deque[_Round] = deque()  # rounds whose configs are being built
            try:
                while not why:
                    # On a CPU nothing is built while a round is timed, so there is one round at a time.
                    while self._needs_more(begun, runner):
                        busy = {each.key for each in begun}
                        free = {key: standing for key, standing in standings.items() if key not in busy}
                        fixed = decided | {key: standings[key].best for key in busy}
                        key = self._next(free, fixed)
                        if key is None or (why := "budget" if runner.spent else self._reason_to_stop(key)):
                            break
                        begun.append(self._begin_round(key, runner))
                    if begun and why != "budget":
                        self._finish_round(begun, runner)
                        why = ""
                    elif not why:
                        why = self._reason_to_stop(None)
            finally:  # also if no node is left
                for each in begun:
                    if measured := runner.prepared(self.states[each.key].job, each.configs):
                        self._keep(each, measured, runner)
            self._confirm_all(runner, why)
        return why

    @staticmethod
    def _needs_more(begun: Sequence[_Round], runner: Measuring) -> bool:
        """Whether to begin a round before the first one is finished. The others keep several devices busy."""
        if len(begun) <= runner.ahead:
            return True
        following = sum(len(each.configs) for each in begun) - len(begun[0].configs)
        return runner.devices > 1 and following < _PER_DEVICE * runner.devices

    def _round_size(self, devices: int) -> int:
        """The number of configs in a round. If there are fewer tasks than devices, rounds are larger."""
        preset = self.tuning.preset
        if devices == 1:
            return preset.round
        tasks = sum(not state.standing.done for state in self.states.values())
        wanted = -(-_PER_DEVICE * devices // max(1, tasks))
        return max(preset.round, min(wanted, preset.trials // _MIN_ROUNDS))

    def _next(self, free: Mapping[str, TaskStanding], fixed: Mapping[str, float]) -> str | None:
        """The task for the next round: one that must be timed and is not yet, else the one with the most to gain."""
        allocation = ALLOCATIONS[self.tuning.allocation]
        first = {key: free[key] for key in free if key in self.timed and not self.states[key].trials}
        best = {**fixed, **{key: standing.best for key, standing in free.items()}}
        return next_task(first, self.objective, best, allocation) or next_task(
            free, self.objective, fixed, allocation
        )

    def _reason_to_stop(self, key: str | None) -> str:
        if key is None:
            return "exhausted" if all(s.standing.done for s in self.states.values()) else "met"
        if time.monotonic() + self._reserved() + self._round_seconds / 2 >= self.deadline:
            return "budget"
        if self.tuning.trials is not None and self._asked >= self.tuning.trials:
            return "trials"
        gain = self._expected_gain()
        return "converged" if gain is not None and gain < CONVERGED else ""

    def _reserved(self) -> float:
        """Seconds to keep for the final comparisons."""
        if self.models is not None:
            wanted = self._confirmation_seconds(self._alternatives())
        else:
            races = sum(len(state.finalists) > 1 for state in self.states.values())
            wanted = races * self._race_seconds
        return min(wanted, _MAX_RESERVED * self.tuning.seconds)

    def _expected_gain(self) -> float | None:
        """The expected gain from continuing, as a share of the time of all models; None while the gain of some task
        is unknown."""
        total = sum(self.calls[key] * (choice.seconds or 0.0) for key, choice in self.chosen.items())
        expected = 0.0
        for key, state in self.states.items():
            if not state.standing.times or (gain := state.gain) is None:
                return None
            seconds = self.calls[key] * state.standing.best
            total += seconds
            expected += gain * seconds
        return expected / total if total else 0.0

    def _begin_round(self, key: str, runner: Measuring) -> _Round:
        """Start a round: choose its configs, which are built while other rounds are timed."""
        state = self.states[key]
        begin = time.monotonic()
        runner.expect(state.job)
        most = None if self.tuning.trials is None else self.tuning.trials - self._asked
        configs = state.ask(most, self._round_size(runner.devices))
        predicted = state.predict(configs) if configs else {}
        self._asked += len(configs)
        if runner.ahead:
            runner.prepare(state.job, configs, best=state.times.get(state.best))
        return _Round(key, configs, predicted, time.monotonic() - begin)

    def _finish_round(self, rounds: deque[_Round], runner: Measuring) -> None:
        state, configs = self.states[rounds[0].key], rounds[0].configs
        begin = time.monotonic()
        with self.trace.span("tune.round", task=rounds[0].key, label=state.label) as span:
            trials, failures = state.trials, state.failures.copy()
            if configs:
                best = state.times.get(state.best)
                deadline = self.deadline - self._reserved()
                measured = runner.measure(state.job, configs, best=best, deadline=deadline)
            begun = rounds.popleft()
            if configs:
                try:
                    measured = interleaved(state, measured, runner, deadline)
                finally:
                    self._keep(begun, measured, runner)
                if not runner.ahead:
                    self._note_builds(measured)
            span.note(
                best=state.standing.best,
                before=state.before,
                trials=state.trials - trials,
                gain=state.gain,
                done=state.standing.done,
                failures=dict(state.failures - failures),
            )
        taken = begun.seconds + time.monotonic() - begin
        self._round_seconds = 0.5 * (self._round_seconds + taken) if self._round_seconds else taken

    def _keep(self, begun: _Round, measured: Sequence[Measurement], runner: Measuring) -> None:
        state = self.states[begun.key]
        with self.shield():
            self.database.add(state.records(measured, begun.predicted))
            state.tell(measured)
        runner.acknowledge(state.job, measured)

    def _note_builds(self, measured: Sequence[Measurement]) -> None:
        spent = [one.build_seconds for one in measured if one.build_seconds]
        if spent:
            self._build_seconds = 0.5 * (self._build_seconds + statistics.mean(spent))

    # -- winners inside the models ------------------------------------------------------------------------------------

    def _alternatives(self) -> dict[str, list[Config]]:
        """The config to beat for each task, then those about as fast as the best."""
        return {
            key: state.faster(_NEAR * state.times.get(state.best, math.inf))
            for key, state in self.states.items()
            if key not in self.alone
        }

    def _confirmation_seconds(
        self, alternatives: Mapping[str, Sequence[Config]], *, hasty: bool = False
    ) -> float:
        """The seconds that the confirmation takes, with the preferred number of repetitions or the minimum."""
        most = max(map(len, alternatives.values()), default=1)
        if most == 1:
            return 0.0
        kernels = len(self.tunables) + sum(len(some) - 1 for some in alternatives.values())
        models = sum(self.calls[key] * state.standing.best for key, state in self.states.items())
        models += sum(self.calls[key] * (choice.seconds or 0.0) for key, choice in self.chosen.items())
        turns = sum(comparison_seconds(models, assignments, hasty=hasty) for assignments in (most, 2))
        return kernels * self._build_seconds + turns

    def _confirm_in_model(self, why: str) -> bool:
        """Confirm winners in the models, with as many alternatives as the time allows. Returns whether models could
        run in time."""
        alternatives = self._alternatives()
        if self.models is None or max(map(len, alternatives.values()), default=0) < 2:
            return False
        while self._confirmation_seconds(alternatives, hasty=True) > self.deadline - time.monotonic():
            fewer = max(map(len, alternatives.values())) - 1
            if fewer < 2:
                return False
            alternatives = {key: some[:fewer] for key, some in alternatives.items()}
        with self.trace.span("tune.confirm_in_model", tasks=len(alternatives)):
            heaviest = sorted(alternatives, key=lambda key: -self.calls[key] * self.states[key].standing.best)
            choices = {
                key: [self.states[key].choice(config, None) for config in alternatives[key]]
                for key in heaviest
            }
            known = {key: choice for key, choice in self.chosen.items() if key not in self.alone}
            confirmed_choices = confirm_in_model(
                self.models, known, choices, deadline=self.deadline, seed=self.tuning.seed
            )
        for key, confirmed_choice in (confirmed_choices or {}).items():
            state, config = self.states[key], confirmed_choice.choice.config
            if confirmed_choice.seconds is not None and confirmed_choice.before is not None:
                seconds, before = (
                    confirmed_choice.seconds / self.calls[key],
                    confirmed_choice.before / self.calls[key],
                )
            else:  # keep the times measured alone
                before = state.before
                seconds = state.times.get(config, before)
            label = state.label
            with self.shield(), self.trace.span("tune.confirm", task=key, label=label) as span:
                self._decide(key, config, seconds, before, why)
                span.note(best=seconds, before=before, config=str(config))
        return confirmed_choices is not None

    # -- winners alone ------------------------------------------------------------------------------------------------

    def _confirm_all(self, runner: Measuring, why: str) -> None:
        """Confirm winners alone, those with the largest gain first. Without time for a comparison, a winner must be
        clearly faster."""
        left = set(self.states)
        if self.models is not None and self._confirm_in_model(why):
            left &= self.alone
        for key in sorted(left, key=lambda key: -self._gained(key)):
            state = self.states[key]
            finalists = state.finalists
            if len(finalists) > 1 and time.monotonic() + self._race_seconds / 2 < self.deadline:
                winner, seconds, before = self._race(key, finalists, runner)
            else:
                winner, before = state.unconfirmed, state.before
                seconds = state.times.get(winner, before)
            with self.shield():
                self._decide(key, winner, seconds, before, why)

    def _gained(self, key: str) -> float:
        state = self.states[key]
        return self.calls[key] * (state.before - state.standing.best)

    def _race(self, key: str, finalists: Sequence[Config], runner: Measuring) -> tuple[Config, float, float]:
        """Return (winner, its seconds, seconds of the config to beat)."""
        state = self.states[key]
        begin = time.monotonic()
        with self.trace.span("tune.confirm", task=key, label=state.label) as span:
            deadline = self.deadline + self._race_seconds
            times = runner.race(state.job, finalists, min(_RACE_SECONDS, self._left()), deadline=deadline)
            seconds = [statistics.median(each) if each else math.inf for each in times]
            before = seconds[0]
            winner = min(range(len(finalists)), key=lambda number: (seconds[number], number))
            if not seconds[winner] <= BETTER * before:
                winner = 0
            if not any(times):  # nothing answered in time
                finalists = [state.unconfirmed]
                seconds, before = [state.times.get(finalists[0], state.before)], state.before
            span.note(best=seconds[winner], before=before, config=str(finalists[winner]))
        taken = time.monotonic() - begin
        self._race_seconds = max(0.5 * (self._race_seconds + taken), _RACE_SECONDS)
        return finalists[winner], seconds[winner], before

    def _left(self) -> float:
        return max(0.05, self.deadline - time.monotonic())

    def _decide(self, key: str, config: Config, seconds: float, before: float, why: str) -> None:
        state = self.states[key]
        choice = state.choice(config, seconds)
        if state.trials and not state.times:  # everything failed: nothing was decided
            self.chosen[key] = choice
            return
        effort = self.tuning.effort if state.trials else self.unmeasured
        if state.complete or why == "converged":
            effort = COMPLETE
        spent = time.monotonic() - self.begun
        whole = math.isfinite(self.tuning.seconds) and why != "trials"
        decision = Decision(
            key=state.key,
            config=config,
            seconds=seconds,
            effort=effort,
            budget=self.tuning.seconds if whole else spent,
            trials=state.trials,
            default_seconds=before,
            code=state.tunable.code(choice) if state.trials else "",
        )
        self.chosen[key] = replace(choice, origin=origin_of(decision))
        self.database.decide(decision)


def interleaved(
    state: TaskState, measured: list[Measurement], runner: Measuring, deadline: float
) -> list[Measurement]:
    """Time the round's configs again, interleaved with the best so far, and return times relative to it.

    A machine's speed changes over time by more than configs differ. Interleaved configs are slowed equally.
    """
    timed = [(one.config, one.seconds) for one in measured if one.seconds is not None]
    limit = _HOPELESS * min((seconds for _, seconds in timed), default=0.0)
    anchor = state.best if state.times else None
    racing = [config for config, seconds in timed if seconds <= limit and config != anchor]
    if anchor is not None:
        racing.insert(0, anchor)
    if len(racing) < 2:
        return measured
    raced = runner.race(state.job, racing, _INTERLEAVED_SECONDS * len(racing), deadline=deadline)
    times = dict(zip(racing, raced, strict=True))
    scale = 1.0
    if anchor is not None and times[anchor]:
        scale = state.times[anchor] / statistics.median(times[anchor])
    return [
        msgspec.structs.replace(one, times=tuple(scale * each for each in own))
        if (own := times.get(one.config))
        else one
        for one in measured
    ]


def serves(decision: Decision, tuning: Tuning, unmeasured: str) -> bool:
    """Whether a decision is as good as one that would be made now.

    A decision that was starved of trials is not. A task that was left out for lack of time counts only if the same
    tasks are tuned together, because it would be left out again.
    """
    if decision.effort == COMPLETE:
        return True
    return tuning.seconds <= decision.budget and (decision.trials > 0 or decision.effort == unmeasured)
