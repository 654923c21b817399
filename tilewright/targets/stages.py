"""The stages after the partition, the same for every target: tasks -> choices -> kernels -> plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.generator import Builds, generator
from tilewright.cost.predictor import kernel_seconds
from tilewright.graph.task import Partition, Rival, Task
from tilewright.link import Boundary, Linkable, Linked, link
from tilewright.rewrites.expand import expand
from tilewright.rewrites.join_reductions import Alternative, alternatives, join_reductions
from tilewright.runtime.plan import Origin
from tilewright.space.implementation import Part
from tilewright.space.template import Work
from tilewright.space.templates.default import DEFAULT
from tilewright.support.layers import fused_name, shared_name
from tilewright.support.trace import Trace
from tilewright.support.version import VERSION
from tilewright.targets.options import Settings
from tilewright.targets.target import Choices, Target, computed, together
from tilewright.tune.allocate import Goal, Objective
from tilewright.tune.choose import Choice, best_of, choose, implementation_of
from tilewright.tune.known import known_choices
from tilewright.tune.lock import check_lockable, lock_of, locked_choices, read_lock, write_lock

_CLOSE = 1.5  # a pair is measured as one task if predicted to take less than this multiple of its two kernels


@dataclass(frozen=True)
class Chosen:
    """The choice for each task, by key, and the partitions in which pairs are joined where that is faster."""

    partitions: tuple[Partition, ...]
    choices: Choices


def choose_implementations(
    settings: Settings,
    partitions: Sequence[Partition],
    *,
    objective: Objective | None = None,
    builds: Builds | None = None,
) -> Chosen:
    """Choose the implementation of each task: from the lock file, by measuring now, from earlier measurements, or
    predicted. `builds` starts to build predicted choices while the rest is chosen."""
    target, numerics, path = settings.target, settings.numerics, settings.lock
    pairs = alternatives(partitions) if target.joins_reductions() else {}
    if path is not None:
        if (found := read_lock(path)) is not None:
            joined = _join(partitions, [key for key in pairs if key in found.tasks])
            return Chosen(joined, locked_choices(found, _works(joined, target, numerics), numerics, path))
        check_lockable(path)
    pairs = {key: pair for key, pair in pairs.items() if _is_possible(pair, target, numerics)}
    works = _works(partitions, target, numerics)
    alternative_tasks = {key: Work(pair.joined, target.machine, numerics) for key, pair in pairs.items()}
    if settings.tuning.measures:
        # A lock file names tasks, so what is measured must not change the cut.
        rivals = [None if path is not None else partition.rival() for partition in partitions]
        choices = _tune_tasks(settings, partitions, rivals, pairs, alternative_tasks, objective)
        partitions = [
            _settle(partition, rival, choices, target)
            for partition, rival in zip(partitions, rivals, strict=True)
        ]
    else:
        with settings.trace.span("choose", tasks=len(works)) as span:
            threads = target.threads(settings.threads)
            known = known_choices({**works, **alternative_tasks}, threads, settings.tuning.db)
            choices = {}
            for key, work in (works | alternative_tasks).items():
                choices[key] = choice = known.get(key) or choose(work)
                if builds is not None and not pairs:  # of a pair, one or the other is not needed
                    for part in choice.implementation.parts:
                        builds.begin(part)
            span.note(known=len(known))
    faster = [key for key, pair in pairs.items() if _is_faster(pair, choices)]
    joined = _join(partitions, faster)
    needed = _works(joined, target, numerics)
    choices = {key: choices[key] for key in needed}
    if path is not None:
        write_lock(path, lock_of(choices, needed, numerics))
    return Chosen(joined, choices)


def tunable_tasks(partitions: Sequence[Partition], target: Target) -> dict[str, tuple[Task, int]]:
    """The tasks of several models that may be measured, each with the total number of its calls: those of the
    partitions, and those that could replace pairs of them."""
    pairs = alternatives(partitions) if target.joins_reductions() else {}
    return {key: (pair.joined, pair.calls) for key, pair in pairs.items()} | together(partitions)


def _works(partitions: Sequence[Partition], target: Target, numerics: str) -> dict[str, Work]:
    return {key: Work(task, target.machine, numerics) for key, (task, _) in together(partitions).items()}


def _calls_of(partitions: Sequence[Partition]) -> dict[str, int]:
    return {key: count for key, (_, count) in together(partitions).items()}


def _join(partitions: Sequence[Partition], keys: Sequence[str]) -> tuple[Partition, ...]:
    return tuple(join_reductions(partition, keys) for partition in partitions)


def _is_possible(pair: Alternative, target: Target, numerics: str) -> bool:
    """Whether some kernel computes both tasks at once."""
    return best_of(Work(pair.joined, target.machine, numerics)) is not None


def _is_faster(pair: Alternative, choices: Mapping[str, Choice]) -> bool:
    """Whether one kernel for both tasks is faster: by measured times if all are measured, otherwise by
    predictions."""
    joined, separate = choices[pair.joined.key], [choices[task.key] for task in pair.separate]
    times = [choice.seconds for choice in (joined, *separate)]
    measured = [choice.origin.kind == "tuned" for choice in (joined, *separate)]
    if any(seconds is None for seconds in times) or any(measured) != all(measured):
        return False
    one, *two = (seconds or 0.0 for seconds in times)
    return one < sum(two)


def _settle(
    partition: Partition, rival: Rival | None, choices: Mapping[str, Choice], target: Target
) -> Partition:
    """The cheapest cut into tasks of the partition and of its rival, if what differs between the two was measured."""
    if rival is None:
        return partition
    mine, others = computed(partition), computed(rival.partition)
    if any(choices[key].origin.kind != "tuned" for key in mine.keys() ^ others.keys()):
        return partition
    between = kernel_seconds(target.machine)
    return rival.settle({key: (choices[key].seconds or 0.0) + between for key in (*mine, *others)})


def _tune_tasks(
    settings: Settings,
    partitions: Sequence[Partition],
    rivals: Sequence[Rival | None],
    pairs: Mapping[str, Alternative],
    alternative_tasks: Mapping[str, Work],
    objective: Objective | None,
) -> dict[str, Choice]:
    # Imports the database and the searches, which only tuning needs.
    from tilewright.targets.model_runs import ModelRuns
    from tilewright.tune.tunable import TunableTask
    from tilewright.tune.tuner import tune

    target, runner = settings.target, settings.runner
    threads = target.threads(settings.threads)
    untraced = replace(settings, trace=Trace.off())
    every = [*partitions, *(rival.partition for rival in rivals if rival is not None)]
    works = _works(every, target, settings.numerics)
    calls = _calls_of(every)
    named = _task_layers(every)
    tunables = {key: (TunableTask(work, threads, named[key]), calls[key]) for key, work in works.items()}
    close = [key for key, pair in pairs.items() if _is_close(pair, alternative_tasks[key], works)]
    tunables |= {key: (TunableTask(alternative_tasks[key], threads), pairs[key].calls) for key in close}
    own = _calls_of(partitions)
    models = [[number] for number in range(len(partitions))] if objective else [range(len(partitions))]
    wanted = objective or Objective((Goal(own),))
    goals = [
        replace(
            goal,
            alternative_tasks={
                **_calls_of([rival.partition for n in of if (rival := rivals[n]) is not None]),
                **{
                    key: pair.calls
                    for key, pair in alternatives([partitions[n] for n in of]).items()
                    if key in close
                },
            },
        )
        for goal, of in zip(wanted.goals, models, strict=True)
    ]
    unsure = [key for key in calls if key not in own]
    unsure += [
        key
        for partition, rival in zip(partitions, rivals, strict=True)
        if rival is not None
        for key in computed(partition)
        if key not in computed(rival.partition)
    ]
    wanted = replace(wanted, goals=tuple(goals))

    def linked(
        partition: Partition, choices: Choices, boundary: Boundary
    ) -> tuple[Linked, Mapping[str, str]]:
        return build_plan(untraced, partition, choices, boundary)

    with settings.trace.span("tune", tasks=len(tunables)):
        choices = tune(
            tunables,
            settings.tuning,
            threads=threads,
            trace=settings.trace,
            objective=wanted,
            runner=runner or target.runner,
            models=ModelRuns(target, every, linked, threads) if runner is None else None,
            alone=frozenset(close),
            timed=frozenset(
                [*unsure, *(t.key for key in close for t in (pairs[key].joined, *pairs[key].separate))]
            ),
        )
    return choices | {key: choose(work) for key, work in alternative_tasks.items() if key not in choices}


def _is_close(pair: Alternative, work: Work, works: Mapping[str, Work]) -> bool:
    joined, *separate = (
        choose(each).seconds for each in (work, *(works[task.key] for task in pair.separate))
    )
    if joined is None or any(seconds is None for seconds in separate):
        return False
    return joined < _CLOSE * sum(seconds or 0.0 for seconds in separate)


# -- kernels and plan -------------------------------------------------------------------------------------------------


def build_plan(
    settings: Settings,
    partition: Partition,
    choices: Choices,
    boundary: Boundary,
    builds: Builds | None = None,
) -> tuple[Linked, Mapping[str, str]]:
    """Return the plan of a partition with these choices, and the task of each key in the plan. `builds` may already
    be building its kernels."""
    target, numerics, trace = settings.target, settings.numerics, settings.trace
    implementations = {key: choice.implementation for key, choice in choices.items()}
    names = {key: _name(choice) for key, choice in choices.items()}
    expanded = expand(partition, implementations, names)
    origins = {key: choices[expanded.owner[key]].origin for key in expanded.parts}
    parts: dict[str, Any] = dict(expanded.parts)
    for key, task in expanded.joined.items():
        parts[key] = _default_part(task, target, numerics)
        origins[key] = Origin("default")
    with trace.span("build", tasks=len(parts)):
        layers = _layers(expanded.partition)
        if builds is not None:
            kernels = _build(parts, origins, builds, trace, layers)
        else:
            with Builds(target.machine, numerics, ObjectCache.default(), len(parts)) as own:
                kernels = _build(parts, origins, own, trace, layers)
    with trace.span("link"):
        described = generator(target.machine.kind).plan_target(target.machine)
        producer = f"tilewright {VERSION}"
        linked = link(expanded.partition, kernels, boundary, described, numerics=numerics, producer=producer)
    return linked, expanded.owner


def _name(choice: Choice) -> str:
    return str(choice.config) if choice.config.values else choice.config.template


def _default_part(task: Task, target: Target, numerics: str) -> Part:
    (part,) = implementation_of(Work(task, target.machine, numerics), DEFAULT).parts
    return part


def _task_layers(partitions: Sequence[Partition]) -> dict[str, str]:
    """The layers that a task's calls compute, as one name; by task key."""
    found: dict[str, list[str]] = {}
    for partition in partitions:
        for call in partition.calls:
            found.setdefault(call.task.key, []).append(fused_name(call.layers))
    return {key: shared_name(names) for key, names in found.items()}


def _layers(partition: Partition) -> dict[str, list[str]]:
    """The layers that each call of a kernel computes, as one name; by kernel key."""
    found: dict[str, list[str]] = {}
    for call in partition.calls:
        found.setdefault(call.key, []).append(fused_name(call.layers))
    return found


def _build(
    parts: Mapping[str, Part],
    origins: Mapping[str, Origin],
    builds: Builds,
    trace: Trace,
    layers: Mapping[str, Sequence[str]],
) -> dict[str, Linkable]:
    """Build a kernel for every part; return them by call key."""
    kernels: dict[str, Linkable] = {}
    for part in parts.values():
        builds.begin(part)
    for key, part in parts.items():
        # Wait until it is built; other kernels may be built meanwhile.
        named = layers.get(key, [])
        span_of = trace.span("kernel", label=part.task.label, layer=shared_name(named), calls=len(named))
        with span_of as span:
            kernel, cached = builds.result(part)
            span.note(cached=cached)
        kernels[key] = replace(kernel, origin=origins[key])
    return kernels
