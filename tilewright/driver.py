"""The pipeline as code: the stages that a model goes through, top to bottom, on every target.

    import      model -> Graph                                frontend/
    partition   Graph -> Partition (Tasks)                    rewrites/, with the target's cost oracle
    choose      Tasks -> Choices                              tune/: as locked, tuned before, tuned now, or predicted
    build       Choices -> kernels -> Plan                    codegen/, link.py
    load        Plan -> CompiledModel                         runtime/

`run_pipeline` is that list as code. A `Target` (`targets/`) holds what differs between kinds of machines.
`targets/options.py` checks and resolves the options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from tilewright import frontend
from tilewright.codegen.cache import ObjectCache
from tilewright.codegen.generator import Builds
from tilewright.errors import OptionError
from tilewright.frontend import ImportedModel
from tilewright.graph.task import Partition
from tilewright.hw import CpuMachine
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gpu import GpuMachine
from tilewright.measure.passes import PassChecks, PassReport
from tilewright.rewrites.base import Observer
from tilewright.runtime.arguments import as_arguments, joined
from tilewright.runtime.dispatch import Policy
from tilewright.runtime.dynamic import Arguments, ConstantPool, DynamicModel
from tilewright.runtime.model import CompiledModel
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.support.budget import exhaustion
from tilewright.support.collecting import collecting_the_young
from tilewright.support.trace import Trace
from tilewright.targets.options import (
    CompileOptions,
    Settings,
    check_measures,
    resolve_latency,
    resolve_objective,
    resolve_task_latency,
)
from tilewright.targets.resolve import resolve_target
from tilewright.targets.stages import Chosen, build_plan, choose_implementations, tunable_tasks
from tilewright.targets.target import Choices, Share, Target, boundary, computed, unshared
from tilewright.tune.allocate import Combine, Goal, Objective
from tilewright.tune.choose import Choice
from tilewright.tune.effort import KNOWN, Tuning

if TYPE_CHECKING:
    from tilewright.measure.pool.connection import Pool


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
    partition: str = ...,
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
    partition: str = ...,
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
    partition: str = "dynamic",
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
      learns from every trial, "analytical", which does not, or one that was registered (docs/07-extending.md).
    - `allocation`: which task is measured next: "gradient" (the default) takes the one with the largest expected
      gain, "heaviest" the slowest one, "round-robin" each in turn.
    - `partition`: how operators are grouped into kernels: "dynamic" (the default) finds the groups with the least total
      time, measured or predicted, by dynamic programming; "greedy" applies fixed rules.
    - `lock`: a file of choices. If it exists, its choices are used and nothing is measured; otherwise the choices of
      this compilation are written to it.
    - `db`: the tuning database; None uses the one in the cache folder.
    - `numerics`: "fast", the default, bounds the error of each element of a float32 matmul or convolution by that of
      a plain sum of products, up to a stated factor; "strict" has no fast-math flags and no other algorithms, and
      keeps every rounding of the model's own types; "relaxed" may lose digits for speed; "tf32" is "fast", and on a
      GPU float32 may be rounded to 10 bits of fraction where matrices are multiplied. That is the default on a GPU
      where PyTorch may do so too (`torch.backends.cuda.matmul.allow_tf32`). docs/numerics.md has the details.
    - `threads`: the number of threads of a call on a processor; None uses `TILEWRIGHT_THREADS`, or all cores that this
      process may use.
    - `pool`: the address of a pool of machines, or a `Pool`: candidates are built, checked and timed there, for the
      device that it names, which need not be here (docs/pool.md).
    - `trace`: collects events, for progress and reports.

    The result is called like the model, with torch tensors (of the target's device) or NumPy arrays.
    """
    options = CompileOptions.among(locals())
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
    model = frontend.opened(model)
    example_inputs = joined(example_inputs, example_kwargs)
    with options.resolved(model, example_inputs, pool=pool, trace=trace) as settings:
        if dynamic:
            policy = dynamic if isinstance(dynamic, Policy) else None
            return compile_dynamic(model, example_inputs, settings, policy)
        with settings.trace.span("import"):
            imported = frontend.import_model(model, example_inputs)
        return run_pipeline(imported, settings)


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
    partition: str = "dynamic",
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
    options = CompileOptions.among(locals())
    goals = {
        "objective": objective != "sum",
        "latency": latency is not None,
        "task_latency": bool(task_latency),
    }
    check_measures(effort, goals)
    latencies = resolve_latency(latency, len(models))
    combine = resolve_objective(objective)
    examples = [
        (frontend.opened(model), joined(inputs, *kwargs or (None,))) for model, inputs, *kwargs in models
    ]
    with options.resolved(*examples, pool=pool, trace=trace) as settings:
        with settings.trace.span("import"):
            imported = [frontend.import_model(model, inputs) for model, inputs in examples]
        partitions = [cut_into_tasks(one, settings) for one in imported]
        chosen = choose_together(settings, partitions, combine, latencies, task_latency)
        return build_together(imported, chosen, settings)


