"""The default program on a GPU as a template: one config, no knobs. It computes any task that has a formula."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright.graph.op import flops_of
from tilewright.graph.separable import is_depthwise
from tilewright.graph.task import Task
from tilewright.loops.formula import Formula
from tilewright.loops.gpu.default import default_program
from tilewright.loops.ir import Program, thread_count
from tilewright.space.space import Config, Space
from tilewright.space.template import Applied, GpuWork
from tilewright.space.templates.default import NAME
from tilewright.space.terms import Roofline

_FULL = 1_024  # threads per multiprocessor that saturate its memory bandwidth
_HEAVY = 2e8  # operations of a contraction for which the default program is far too slow


class Default:
    name = NAME

    def apply(self, work: GpuWork) -> Applied | None:
        return None if work.formula is None else AppliedGpuDefault(work, work.formula)


@dataclass(frozen=True)
class AppliedGpuDefault:
    work: GpuWork
    formula: Formula

    @property
    def space(self) -> Space:
        return Space(NAME, (), lambda values: True)

    @cached_property
    def _program(self) -> Program:
        return default_program(self.formula, self.work.machine)

    def program(self, config: Config) -> Program:
        return self._program

    def terms(self, config: Config) -> Roofline:
        return roofline(self.work, self._program)


def roofline(work: GpuWork, program: Program) -> Roofline:
    """What is known of any program: the task's totals, and how much of the machine has work."""
    task = work.task
    threads = program.parallel_extent * thread_count(program)
    busy = min(1.0, threads / (_FULL * work.machine.sms))
    products = [node for node in task.graph.nodes() if node.op in ("conv", "matmul", "linear")]
    chain = sum(flops_of(node) / max(1, 2 * node.type.size) for node in products)
    return Roofline(task.flops, task.bytes, busy=busy, chain=chain)


def is_hopeless(task: Task) -> bool:
    """Whether the default program is left out if there is any other candidate: for large contractions that are not
    depthwise."""
    anchors = [node for node in task.graph.nodes() if node.op in ("conv", "matmul", "linear", "attention")]
    plain = any(node.op != "conv" or not is_depthwise(node) for node in anchors)
    return plain and task.flops > _HEAVY
