"""Kernels whose knobs the tuner sets, in any language: `autotune.py` has tile kernels, `triton_kernels.py` Triton's.

    launch -> the config of its key: as a lock file says, as was measured, as measurements nearby suggest, or predicted
    tune   -> the tuner (`tuner.py`) on a `TunableKernel`, in the processes of the runner; the winner is kept

A launch measures nothing unless the user asks for it (`effort`). What is chosen is kept in memory, so a launch costs
one look into a dictionary more than that of a plain kernel.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.db.database import Database
from tilewright.db.known import read_decisions
from tilewright.db.location import default_path
from tilewright.db.record import Record
from tilewright.errors import (
    AutotuneError,
    KernelArgumentError,
    LockError,
    OptionError,
    ReferenceMismatchError,
)
from tilewright.hw import Machine
from tilewright.measure.runner import Runner
from tilewright.measure.shared_runner import shared_runner
from tilewright.runtime.plan import Origin
from tilewright.space.space import Config
from tilewright.support.source import location_of
from tilewright.support.trace import Trace
from tilewright.tile.frontend.source import constexpr_key
from tilewright.tile.kernel import Grid
from tilewright.tile.recording import RecordedLaunch
from tilewright.tile.recording import active as recorded_launches
from tilewright.tune.choose import Choice
from tilewright.tune.effort import Tuning, resolve_tuning
from tilewright.tune.kernel_space import SpaceLike, Where, kernel_space
from tilewright.tune.kernel_tunable import NOTHING, TunableKernel
from tilewright.tune.known import origin_of
from tilewright.tune.launches import LaunchCall, LaunchedKernel
from tilewright.tune.lock import FORMAT, Lock, LockedTask, check_lockable, read_lock, write_lock
from tilewright.tune.neighbours import from_neighbours
from tilewright.tune.tuner import tune as run_tuner

if TYPE_CHECKING:
    from tilewright.measure.pool.connection import Pool

MakeRunner = Callable[[int], Any]  # of a number of threads
_NEARBY_RECORDS = 2000
_SHOWN = 8  # configs in `explain`


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning one launch."""

    config: dict[str, Any]
    seconds: float | None
    origin: Origin
    trials: int
    failures: dict[str, int]  # by kind

    def __str__(self) -> str:
        values = " ".join(f"{name}={value}" for name, value in self.config.items())
        failed = "".join(f", {count} {kind}" for kind, count in sorted(self.failures.items()))
        took = "" if self.seconds is None else f", {self.seconds * 1e6:.1f} us"
        return f"{values} ({self.origin}{took}; {self.trials} trials{failed})"


