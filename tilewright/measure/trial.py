"""A task on this machine as plain data: what one process tells another that it is about."""

from __future__ import annotations

import msgspec

from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph
from tilewright.hw import CpuMachine
from tilewright.space.template import Work


class TaskJob(msgspec.Struct, frozen=True):
    """A task as plain data."""

    text: str
    constants: tuple[int, ...]
    machine: CpuMachine
    numerics: str
    threads: int

    @classmethod
    def of(cls, work: Work, threads: int) -> TaskJob:
        constants = tuple(sorted(work.task.constants))
        return cls(work.task.text, constants, work.machine, work.numerics, threads)

    def work(self) -> Work:
        task = Task(parse_graph(self.text, {}), frozenset(self.constants))
        return Work(task, self.machine, self.numerics)
