"""Records of a small task, made without measuring."""

from __future__ import annotations

import dataclasses
import random
from functools import lru_cache

from tilewright.db.record import Key, Record
from tilewright.db.versions import Versions
from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, TensorType, input_node
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.space.space import Config
from tilewright.space.template import Work

VERSIONS = Versions("0.1.0", "3.11", "0" * 32)  # of sources that do not change meanwhile
KINDS = ("", "", "", "timeout", "wrong")


@lru_cache(maxsize=64)
def work(rows: int = 8, *, cores: int | None = None, numerics: str = "fast") -> Work:
    """A matmul with a ReLU, on this machine or on one like it with so many cores."""
    a = input_node(0, TensorType((rows, 16), DType.F32))
    b = input_node(1, TensorType((16, 4), DType.F32))
    task = Task(Graph((a, b), (apply("relu", apply("matmul", a, b)),)), frozenset([1]))
    machine = host() if cores is None else dataclasses.replace(host(), cores=cores)
    return Work(task, machine, numerics)


def config(number: int) -> Config:
    values = (("rows", number), ("order", "mn" if number % 2 else "nm"), ("packed", number % 3 == 0))
    return Config("contraction", values)


def record(number: int = 0, *, of: Work | None = None, threads: int = 2, when: float | None = None) -> Record:
    rng = random.Random(number)
    failure = KINDS[number % len(KINDS)]
    return Record.of(
        of or work(),
        threads,
        config(number),
        times=() if failure else tuple(1e-5 * rng.uniform(1, 2) for _ in range(5)),
        error=None if failure else 1e-7,
        failure=failure,
        message=f"it was {failure}" if failure else "",
        build_seconds=0.1,
        predicted=2e-5,
        versions=VERSIONS,
        when=1e9 + number if when is None else when,
    )


def key(of: Work | None = None, threads: int = 2) -> Key:
    return Key.of(of or work(), threads)
