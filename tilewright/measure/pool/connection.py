"""Tuning on a pool's devices: a machine that need not be here, and the runner that measures on it.

    with connected(Pool("10.0.0.7:6379", "cuda:h200")) as session:
        device = session.device("cuda:h200")
        device.machine, device.runner      # what the pipeline and the tuner need

A session may have several devices at once, each with a budget of its own. Whole models run only where a device is, so
winners are confirmed by races on it, and not inside the models.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import hmac
import socket
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import OptionError
from tilewright.hw.cpu import CpuMachine
from tilewright.hw.gpu import GpuMachine
from tilewright.hw.machine import from_text
from tilewright.measure.pool import calibrations, cluster
from tilewright.measure.pool.driver import DeviceUse, PoolRunner
from tilewright.measure.pool.workers import Workers
from tilewright.support.trace import Trace


@dataclass(frozen=True)
class Pool:
    """A pool of machines to tune on. `address`: as `tilewright pool up` prints it. `device`: the device's label, as
    `tilewright pool ls` shows it; None if the pool has only one kind. `token_file`: the pool's token; None for the one
    in the environment or in this user's files. `device_seconds`: the total time that devices of that label may work for
    this run; None for no limit."""

    address: str
    device: str | None = None
    token_file: Path | str | None = None
    device_seconds: float | None = None


class PoolDevice:
    """One kind of device of a pool, for one run."""

    def __init__(
        self,
        workers: Workers,
        machine: str,
        over: threading.Event,
        trace: Trace,
        seconds: float | None,
        seed: int,
    ) -> None:
        self._workers, self._over, self._trace, self._seconds, self._seed = (
            workers,
            over,
            trace,
            seconds,
            seed,
        )
        found = from_text(machine)
        if not isinstance(found, CpuMachine | GpuMachine):
            raise OptionError(f"models are not compiled for a {found.kind} in a pool")
        self.machine: CpuMachine | GpuMachine = found
        self._user = _user()  # all drivers of a user share that user's turns
        self.use: dict[str, DeviceUse] = {}
        self.given_again = 0

    @property
    def aside(self) -> dict[str, str]:
        """The workers that get no work, with the reasons."""
        return dict(self._workers.aside)

    @contextlib.contextmanager
    def runner(self, threads: int) -> Iterator[PoolRunner]:
        runner = PoolRunner(
            self._workers,
            threads,
            user=self._user,
            seed=self._seed,
            note=self._note,
            budget=self._seconds,
            is_over=self._over.is_set,
        )
        self.use = runner.use
        try:
            with runner:
                yield runner
        finally:
            self.given_again = runner.given_again
            use = {name: {"trials": each.trials, "seconds": each.seconds} for name, each in self.use.items()}
            self._trace.mark("pool.end", use=use, given_again=runner.given_again, aside=self.aside)

    def _note(self, message: str) -> None:
        self._trace.mark("pool.note", message=message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


class Session:
    """The connection of this process as a driver of a pool. `seed`: of the validation inputs."""

    def __init__(self, seed: int) -> None:
        self._over, self._seed = threading.Event(), seed

    def end(self) -> None:
        """Measure nothing more: every tuner uses its results so far."""
        self._over.set()

    def device(self, label: str | None, trace: Trace, seconds: float | None = None) -> PoolDevice:
        """Raises PoolError if no machine of the pool has it."""
        workers = Workers()
        for name, reason in workers.refresh().items():
            warnings.warn(f"{name} is not used: {reason}", RuntimeWarning, stacklevel=3)
        machine = workers.choose(label)
        calibrations.keep(machine, workers.calibration(machine))
        while workers.warnings:
            warnings.warn(workers.warnings.pop(0), RuntimeWarning, stacklevel=3)
        return PoolDevice(workers, machine, self._over, trace, seconds, self._seed)


@contextlib.contextmanager
def connected(pool: Pool | str) -> Iterator[Session]:
    """Raises PoolError if there is no such pool, or it refuses this process."""
    wanted = Pool(pool) if isinstance(pool, str) else pool
    cluster.need_ray()
    file = None if wanted.token_file is None else Path(wanted.token_file)
    token = cluster.read_token(wanted.address, file)
    with cluster.connected(wanted.address, token):
        yield Session(seed_of(token, _user()))


def _user() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def seed_of(token: str, user: str) -> int:
    """A seed that is the same for all drivers of a user while the pool is up. So a driver that was killed and restarted
    gets the answers that timers still keep for it. The seed is unknown outside the pool."""
    digest = hmac.new(token.encode(), f"validation inputs of {user}".encode(), hashlib.sha256).digest()
    return int.from_bytes(digest[:4], "little")


@contextlib.contextmanager
def device_of(pool: Pool | str, trace: Trace) -> Iterator[PoolDevice]:
    """The device that a pool names, or its only one."""
    wanted = Pool(pool) if isinstance(pool, str) else pool
    with connected(wanted) as session:
        yield session.device(wanted.device, trace, wanted.device_seconds)
