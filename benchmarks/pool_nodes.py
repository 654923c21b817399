"""Pools of several nodes on this machine, with pseudo-devices, and trials for them: for the benchmarks of pools."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.faults.candidates import product
from tilewright.hw import host
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Device, Share
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.space.template import Work

QUICK = Device("cpu:pseudo", timing="tilewright.testing.pool:serve")
SLOW = Device("cpu:pseudo", timing="tilewright.testing.pool:serve_slowly")
_SHAPES = (
    (32, 48, 40),
    (64, 64, 64),
    (17, 96, 33),
    (128, 64, 48),
    (48, 48, 96),
    (20, 128, 64),
    (80, 40, 72),
    (96, 96, 96),
)


def jobs(count: int) -> list[tuple[TaskJob, list[Config]]]:
    """So many trials, of eight tasks."""
    found = []
    wanted = -(-count // len(_SHAPES))
    for shape in _SHAPES:
        job = TaskJob.of(Work(product(*shape), host()), 1)
        sampled = Candidates.of(job.work(), sketches=False).sample(Random(0), 2 * wanted)
        found.append((job, list(dict.fromkeys(sampled))[:wanted]))
    return found


@contextlib.contextmanager
def pool(nodes: list[tuple[int, tuple[Device, ...]]]) -> Iterator[tuple[str, Path]]:
    """Nodes with so many builders and these devices, one started after the other: the pool's address, and a folder
    for files."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        os.environ["TILEWRIGHT_CACHE_DIR"] = folder
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        begin = time.monotonic()
        try:
            address = cluster.up(Share(*nodes[0]), port)
            for number, node in enumerate(nodes[1:], 1):
                _say(f"{number} of {len(nodes)} nodes after {time.monotonic() - begin:.0f} s")
                cluster.join(Share(*node), address)
            _say(f"{len(nodes)} of {len(nodes)} nodes after {time.monotonic() - begin:.0f} s")
            yield address, Path(folder)
        finally:
            cluster.down()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
