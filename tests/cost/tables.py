"""Times that were measured once, alongside the code: what a model that learns can be tried on without measuring.

`measured.json` says on which machine and when: the candidates are those of that machine. Templates change: knobs that
are new have their defaults, and configs that are not legal any more are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from tests.machines import ICE_LAKE
from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.template import Work


@dataclass(frozen=True)
class Table:
    label: str
    candidates: Candidates
    threads: int
    configs: tuple[Config, ...]
    seconds: np.ndarray

    def outcomes(self, positions: np.ndarray | range) -> list[Outcome]:
        return [Outcome(self.configs[position], float(self.seconds[position])) for position in positions]


@lru_cache(maxsize=1)
def tables() -> tuple[Table, ...]:
    kept = json.loads(Path(__file__).with_name("measured.json").read_text())
    return tuple(_table(table) for table in kept["tables"])


def _table(kept: dict) -> Table:
    task = Task(parse_graph(kept["text"], {}), frozenset(kept["constants"]))
    candidates = Candidates.of(Work(task, ICE_LAKE), sketches=False)
    trials = [
        (Config.of(template, dict(zip(entry["knobs"], values, strict=True))), microseconds * 1e-6)
        for template, entry in kept["templates"].items()
        for values, microseconds in entry["trials"]
    ]
    recalled = [(candidates.recalled(config), seconds) for config, seconds in trials]
    legal = [(config, seconds) for config, seconds in recalled if config is not None]
    configs, seconds = zip(*legal, strict=True) if legal else ((), ())
    return Table(kept["task"], candidates, kept["threads"], tuple(configs), np.array(seconds))
