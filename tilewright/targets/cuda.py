"""NVIDIA GPUs: kernels through CUDA C++ and NVRTC, calls of the vendor's libraries between them, one graph for all."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tilewright import knobs
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.cuda.build import GpuKernel
from tilewright.codegen.cuda.pieces import build_piece
from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition, Task
from tilewright.hw.gpu import PORTABLE, GpuMachine, detect
from tilewright.link import Boundary, Linkable, Linked, link
from tilewright.measure.check import checked_kernel
from tilewright.measure.gpu_calibration import rated
from tilewright.rewrites.base import Observer
from tilewright.rewrites.oracle import FewestBytes
from tilewright.rewrites.pipeline import Abilities, run_pipeline
from tilewright.runtime.cuda import device, vendor
from tilewright.runtime.cuda.executor import AWAITS_TURN, TRIPLE, GpuExecutor
from tilewright.runtime.cuda.model import GpuModel
from tilewright.runtime.explain import random_inputs
from tilewright.runtime.plan import Launch
from tilewright.runtime.ports import torch_module
from tilewright.space.vendor import summed
from tilewright.space.vendor.pieces import Piece, Way, refined
from tilewright.support.trace import Trace
from tilewright.support.version import VERSION
from tilewright.targets.target import Choices, Share, Target, boundary, computed, together, unshared
from tilewright.tune.allocate import Objective
from tilewright.tune.effort import KNOWN, Tuning
from tilewright.tune.gpu import GpuTuner
from tilewright.tune.gpu_known import GpuMemory, known_ways
from tilewright.tune.gpu_lock import lock_of, locked_ways
from tilewright.tune.gpu_rule import has_kernel
from tilewright.tune.gpu_sums import Pair, joined, joined_tasks, pairs_of
from tilewright.tune.lock import check_lockable, read_lock, write_lock

_BUILDERS = 8  # threads that compile at once
_RUNS = 5  # of a model, to see how long a call takes


@dataclass(frozen=True)
class CudaTarget:
    """`ordinal`: the card here; None: only its description. `libraries`: those that may compute parts of a model."""

    machine: GpuMachine
    ordinal: int | None = None
    libraries: frozenset[str] = frozenset()

    @classmethod
    def of_card(cls, ordinal: int) -> Target:
        """DeviceError, MissingDependencyError or TargetError where models cannot run on it."""
        machine = detect(ordinal)
        there = frozenset(name for name, found in vendor.is_available().items() if found)
        return cls(machine, ordinal, there)

    @classmethod
    def described(cls, machine: GpuMachine) -> Target:
        """For a file, or for another machine: without libraries, since a file cannot hold them."""
        return cls(machine)

    @property
    def is_here(self) -> bool:
        return self.ordinal is not None and device.count() > self.ordinal

    def default_numerics(self) -> str:
        """As the option says; and as PyTorch is told to treat float32."""
        chosen = knobs.get("numerics")
        return "tf32" if chosen == "fast" and _torch_rounds() else chosen

    def partitioned(
        self, imported: ImportedModel, numerics: str, trace: Trace, observe: Observer | None = None
    ) -> Partition:
        abilities = Abilities(chains=False, half=True, libraries=bool(self.libraries), prologues=True)

        def pipeline(abilities: Abilities) -> Partition:
            return run_pipeline(
                imported.graph,
                trace,
                numerics=numerics,
                oracle=FewestBytes(),
                abilities=abilities,
                observe=observe,
            )

        found = pipeline(abilities)
        if "torch" in self.libraries or all(
            has_kernel(task, self.machine, numerics) for task, _ in computed(found).values()
        ):
            return found
        return pipeline(replace(abilities, attention=False))

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
    ) -> dict[str, Way]:
        tasks = together(partitions)
        path = None if lock is None else Path(lock)
        plain = {key: task for key, (task, _) in tasks.items()}
        if path is not None:
            if (found := read_lock(path)) is not None:
                sums = {key for key, locked in found.tasks.items() if locked.template == summed.NAME}
                plain |= joined_tasks(partitions, sums)
                return locked_ways(found, plain, self.machine, numerics, self.libraries, path)
            check_lockable(path)
        ways = self._ways(partitions, tasks, numerics, trace, tuning, objective)
        if path is not None:
            plain |= joined_tasks(partitions, ways.keys())
            write_lock(path, lock_of(ways, plain, self.machine, numerics))
        return ways

    def _ways(
        self,
        partitions: Sequence[Partition],
        tasks: Mapping[str, tuple[Task, int]],
        numerics: str,
        trace: Trace,
        tuning: Tuning,
        objective: Objective | None,
    ) -> dict[str, Way]:
        """As raced, or by the rule; of each task, and of each pair of them that is better joined."""

        def pairs(ways: Mapping[str, Way]) -> dict[str, Pair]:
            return pairs_of(partitions, ways, rated(self.machine), numerics)

        if not tuning.measures:
            with trace.span("choose", tasks=len(tasks)) as span:
                memory = GpuMemory(self.machine, numerics, self.libraries)
                plain = {key: task for key, (task, _) in tasks.items()}
                ways = known_ways(plain, memory, pairs, tuning.db)
                span.note(known=sum(way.origin.kind == "tuned" for way in ways.values()))
                return ways
        assert self.ordinal is not None
        from tilewright.targets.staged import boundary_of  # with what measures: only for those who do

        def ready(ways: Mapping[str, Way]) -> list[GpuExecutor]:
            found = []
            for partition in partitions:
                linked = self._linked(partition, ways, boundary_of(partition), numerics)
                executor = GpuExecutor(linked.plan, linked.constants, linked.objects, self.ordinal or 0)
                executor.run(random_inputs(linked.plan), executor.new_outputs())
                found.append(executor)
            return found

        def models(ways: Mapping[str, Way]) -> Callable[[], float]:
            executors = ready(ways)
            return lambda: sum(executor.seconds_of_graph() for executor in executors)

        def each_model(ways: Mapping[str, Way]) -> list[float]:
            return [
                statistics.median(executor.seconds_of_graph() for _ in range(_RUNS))
                for executor in ready(ways)
            ]

        tuner = GpuTuner(
            self.machine,
            self.ordinal,
            numerics,
            self.libraries,
            tuning,
            trace,
            models=models,
            pairs=pairs,
            objective=objective,
            each_model=each_model,
        )
        with trace.span("tune", tasks=len(tasks)) as span:
            found = tuner.tune(tasks)
            span.note(trials=tuner.trials, gpu_seconds=tuner.gpu_seconds)
        return found

    def _linked(
        self,
        partition: Partition,
        ways: Mapping[str, Way],
        boundary: Boundary,
        numerics: str,
        trace: Trace | None = None,
    ) -> Linked:
        trace = trace or Trace.off()
        split, pieces = refined(joined(partition, ways), dict(ways))
        with trace.span("build", tasks=len(pieces)):
            kernels = build_pieces(pieces, self.machine, numerics)
        with trace.span("link"):
            features = [AWAITS_TURN] if self.machine.dependent_launch else []
            target = {"triple": TRIPLE, "cpu": self.machine.capability, "features": features}
            return link(split, kernels, boundary, target, numerics=numerics, producer=f"tilewright {VERSION}")

    def finished(
        self,
        imported: ImportedModel,
        partition: Partition,
        numerics: str,
        threads: int | None,
        trace: Trace,
        choices: Choices,
        share: Share = unshared,
    ) -> GpuModel:
        linked = self._linked(partition, choices, boundary(imported), numerics, trace)

        def planned_for(machine: GpuMachine) -> GpuModel:
            """The model again, of kernels of ours alone."""
            alone = replace(self, machine=machine, libraries=frozenset())
            parts = alone.partitioned(imported, numerics, trace)
            own = alone.chosen([parts], numerics, threads, trace)
            if machine == self.machine:  # what was tuned, or locked, as far as it needs no library
                own |= {key: way for key, way in choices.items() if key in own and way.is_ours}
            return alone.finished(imported, parts, numerics, threads, trace, own)

        def to_save() -> list[GpuModel]:
            """One for cards as this one, then one for all others."""
            own = planned_for(self.machine) if self.libraries else model
            return [own, planned_for(PORTABLE)] if self.machine != PORTABLE else [own]

        with trace.span("load"):
            model = GpuModel(
                linked.plan,
                share(linked.constants),
                linked.objects,
                ordinal=self.ordinal or 0,
                checker=checked_kernel,
                to_save=to_save,
            )
        return model


def _torch_rounds() -> bool:
    """Whether PyTorch may round float32 in matrix products on a GPU."""
    torch = torch_module()
    if torch is None:
        return False
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    if precision is None:  # before PyTorch 2.9
        return bool(matmul.allow_tf32)
    return bool(precision == "tf32" or (precision == "none" and torch.backends.fp32_precision == "tf32"))


def build_pieces(pieces: Mapping[str, Piece], machine: GpuMachine, numerics: str) -> dict[str, Linkable]:
    """What a plan needs of each piece; those of ours are compiled, several at once."""
    cache = ObjectCache.default()

    def made(piece: Piece) -> Linkable:
        if piece.call is not None:
            missing = len(piece.operands) - len(piece.packings)
            packings = (*piece.packings, *[None] * missing)
            called = f"{piece.call.function} of a library"
            return Linkable("", b"", 1, called, packings, vendor=piece.call, origin=piece.origin)
        kernel = build_piece(piece, machine, numerics, cache)
        return replace(linkable(kernel, len(piece.operands)), origin=piece.origin)

    with ThreadPoolExecutor(min(_BUILDERS, os.cpu_count() or 1)) as pool:
        return dict(zip(pieces, pool.map(made, pieces.values()), strict=True))


def linkable(kernel: GpuKernel, inputs: int) -> Linkable:
    return Linkable(
        kernel.symbol,
        kernel.cubin,
        kernel.blocks,
        kernel.decisions,
        (*kernel.packings, *[None] * (inputs - len(kernel.packings))),
        launch=Launch(kernel.threads, kernel.shared_bytes, kernel.awaits),
        arguments=kernel.arguments,
    )
