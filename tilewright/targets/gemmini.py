"""Gemmini beside this machine's processor: integer layers on the simulated accelerator, the rest through LLVM."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import OptionError
from tilewright.frontend import ImportedModel
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.task import Partition, Task, TaskCall
from tilewright.hw import host
from tilewright.hw.gemmini_system import GemminiSystem, machine_named
from tilewright.link import Linked
from tilewright.loops.gemmini.chosen import read_design
from tilewright.rewrites.base import Observer
from tilewright.rewrites.calls import reader_counts, with_operand, with_producer
from tilewright.rewrites.pipeline import run_pipeline
from tilewright.runtime.gemmini.bias import limit, rows_for
from tilewright.runtime.gemmini.executor import GemminiExecutor, GemminiModel
from tilewright.runtime.model import CompiledModel
from tilewright.space.templates.gemmini.accelerated import matched
from tilewright.space.templates.gemmini.match import pooling_of
from tilewright.support.trace import Trace
from tilewright.targets.cpu import ProcessorTarget
from tilewright.targets.target import DYNAMIC, Cutting, Target
from tilewright.tune.oracle import PredictedCosts


@dataclass(frozen=True)
class _Costs(PredictedCosts):
    """The host's, but for convolutions of bytes: the accelerator computes those that are channels-last."""

    def seconds(self, task: Task) -> float:
        return math.inf if _is_channels_first(task) else super().seconds(task)

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        return (math.inf, True) if _is_channels_first(task) else super().upper_bound(task)


def _is_channels_first(task: Task) -> bool:
    return any(
        node.op == "conv"
        and node.inputs[0].dtype is DType.I8
        and node.attrs["groups"] == 1
        and node.attrs["layout"] != "channels_last"
        for node in task.graph.nodes()
    )


@dataclass(frozen=True)
class GemminiTarget(ProcessorTarget):
    machine: GemminiSystem
    _model: ClassVar[type[CompiledModel]] = GemminiModel

    @classmethod
    def named(cls, options: str) -> Target:
        """The target that the text after "gemmini:" describes: parameters, or the file of a design."""
        if options.endswith(".json"):
            machine, tilings = read_design(Path(options))
            return cls(GemminiSystem(host(), machine, tilings=tilings))
        return cls(GemminiSystem(host(), machine_named(options)))

    @property
    def is_here(self) -> bool:
        """A simulator's time is not the accelerator's: there is nothing to measure."""
        return False

    def partition(
        self,
        imported: ImportedModel,
        numerics: str,
        trace: Trace,
        observe: Observer | None = None,
        cutting: Cutting = DYNAMIC,
    ) -> Partition:
        oracle = _Costs(self.machine.host, numerics)
        found = run_pipeline(imported.graph, trace, numerics=numerics, oracle=oracle, observe=observe)
        with trace.span("join", calls=len(found.calls)):
            return self._joined(found)

    def _joined(self, partition: Partition) -> Partition:
        """The partition with calls merged into the layer's task if the accelerator computes them with it: the scaling
        of a residual before it, max pooling after it."""
        readers = reader_counts(partition)
        calls: list[TaskCall] = []
        writer: dict[Node, TaskCall] = {}
        for call in partition.calls:
            made = call
            for node in call.inputs:
                buffer = partition.buffer_of(node)
                before = writer.get(buffer)
                alone = readers[buffer] == 1 and buffer not in partition.graph.outputs
                if before is None or not alone or node not in made.inputs:
                    continue
                if not (_is_pooling(call) or _is_scaling(before)):
                    continue
                whole = with_producer(made, node, before)
                if self._takes_more(whole, made, before):
                    calls.remove(before)
                    made = whole
            calls.append(made)
            writer[made.output] = made
        result = replace(partition, calls=tuple(map(self._with_bounded_bias, calls)))
        result.check()
        return result

    def _with_bounded_bias(self, call: TaskCall) -> TaskCall:
        """The call with the bounds of a constant bias in its task, if these let the array add it up."""
        found = matched(call.task, self.machine.accelerator)
        biases = [] if found is None else [node for node, role in found.roles.items() if role == "bias"]
        for node in biases:
            value = call.inputs[call.task.graph.inputs.index(node)]
            if value.data is None:
                continue
            rows = rows_for(int(np.abs(value.data.astype(np.int64)).max()))
            if rows > self.machine.accelerator.dim:
                continue
            most = limit(rows)
            task = with_operand(call.task, node, apply("clamp", node, min=-most, max=most))
            bounded = matched(task, self.machine.accelerator)
            if bounded is not None and bounded.layer.bias_rows:
                return replace(call, task=task)
        return call

    def _takes_more(self, whole: TaskCall, call: TaskCall, before: TaskCall) -> bool:
        """Whether the accelerator computes more of both as one task than as two."""

        def taken(task: Task) -> int:
            found = matched(task, self.machine.accelerator)
            return 0 if found is None else len(found.taken)

        return taken(whole.task) > taken(call.task) + taken(before.task)

    def runner(self, threads: int) -> Any:
        raise OptionError(
            "the simulated accelerator has no time to measure", remedy='compile with effort="none"'
        )

    def executor(self, linked: Linked, threads: int) -> GemminiExecutor:
        return GemminiExecutor(linked.plan, linked.constants, linked.objects, threads)


def _operators(call: TaskCall) -> list[Node]:
    return [node for node in call.task.graph.nodes() if not (node.is_input or node.is_constant)]


def _is_pooling(call: TaskCall) -> bool:
    operators = _operators(call)
    return len(operators) == 1 and pooling_of(operators[0]) is not None


def _is_scaling(call: TaskCall) -> bool:
    """Whether it scales bytes that are then added to sums."""
    return [node.op for node in _operators(call)] == ["cast", "mul", "round", "cast"]
