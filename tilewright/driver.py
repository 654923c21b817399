"""The road as code: what happens to a model, top to bottom.

model -> Graph -> Partition (Tasks) -> Programs -> Kernels -> Plan -> CompiledModel
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

import tilewright
from tilewright import frontend, knobs
from tilewright.codegen.llvm.build import Kernel, build
from tilewright.codegen.llvm.cache import ObjectCache
from tilewright.errors import OptionError, TargetError
from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition, Task
from tilewright.hw import CpuMachine, host
from tilewright.link import Boundary, link
from tilewright.measure.check import kernel_error
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.runtime.dispatch import Policy
from tilewright.runtime.dynamic import Arguments, ConstantPool, DynamicModel
from tilewright.runtime.model import CompiledModel, as_arguments
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.tune.allocate import Goal, Objective
from tilewright.tune.choose import Choice, choose
from tilewright.tune.effort import EFFORTS as MEASURING
from tilewright.tune.effort import Tuning, parse_duration
from tilewright.tune.lock import check_lockable, lock_of, locked_choices, read_lock, write_lock
from tilewright.tune.oracle import PredictedCosts

EFFORTS = ("none", *MEASURING)
NUMERICS = ("fast", "strict")


@overload
def compile(
    model: Any,
    example_inputs: Any = ...,
    *,
    dynamic: Literal[False] = ...,
    target: str | CpuMachine | None = ...,
    effort: str = ...,
    budget: float | str | None = ...,
    seed: int = ...,
    lock: str | Path | None = ...,
    db: str | Path | None = ...,
    numerics: str | None = ...,
    threads: int | None = ...,
    trace: Trace | None = ...,
) -> CompiledModel: ...


@overload
def compile(
    model: Any,
    example_inputs: Any = ...,
    *,
    dynamic: Literal[True] | Policy,
    target: str | CpuMachine | None = ...,
    effort: str = ...,
    budget: float | str | None = ...,
    seed: int = ...,
    lock: str | Path | None = ...,
    db: str | Path | None = ...,
    numerics: str | None = ...,
    threads: int | None = ...,
    trace: Trace | None = ...,
) -> DynamicModel: ...


def compile(
    model: Any,
    example_inputs: Any = None,
    *,
    dynamic: bool | Policy = False,
    target: str | CpuMachine | None = None,
    effort: str = "none",
    budget: float | str | None = None,
    seed: int = 0,
    lock: str | Path | None = None,
    db: str | Path | None = None,
    numerics: str | None = None,
    threads: int | None = None,
    trace: Trace | None = None,
) -> CompiledModel | DynamicModel:
    """Compile `model` for inputs like `example_inputs`.

    - `model`: an `nn.Module` in eval mode, a `torch.export.ExportedProgram`, an `onnx.ModelProto`, or the path of an
      `.onnx` file.
    - `example_inputs`: a tuple of positional arguments, a dict of keyword arguments, or a single tensor. An exported
      program has its own; an ONNX model needs them only where it leaves dimensions open.
    - `dynamic`: True for a model that is called with other shapes too: each is compiled when it comes, into a bounded
      table with the policy of `runtime.dispatch`, which may be given instead of True.
    - `target`: None or "cpu" for this machine, or a machine description.
    - `effort`: "none": no measurement, an analytical model chooses; "quick" (about a minute) and "full" (until no more
      than 1% is expected): candidates are built, checked and timed here, and what is found is kept for the next time.
      Ctrl-C and SIGTERM end the measuring, and the best so far is used.
    - `budget`: seconds that measuring may take at most, or a text such as "5m". `seed`: of the search.
    - `lock`: a file of choices. Where it exists they are taken as they are, and nothing is measured; otherwise the
      choices of this build are written there.
    - `db`: the database of what was measured; None: the one in the cache folder.
    - `numerics`: "fast", or "strict": no fast-math flags, every rounding of the model's own types kept.
    - `threads`: how many threads a call uses; None: `TILEWRIGHT_THREADS`, or as many as this process may use.
    - `trace`: collects what happened, for progress and reports.

    The result is called like the model, with torch tensors or NumPy arrays.
    """
    trace = trace or Trace.off()
    machine = resolve_target(target)
    numerics = resolve_option("numerics", numerics or knobs.get("numerics"), NUMERICS)
    tuning = resolve_tuning(effort, budget, machine, seed=seed, db=db)

    if dynamic and lock is not None:
        raise OptionError(
            "a lock file is of one kind of call, and a model with dynamic=True has many",
            remedy="compile each kind of call with a lock file of its own, or leave `lock` out",
        )
    if dynamic:
        policy = dynamic if isinstance(dynamic, Policy) else None
        return compile_dynamic(model, example_inputs, machine, numerics, threads, policy, trace, tuning)
    with trace.span("import"):
        imported = frontend.import_model(model, example_inputs)
    return compile_imported(
        imported, machine, numerics=numerics, threads=threads, trace=trace, tuning=tuning, lock=lock
    )


def compile_all(
    models: Sequence[tuple[Any, Any]],
    *,
    latency: Sequence[float | str | None] | None = None,
    target: str | CpuMachine | None = None,
    effort: str = "quick",
    budget: float | str | None = None,
    seed: int = 0,
    lock: str | Path | None = None,
    db: str | Path | None = None,
    numerics: str | None = None,
    threads: int | None = None,
    trace: Trace | None = None,
) -> list[CompiledModel]:
    """Compile several models, each with its example inputs, in one tuning run: tasks that they share are measured once,
    and the budget goes to where the time of all of them together falls most.

    `latency`: of each model, the time that a call may take. One that is fast enough gets no more of the budget. The
    other options are those of `compile`.
    """
    trace = trace or Trace.off()
    machine = resolve_target(target)
    numerics = resolve_option("numerics", numerics or knobs.get("numerics"), NUMERICS)
    tuning = resolve_tuning(effort, budget, machine, seed=seed, db=db)
    latencies = resolve_latency(latency, len(models))
    with trace.span("import"):
        imported = [frontend.import_model(model, inputs) for model, inputs in models]
    with trace.span("rewrite"):
        partitions = [partitioned(one, machine, numerics, trace) for one in imported]
    goals = tuple(
        Goal({key: count for key, (_, count) in computed(partition).items()}, seconds)
        for partition, seconds in zip(partitions, latencies, strict=True)
    )
    choices = chosen(
        partitions, machine, numerics, threads, trace, tuning=tuning, lock=lock, objective=Objective(goals)
    )
    return [
        finished(one, partition, machine, numerics, threads, trace, choices)
        for one, partition in zip(imported, partitions, strict=True)
    ]


def compile_dynamic(
    model: Any,
    example_inputs: Any,
    machine: CpuMachine,
    numerics: str,
    threads: int | None,
    policy: Policy | None,
    trace: Trace,
    tuning: Tuning | None = None,
) -> DynamicModel:
    """The road for each kind of call, when it comes; for that of the examples, if there are any, now."""
    source = frontend.source_of(model)
    pool = ConstantPool()

    def make(arguments: Arguments) -> CompiledModel:
        with trace.span("import"):
            imported = source.import_for(arguments)
        return compile_imported(
            imported,
            machine,
            numerics=numerics,
            threads=threads,
            trace=trace,
            share=pool.shared,
            tuning=tuning,
        )

    result = DynamicModel(source.names, make=make, otherwise=source.run, policy=policy)
    if example_inputs is not None:
        result.variant(*as_arguments(example_inputs))
    return result


def compile_imported(
    imported: ImportedModel,
    machine: CpuMachine,
    *,
    numerics: str = "fast",
    threads: int | None = None,
    trace: Trace | None = None,
    share: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]] = lambda constants: constants,
    tuning: Tuning | None = None,
    lock: str | Path | None = None,
) -> CompiledModel:
    """The road from a graph on, whatever frontend it came from. `share` may put equal constants of other models in the
    place of this one's. `tuning`: how much to measure; None: nothing."""
    trace = trace or Trace.off()
    with trace.span("rewrite"):
        partition = partitioned(imported, machine, numerics, trace)
    choices = chosen([partition], machine, numerics, threads, trace, tuning=tuning, lock=lock)
    return finished(imported, partition, machine, numerics, threads, trace, choices, share)


