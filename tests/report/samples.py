"""A small model and a database with made-up trials of its tasks: what a report is drawn from."""

from __future__ import annotations

import random
from pathlib import Path

import torch

import tilewright
from tilewright import knobs
from tilewright.db.database import Database
from tilewright.db.record import Decision, Record
from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph
from tilewright.hw import host
from tilewright.runtime.model import CompiledModel
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.tune.choose import choose

FAILURES = ("timeout", "wrong", "crash", "build", "memory")


def model() -> CompiledModel:
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, padding=1),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 16 * 16, 10),
    ).eval()
    return tilewright.compile(network, (torch.randn(1, 3, 16, 16),))


def fill(database: Database, compiled: CompiledModel, count: int = 24, seed: int = 0) -> None:
    """Trials of every task, with a winner that is a fifth faster than what would run otherwise. Inside the model, where
    a decision is made, everything takes a fourth of its time alone."""
    rng = random.Random(seed)
    when = 1.7e9
    for task in works(compiled):
        start = choose(task).config
        sampled = Candidates.of(task).sample(rng, count)
        base = 1e-5 * rng.uniform(1, 50)
        records = []
        for number, config in enumerate([start, *sampled]):
            when += rng.uniform(0.1, 0.5)
            failure = FAILURES[number % len(FAILURES)] if number % 7 == 6 else ""
            seconds = base * (1.25 if number == 0 else rng.uniform(1.0, 4.0))
            records.append(
                Record.of(
                    task,
                    knobs.get("threads"),
                    config,
                    times=() if failure else tuple(seconds * rng.uniform(1, 1.05) for _ in range(5)),
                    failure=failure,
                    message=f"<b>{failure}</b> & more" if failure else "",
                    build_seconds=0.08,
                    predicted=seconds * rng.lognormvariate(0, 0.3),
                    error=None if failure else 1e-7,
                    when=when,
                )
            )
        database.add(records)
        key = records[0].key
        inside = base / 4
        database.decide(
            Decision(key, start, inside, "quick", 60.0, count, when, default_seconds=1.25 * inside)
        )


def works(compiled: CompiledModel) -> list[Work]:
    plan = compiled.plan
    found = {}
    for step in plan.steps:
        constants = [n for n, position in enumerate(step.arguments[:-1]) if position.space == "constant"]
        task = Task(parse_graph(plan.tasks[step.task].text, {}), frozenset(constants))
        found[task.key] = Work(task, host(), plan.numerics)
    return list(found.values())


def database(folder: Path, compiled: CompiledModel) -> Database:
    found = Database.open(folder / "tuning.sqlite")
    fill(found, compiled)
    return found
