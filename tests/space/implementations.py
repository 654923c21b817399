"""What tests of implementations share: their meaning by the oracle, their kernels built, and a run on a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from tilewright.codegen.cuda.build import GpuKernel, build
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.graph.ir import Node
from tilewright.graph.oracle import evaluate
from tilewright.hw.gpu import H200, GpuMachine
from tilewright.measure.kernels import packed
from tilewright.measure.single import Built, KernelRun, plan_of
from tilewright.runtime.plan import VendorCall, View
from tilewright.space.implementation import Implementation
from tilewright.space.libraries import LIBRARIES
from tilewright.space.space import Config
from tilewright.space.template import GpuWork

NAMES = ("cublaslt", "torch")
WITH_LIBRARIES = replace(H200, libraries=NAMES)


def library_calls(work: GpuWork) -> Iterator[tuple[Config, Implementation]]:
    """Every config of every library that computes the work."""
    for template in LIBRARIES:
        applied = template.apply(work)
        if applied is None:
            continue
        for config in applied.space.configs():
            made = applied.program(config)
            assert isinstance(made, Implementation)
            yield config, made


def computed(implementation: Implementation, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """What an implementation means: its kernels by the oracle, its calls by what the library's function is."""
    values: dict[Node, np.ndarray] = dict(zip(implementation.inputs, inputs, strict=True))
    for part in implementation.parts:
        arrays = [np.asarray(values[node]) for node in part.operands]
        if part.call is None:
            (values[part.result],) = evaluate(part.task.graph, arrays, precise=True)
            continue
        packings = (*part.packings, *[None] * (len(arrays) - len(part.packings)))
        stored = [a if p is None else p.pack(a) for a, p in zip(arrays, packings, strict=True)]
        values[part.result] = _called(part.call, stored).reshape(part.result.shape)
    return np.asarray(values[implementation.parts[-1].result])


def _called(call: VendorCall, arrays: list[np.ndarray]) -> np.ndarray:
    x, w, *rest = (_viewed(view, arrays) for view in call.operands)
    if call.function == "product":
        result = sum(rest, x @ w)
        activation = call.options["activation"]
        result = torch.relu(result) if activation == "relu" else result
        result = nn.functional.gelu(result, approximate="tanh") if activation == "gelu" else result
    elif call.function == "attention":
        options = {"is_causal": call.options["causal"], "scale": call.options["scale"]}
        result = nn.functional.scaled_dot_product_attention(x, w, rest[0], *rest[1:], **options)
    else:
        window = [call.options[name] for name in ("stride", "padding", "dilation", "groups")]
        result = torch.conv2d(x, w, rest[0] if rest else None, *window)
        result = sum(rest[1:], result)
        result = torch.relu(result) if call.function.endswith("relu") else result
    assert tuple(result.shape) == call.result
    return result.permute(call.order or tuple(range(result.dim()))).contiguous().numpy()


def _viewed(view: View, arrays: list[np.ndarray]) -> torch.Tensor:
    flat = torch.from_numpy(np.ascontiguousarray(arrays[view.argument]).reshape(-1).astype(np.float64))
    return flat.as_strided(view.shape, view.strides, view.offset)


def kernels_of(implementation: Implementation, machine: GpuMachine) -> list[GpuKernel]:
    """Those of its parts that are no calls, compiled."""
    own = [part.body for part in implementation.parts if not isinstance(part.body, VendorCall)]
    return [build(tensor_source(body), machine, "fast", None) for body in own]


def run_on_a_card(
    implementation: Implementation, arrays: Sequence[np.ndarray], machine: GpuMachine, repeats: int = 5
) -> list[np.ndarray]:
    """The flat results of several runs. `arrays`: the inputs of the task, constants among them."""
    from tilewright.runtime.cuda.executor import GpuExecutor

    built = Built.of(implementation, machine, "fast")
    inputs = len(built.sources)
    plan, objects = plan_of([KernelRun(built, range(inputs), 0)], machine, inputs=inputs, outputs=1)
    executor = GpuExecutor(plan, [], objects)
    given = [
        packed(arrays[source], packing) for source, packing in zip(built.sources, built.packings, strict=True)
    ]
    output = implementation.parts[-1].task.output
    results = [np.empty(output.type.size, output.dtype.numpy) for _ in range(repeats)]
    for result in results:
        executor.run(given, [result])
    return results
