"""A task on a machine as plain data, for messages between processes."""

from __future__ import annotations

import msgspec

from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph
from tilewright.hw import Machine
from tilewright.hw.machine import from_text, to_text
from tilewright.space.template import Work


class TaskJob(msgspec.Struct, frozen=True):
    """A task as plain data. `threads`: 0 on a GPU."""

    text: str
    constants: tuple[int, ...]
    described: str  # the machine
    numerics: str
    threads: int

    @classmethod
    def of(cls, work: Work, threads: int) -> TaskJob:
        constants = tuple(sorted(work.task.constants))
        return cls(work.task.text, constants, to_text(work.machine), work.numerics, threads)

    @property
    def machine(self) -> Machine:
        return from_text(self.described)

    def work(self) -> Work:
        task = Task(parse_graph(self.text, {}), frozenset(self.constants))
        return Work(task, self.machine, self.numerics)
