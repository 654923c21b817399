"""What golden files show: machines that are described, never the host's, and the programs that templates make for them.

All that the tests of programs ask of templates, sketches, schedules, targets and validation is asked here, so that a
change of those interfaces is one edit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from tilewright.codegen.cuda.emit import included
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.codegen.llvm.build import llvm_ir
from tilewright.graph.ir import Graph
from tilewright.graph.lower import lower_graph
from tilewright.graph.task import Partition, Task
from tilewright.graph.text import print_graph
from tilewright.hw import Caches, CpuMachine
from tilewright.hw.gpu import H200, GpuMachine
from tilewright.loops import default as cpu_default
from tilewright.loops.formula import Formula, formula_of
from tilewright.loops.gpu import default as gpu_default
from tilewright.loops.ir import Program
from tilewright.loops.softmax_exp import with_softmax_exp
from tilewright.loops.text import print_program
from tilewright.loops.verify import verify_program
from tilewright.measure.validation import CheckCase, make_validation
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.runtime.packing import Packing
from tilewright.runtime.paired import PairedWeights
from tilewright.runtime.transform import Transform
from tilewright.runtime.winograd import WinogradWeights
from tilewright.space.catalog import SKETCHED
from tilewright.space.implementation import Implementation, Kernel
from tilewright.space.sketches.cuda.block_reduction import BlockReduction
from tilewright.space.sketches.cuda.tensorised import Tensorised
from tilewright.space.sketches.cuda.tiled import Tiled
from tilewright.space.sketches.cuda.warpgroups import WarpgroupMatmul
from tilewright.space.space import Config
from tilewright.space.template import GpuWork, Template, Work
from tilewright.space.templates.cpu import TEMPLATES
from tilewright.space.templates.cuda.attention import TensorCoreAttention
from tilewright.space.templates.cuda.chain import TensorCoreChain
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.space.templates.cuda.matmul_reduction import TensorMatmulReduction
from tilewright.space.templates.cuda.norms import TensorCoreNorm
from tilewright.support.trace import Trace
from tilewright.tune.choose import descend
from tilewright.tune.oracle import PredictedCosts

AVX2 = CpuMachine(
    triple="x86_64-unknown-linux-gnu",
    cpu="haswell",
    features=("avx", "avx2", "f16c", "fma", "sse4.2"),
    absent=(),
    vector_bytes=32,
    vector_registers=16,
    has_fma=True,
    cores=4,
    caches=Caches(32 << 10, 256 << 10, 8 << 20, l2_cores=1, l3_cores=4),
)
AVX_VNNI = replace(AVX2, cpu="alderlake", features=tuple(sorted((*AVX2.features, "avxvnni"))))
_AVX512 = (
    "avx",
    "avx2",
    "avx512bw",
    "avx512dq",
    "avx512f",
    "avx512vl",
    "avx512vnni",
    "f16c",
    "fma",
    "sse4.2",
)
AVX512 = CpuMachine(
    triple="x86_64-unknown-linux-gnu",
    cpu="icelake-server",
    features=_AVX512,
    absent=(),
    vector_bytes=64,
    vector_registers=32,
    has_fma=True,
    cores=8,
    caches=Caches(48 << 10, 1280 << 10, 48 << 20, l2_cores=1, l3_cores=8),
)
ZEN4 = CpuMachine(
    triple="x86_64-unknown-linux-gnu",
    cpu="znver4",
    features=_AVX512,
    absent=(),
    vector_bytes=64,
    vector_registers=32,
    has_fma=True,
    cores=8,
    caches=Caches(32 << 10, 1 << 20, 32 << 20, l2_cores=1, l3_cores=8),
)
GPU: GpuMachine = H200

GPU_SKETCHES: dict[str, Template] = {
    "tensorised": Tensorised(),
    "tiled": Tiled(),
    "block-reduction": BlockReduction(),
    "warpgroups": WarpgroupMatmul(),
}
GPU_TEMPLATES: dict[str, Template] = {
    "product": TensorCores(),
    "sums": TensorMatmulReduction(),
    "attention": TensorCoreAttention(),
    "chain": TensorCoreChain(),
    "norm": TensorCoreNorm(),
}
CPU_TEMPLATES = {template.name: template for template in TEMPLATES}


# -- programs ---------------------------------------------------------------------------------------------------------


def cpu_program(
    template: str, task: Task, machine: CpuMachine, numerics: str = "fast", **wanted: object
) -> tuple[Config, Program]:
    """What the analytical model expects to be the template's fastest config, or its first with the wanted values."""
    work = Work(task, machine, numerics)
    applied = CPU_TEMPLATES[template].apply(work)
    assert applied is not None, f"{template} declines the task"
    if wanted:
        config = next(c for c in applied.space.configs() if wanted.items() <= dict(c.values).items())
    else:
        found = descend(applied, work)
        assert found is not None
        config = found[1]
    program = applied.program(config)
    assert isinstance(program, Program)
    verify_program(program)
    return config, program


