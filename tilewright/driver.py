"""The pipeline as code: the stages that a model goes through, top to bottom, on every target.

    import      model -> Graph                                frontend/
    partition   Graph -> Partition (Tasks)                    rewrites/, with the target's cost oracle
    choose      Tasks -> Choices                              tune/: as locked, tuned before, tuned now, or predicted
    build       Choices -> kernels -> Plan                    codegen/, link.py
    load        Plan -> CompiledModel                         runtime/

`compile_imported` is that list as code. A `Target` (`targets/`) holds what differs between kinds of machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from tilewright import frontend
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.generator import Builds
from tilewright.errors import OptionError
from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition, Task
from tilewright.hw import CpuMachine
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gpu import GpuMachine
from tilewright.measure.passes import PassChecks, PassReport
from tilewright.numerics import NUMERICS
from tilewright.runtime.arguments import as_arguments, joined
from tilewright.runtime.dispatch import Policy
from tilewright.runtime.dynamic import Arguments, ConstantPool, DynamicModel
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.threads import resolve as resolve_threads
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.support.budget import exhaustion
from tilewright.support.collecting import collecting_the_young
from tilewright.support.suggest import did_you_mean
from tilewright.support.trace import Trace
from tilewright.targets.resolve import resolve_target
from tilewright.targets.stages import build_plan, choose_implementations
from tilewright.targets.target import Choices, Share, Target, boundary, computed, together, unshared
from tilewright.tune.allocate import ALLOCATIONS, OBJECTIVES, Combine, Goal, Objective
from tilewright.tune.choose import Choice
from tilewright.tune.effort import BUILT_IN_COST_MODELS, BUILT_IN_SEARCHES, KNOWN, Tuning, parse_duration
from tilewright.tune.effort import EFFORTS as MEASURING

if TYPE_CHECKING:
    from tilewright.targets.pooled import Pool

EFFORTS = ("none", *MEASURING)


@overload
def compile(
    model: Any,
    example_inputs: Any = ...,
    *,
    example_kwargs: Mapping[str, Any] | None = ...,
    dynamic: Literal[False] = ...,
    target: str | CpuMachine | GpuMachine | GemminiMachine | None = ...,
    effort: str = ...,
    budget: float | str | None = ...,
    seed: int = ...,
    search: str = ...,
    cost_model: str = ...,
    allocation: str = ...,
    lock: str | Path | None = ...,
    db: str | Path | None = ...,
    numerics: str | None = ...,
    threads: int | None = ...,
    pool: Pool | str | None = ...,
    trace: Trace | None = ...,
) -> CompiledModel: ...


@overload
def compile(
    model: Any,
    example_inputs: Any = ...,
    *,
    example_kwargs: Mapping[str, Any] | None = ...,
    dynamic: Literal[True] | Policy,
    target: str | CpuMachine | GpuMachine | GemminiMachine | None = ...,
    effort: str = ...,
    budget: float | str | None = ...,
    seed: int = ...,
    search: str = ...,
    cost_model: str = ...,
    allocation: str = ...,
    lock: str | Path | None = ...,
    db: str | Path | None = ...,
    numerics: str | None = ...,
    threads: int | None = ...,
    pool: Pool | str | None = ...,
    trace: Trace | None = ...,
) -> DynamicModel: ...


def compile(
    model: Any,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic: bool | Policy = False,
    target: str | CpuMachine | GpuMachine | GemminiMachine | None = None,
    effort: str = "none",
    budget: float | str | None = None,
    seed: int = 0,
    search: str = "guided",
    cost_model: str = "boosted",
    allocation: str = "gradient",
    lock: str | Path | None = None,
    db: str | Path | None = None,
    numerics: str | None = None,
    threads: int | None = None,
    pool: Pool | str | None = None,
    trace: Trace | None = None,
) -> CompiledModel | DynamicModel:
    """Compile a model for inputs like the examples, and return it as a `CompiledModel`, which is called like it.

        import torch, tilewright

        model = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Softmax(dim=-1)).eval()
        x = torch.randn(8, 64)
        fast = tilewright.compile(model, (x,))
        fast(x)                          # as model(x)
        fast.save("model.tw")            # tilewright.load("model.tw") needs no PyTorch
        print(fast.explain((x,)))        # its kernels, how long each takes, how exact it is

        tilewright.compile(bert, {"input_ids": ids, "attention_mask": mask})   # keyword arguments
        tilewright.compile(model, (x,), example_kwargs={"scale": s})           # both
        tilewright.compile("model.onnx")                                       # ONNX; also "model.pt2"
        tilewright.compile(model, (x,), dynamic=True)                          # shapes that change
        tilewright.compile(model, (x,), effort="quick")                        # tuned for a minute

    - `model`: an `nn.Module` in eval mode, a `torch.export.ExportedProgram`, an `onnx.ModelProto`, or the path of an
      `.onnx` file or of a `.pt2` file that `torch.export.save` wrote.
    - `example_inputs`: a tuple of positional arguments, a dict of keyword arguments, or a single tensor; torch
      tensors or NumPy arrays. An exported program has its own; an ONNX model needs them only where it leaves
      dimensions open.
    - `example_kwargs`: keyword arguments alongside positional `example_inputs`.
    - `dynamic`: True if the model is also called with other shapes. Each new shape is compiled when it first occurs,
      up to a limit. Pass a policy of `runtime.dispatch` instead of True to change the limit.
    - `target`: None compiles for the device that holds the model's tensors; "cpu" for this machine's processor,
      "cuda" or "gpu" for its NVIDIA GPU; "gemmini" for a simulated accelerator of 8-bit integers (docs/gemmini.md); or
      pass the description of a machine.
    - `effort`: "none" measures nothing: kernels that were tuned before come from the database, and an analytical
      model chooses the others. "quick" (about a minute) and "full" (until no more than 1% is expected): build, check
      and time candidates on this machine, and keep the results for later compilations. After Ctrl-C or SIGTERM, the
      best candidates so far are used.
    - `budget`: the maximum time for measuring, in seconds or as text ("5m"). `seed`: the seed of the search.
    - `search`: which search proposes candidates: "guided" (the default), "evolution", "annealing", "random",
      "exhaustive", or one that was registered. `cost_model`: which model ranks them: "boosted" (the default), which
      learns from every trial, "analytical", which does not, or one that was registered (docs/08-extending.md).
    - `allocation`: which task is measured next: "gradient" (the default) takes the one with the largest expected
      gain, "heaviest" the slowest one, "round-robin" each in turn.
    - `lock`: a file of choices. If it exists, its choices are used and nothing is measured; otherwise the choices of
      this compilation are written to it.
    - `db`: the tuning database; None uses the one in the cache folder.
    - `numerics`: "fast", the default, bounds the error of each element of a float32 matmul or convolution by that of
      a plain sum of products, up to a stated factor; "strict" has no fast-math flags and no other algorithms, and
      keeps every rounding of the model's own types; "relaxed" may lose digits for speed; "tf32" is "fast", and on a
      GPU float32 may be rounded to 10 bits of fraction where matrices are multiplied. That is the default on a GPU
      where PyTorch may do so too (`torch.backends.cuda.matmul.allow_tf32`). docs/numerics.md has the details.
    - `threads`: the number of threads of a call; None uses `TILEWRIGHT_THREADS`, or all cores that this process may
      use.
    - `pool`: the address of a pool of machines, or a `Pool`: candidates are built, checked and timed there, for the
      device that it names, which need not be here (docs/pool.md).
    - `trace`: collects events, for progress and reports.

    The result is called like the model, with torch tensors (of the target's device) or NumPy arrays.
    """
    trace = trace or Trace.off()
    check_options(
        effort=effort,
        budget=budget,
        seed=seed,
        numerics=numerics,
        threads=threads,
        search=search,
        cost_model=cost_model,
        allocation=allocation,
    )
    model = frontend.opened(model)
    example_inputs = joined(example_inputs, example_kwargs)
    if dynamic and lock is not None:
        raise OptionError(
            "a lock file covers a single input signature, and dynamic=True compiles several",
            remedy="compile each input signature with a lock file of its own, or leave `lock` out",
        )
    if dynamic and pool is not None:
        raise OptionError(
            "dynamic=True compiles when calls come, and a pool is only there while it tunes",
            remedy="tune each input signature with the pool, then compile with dynamic=True",
        )
    with _measuring(pool, target, effort, trace) as (target, runner):
        resolved = resolve_target(target, model, example_inputs)
        numerics = resolve_option("numerics", numerics or resolved.default_numerics(), NUMERICS)
        tuning = resolve_tuning(
            effort,
            budget,
            resolved,
            seed=seed,
            db=db,
            search=search,
            cost_model=cost_model,
            allocation=allocation,
            elsewhere=runner is not None,
        )
        if dynamic:
            policy = dynamic if isinstance(dynamic, Policy) else None
            return compile_dynamic(model, example_inputs, resolved, numerics, threads, policy, trace, tuning)
        with trace.span("import"):
            imported = frontend.import_model(model, example_inputs)
        return compile_imported(
            imported,
            resolved,
            numerics=numerics,
            threads=threads,
            trace=trace,
            tuning=tuning,
            lock=lock,
            runner=runner,
        )


@contextmanager
def _measuring(
    pool: Pool | str | None, target: Any, effort: str, trace: Trace
) -> Iterator[tuple[Any, Callable[[int], Any] | None]]:
    """The target, and what measures for it: of a pool's device where a pool is given, else (`target`, None)."""
    if pool is None:
        yield target, None
        return
    if target is not None:
        raise OptionError(
            "the device of the pool is the target",
            remedy="leave `target` out, and name the device in the pool",
        )
    if effort == "none":
        raise OptionError('effort="none" measures nothing and needs no pool; say effort="quick" or "full"')
    from tilewright.targets.pooled import connected

    with connected(pool, trace) as connection:
        yield connection.machine, connection.runner


def compile_all(
    models: Sequence[tuple[Any, Any] | tuple[Any, Any, Mapping[str, Any]]],
    *,
    objective: str | Combine = "sum",
    latency: Sequence[float | str | None] | None = None,
    task_latency: Mapping[str, float | str] | None = None,
    target: str | CpuMachine | GpuMachine | GemminiMachine | None = None,
    effort: str = "quick",
    budget: float | str | None = None,
    seed: int = 0,
    search: str = "guided",
    cost_model: str = "boosted",
    allocation: str = "gradient",
    lock: str | Path | None = None,
    db: str | Path | None = None,
    numerics: str | None = None,
    threads: int | None = None,
    pool: Pool | str | None = None,
    trace: Trace | None = None,
) -> list[CompiledModel]:
    """Compile several models in one tuning run, each with its example inputs.

    Tasks that several models share are measured once, and the budget goes to the tasks that reduce the total time
    most.

    - `models`: one (model, example inputs) or (model, positional examples, keyword examples) per model.
    - `objective`: what tuning minimises: "sum", the total time of all models; "geomean", the geometric mean of their
      times, so that a slow model does not take the whole budget; or a function of the list of their times.
    - `latency`: a target time per call for each model. A model that is fast enough gets no more of the budget.
    - `task_latency`: the same for single tasks, by the label that `explain` shows.

    The other options are those of `compile`.
    """
    trace = trace or Trace.off()
    check_options(
        effort=effort,
        budget=budget,
        seed=seed,
        numerics=numerics,
        threads=threads,
        search=search,
        cost_model=cost_model,
        allocation=allocation,
    )
    examples = [
        (frontend.opened(model), joined(inputs, *kwargs or (None,))) for model, inputs, *kwargs in models
    ]
    with _measuring(pool, target, effort, trace) as (target, runner):
        resolved = resolve_target(target, *examples)
        numerics = resolve_option("numerics", numerics or resolved.default_numerics(), NUMERICS)
        tuning = resolve_tuning(
            effort,
            budget,
            resolved,
            seed=seed,
            db=db,
            search=search,
            cost_model=cost_model,
            allocation=allocation,
            elsewhere=runner is not None,
        )
        latencies = resolve_latency(latency, len(models))
        with trace.span("import"):
            imported = [frontend.import_model(model, inputs) for model, inputs in examples]
        with trace.span("rewrite"):
            partitions = [resolved.partition(one, numerics, trace) for one in imported]
        goals = tuple(
            Goal({key: count for key, (_, count) in computed(partition).items()}, seconds)
            for partition, seconds in zip(partitions, latencies, strict=True)
        )
        chosen = choose_implementations(
            resolved,
            partitions,
            numerics,
            threads,
            trace,
            tuning=tuning,
            lock=lock,
            objective=Objective(
                goals, resolve_task_latency(task_latency, together(partitions)), resolve_objective(objective)
            ),
            runner=runner,
        )
        return [
            _build_and_load(one, partition, resolved, chosen.choices, numerics, threads, trace)
            for one, partition in zip(imported, chosen.partitions, strict=True)
        ]


def compile_dynamic(
    model: Any,
    example_inputs: Any,
    target: Target,
    numerics: str,
    threads: int | None,
    policy: Policy | None,
    trace: Trace,
    tuning: Tuning = KNOWN,
) -> DynamicModel:
    """Compile each input signature when it first occurs, and that of the examples, if there are any, now."""
    source = frontend.source_of(model)
    pool = ConstantPool()

    def make(arguments: Arguments) -> CompiledModel:
        with trace.span("import"):
            imported = source.import_for(arguments)
        return compile_imported(
            imported,
            target,
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
    target: CpuMachine | GpuMachine | Target,
    *,
    numerics: str = "fast",
    threads: int | None = None,
    trace: Trace | None = None,
    share: Share = unshared,
    tuning: Tuning = KNOWN,
    lock: str | Path | None = None,
    runner: Callable[[int], Any] | None = None,
) -> CompiledModel:
    """Run the pipeline on an imported graph, whatever frontend it came from. `tuning` says how much to measure.
    `runner` measures, where it is not this machine."""
    trace = trace or Trace.off()
    resolved = resolve_target(target)
    # Measuring takes long, and candidates should be measured under the usual conditions.
    collecting = nullcontext() if tuning.measures else collecting_the_young()
    with exhaustion("compiling the model"), collecting:
        with trace.span("rewrite"):
            partition = resolved.partition(imported, numerics, trace)
        kernels = len(computed(partition))
        with Builds(resolved.machine, numerics, ObjectCache.default(), kernels) as builds:
            chosen = choose_implementations(
                *(resolved, [partition], numerics, threads, trace),
                tuning=tuning,
                lock=lock,
                runner=runner,
                builds=builds,
            )
            (partition,) = chosen.partitions
            return _build_and_load(
                imported, partition, resolved, chosen.choices, numerics, threads, trace, share, builds
            )


def _build_and_load(
    imported: ImportedModel,
    partition: Partition,
    target: Target,
    choices: Choices,
    numerics: str,
    threads: int | None,
    trace: Trace,
    share: Share = unshared,
    builds: Builds | None = None,
) -> CompiledModel:
    linked, _ = build_plan(target, partition, choices, boundary(imported), numerics, trace, builds)

    def again(other: Target) -> CompiledModel:
        """Compile for another machine of the same kind, and keep the choices made here that are legal there."""
        with trace.span("rewrite"):
            cut = other.partition(imported, numerics, trace)
        chosen = choose_implementations(other, [cut], numerics, threads, trace)
        kept = {
            key: _as_chosen(choices.get(key), choice, key, other, numerics, cut)
            for key, choice in chosen.choices.items()
        }
        return _build_and_load(imported, chosen.partitions[0], other, kept, numerics, threads, trace)

    with trace.span("load"):
        return target.load(linked, share(linked.constants), threads, again)


def _as_chosen(
    here: Choice | None, there: Choice, key: str, target: Target, numerics: str, cut: Partition
) -> Choice:
    """Return this machine's choice if it was tuned or locked and is legal on the other machine, else the other's."""
    task = computed(cut).get(key)
    if here is None or task is None or here.origin.kind not in ("tuned", "lock"):
        return there
    candidates = Candidates.of(Work(task[0], target.machine, numerics))
    if not candidates.is_legal(here.config):
        return there
    return Choice(candidates.implementation(here.config), here.config, here.seconds, here.origin)


def check_passes(
    model: Any,
    example_inputs: Any,
    inputs: Sequence[np.ndarray],
    *,
    target: str | CpuMachine | GpuMachine | GemminiMachine | None = None,
    numerics: str | None = None,
    trace: Trace | None = None,
) -> PassReport:
    """Check that the model's graph, run by the oracle, computes the same function after every pass.

    The pipeline runs up to the tasks, with the decisions that `compile` makes with these options. `inputs` are arrays
    for the graph's inputs, in order.
    """
    model = frontend.opened(model)
    resolved = resolve_target(target, model, example_inputs)
    numerics = resolve_option("numerics", numerics or resolved.default_numerics(), NUMERICS)
    imported = frontend.import_model(model, example_inputs)
    checks = PassChecks(imported.graph, inputs)
    checks.cut(resolved.partition(imported, numerics, trace or Trace.off(), checks))
    return checks.report


def check_options(
    *,
    effort: str = "none",
    budget: float | str | None = None,
    seed: int = 0,
    numerics: str | None = None,
    threads: int | None = None,
    search: str = "guided",
    cost_model: str = "boosted",
    allocation: str = "gradient",
) -> None:
    """Raise OptionError for a value that `compile` cannot use; callers use it before they start long work."""
    resolve_option("effort", effort, EFFORTS)
    resolve_option("allocation", allocation, tuple(ALLOCATIONS))
    if numerics is not None:
        resolve_option("numerics", numerics, NUMERICS)
    if budget is not None:
        parse_duration(budget)
        if effort == "none":
            raise OptionError(
                'effort="none" measures nothing and needs no budget; say effort="quick" or "full"'
            )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OptionError(f"seed={seed!r} must be a whole number", remedy="pass an int, such as seed=0")
    if threads is not None:
        resolve_threads(threads)
    if search not in BUILT_IN_SEARCHES:
        from tilewright.search import search_named  # a user's own search is registered there

        search_named(search)
    if cost_model not in BUILT_IN_COST_MODELS:
        from tilewright.cost.models import cost_model_named

        cost_model_named(cost_model)


def resolve_tuning(
    effort: str,
    budget: float | str | None,
    target: Target,
    *,
    seed: int = 0,
    db: str | Path | None = None,
    search: str = "guided",
    cost_model: str = "boosted",
    allocation: str = "gradient",
    elsewhere: bool = False,
) -> Tuning:
    """`elsewhere`: a pool measures, and the target need not be here."""
    check_options(effort=effort, budget=budget, seed=seed)
    path = None if db is None else Path(db)
    if effort != "none" and not target.is_here and not elsewhere:
        raise OptionError(
            f'effort={effort!r} measures on this machine, and the target is another; say effort="none"'
        )
    seconds = None if budget is None else parse_duration(budget)
    return Tuning(effort, seconds, seed, search, path, cost_model, allocation)


def resolve_latency(latency: Sequence[float | str | None] | None, models: int) -> list[float | None]:
    if latency is None:
        return [None] * models
    if len(latency) != models:
        raise OptionError(
            f"{len(latency)} latencies for {models} models",
            remedy="give one for each model, None where there is none",
        )
    return [None if each is None else parse_duration(each, "latency") for each in latency]


def resolve_objective(objective: str | Combine) -> str | Combine:
    if not callable(objective) and objective not in OBJECTIVES:
        known = ", ".join(map(repr, OBJECTIVES))
        raise OptionError(
            f"objective must be one of {known} or a function of the models' times, got {objective!r}"
        )
    return objective


def resolve_task_latency(
    latency: Mapping[str, float | str] | None, tasks: Mapping[str, tuple[Task, int]]
) -> dict[str, float]:
    """Return the target seconds by task key. The caller names tasks by label or by key."""
    found: dict[str, float] = {}
    for name, value in (latency or {}).items():
        keys = [key for key, (task, _) in tasks.items() if name in (key, task.label)]
        if not keys:
            labels = sorted({task.label for task, _ in tasks.values()})
            raise OptionError(
                f"no task is called {name!r}", remedy=f"name one of these: {', '.join(labels[:8])}"
            )
        found |= dict.fromkeys(keys, parse_duration(value, "task_latency"))
    return found


def resolve_option(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}",
            remedy=did_you_mean(str(value), allowed) or f"pass {name}={allowed[0]!r}, or leave it out",
        )
    return value
