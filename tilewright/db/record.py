"""The records of tuning: every trial of a config (Record), and the winner of every task (Decision).

Plain data, and untrusted: a config from a record is checked for legality before use.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from tilewright.db.versions import Versions
from tilewright.numerics import mode_of, recorded
from tilewright.space.space import Config

if TYPE_CHECKING:  # reading records needs no compiler: `tilewright db ls` starts without it
    from tilewright.hw import Machine
    from tilewright.space.template import Work


class Key(msgspec.Struct, frozen=True):
    """Everything that must match for a measured time to be valid now."""

    task: str  # Task.key
    machine: str  # fingerprint of the machine's description
    toolchain: str
    numerics: str
    threads: int  # 0 on a GPU

    @classmethod
    def of(cls, work: Work, threads: int) -> Key:
        return cls.of_task(work.task.key, work.machine, work.numerics, threads)

    @classmethod
    def of_task(cls, task: str, machine: Machine, numerics: str, threads: int) -> Key:
        """`task`: the key of a task."""
        from tilewright.codegen.generator import generator
        from tilewright.measure.calibration import machine_key

        tools = generator(machine.kind).toolchain(machine)
        return cls(task, machine_key(machine), tools, recorded(numerics), threads)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One trial of one config. `times` are the raw seconds of each run, empty if it failed."""

    key: Key
    label: str  # of the task, for display
    text: str  # of the task's graph
    constants: tuple[int, ...]  # its inputs that are the same in every call
    machine: dict[str, Any]  # the machine's description, whose fingerprint is `key.machine`
    config: Config
    times: tuple[float, ...] = ()
    error: float | None = None  # relative, against the oracle
    failure: str = ""  # its kind; "": it ran and was correct
    message: str = ""
    build_seconds: float = 0.0
    predicted: float | None = None  # seconds that the cost model predicted before the trial
    versions: Versions = msgspec.field(default_factory=Versions.now)
    when: float = msgspec.field(default_factory=time.time)  # seconds since 1970

    @classmethod
    def of(cls, work: Work, threads: int, config: Config, **found: Any) -> Record:
        """A record with the current time; `found`: times, error, failure and so on."""
        from tilewright.hw.machine import description

        return cls(
            key=Key.of(work, threads),
            label=work.task.label,
            text=work.task.text,
            constants=tuple(sorted(work.task.constants)),
            machine=description(work.machine),
            config=config,
            **found,
        )

    @property
    def seconds(self) -> float | None:
        """The time of a call, as the runner computes it; None if it failed."""
        import statistics

        return statistics.median(self.times) if self.times and not self.failure else None

    def work(self) -> Work | None:
        """Rebuild the task and the machine; None if this version does not know the operator or machine."""
        from tilewright.graph.task import Task
        from tilewright.graph.text import parse_graph
        from tilewright.hw.machine import machine_of
        from tilewright.space.template import Work

        # Text and description may be of another version; if anything is wrong with them, they are unusable.
        try:
            machine = machine_of(self.machine)
            task = Task(parse_graph(self.text, {}), frozenset(self.constants))
        except Exception:
            return None
        return Work(task, machine, mode_of(self.key.numerics)) if task.key == self.key.task else None


class Decision(msgspec.Struct, frozen=True):
    """The confirmed winner of a task, which the next compilation uses without measuring."""

    key: Key
    config: Config
    seconds: float
    effort: str
    budget: float  # seconds, for the whole model
    trials: int
    when: float = msgspec.field(default_factory=time.time)
    default_seconds: float | None = None  # of the unmeasured choice, timed interleaved with the winner
    code: str = ""
    versions: Versions = msgspec.field(default_factory=Versions.now)