def gpu_kernel(
    template: Template,
    task: Task,
    wanted: Mapping[str, object] | Random,
    numerics: str = "fast",
    machine: GpuMachine = GPU,
) -> tuple[Config, Kernel]:
    """The kernel of the first config that has the wanted values, or of a random one."""
    applied = template.apply(GpuWork(task, machine, numerics))
    assert applied is not None, f"{template.name} declines the task"
    if isinstance(wanted, Random):
        config = applied.space.sample(wanted)
        assert config is not None
    else:
        config = next(c for c in applied.space.configs() if wanted.items() <= dict(c.values).items())
    kernel = applied.program(config)
    assert not isinstance(kernel, Implementation), "more than one kernel"
    return config, kernel


def formula(task: Task) -> Formula:
    """As schedules get it in `fast` numerics."""
    output, inputs = lower_graph(task.graph)
    return with_softmax_exp(formula_of(output, inputs, constants=task.constants))


def default_program(task: Task, machine: CpuMachine | GpuMachine) -> Program:
    schedule = gpu_default if isinstance(machine, GpuMachine) else cpu_default
    program = schedule.default_program(formula(task), machine)
    verify_program(program)
    return program


# -- as text ----------------------------------------------------------------------------------------------------------


def program_text(
    task: Task, program: Program, machine: CpuMachine | GpuMachine, config: Config | None = None
) -> str:
    """The task, what was decided, and the program."""
    machine_name = machine.cpu if isinstance(machine, CpuMachine) else machine.name
    head = [f"machine: {machine_name}"]
    if config is not None:
        head.append(f"config: {config_text(config)}")
    head.append(f"decisions: {program.decisions}")
    head += [
        f"packed: {buffer.name}: {_packing_text(packing)}"
        for buffer, packing in zip(program.params, program.packings, strict=False)
        if packing is not None
    ]
    return "\n".join([*head, "", graph_text(task.graph).rstrip(), "", print_program(program)])


def config_text(config: Config) -> str:
    return " ".join(
        [config.template.removeprefix(SKETCHED), *(f"{name}={value}" for name, value in config.values)]
    )


def _packing_text(packing: Packing) -> str:
    """The fields that say something, and what is done to the array before."""
    fields = {name: getattr(packing, name) for name in packing.__struct_fields__ if name != "transforms"}
    said = [f"{name}={value}" for name, value in fields.items() if (name, value) != ("zero_filled", ())]
    return ", ".join([*said, *map(_transform_text, packing.transforms)])


def _transform_text(transform: Transform) -> str:
    match transform:
        case WinogradWeights():
            return f"winograd={transform.outputs}"
        case PairedWeights():
            return f"taps={transform.axes}"
        case _:
            return repr(transform)


def graph_text(graph: Graph) -> str:
    return print_graph(graph)


def holes(kernel: Kernel) -> str:
    """The CUDA C++ of a hand-written pipeline without the parts that are the same for every kernel, each named."""
    source = tensor_source(kernel)
    text = source.text
    for name in ("prelude", "tensor_cores", "cluster", "matmul", "attention"):
        whole = included(f"{name}.cuh")
        if whole in text:
            text = text.replace(whole, f"// {name}.cuh")
    size = (
        f"// {source.blocks} blocks of {source.threads} threads, {source.shared_bytes} bytes of shared memory"
    )
    return f"// {source.decisions}\n{size}\n{text}"


def ir_text(program: Program, machine: CpuMachine) -> str:
    """LLVM IR before any optimisation, in one spelling: llvmlite's versions differ in how they print pointers."""
    text = llvm_ir(program, machine, "fast", "kernel")
    text = re.sub(r"(?:<[^<>]*>|\b[a-z]\w*)\*+", "ptr", text)
    text = re.sub(r"(?<=\S) {2,}", " ", text)
    return re.sub(r"<(\w+ [^ ,<>]+)(?:, \1)+>", r"splat (\1)", text)


def pipeline_text(graph: Graph, machine: CpuMachine, numerics: str = "fast") -> str:
    """The passes that changed a graph, and the calls that it is cut into."""
    trace = Trace()
    cut = run_pipeline(graph, trace, numerics=numerics, oracle=PredictedCosts(machine, numerics))
    changed = [event for event in trace.events if event.notes.get("changed")]
    passes = [
        f"{event.name.removeprefix('rewrites.')}: {event.notes['before']} -> {event.notes['after']} nodes"
        for event in changed
    ]
    return "\n".join(
        ["# imported", print_graph(graph), "# passes that changed it", *passes, "", *_calls(cut), ""]
    )


def _calls(cut: Partition) -> list[str]:
    lines = []
    for number, call in enumerate(cut.calls):
        constants = ", ".join(f"%{index}" for index in sorted(call.task.constants))
        operands = ", ".join(operand.name or operand.op for operand in call.inputs)
        lines += [
            f"# call {number}: {call.name} = {call.task.label}({operands})"
            + (f"; constant: {constants}" if constants else ""),
            print_graph(call.task.graph),
        ]
    lines += [f"# view: {view.name or view.op} of {of.name or of.op}" for view, of in cut.views.items()]
    return lines


# -- validation -------------------------------------------------------------------------------------------------------


def validation(task: Task, numerics: str, seed: int = 0) -> Sequence[CheckCase]:
    """Inputs of several kinds, the oracle's answers, and how far each element may be off."""
    return make_validation(task, numerics, seed).cases
