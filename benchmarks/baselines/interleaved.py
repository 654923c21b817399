"""One process per system, and turns handed out between them.

Systems that share a process tax each other: the thread pool of one spins while the next is timed. Here each has its
own, is blocked on a pipe while the others run, and gets a pause after its turn so that its threads go to sleep. That
they do is not assumed: `Seat.idle_share` is the part of a core that a system burned during the turns of the others.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil

from . import System
from .job import Job, NotAvailable, arrays_of, save_arrays
from .prepare import prepare

# Variables by which the libraries choose their number of threads by default.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
MAX_RUNS_IN_A_TURN = 200

spawn = multiprocessing.get_context("spawn")


class AnyJob(Protocol):
    """What a loader understands, and where its outputs go."""

    def outputs_file(self, system: str) -> Path: ...


class SystemError(Exception):
    """A system failed; the message is its own. `available` is false where it never could have taken part."""

    def __init__(self, message: str, available: bool = True) -> None:
        self.available = available
        super().__init__(message)


# -- in the system's process ---------------------------------------------------------------------------------------


def _serve(system: System, pipe: Connection) -> None:
    """Do what comes: a job is loaded and its outputs are left in a file; n: n times of what was loaded last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends this process
    run: Any = None
    with contextlib.suppress(EOFError):  # the parent is gone
        while (asked := pipe.recv()) is not None:
            try:
                if isinstance(asked, int):
                    pipe.send(("times", _timed(run, warm_up=1, count=asked)))
                    continue
                run = None  # what it held is free before the next is loaded
                module, function = system.loader.split(":")
                run = getattr(importlib.import_module(module), function)(asked)
                save_arrays(asked.outputs_file(system.name), arrays_of(run()))
                pipe.send(("ready", _timed(run, warm_up=2, count=3)))
            except NotAvailable as reason:
                pipe.send(("not available", str(reason)))
            except Exception as error:  # whatever a system raises is its result
                traceback.print_exc()
                message = (str(error).strip() or "(no message)").splitlines()[0]
                pipe.send(("failed", f"{type(error).__name__}: {message}"))


def _timed(run: Any, warm_up: int, count: int) -> list[float]:
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


# -- in the parent's --------------------------------------------------------------------------------------------------


class Seat:
    """A system that takes part: its process, and what it has been timed at so far."""

    def __init__(self, system: System, job: AnyJob | None, timeout: float) -> None:
        """Start the process and, unless jobs are to be loaded later, wait until it can run. Raises ContenderError."""
        self.system = system
        self._timeout = timeout
        started = time.perf_counter()
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(system, theirs))
        self._process.start()
        theirs.close()  # or the end of the process would not be seen here
        self._monitored = psutil.Process(self._process.pid)
        if job is None:
            return
        try:
            self.load(job)
        except BaseException:
            self.close()
            raise
        self.setup_seconds = time.perf_counter() - started

    def load(self, job: AnyJob) -> None:
        """Another job for the same process, with times of its own. Raises ContenderError; unless the process ended with
        it (`alive`), yet another may be loaded."""
        self.seconds: list[float] = []
        self.idle_cpu = 0.0
        self.idle_wall = 0.0
        started = time.perf_counter()
        self._pipe.send(job)
        self._typical = statistics.median(self._answer())
        self.setup_seconds = time.perf_counter() - started

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def idle_share(self) -> float:
        return self.idle_cpu / self.idle_wall if self.idle_wall else 0.0

    def turn(self, budget: float) -> None:
        """Run for about `budget` seconds, at least three times."""
        count = min(MAX_RUNS_IN_A_TURN, max(3, round(budget / self._typical)))
        self._pipe.send(count)
        self.seconds += self._answer()

    def cpu_seconds(self) -> float:
        try:
            used = self._monitored.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0  # it died between turns; its next turn will say so
        return float(used.user + used.system)

    def close(self) -> None:
        """End the process: ask first, then insist."""
        with contextlib.suppress(OSError):  # it may be gone already
            self._pipe.send(None)
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _answer(self) -> list[float]:
        if not self._pipe.poll(self._timeout):
            self._process.kill()  # its answer may still come, to another question
            self._process.join()
            raise SystemError(f"no answer within {self._timeout:.0f} s")
        try:
            kind, content = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(timeout=5)
            raise SystemError(f"its process ended with exit code {self._process.exitcode}") from None
        if kind in ("failed", "not available"):
            raise SystemError(content, available=kind == "failed")
        return content


def prepare_separately(job: Job, with_onnx: bool) -> None:
    """`prepare` in a process of its own, so that no exporter's memory or threads stay behind."""
    process = spawn.Process(target=prepare, args=(job, with_onnx))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemError(f"the model could not be prepared (exit code {process.exitcode})")


def run_interleaved(
    seats: Sequence[Seat], rounds: int, turn_seconds: float, gap_seconds: float
) -> dict[str, SystemError]:
    """`rounds` turns for each seat; the first to go changes from round to round. Returns those who failed midway."""
    failed: dict[str, SystemError] = {}
    for number in range(rounds):
        first = number % len(seats)
        for seat in (*seats[first:], *seats[:first]):
            idle = [s for s in seats if s is not seat and s.system.name not in failed]
            if seat.system.name in failed:
                continue
            before, started = [s.cpu_seconds() for s in idle], time.perf_counter()
            try:
                seat.turn(turn_seconds)
            except SystemError as error:
                failed[seat.system.name] = error
                seat.close()  # or it might go on working during the turns of the others
            wall = time.perf_counter() - started
            for other, then in zip(idle, before, strict=True):
                other.idle_cpu += max(0.0, other.cpu_seconds() - then)
                other.idle_wall += wall
            time.sleep(gap_seconds)
    return failed


def fix_threads(threads: int) -> None:
    """For this process and those it starts: no library chooses another number of threads."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads)