def choose_together(
    settings: Settings,
    partitions: Sequence[Partition],
    objective: str | Combine,
    latencies: Sequence[float | None],
    task_latency: Mapping[str, float | str] | None = None,
) -> Chosen:
    """Choose implementations for the tasks of several models in one tuning run."""
    goals = tuple(
        Goal({key: count for key, (_, count) in computed(partition).items()}, seconds)
        for partition, seconds in zip(partitions, latencies, strict=True)
    )
    enough = resolve_task_latency(task_latency, tunable_tasks(partitions, settings.target))
    wanted = Objective(goals, enough, objective)
    return choose_implementations(settings, partitions, objective=wanted)


def build_together(
    imported: Sequence[ImportedModel], chosen: Chosen, settings: Settings
) -> list[CompiledModel]:
    return [
        _build_and_load(one, partition, chosen.choices, settings)
        for one, partition in zip(imported, chosen.partitions, strict=True)
    ]


def compile_dynamic(
    model: Any, example_inputs: Any, settings: Settings, policy: Policy | None
) -> DynamicModel:
    """Compile each input signature when it first occurs, and that of the examples, if there are any, now."""
    source = frontend.source_of(model)
    pool = ConstantPool()

    def make(arguments: Arguments) -> CompiledModel:
        with settings.trace.span("import"):
            imported = source.import_for(arguments)
        return run_pipeline(imported, settings, pool.shared)

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
    tuning: Tuning = KNOWN,
    lock: Path | None = None,
) -> CompiledModel:
    """Compile a graph that is already imported, whatever frontend it came from. `tuning` says how much to measure."""
    resolved = resolve_target(target)
    return run_pipeline(
        imported, Settings(resolved, numerics, threads, tuning, lock, trace=trace or Trace.off())
    )


def run_pipeline(imported: ImportedModel, settings: Settings, share: Share = unshared) -> CompiledModel:
    """Run the stages after the import. `share` replaces constants by equal ones of other models."""
    # Measuring takes long, and candidates should be measured under the usual conditions.
    collecting = nullcontext() if settings.tuning.measures else collecting_the_young()
    with exhaustion("compiling the model"), collecting:
        partition = cut_into_tasks(imported, settings)
        kernels = len(computed(partition))
        machine, numerics = settings.target.machine, settings.numerics
        with Builds(machine, numerics, ObjectCache.default(), kernels) as builds:
            chosen = choose_implementations(settings, [partition], builds=builds)
            (partition,) = chosen.partitions
            return _build_and_load(imported, partition, chosen.choices, settings, share, builds)


def cut_into_tasks(imported: ImportedModel, settings: Settings, observe: Observer | None = None) -> Partition:
    with settings.trace.span("rewrite"):
        return settings.target.partition(
            imported, settings.numerics, settings.trace, observe, cutting=settings.cutting
        )


def _build_and_load(
    imported: ImportedModel,
    partition: Partition,
    choices: Choices,
    settings: Settings,
    share: Share = unshared,
    builds: Builds | None = None,
) -> CompiledModel:
    linked, _ = build_plan(settings, partition, choices, boundary(imported), builds)

    def again(other: Target) -> CompiledModel:
        """Compile for another machine of the same kind, and keep the choices made here that are legal there."""
        there = replace(
            settings, target=other, tuning=replace(settings.tuning, effort="none"), lock=None, runner=None
        )
        cut = cut_into_tasks(imported, there)
        chosen = choose_implementations(there, [cut])
        kept = {
            key: _as_chosen(choices.get(key), choice, key, there, cut)
            for key, choice in chosen.choices.items()
        }
        return _build_and_load(imported, chosen.partitions[0], kept, there)

    with settings.trace.span("load"):
        return settings.target.load(linked, share(linked.constants), settings.threads, again)


def _as_chosen(here: Choice | None, there: Choice, key: str, settings: Settings, cut: Partition) -> Choice:
    """Return this machine's choice if it was tuned or locked and is legal on the other machine, else the other's."""
    task = computed(cut).get(key)
    if here is None or task is None or here.origin.kind not in ("tuned", "lock"):
        return there
    candidates = Candidates.of(Work(task[0], settings.target.machine, settings.numerics))
    if not candidates.is_legal(here.config):
        return there
    return Choice(candidates.implementation(here.config), here.config, here.seconds, here.origin)


def check_passes(
    model: Any,
    example_inputs: Any,
    inputs: Sequence[np.ndarray],
    *,
    target: str | CpuMachine | GpuMachine | GemminiMachine | None = None,
    partition: str = "dynamic",
    lock: str | Path | None = None,
    db: str | Path | None = None,
    numerics: str | None = None,
    threads: int | None = None,
    trace: Trace | None = None,
) -> PassReport:
    """Check that the model's graph, run by the oracle, computes the same function after every pass.

    The pipeline runs up to the tasks, with the decisions that `compile` makes with these options. `inputs` are arrays
    for the graph's inputs, in order.
    """
    options = CompileOptions.among(locals())
    model = frontend.opened(model)
    with options.resolved(model, example_inputs, trace=trace) as settings:
        imported = frontend.import_model(model, example_inputs)
        checks = PassChecks(imported.graph, inputs)
        checks.cut(cut_into_tasks(imported, settings, checks))
    return checks.report