class TunedKernel:
    """A kernel whose knobs are set: launched as the kernel itself, without them."""

    launch_options: tuple[
        str, ...
    ] = ()  # keyword arguments of a launch that are not parameters of the kernel

    def __init__(
        self,
        launched: LaunchedKernel,
        space: SpaceLike,
        key: Sequence[str],
        where: Where | Sequence[Where],
        reference: Callable[..., Any] | None,
        tolerance: float | None,
        tuning: Tuning,
        lock: str | Path | None,
    ) -> None:
        self.launched = launched
        self.reference, self.tolerance, self.tuning = reference, tolerance, tuning
        parameters = {each.name: each for each in launched.parameters}
        options = tuple(dict.fromkeys((*launched.options("cpu"), *launched.options("cuda"))))
        self.space = kernel_space(space, where, list(parameters))
        for name in self.space.names:
            if name in options and name not in parameters:
                continue
            if name not in parameters or not parameters[name].is_constexpr:
                known = [each.name for each in parameters.values() if each.is_constexpr]
                raise AutotuneError(
                    f"knob {name!r} is not a constexpr parameter of {launched.name}",
                    remedy=f"use some of {', '.join(known) or 'none'}, or an option of the launch:"
                    f" {', '.join(options)}",
                )
        self.key = (key,) if isinstance(key, str) else tuple(key)
        arguments = [name for name in parameters if name not in self.space.names]
        for name in self.key:
            if name not in arguments:
                raise AutotuneError(
                    f"key {name!r} is a knob or not a parameter of {launched.name}",
                    remedy=f"use some of {', '.join(arguments)}",
                )
        self._arguments = arguments
        self._lock = None if lock is None else _LockFile(Path(lock))
        self._choices: dict[Any, tuple[Choice, dict[str, Any], dict[str, Any]]] = {}
        self._explained: dict[Any, tuple[str, Choice]] = {}

    def __repr__(self) -> str:
        return f"<tuned {self.launched.language} kernel {self.launched.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise KernelArgumentError(
            f"kernel {self.launched.name} was called without a grid",
            remedy=f"launch it as {self.launched.name}[grid](...)",
        )

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        """A function that launches the kernel on this grid, with the config of its key."""

        def launch(*args: Any, **kwargs: Any) -> None:
            how = {name: kwargs.pop(name) for name in self.launch_options if name in kwargs}
            extra = how.pop("options", None) or {}
            bound = self._bound(args, kwargs)
            if (recording := recorded_launches()) is not None:
                recording.append(RecordedLaunch(self, grid, bound, is_tuned=True, options=extra))
                return
            knobs, options = self._config_for(grid, bound)
            self.launched.launch(grid, {**bound, **knobs}, {**options, **extra}, **how)

        return launch

    # -- choosing -----------------------------------------------------------------------------------------------------

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(zip(self._arguments, args, strict=False))
        if len(args) > len(self._arguments):
            raise AutotuneError(
                f"{self.launched.name} takes {len(self._arguments)} arguments, got {len(args)}",
                remedy=f"pass {', '.join(self._arguments)}; the tuner sets {', '.join(self.space.names)}",
            )
        for name, value in kwargs.items():
            if name in self.space.names:
                raise AutotuneError(
                    f"`{name}` is a knob of {self.launched.name}, which the tuner sets",
                    remedy=f"leave it out, or launch {self.launched.name}.kernel[grid](...) with a config of your own",
                )
            given[name] = value
        parameters = [name for name in self.space.names if name in self._parameters]
        bound = self.launched.bind({**given, **dict.fromkeys(parameters)})
        return {name: value for name, value in bound.items() if name not in parameters}

    @functools.cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(each.name for each in self.launched.parameters)

    def _signature(self, bound: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values that the choice of a config depends on."""
        found: list[tuple[Any, ...]] = []
        for name, value in bound.items():
            if isinstance(value, np.ndarray):
                found.append((value.dtype, value.shape if name in self.key else None))
            elif hasattr(value, "data_ptr"):
                found.append((value.dtype, value.device, value.shape if name in self.key else None))
            elif name in self.key or not isinstance(value, int | float) or isinstance(value, bool):
                found.append((name, constexpr_key(value)))
            else:
                found.append((type(value), -(2**31) <= value < 2**31))
        return tuple(found)

    def _config_for(self, grid: Grid, bound: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        signature = self._signature(bound)
        known = self._choices.get(signature)
        if known is None:
            call = self._call(grid, bound)
            try:
                choice = self._choose(call, call.tunable())
            finally:
                call.close()
            known = self._keep(signature, call, choice)
        return known[1], known[2]

    def _call(self, grid: Grid, bound: dict[str, Any], machine: Machine | None = None) -> LaunchCall:
        reference, tolerance = self.reference, self.tolerance
        return LaunchCall(self.launched, self.space, grid, bound, self.key, reference, tolerance, machine)

    def _keep(
        self, signature: Any, call: LaunchCall, choice: Choice
    ) -> tuple[Choice, dict[str, Any], dict[str, Any]]:
        values = dict(choice.config.values)
        options = {name: values.pop(name) for name in call.options}
        self._choices[signature] = known = choice, values, options
        self._explained[signature] = _described_key(call), choice
        if self._lock is not None:
            self._lock.note(call.tunable(), choice)
        return known

    def _choose(self, call: LaunchCall, tunable: TunableKernel) -> Choice:
        if (
            self._lock is not None
            and (locked := self._lock.choice(tunable, _described_key(call))) is not None
        ):
            return locked
        _check_not_empty(tunable, call)
        if self.tuning.measures:
            return self._tune(call, tunable, self.tuning, None)
        return self._unmeasured(tunable)

    def _unmeasured(self, tunable: TunableKernel) -> Choice:
        """The choice without measuring: measured earlier for this key or a nearby one, or predicted."""
        path = self.tuning.db or default_path()
        if path.exists():
            decision = read_decisions([tunable.key], path).get(tunable.key)
            if decision is not None and decision.trials and decision.config in tunable.space:
                return Choice(NOTHING, decision.config, decision.seconds, origin_of(decision))
            with Database.open(path) as database:
                near = from_neighbours(tunable, database.similar(tunable.key, limit=_NEARBY_RECORDS))
            if near is not None:
                return near
        return tunable.predicted()

    # -- measuring ----------------------------------------------------------------------------------------------------

    def tune(
        self,
        grid: Grid,
        *args: Any,
        effort: str = "quick",
        budget: float | str | None = None,
        trials: int | None = None,
        trace: Trace | None = None,
        pool: Pool | str | None = None,
        **kwargs: Any,
    ) -> Tuned:
        """Measure configs for a launch with these arguments, keep the winner, and use it from now on.

        The tensors are copied: nothing is stored to them. `effort`, `budget` and `trials` are those of `autotune`. What
        was measured before is not measured again. Raises ReferenceMismatchError if no config agrees with the reference;
        AutotuneError where none runs.

        `pool`: measure on a device of a pool of machines (docs/pool.md), for which the winner is kept in the database;
        the kernel travels there as text, its tensors as bytes."""
        base = self.tuning
        asked = resolve_tuning(
            effort, budget, base.seed, base.search, base.db, base.cost_model, trials=trials
        )
        bound = self._bound(args, kwargs)
        with self._measuring(pool, trace or Trace.off(), asked) as (machine, runner):
            call = self._call(grid, bound, machine)
            try:
                tunable = call.tunable()
                _check_not_empty(tunable, call)
                measured = asked.measures
                choice = (
                    self._tune(call, tunable, asked, trace, runner) if measured else self._unmeasured(tunable)
                )
                if machine is None or tunable.key == self._call(grid, bound).tunable().key:
                    self._keep(self._signature(bound), call, choice)
                return self._tuned(tunable, choice)
            finally:
                call.close()

    @contextmanager
    def _measuring(
        self, pool: Pool | str | None, trace: Trace, tuning: Tuning
    ) -> Iterator[tuple[Machine | None, MakeRunner | None]]:
        """The machine of a pool's device and what measures on it; (None, None) without a pool."""
        if pool is None:
            yield None, None
            return
        if not tuning.measures:
            raise OptionError(
                'effort="none" measures nothing and needs no pool; use effort="quick" or "full"'
            )
        if self.launched.language != "tile":
            raise OptionError(
                f"{self.launched.name} is not a tile kernel, and a pool measures tasks and tile kernels",
                remedy="tune it on the machine that has the device",
            )
        from tilewright.measure.pool.connection import device_of

        with device_of(pool, trace) as device:
            yield device.machine, device.runner

    def _tune(
        self,
        call: LaunchCall,
        tunable: TunableKernel,
        tuning: Tuning,
        trace: Trace | None,
        elsewhere: MakeRunner | None = None,
    ) -> Choice:
        name = tunable.key.task
        device = None if call.kind == "cpu" else 0

        def runner(threads: int) -> Runner:
            return shared_runner(threads, device)

        choices = run_tuner(
            {name: (tunable, 1)},
            tuning,
            threads=max(1, tunable.threads),
            trace=trace or Trace.off(),
            runner=elsewhere or runner,
        )
        choice = choices[name]
        self._check_measured(tunable)
        return choice

    def _records(self, tunable: TunableKernel) -> list[Record]:
        with Database.open(self.tuning.db) as database:
            return database.records(tunable.key)

    def _check_measured(self, tunable: TunableKernel) -> None:
        """An error where everything failed: there is no config to run."""
        records = [record for record in self._records(tunable) if record.config in tunable.space]
        failures = Counter(record.failure for record in records if record.failure)
        if not failures or any(record.seconds is not None for record in records):
            return
        last = records[-1]
        count = f"none of {len(records)} configs of {self.launched.name}"
        if set(failures) == {"wrong"} and self.reference is not None:
            raise ReferenceMismatchError(
                f"{count} agrees with the reference: {last.message} ({last.config})",
                where=location_of(self.reference),
            )
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(failures.items()))
        raise AutotuneError(
            f"{count} could be measured ({kinds}): {last.message} ({last.config})",
            remedy="check the kernel with kernel.interpret[grid](..., debug=True), or add configs that work",
        )

    def _tuned(self, tunable: TunableKernel, choice: Choice) -> Tuned:
        records = self._records(tunable)
        failures = Counter(record.failure for record in records if record.failure)
        return Tuned(dict(choice.config.values), choice.seconds, choice.origin, len(records), dict(failures))

    # -- for people ---------------------------------------------------------------------------------------------------

    def explain(self, grid: Grid | None = None, *args: Any, **kwargs: Any) -> str:
        """The config that launches take, and its origin: measured ("tuned"), a lock file, measurements at other values
        of the key ("neighbour"), or the analytical model ("predicted"). With the grid and the arguments of a launch:
        that launch, with the fastest measured configs, and failures by kind. Without: all launches of this process."""
        if grid is None:
            lines = [_line(key, choice) for key, choice in self._explained.values()]
            return "\n".join([f"{self.launched.name}: {len(lines)} keys", *lines])
        bound = self._bound(args, kwargs)
        call = self._call(grid, bound)
        self._config_for(grid, bound)
        choice = self._choices[self._signature(bound)][0]
        tunable = call.tunable()
        lines = [f"{self.launched.name}", _line(_described_key(call), choice)]
        path = self.tuning.db or default_path()
        records = self._records(tunable) if path.exists() else []
        timed = {record.config: record for record in records if record.seconds is not None}
        for record in sorted(timed.values(), key=lambda each: each.seconds or 0.0)[:_SHOWN]:
            lines.append(f"    {(record.seconds or 0.0) * 1e6:10.1f} us  {_values(record.config)}")
        failed = [record for record in records if record.failure]
        for record in failed[:_SHOWN]:
            lines.append(f"    {record.failure:>13}  {_values(record.config)}: {record.message}")
        return "\n".join(lines)

    def best(self, grid: Grid, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The config that a launch with these arguments takes."""
        bound = self._bound(args, kwargs)
        knobs, options = self._config_for(grid, bound)
        return {**knobs, **options}


def _check_not_empty(tunable: TunableKernel, call: LaunchCall) -> None:
    if next(iter(tunable.space.configs()), None) is None:
        raise AutotuneError(
            f"no config of {call.launched.name} is legal for {_described_key(call)}: its predicates (`where`) admit"
            f" none of {tunable.space.size} combinations",
            remedy="widen the choices of the knobs, or the predicates",
        )


def _described_key(call: LaunchCall) -> str:
    values = ", ".join(f"{name}={value}" for name, value in call.facts.key.items())
    types = ", ".join(dict.fromkeys(call.facts.dtypes.values()))
    return f"{values or 'any arguments'} ({types or 'no tensors'} on {call.kind})"


def _values(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in config.values)


def _line(key: str, choice: Choice) -> str:
    took = "" if choice.seconds is None else f", {choice.seconds * 1e6:.1f} us"
    return f"  {key}: {_values(choice.config)} [{choice.origin}{took}]"


class _LockFile:
    """The configs of a kernel's keys in a lock file: read where it exists, written where it does not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: Lock | None = None
        self._opened = False
        self._written: dict[str, LockedTask] = {}

    def _existing(self) -> Lock | None:
        if not self._opened:
            self._opened, self._read = True, read_lock(self.path)
            if self._read is None:
                check_lockable(self.path)
        return self._read

    def choice(self, tunable: TunableKernel, key: str) -> Choice | None:
        lock = self._existing()
        if lock is None:
            return None
        locked = lock.tasks.get(tunable.key.task)
        if locked is None:
            raise LockError(
                f"{self.path} has no config of {tunable.label} for {key}",
                remedy="remove the file to choose anew, or launch with a key that it has",
            )
        if locked.config not in tunable.space:
            raise LockError(
                f"{self.path}: {locked.config} is not a legal config of {tunable.label} for {key}"
            )
        return Choice(NOTHING, locked.config, None, Origin("lock"))

    def note(self, tunable: TunableKernel, choice: Choice) -> None:
        if self._existing() is not None:
            return
        config = choice.config
        self._written[tunable.key.task] = LockedTask(
            tunable.label, tunable.launched.source, config.template, dict(config.values)
        )
        write_lock(self.path, Lock(FORMAT, "fast", dict(self._written), target=tunable.machine.kind))
