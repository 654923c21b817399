"""Processors: loop programs through LLVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright import knobs
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.llvm.build import Kernel, build
from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition
from tilewright.hw import CpuMachine, host
from tilewright.link import Boundary, Linkable, Linked, link
from tilewright.measure.check import checked_kernel
from tilewright.rewrites.base import Observer
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import Origin
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.support.version import VERSION
from tilewright.targets.target import Choices, Share, boundary, computed, together, unshared
from tilewright.tune.allocate import Objective
from tilewright.tune.choose import Choice, choose
from tilewright.tune.effort import KNOWN, Tuning
from tilewright.tune.known import known_choices
from tilewright.tune.lock import check_lockable, lock_of, locked_choices, read_lock, write_lock
from tilewright.tune.oracle import PredictedCosts
from tilewright.tune.rehearse import Models


@dataclass(frozen=True)
class CpuTarget:
    machine: CpuMachine

    @property
    def is_here(self) -> bool:
        return self.machine == host()

    def default_numerics(self) -> str:
        return knobs.get("numerics")

    def partitioned(
        self, imported: ImportedModel, numerics: str, trace: Trace, observe: Observer | None = None
    ) -> Partition:
        oracle = PredictedCosts(self.machine, numerics)
        return run_pipeline(imported.graph, trace, numerics=numerics, oracle=oracle, observe=observe)

    def chosen(
        self,
        partitions: Sequence[Partition],
        numerics: str,
        threads: int | None,
        trace: Trace,
        *,
        tuning: Tuning = KNOWN,
        lock: str | Path | None = None,
        objective: Objective | None = None,
    ) -> dict[str, Choice]:
        tasks = together(partitions)
        works = {key: Work(task, self.machine, numerics) for key, (task, _) in tasks.items()}
        path = None if lock is None else Path(lock)
        if path is not None:
            if (found := read_lock(path)) is not None:
                return locked_choices(found, works, numerics, path)
            check_lockable(path)
        threads = threads or knobs.get("threads")
        if not tuning.measures:
            with trace.span("choose", tasks=len(works)) as span:
                known = known_choices(works, threads, tuning.db)
                choices = {key: known.get(key) or choose(work) for key, work in works.items()}
                span.note(known=len(known))
        else:
            from tilewright.tune.tuner import (
                tune,  # with the database and the searches: only for those who measure
            )

            with trace.span("tune", tasks=len(works)):
                choices = tune(
                    tasks,
                    self.machine,
                    tuning,
                    numerics=numerics,
                    threads=threads,
                    trace=trace,
                    objective=objective,
                    models=self.staged(partitions, numerics, threads),
                )
        if path is not None:
            write_lock(path, lock_of(choices, works, numerics))
        return choices

    def staged(self, partitions: Sequence[Partition], numerics: str, threads: int) -> Models:
        """These models, with any choices, for those who time their tasks inside them."""
        from tilewright.targets.staged import Staged

        def linked(partition: Partition, cast: Mapping[str, Choice], boundary: Boundary) -> Linked:
            return self._linked(partition, cast, boundary, numerics, Trace.off())

        return Staged(partitions, linked, threads)

    def finished(
        self,
        imported: ImportedModel,
        partition: Partition,
        numerics: str,
        threads: int | None,
        trace: Trace,
        choices: Choices,
        share: Share = unshared,
    ) -> CompiledModel:
        linked = self._linked(partition, choices, boundary(imported), numerics, trace)
        with trace.span("load"):
            return CompiledModel(
                linked.plan, share(linked.constants), linked.objects, threads=threads, checker=checked_kernel
            )

    def _linked(
        self,
        partition: Partition,
        choices: Mapping[str, Choice],
        boundary: Boundary,
        numerics: str,
        trace: Trace,
    ) -> Linked:
        with trace.span("build", tasks=len(computed(partition))):
            kernels = build_kernels(partition, self.machine, numerics, trace, choices)
        with trace.span("link"):
            producer = f"tilewright {VERSION}"
            ready = {key: _linkable(kernel, choices[key].origin) for key, kernel in kernels.items()}
            machine = self.machine
            target = {"triple": machine.triple, "cpu": machine.cpu, "features": list(machine.features)}
            return link(partition, ready, boundary, target, numerics=numerics, producer=producer)


def build_kernels(
    partition: Partition, machine: CpuMachine, numerics: str, trace: Trace, choices: Mapping[str, Choice]
) -> dict[str, Kernel]:
    """A kernel for every distinct task, by key."""
    cache = ObjectCache.default()
    kernels: dict[str, Kernel] = {}
    for key, (task, count) in computed(partition).items():
        with trace.span("kernel", label=task.label, calls=count) as span:
            kernels[key] = build(choices[key].program, machine, numerics, cache)
            span.note(cached=kernels[key].cached)
    return kernels


def _linkable(kernel: Kernel, origin: Origin) -> Linkable:
    return Linkable(
        kernel.symbol,
        kernel.object_code,
        kernel.extent,
        kernel.decisions,
        kernel.packings,
        arguments=kernel.arguments,
        origin=origin,
    )
