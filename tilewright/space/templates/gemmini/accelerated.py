"""Integer layers on Gemmini, with kernels of the host's before and behind them; other tasks on the host alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from tilewright.errors import LayerFitError
from tilewright.graph.ir import Graph, Node
from tilewright.graph.task import Task
from tilewright.hw.gemmini import GemminiMachine
from tilewright.hw.gemmini_system import GemminiSystem
from tilewright.loops.gemmini.chosen import tiling_for
from tilewright.loops.gemmini.kernel import GemminiKernel
from tilewright.loops.gemmini.tiling import estimated_cycles, with_bias_stored
from tilewright.space.implementation import Implementation, Kernel, SubTask, cut
from tilewright.space.space import Config, Space
from tilewright.space.template import Applied, Template, Work
from tilewright.space.templates.cpu.default import Default
from tilewright.space.templates.default import DEFAULT
from tilewright.space.templates.gemmini.match import Match, match
from tilewright.space.terms import Cycles

NAME = "gemmini"
GemminiWork = Work[GemminiSystem]


_MAX_KNOWN = 1024
_known: dict[tuple[int, GemminiMachine], tuple[Task, Match | None]] = {}


def matched(task: Task, machine: GemminiMachine) -> Match | None:
    """The part of a task that the accelerator computes, if a tile of it fits and the host can compute the rest. Cached
    for this task object: an equal one has other nodes."""
    key = id(task), machine
    if key not in _known or _known[key][0] is not task:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = (task, _matched(task, machine))
    return _known[key][1]


def _matched(task: Task, machine: GemminiMachine) -> Match | None:
    found = match(task, machine)
    if found is None:
        return None
    if _cut(task, found) is None:
        return None
    try:
        return replace(found, layer=with_bias_stored(found.layer, machine))
    except LayerFitError:
        return None


def _cut(task: Task, found: Match) -> tuple[list[SubTask], int] | None:
    """The subtasks in order, and which of them is the accelerator's."""
    graph = task.graph
    computed = [node for node in graph.nodes() if not (node.is_input or node.is_constant)]
    wanted = [node for node in found.roles if not node.is_input]
    parts: list[tuple[list[Node], Node]] = []
    if wanted:
        before = [node for node in Graph((), (wanted[0],)).nodes() if node in computed]
        if len(wanted) > 1 or any(node in found.taken for node in before):
            return None
        parts.append((before, wanted[0]))
    done = {node for nodes, _ in parts for node in nodes} | set(found.taken)
    taken = [node for node in computed if node in found.taken]
    parts.append((taken, found.taken[-1]))
    rest = [node for node in computed if node not in done]
    if rest:
        parts.append((rest, graph.outputs[0]))
    constants = [graph.inputs[number] for number in task.constants]
    subtasks = cut(graph, constants, parts)
    operands = set(subtasks[len(wanted)].operands)
    return (subtasks, len(wanted)) if operands == set(found.roles) else None


class Accelerated:
    """Declines where the accelerator computes no part of a task."""

    name = NAME

    def apply(self, work: GemminiWork) -> Applied | None:
        found = matched(work.task, work.machine.accelerator)
        if found is None:
            return None
        applied = _Accelerated(work, found)
        return applied if applied.is_possible else None


@dataclass(frozen=True)
class _Accelerated:
    work: GemminiWork
    found: Match

    @cached_property
    def space(self) -> Space:
        return Space(NAME, (), lambda values: True)

    @cached_property
    def _subtasks(self) -> tuple[list[SubTask], int]:
        subtasks = _cut(self.work.task, self.found)
        assert subtasks is not None
        return subtasks

    @cached_property
    def _host(self) -> dict[int, Applied | None]:
        subtasks, own = self._subtasks
        return {
            number: Default().apply(Work(subtask.task, self.work.machine.host, self.work.numerics))
            for number, subtask in enumerate(subtasks)
            if number != own
        }

    @property
    def is_possible(self) -> bool:
        return all(applied is not None for applied in self._host.values())

    def terms(self, config: Config) -> Cycles:
        system, layer = self.work.machine, self.found.layer
        cycles = estimated_cycles(layer, tiling_for(layer, system), system.accelerator)
        return Cycles(self.found.images * cycles)

    def program(self, config: Config) -> Implementation:
        subtasks, own = self._subtasks
        parts = []
        for number, subtask in enumerate(subtasks):
            body: Kernel | Implementation
            if number == own:
                body = self._kernel(subtask)
            else:
                applied = self._host[number]
                assert applied is not None
                body = applied.program(DEFAULT)
            assert not isinstance(body, Implementation)
            parts.append(subtask.by(body))
        return Implementation(self.work.task.graph.inputs, tuple(parts))

    def _kernel(self, subtask: SubTask) -> GemminiKernel:
        found = self.found
        return GemminiKernel(
            name=subtask.task.label,
            layer=found.layer,
            tiling=tiling_for(found.layer, self.work.machine),
            roles=tuple(found.roles[node] for node in subtask.operands),
            images=found.images,
            own_weights=found.own_weights,
        )


@dataclass(frozen=True)
class OnHost:
    """A processor's template, for tasks of which the accelerator computes nothing."""

    template: Template
    always: bool = False

    @property
    def name(self) -> str:
        return self.template.name

    def apply(self, work: GemminiWork) -> Applied | None:
        if not self.always and Accelerated().apply(work) is not None:
            return None
        return self.template.apply(Work(work.task, work.machine.host, work.numerics))
