"""The stages of a task with several contractions, as templates see them: each as a work item of its own.

A `Formula` has one level of reductions, so a chain has none. Each of its stages has: a template matches the stages one
by one and computes them in one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewright import te
from tilewright.graph.chain import Chain, Refused, chain_of
from tilewright.loops.formula import Formula
from tilewright.loops.ir import Buffer
from tilewright.space.implementation import SubTask, cut
from tilewright.space.template import Work


@dataclass(frozen=True)
class Stage:
    """One stage: its sub-task, and its formula over the buffers of the whole task: `x0`, `x1`, ... for the inputs,
    `source` for the result of the stage before it (None: it is the first), `formula.output` for its own."""

    sub: SubTask
    formula: Formula
    source: Buffer | None


def subtasks_of(chain: Chain) -> list[SubTask]:
    graph = chain.task.graph
    constants = [graph.inputs[number] for number in chain.task.constants]
    return cut(graph, constants, [(stage.members, stage.result) for stage in chain.stages])


def stages_of(work: Work[Any]) -> tuple[Stage, ...] | Refused:
    """The stages of a chain with a formula each; Refused if the task is not a chain, or a stage has no formula."""
    chain = chain_of(work.task)
    if isinstance(chain, Refused):
        return chain
    stages: list[Stage] = []
    made: dict[object, Buffer] = {}
    for number, sub in enumerate(subtasks_of(chain)):
        formula = Work(sub.task, work.machine, work.numerics).formula
        if formula is None:
            return Refused(f"{sub.task.label} has no normal form")
        known: dict[Buffer, Buffer] = {}
        for buffer, operand in zip(formula.inputs, sub.operands, strict=True):
            known[buffer] = (
                replace(buffer, name=f"x{operand.attrs['index']}") if operand.is_input else made[operand]
            )
        last = number == len(chain.stages) - 1
        output = formula.output if last else replace(formula.output, name=f"between{number}")
        source = next((made[operand] for operand in sub.operands if operand in made), None)
        made[sub.result] = output
        stages.append(Stage(sub, replace(with_buffers(formula, known), output=output), source))
    return tuple(stages)


def with_buffers(formula: Formula, known: Mapping[Buffer, Buffer]) -> Formula:
    """The formula with other buffers of the same size and type as inputs."""

    def rule(node: te.Expr) -> te.Expr | None:
        if isinstance(node, te.Load) and isinstance(node.source, Buffer) and node.source in known:
            return te.Load(known[node.source], node.indices)
        return None

    return replace(
        formula.map(lambda expr: te.rewrite(expr, rule)),
        inputs=tuple(known.get(buffer, buffer) for buffer in formula.inputs),
        constants=frozenset(known.get(buffer, buffer) for buffer in formula.constants),
    )
