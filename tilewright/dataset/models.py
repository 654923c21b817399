"""The tasks of models, as sources of a data set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilewright import frontend
from tilewright.dataset.tasks import TaskSource
from tilewright.graph.task import Task
from tilewright.support.trace import Trace
from tilewright.targets.target import Cutting, Target, computed


def model_sources(models: Iterable[tuple[str, Any, Any]], target: Target) -> list[TaskSource]:
    """Every task of these models, once. A model is its name, the model, and its example inputs.

    The tasks do not depend on what was tuned here, so that a collection that goes on later has the same."""
    numerics = target.default_numerics()
    found: dict[str, TaskSource] = {}
    for name, model, examples in models:
        imported = frontend.import_model(frontend.opened(model), examples)
        cut = target.partition(imported, numerics, Trace.off(), cutting=Cutting(measured=False))
        for key, (task, _) in computed(cut).items():
            found.setdefault(key, TaskSource(f"{name} {task.label} {key[:8]}", _always(task), numerics))
    return list(found.values())


class _always:
    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self) -> Task:
        return self._task
