"""Tuning on a pool's devices: the machine is that of a device in the pool, and the runner is the pool's.

The rest of the pipeline is that of the machine's kind. Whole models run only where the device is, so winners are
confirmed by races on the device, and not inside the models.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import OptionError
from tilewright.hw.cpu import CpuMachine
from tilewright.hw.gpu import GpuMachine
from tilewright.hw.machine import from_text
from tilewright.measure.pool import cluster
from tilewright.measure.pool.driver import PoolRunner
from tilewright.measure.pool.workers import Workers
from tilewright.support.trace import Trace


@dataclass(frozen=True)
class Pool:
    """A pool of machines to tune on.

    `address`: as `tilewright pool up` prints it. `device`: the device's label, as `tilewright pool ls` shows it; None
    where the pool has one kind alone. `token_file`: the pool's token; None: what the environment or this user's files
    have for that address.
    """

    address: str
    device: str | None = None
    token_file: Path | str | None = None


class Connection:
    """A driver's connection to a pool, for one kind of device."""

    def __init__(self, workers: Workers, machine: str, trace: Trace) -> None:
        self._workers, self._trace = workers, trace
        found = from_text(machine)
        if not isinstance(found, CpuMachine | GpuMachine):
            raise OptionError(f"models are not compiled for a {found.kind} in a pool")
        self.machine: CpuMachine | GpuMachine = found
        self._user = f"{getpass.getuser()}@{socket.gethostname()}/{os.getpid()}"
        self.use: dict[str, int] = {}
        self.given_again = 0

    @contextlib.contextmanager
    def runner(self, threads: int) -> Iterator[PoolRunner]:
        runner = PoolRunner(
            self._workers, threads, user=self._user, seed=secrets.randbits(32), note=self._note
        )
        try:
            with runner:
                yield runner
        finally:
            self.use = dict(runner.use)
            self.given_again = runner.given_again
            self._trace.mark(
                "pool.end", use=self.use, given_again=runner.given_again, aside=self._workers.aside
            )

    def _note(self, message: str) -> None:
        self._trace.mark("pool.note", message=message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def connected(pool: Pool | str, trace: Trace) -> Iterator[Connection]:
    """PoolError where there is no such pool, it refuses this process, or nobody in it has the device."""
    wanted = Pool(pool) if isinstance(pool, str) else pool
    cluster.need_ray()
    file = None if wanted.token_file is None else Path(wanted.token_file)
    with cluster.connected(wanted.address, cluster.read_token(wanted.address, file)):
        workers = Workers()
        for name, reason in workers.refresh().items():
            warnings.warn(f"{name} is not used: {reason}", RuntimeWarning, stacklevel=3)
        machine = workers.choose(wanted.device)
        for message in workers.warnings:
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        yield Connection(workers, machine, trace)
