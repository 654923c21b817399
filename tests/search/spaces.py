"""Spaces to search, and costs that have the shape of real ones: what the analytical model predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from tests.space.checked import Inputs
from tilewright.cost.analytical import Analytical
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.search import SEARCHES, Searcher
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.template import Work

THREADS = 2


@cache
def large() -> Candidates:
    """A GEMM: hundreds of thousands of combinations."""
    x = Inputs()
    task = x.task(apply("matmul", x(512, 512), x(512, 512, constant=True)))
    return Candidates.of(Work(task, host()), sketches=False)


@cache
def small() -> Candidates:
    """Attention: some tens of configs."""
    x = Inputs()
    task = x.task(apply("attention", *(x(1, 2, 128, 64) for _ in range(3)), causal=False, scale=0.25))
    return Candidates.of(Work(task, replace(host(), cpu="icelake-server")), sketches=False)


@cache
def costs(candidates: Candidates) -> Analytical:
    return Analytical(candidates, THREADS)


def searcher(name: str, candidates: Candidates, seed: int = 0) -> Searcher:
    return SEARCHES[name](candidates, Analytical(candidates, THREADS), seed)


def timed(candidates: Candidates, configs: list[Config]) -> list[Outcome]:
    return [Outcome(config, costs(candidates).seconds(config)) for config in configs]


def run(
    search: Searcher, rounds: int, count: int, told: Callable[[list[Config]], list[Outcome]]
) -> list[Config]:
    asked: list[Config] = []
    for _ in range(rounds):
        batch = search.ask(count)
        asked += batch
        search.tell(told(batch))
    return asked
