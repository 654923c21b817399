"""The road as code: what happens to a model, top to bottom.

model -> Graph -> Partition (Tasks) -> Programs -> Kernels -> Plan -> CompiledModel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from tilewright.loops.ir import Program
from tilewright.measure.check import kernel_error
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.runtime.dispatch import Policy
from tilewright.runtime.dynamic import Arguments, ConstantPool, DynamicModel
from tilewright.runtime.model import CompiledModel, as_arguments
from tilewright.space.template import Work
from tilewright.support.trace import Trace
from tilewright.tune import plain
from tilewright.tune.choose import choose
from tilewright.tune.oracle import PredictedCosts
from tilewright.tune.plain import Tuning, tune

EFFORTS = ("none", *plain.EFFORTS)
NUMERICS = ("fast", "strict")


@overload
def compile(
    model: Any,
    example_inputs: Any = ...,
    *,
    dynamic: Literal[False] = ...,
    target: str | CpuMachine | None = ...,
    effort: str = ...,
    budget: float | None = ...,
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
    budget: float | None = ...,
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
    budget: float | None = None,
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
    - `effort`: "none": no measurement, each kernel's schedule is chosen by counting; "quick" (a minute) and "full"
      (ten): the most promising ones are measured here, and what is found is remembered for the next time.
    - `budget`: seconds that measuring may take instead.
    - `numerics`: "fast", or "strict": no fast-math flags, every rounding of the model's own types kept.
    - `threads`: how many threads a call uses; None: `TILEWRIGHT_THREADS`, or as many as this process may use.
    - `trace`: collects what happened, for progress and reports.

    The result is called like the model, with torch tensors or NumPy arrays.
    """
    trace = trace or Trace.off()
    machine = resolve_target(target)
    numerics = resolve_option("numerics", numerics or knobs.get("numerics"), NUMERICS)
    tuning = resolve_tuning(effort, budget, machine)

    if dynamic:
        policy = dynamic if isinstance(dynamic, Policy) else None
        return compile_dynamic(model, example_inputs, machine, numerics, threads, policy, trace, tuning)
    with trace.span("import"):
        imported = frontend.import_model(model, example_inputs)
    return compile_imported(imported, machine, numerics=numerics, threads=threads, trace=trace, tuning=tuning)


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
) -> CompiledModel:
    """The road from a graph on, whatever frontend it came from. `share` may put equal constants of other models in the
    place of this one's. `tuning`: how much to measure; None: nothing."""
    trace = trace or Trace.off()

    with trace.span("rewrite"):
        oracle = PredictedCosts(machine, numerics)
        partition = run_pipeline(imported.graph, trace, numerics=numerics, oracle=oracle)

    programs: dict[str, Program] = {}
    if tuning is not None:
        with trace.span("tune", tasks=len(partition.tasks())):
            count = threads or knobs.get("threads")
            choices = tune(partition.tasks(), machine, tuning, numerics=numerics, threads=count, trace=trace)
            programs = {key: choice.program for key, choice in choices.items()}

    with trace.span("build", tasks=len(partition.tasks())):
        kernels = build_kernels(partition, machine, numerics, trace, programs)

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
    partition: Partition, machine: CpuMachine, numerics: str, trace: Trace, programs: Mapping[str, Program]
) -> dict[str, Kernel]:
    """A kernel for every distinct task, by key: of the program that was found for it, if there is one."""
    cache = ObjectCache.default()
    kernels: dict[str, Kernel] = {}
    for key, (task, count) in partition.tasks().items():
        if not task.output.type.size:
            continue
        with trace.span("kernel", label=task.label, calls=count) as span:
            program = programs.get(key) or task_program(task, machine, numerics)
            kernels[key] = build(program, machine, numerics, cache)
            span.note(cached=kernels[key].cached)
    return kernels


def task_program(task: Task, machine: CpuMachine, numerics: str) -> Program:
    """Task -> loop program."""
    return choose(Work(task, machine, numerics)).program


def resolve_target(target: str | CpuMachine | None) -> CpuMachine:
    if isinstance(target, CpuMachine):
        return target
    if target in (None, "cpu"):
        return host()
    raise TargetError(f"no target is called {target!r}; this version compiles for the CPU")


def resolve_tuning(effort: str, budget: float | None, machine: CpuMachine) -> Tuning | None:
    resolve_option("effort", effort, EFFORTS)
    if budget is not None and not budget > 0:
        raise OptionError(f"budget={budget!r} is not possible; it is a number of seconds above 0")
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
    return Tuning(effort, budget)


def resolve_option(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(f"{name}={value!r} is not possible; it is one of {', '.join(map(repr, allowed))}")
    return value
