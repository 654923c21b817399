"""The road as code: what happens to a model, top to bottom.

model -> Graph -> Partition (Tasks) -> Programs -> Kernels -> Plan -> CompiledModel
"""

from __future__ import annotations

from typing import Any

import tilewright
from tilewright import frontend, knobs
from tilewright.codegen.llvm.build import Kernel, build
from tilewright.codegen.llvm.cache import ObjectCache
from tilewright.errors import OptionError, TargetError
from tilewright.frontend import ImportedModel
from tilewright.graph.lower import lower_graph
from tilewright.graph.task import Partition, Task
from tilewright.hw import CpuMachine, host
from tilewright.link import Boundary, link
from tilewright.loops.default import default_program
from tilewright.loops.formula import formula_of
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.measure.check import kernel_error
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.runtime.model import CompiledModel
from tilewright.support.trace import Trace

EFFORTS = ("none",)
NUMERICS = ("fast", "strict")


def compile(
    model: Any,
    example_inputs: Any = None,
    *,
    target: str | CpuMachine | None = None,
    effort: str = "none",
    numerics: str | None = None,
    threads: int | None = None,
    trace: Trace | None = None,
) -> CompiledModel:
    """Compile `model` for inputs like `example_inputs`.

    - `model`: an `nn.Module` in eval mode, a `torch.export.ExportedProgram`, an `onnx.ModelProto`, or the path of an
      `.onnx` file.
    - `example_inputs`: a tuple of positional arguments, a dict of keyword arguments, or a single tensor. An exported
      program has its own; an ONNX model needs them only where it leaves dimensions open.
    - `target`: None or "cpu" for this machine, or a machine description.
    - `effort`: "none": no measurement, each kernel's schedule is chosen by counting.
    - `numerics`: "fast", or "strict": no fast-math flags, every rounding of the model's own types kept.
    - `threads`: how many threads a call uses; None: `TILEWRIGHT_THREADS`, or as many as this process may use.
    - `trace`: collects what happened, for progress and reports.

    The result is called like the model, with torch tensors or NumPy arrays.
    """
    trace = trace or Trace.off()
    machine = resolve_target(target)
    numerics = resolve_option("numerics", numerics or knobs.get("numerics"), NUMERICS)
    resolve_option("effort", effort, EFFORTS)

    with trace.span("import"):
        imported = frontend.import_model(model, example_inputs)
    return compile_imported(imported, machine, numerics=numerics, threads=threads, trace=trace)


def compile_imported(
    imported: ImportedModel,
    machine: CpuMachine,
    *,
    numerics: str = "fast",
    threads: int | None = None,
    trace: Trace | None = None,
) -> CompiledModel:
    """The road from a graph on, whatever frontend it came from."""
    trace = trace or Trace.off()

    with trace.span("rewrite"):
        partition = run_pipeline(imported.graph, trace, numerics=numerics)

    with trace.span("build", tasks=len(partition.tasks())):
        kernels = build_kernels(partition, machine, numerics, trace)

    with trace.span("link"):
        boundary = Boundary(
            imported.input_names, imported.input_tree, imported.output_tree, imported.argument_names
        )
        producer = f"tilewright {tilewright.__version__}"
        linked = link(partition, kernels, boundary, machine, numerics=numerics, producer=producer)

    with trace.span("load"):
        return CompiledModel(
            linked.plan, linked.constants, linked.objects, threads=threads, checker=kernel_error
        )


def build_kernels(
    partition: Partition, machine: CpuMachine, numerics: str, trace: Trace
) -> dict[str, Kernel]:
    """A kernel for every distinct task, by key."""
    cache = ObjectCache.default()
    kernels: dict[str, Kernel] = {}
    for key, (task, count) in partition.tasks().items():
        if not task.output.type.size:
            continue
        with trace.span("kernel", label=task.label, calls=count) as span:
            kernels[key] = build(task_program(task, machine, numerics), machine, numerics, cache)
            span.note(cached=kernels[key].cached)
    return kernels


def task_program(task: Task, machine: CpuMachine, numerics: str) -> Program:
    """Task -> tensor expressions -> loop program."""
    output, inputs = lower_graph(task.graph)
    formula = formula_of(output, inputs, constants=task.constants, keep_rounding=numerics == "strict")
    program = default_program(formula, machine)
    verify_program(program)
    return program


def resolve_target(target: str | CpuMachine | None) -> CpuMachine:
    if isinstance(target, CpuMachine):
        return target
    if target in (None, "cpu"):
        return host()
    raise TargetError(f"no target is called {target!r}; this version compiles for the CPU")


def resolve_option(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(f"{name}={value!r} is not possible; it is one of {', '.join(map(repr, allowed))}")
    return value
