"""What earlier runs have decided, for a GPU: the ways that a compilation takes without measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.pieces import code_of
from tilewright.db.known import read_decisions
from tilewright.db.record import Decision, Key
from tilewright.errors import TilewrightError
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.numerics import recorded
from tilewright.runtime.plan import Origin
from tilewright.runtime.ports import torch_module
from tilewright.space.space import Config
from tilewright.space.vendor.candidates import way_of
from tilewright.space.vendor.pieces import DEFAULT, Way
from tilewright.support.fingerprint import fingerprint
from tilewright.tune.gpu_rule import choose
from tilewright.tune.gpu_sums import Pair, best_joined

# What could be joined where tasks are computed in these ways, by key of the task that it would be.
Pairs = Callable[[Mapping[str, Way]], Mapping[str, Pair]]


@dataclass(frozen=True)
class GpuMemory:
    """What decisions mean on one card, with these libraries."""

    machine: GpuMachine
    numerics: str
    libraries: frozenset[str]

    def key(self, task: Task) -> Key:
        return self.key_of(task.key)

    def key_of(self, task: str) -> Key:
        """Of a task by its key."""
        torch = torch_module()
        libraries = [*sorted(self.libraries), getattr(torch, "__version__", "")]
        tools = f"{toolchain.version()} {fingerprint(libraries)[:12]}"
        return Key(task, fingerprint(description(self.machine)), tools, recorded(self.numerics), 0)

    def way(self, task: Task, decision: Decision | None) -> Way | None:
        """What won, where it still is the code that was timed."""
        if decision is None:
            return None
        way = self._as_timed(task, decision.config, decision.code)
        return None if way is None else replace(way, origin=Origin("tuned", decision.when))

    def is_settled(self, pair: Pair, decision: Decision | None) -> bool:
        """Whether it is known that the tasks of a pair are better apart, or how they are joined."""
        if decision is None:
            return False
        return self._as_timed(pair.task, best_joined(decision.config), decision.code) is not None

    def _as_timed(self, task: Task, config: Config, code: str) -> Way | None:
        """The way that a config stands for, where it still leads to the code that was timed."""
        try:
            way = way_of(task, self.machine, self.numerics, self.libraries, config)
            if way is None or code_of(way, self.machine, self.numerics) != code:
                return None
        except TilewrightError:  # the config is of another version, whose structures may make no code today
            return None
        return way


def by_rule(tasks: Mapping[str, Task], memory: GpuMemory) -> dict[str, Way]:
    """The ways of tasks, by key, where nothing is known of them."""
    return {
        key: with_origin(choose(task, memory.machine, memory.numerics, memory.libraries))
        for key, task in tasks.items()
    }


def with_origin(way: Way) -> Way:
    """A way of the rule, or of the analytical model."""
    return replace(way, origin=Origin("default" if way.config == DEFAULT else "predicted"))


def known_ways(tasks: Mapping[str, Task], memory: GpuMemory, pairs: Pairs, db: Path | None) -> dict[str, Way]:
    """Of each task, and of each pair of them that is better joined: as was decided, and by the rule where nothing was.
    `db` None: the database in the cache folder."""
    ways = by_rule(tasks, memory)
    ways |= _decided(tasks, memory, db)
    joint = pairs(ways)
    decisions = _decisions({key: pair.task for key, pair in joint.items()}, memory, db)
    for key, pair in joint.items():
        known = memory.way(pair.task, decisions.get(key))
        if known is not None:
            ways[key] = known
        elif pair.pays and not memory.is_settled(pair, decisions.get(key)):
            ways[key] = with_origin(pair.ways[0])
    return ways


def _decided(tasks: Mapping[str, Task], memory: GpuMemory, db: Path | None) -> dict[str, Way]:
    found = {}
    for key, decision in _decisions(tasks, memory, db).items():
        way = memory.way(tasks[key], decision)
        if way is not None:
            found[key] = way
    return found


def _decisions(tasks: Mapping[str, Task], memory: GpuMemory, db: Path | None) -> dict[str, Decision]:
    if not tasks:
        return {}
    keys = {memory.key(task): key for key, task in tasks.items()}
    return {keys[found]: decision for found, decision in read_decisions(keys, db).items()}


def description(machine: GpuMachine) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(msgspec.json.encode(machine))
    return found