def partitioned(imported: ImportedModel, machine: CpuMachine, numerics: str, trace: Trace) -> Partition:
    """Graph -> tasks."""
    oracle = PredictedCosts(machine, numerics)
    return run_pipeline(imported.graph, trace, numerics=numerics, oracle=oracle)


def computed(partition: Partition) -> dict[str, tuple[Task, int]]:
    """The tasks that need a kernel: a tensor without elements needs none."""
    return {key: found for key, found in partition.tasks().items() if found[0].output.type.size}


def chosen(
    partitions: Iterable[Partition],
    machine: CpuMachine,
    numerics: str,
    threads: int | None,
    trace: Trace,
    *,
    tuning: Tuning | None = None,
    lock: str | Path | None = None,
    objective: Objective | None = None,
) -> dict[str, Choice]:
    """Tasks -> a program for each, by key: as the lock file says, or as measured, or as predicted."""
    tasks: dict[str, tuple[Task, int]] = {}
    for partition in partitions:
        for key, (task, count) in computed(partition).items():
            tasks[key] = (task, tasks.get(key, (task, 0))[1] + count)
    works = {key: Work(task, machine, numerics) for key, (task, _) in tasks.items()}
    path = None if lock is None else Path(lock)
    if path is not None:
        if (found := read_lock(path)) is not None:
            return locked_choices(found, works, numerics, path)
        check_lockable(path)
    if tuning is None:
        with trace.span("choose", tasks=len(works)):
            choices = {key: choose(work) for key, work in works.items()}
    else:
        from tilewright.tune.tuner import (
            tune,  # with the database and the searches: only for those who measure
        )

        with trace.span("tune", tasks=len(works)):
            choices = tune(
                tasks,
                machine,
                tuning,
                numerics=numerics,
                threads=threads or knobs.get("threads"),
                trace=trace,
                objective=objective,
            )
    if path is not None:
        write_lock(path, lock_of(choices, works, numerics))
    return choices


