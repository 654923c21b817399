"""Networks in processes of their own: a crash or a hang costs one network and is a failure with its number."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])
LIFETIME = 200  # networks of a process: what it has compiled stays in its memory
LONGEST = 300.0  # seconds for one network, the shrinking of a wrong one included


@dataclass
class Done:
    """What came of a run."""

    next: int  # all networks below this number are done
    count: int = 0
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    taken: Counter[str] = field(default_factory=Counter)


def serve(check: Callable[[int], tuple[str, Counter[str]]]) -> None:
    """In a worker: numbers come in, one on a line, and answers go out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        wrong, taken = check(int(line))
        print(json.dumps({"wrong": wrong, "taken": taken}), file=answers, flush=True)


def spread(numbers: Sequence[int], command: Sequence[str], jobs: int, seconds: float) -> Done:
    """All of the numbers, or as many as there is time for, over so many processes of `command`, which calls `serve`."""
    begin = time.monotonic()
    done = Done(numbers[0] if numbers else 0)
    lock = threading.Lock()
    waiting: Iterator[int] = iter(numbers)
    running: set[int] = set()

    def take() -> int | None:
        with lock:
            number = next(waiting, None) if time.monotonic() - begin < seconds else None
            if number is not None:
                running.add(number)
            return number

    def finish(number: int, wrong: str, taken: Counter[str]) -> None:
        with lock:
            running.discard(number)
            done.count += 1
            done.taken.update(taken)
            if wrong:
                done.failures[number] = wrong
                print(f"\n{wrong}\n", flush=True)
            if done.count % 500 == 0:
                elapsed = time.monotonic() - begin
                print(f"{done.count} done in {elapsed:.0f} s, {len(done.failures)} wrong", flush=True)

    def work() -> None:
        worker: _Worker | None = None
        while (number := take()) is not None:
            if worker is None or worker.count >= LIFETIME:
                if worker is not None:
                    worker.close()
                worker = _Worker(command)
            wrong, taken = worker.ask(number)
            finish(number, wrong, taken)
            if worker.process.poll() is not None:
                worker.close()
                worker = None
        if worker is not None:
            worker.close()

    with ThreadPoolExecutor(jobs) as threads:
        for worked in [threads.submit(work) for _ in range(jobs)]:
            worked.result()
    left = next(waiting, None)
    done.next = left if left is not None else (numbers[-1] + 1 if numbers else 0)
    done.seconds = time.monotonic() - begin
    return done


class _Worker:
    def __init__(self, command: Sequence[str]) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH")))),
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.count = 0
        assert self.process.stdout is not None
        if not self.process.stdout.readline():  # no network is at fault: all workers would fail
            self.close()
            code = self.process.returncode
            raise RuntimeError(f"the worker {' '.join(command)} ended with {code} before its first network")

    def ask(self, number: int) -> tuple[str, Counter[str]]:
        self.count += 1
        assert self.process.stdin is not None and self.process.stdout is not None
        limit = threading.Timer(LONGEST, self.process.kill)
        limit.start()
        try:
            print(number, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            limit.cancel()
        if not line:
            code = self.process.wait()
            hung = "it took too long" if code == -9 else f"its process ended with {code}"
            return f"network {number}: {hung}", Counter()
        answer = json.loads(line)
        return answer["wrong"], Counter(answer["taken"])

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
