"""How each task is computed on a GPU: by a rule without measurement, or as raced, and remembered."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.pieces import build_piece, code_of
from tilewright.cost import gpu as cost
from tilewright.db.database import Database
from tilewright.db.record import Decision, Key, Record
from tilewright.errors import SpaceError, TilewrightError
from tilewright.graph.task import Task
from tilewright.hw.gpu import GpuMachine
from tilewright.measure.gpu_ways import Answer, Finished, Question, Refused, Tried, Trying
from tilewright.measure.process import Child, Dead, Failed
from tilewright.runtime.ports import torch_module
from tilewright.space.space import Config
from tilewright.space.templates.cuda.template import GpuWork
from tilewright.space.vendor.candidates import candidate_ways, is_contraction, is_depthwise, way_of
from tilewright.space.vendor.pieces import Way, ours
from tilewright.support.fingerprint import fingerprint
from tilewright.support.trace import Trace
from tilewright.tune.effort import Tuning

_MOST = 16  # candidates of one task
_FROM_TEMPLATES = 4  # of them, those of our own templates
_ANSWER_SECONDS = 60.0  # until a candidate counts as hanging; a library may search for long the first time
_MEMORY = 1 << 46  # bytes of address space, of which a card's driver takes much
_AHEAD = 6  # tasks whose kernels are compiled while one is raced
_FEW_TERMS = 32
_QUERIES, _IDLE = 64, 4  # of a block of attention; blocks for each multiprocessor that are few
_VENDOR_FLOPS, _VENDOR_BYTES, _VENDOR_START = 6e14, 3.5e12, 3e-6  # what a library reaches, roughly
_HOPELESS = 1.6  # times that, at which one config of a template is enough
_GAIN = 0.99  # of the rule's choice, that another must take at most to replace it


def choose(task: Task, machine: GpuMachine, numerics: str, libraries: Collection[str]) -> Way:
    """Without measurement: a library for what has a large matrix product or a convolution in it; a template where it
    was found ahead of them, or nothing else is there; the default program for all else."""
    found = candidate_ways(task, machine, numerics, libraries, algorithms=1)
    own = [way for way in found if way.is_ours]
    if own and (is_depthwise(task) or not is_contraction(task)):
        return own[0]
    if own == found or _suits_template(task, machine):
        best = cost.best_of(GpuWork(task, machine, numerics))
        if best is not None:
            return ours(task, best.config)
    if not found:
        raise SpaceError(f"no kernel and no library computes {task.label} on a GPU")
    return found[0]


def has_kernel(task: Task, machine: GpuMachine, numerics: str) -> bool:
    """Whether a kernel of ours computes the task."""
    work = GpuWork(task, machine, numerics)
    return work.formula is not None or cost.best_of(work) is not None


def _suits_template(task: Task, machine: GpuMachine) -> bool:
    """Sums of few terms, which are bound by memory; attention that leaves most of the card idle."""
    for node in task.graph.nodes():
        if node.op == "attention":
            heads, queries = math.prod(node.shape[:-2]), node.shape[-2]
            return heads * -(-queries // _QUERIES) < _IDLE * machine.sms
        if node.op == "conv" and node.attrs["layout"] == "channels_last":
            return math.prod(node.inputs[1].shape[:-1]) <= _FEW_TERMS
        if node.op == "matmul":
            return node.inputs[0].shape[-1] <= _FEW_TERMS and node.type.rank == 2
    return False


@dataclass
class GpuTuner:
    """Races the ways of tasks in a process of its own. What is known already is not measured again."""

    machine: GpuMachine
    ordinal: int
    numerics: str
    libraries: frozenset[str]
    tuning: Tuning
    trace: Trace
    trials: int = 0
    _child: Child = field(default_factory=lambda: Child("tilewright.measure.gpu_ways:serve", _MEMORY))

    def tune(self, tasks: Mapping[str, tuple[Task, int]]) -> dict[str, Way]:
        """The heaviest first; what the budget does not reach is chosen by the rule. So is what Ctrl-C cuts short."""
        end = time.monotonic() + self.tuning.seconds
        chosen = {
            key: choose(task, self.machine, self.numerics, self.libraries) for key, (task, _) in tasks.items()
        }
        path: Path | None = self.tuning.db
        with Database.open(path) as database, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            unknown = []
            for key, (task, _) in tasks.items():
                known = self._remembered(database, task)
                if known is None:
                    unknown.append(key)
                else:
                    chosen[key] = known
            unknown.sort(key=lambda key: -_weight(*tasks[key]))
            ready: deque[tuple[str, list[Way], list[Future[None]]]] = deque()
            try:
                while (unknown or ready) and time.monotonic() < end:
                    while unknown and len(ready) < _AHEAD:
                        key = unknown.pop(0)
                        ways = self._candidates(tasks[key][0], chosen[key])
                        ready.append((key, ways, [pool.submit(self._built, way) for way in ways]))
                    key, ways, builds = ready.popleft()
                    for build in builds:
                        build.result()
                    if len(ways) > 1:
                        chosen[key] = self._raced(database, tasks[key][0], ways, chosen[key])
            except KeyboardInterrupt:
                pass
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self._child.close()
        return chosen

    # -- one task -----------------------------------------------------------------------------------------------------

    def _candidates(self, task: Task, first: Way) -> list[Way]:
        """The rule's choice first, then those of templates, then the libraries' others."""
        found = {first.config: first}
        ranked = cost.rank(GpuWork(task, self.machine, self.numerics), most=_FROM_TEMPLATES)
        if ranked and found and ranked[0].seconds > _HOPELESS * _vendor_seconds(task):
            ranked = ranked[:1]
        ways = candidate_ways(task, self.machine, self.numerics, self.libraries)
        for way in (*(ours(task, each.config) for each in ranked), *ways):
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

    def _raced(self, database: Database, task: Task, ways: list[Way], first: Way) -> Way:
        with self.trace.span("race", label=task.label, ways=len(ways)):
            results = self._race(task, [way.config for way in ways])
        key = self._key(task)
        records = []
        for way in ways:
            result = results[way.config]
            tried = isinstance(result, Tried)
            records.append(
                Record(
                    key=key,
                    label=task.label,
                    text=task.text,
                    constants=tuple(sorted(task.constants)),
                    machine=_description(self.machine),
                    config=way.config,
                    times=result.times if isinstance(result, Tried) else (),
                    error=result.error if isinstance(result, Tried) else None,
                    failure="" if tried else _failed(result).kind,
                    message="" if tried else _failed(result).message,
                )
            )
        database.add(records)
        self.trials += len(ways)
        times = {
            config: statistics.median(result.times)
            for config, result in results.items()
            if isinstance(result, Tried)
        }
        if not times:
            return first
        best = min(ways, key=lambda way: times.get(way.config, float("inf")))
        default = times.get(first.config)
        if default is not None and times[best.config] > _GAIN * default:
            best = first
        database.decide(
            Decision(
                key=key,
                config=best.config,
                seconds=times[best.config],
                effort=self.tuning.effort,
                budget=self.tuning.seconds,
                trials=len(ways),
                default_seconds=default,
                code=code_of(best, self.machine, self.numerics),
            )
        )
        return best

    def _race(self, task: Task, configs: list[Config]) -> dict[Config, Tried | Refused]:
        """A time or a failure of each. After a death, the rest are asked for again, of another process."""
        results: dict[Config, Tried | Refused] = {}
        left = list(configs)
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
            guilty = 0
            try:
                while True:
                    message = self._child.receive(_ANSWER_SECONDS)
                    answer = msgspec.msgpack.decode(message, type=Answer)
                    if isinstance(answer, Finished):
                        return results
                    if isinstance(answer, Trying):
                        guilty = answer.number
                    else:
                        results[left[answer.number]] = answer
            except Dead as death:
                results[left[guilty]] = Refused(guilty, death.failed)
                left = [config for config in left if config not in results]
        return results

    # -- what is remembered -------------------------------------------------------------------------------------------

    def _remembered(self, database: Database, task: Task) -> Way | None:
        """The decision for a task, where its config still leads to the code that was timed."""
        decision = database.decision(self._key(task))
        if decision is None:
            return None
        way = way_of(task, self.machine, self.numerics, self.libraries, decision.config)
        if way is None or code_of(way, self.machine, self.numerics) != decision.code:
            return None
        return way

    def _key(self, task: Task) -> Key:
        torch = torch_module()
        libraries = [*sorted(self.libraries), getattr(torch, "__version__", "")]
        tools = f"{toolchain.version()} {fingerprint(libraries)[:12]}"
        return Key(task.key, fingerprint(_description(self.machine)), tools, self.numerics, 0)


def _description(machine: GpuMachine) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(msgspec.json.encode(machine))
    return found


def _failed(result: Tried | Refused) -> Failed:
    assert isinstance(result, Refused)
    return result.failed


def _vendor_seconds(task: Task) -> float:
    return max(task.flops / _VENDOR_FLOPS, task.bytes / _VENDOR_BYTES) + _VENDOR_START


def _weight(task: Task, count: int) -> float:
    return count * (task.flops / 5e14 + task.bytes / 3e12 + 2e-6)