def finished(
    imported: ImportedModel,
    partition: Partition,
    machine: CpuMachine,
    numerics: str,
    threads: int | None,
    trace: Trace,
    choices: Mapping[str, Choice],
    share: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]] = lambda constants: constants,
) -> CompiledModel:
    """Programs -> a model that runs."""
    with trace.span("build", tasks=len(computed(partition))):
        kernels = build_kernels(partition, machine, numerics, trace, choices)

    with trace.span("link"):
        boundary = Boundary(
            imported.input_names, imported.input_tree, imported.output_tree, imported.argument_names
        )
        producer = f"tilewright {tilewright.__version__}"
        linked = link(partition, kernels, boundary, machine, numerics=numerics, producer=producer)

    with trace.span("load"):
        return CompiledModel(
            linked.plan, share(linked.constants), linked.objects, threads=threads, checker=kernel_error
        )


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


def resolve_target(target: str | CpuMachine | None) -> CpuMachine:
    if isinstance(target, CpuMachine):
        return target
    if target in (None, "cpu"):
        return host()
    raise TargetError(f"no target is called {target!r}; this version compiles for the CPU")


def resolve_tuning(
    effort: str,
    budget: float | str | None,
    machine: CpuMachine,
    *,
    seed: int = 0,
    db: str | Path | None = None,
) -> Tuning | None:
    resolve_option("effort", effort, EFFORTS)
    seconds = None if budget is None else parse_duration(budget)
    if effort == "none":
        if budget is not None:
            raise OptionError(
                'effort="none" measures nothing and needs no budget; say effort="quick" or "full"'
            )
        return None
    if machine != host():
        raise OptionError(
            f'effort={effort!r} measures on this machine, and the target is another; say effort="none"'
        )
    return Tuning(effort, seconds, seed, db=None if db is None else Path(db))


def resolve_latency(latency: Sequence[float | str | None] | None, models: int) -> list[float | None]:
    if latency is None:
        return [None] * models
    if len(latency) != models:
        raise OptionError(
            f"{len(latency)} latencies for {models} models",
            remedy="give one for each model, None where there is none",
        )
    return [None if each is None else parse_duration(each, "latency") for each in latency]


def resolve_option(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(f"{name}={value!r} is not possible; it is one of {', '.join(map(repr, allowed))}")
    return value
