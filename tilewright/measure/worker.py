"""Trials in a process of their own: what hangs is killed, what crashes costs one candidate.

The process is a plain interpreter, and not one of `multiprocessing`, which would run the caller's script again.
Questions and answers are lines of JSON on its standard input and output.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec

from tilewright.measure.trial import Bench, TaskJob, WrongResult
from tilewright.space.space import Config

START_SECONDS = 60.0  # to import what it needs


class Question(msgspec.Struct, frozen=True):
    """Race these configs of a task for about so long; those not seen before are built and checked first."""

    task: TaskJob
    configs: tuple[Config | None, ...]
    seconds: float


class Answer(msgspec.Struct, frozen=True):
    """Times of each config in turn; or `failed`: which of them failed, and what kind of failure it was."""

    times: tuple[tuple[float, ...], ...] = ()
    errors: tuple[float, ...] = ()  # of the configs that were checked just now
    failed: int | None = None
    kind: str = ""  # "wrong", "illegal", "crash", "timeout"
    message: str = ""


class Worker:
    """The process, from the side of who asks. Started at the first question, and again after each death."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: Question, timeout: float) -> Answer:
        """The last config of the question is the one that is new: a crash or a timeout is its fault."""
        fresh = self._process is None
        process = self._process or self._start()
        assert process.stdin is not None
        blamed = len(question.configs) - 1
        try:
            process.stdin.write(msgspec.json.encode(question) + b"\n")
            process.stdin.flush()
            line = self._lines.get(timeout=timeout + (START_SECONDS if fresh else 0.0))
        except queue.Empty:
            self.close()
            return Answer(failed=blamed, kind="timeout", message=f"no answer within {timeout:.0f} s")
        except BrokenPipeError:
            line = b""
        except BaseException:  # interrupted: an answer may still come, and would be taken for the next one's
            self.close()
            raise
        if line:
            return msgspec.json.decode(line, type=Answer)
        code = process.wait()
        self.close()
        return Answer(failed=blamed, kind="crash", message=f"the process ended with exit code {code}")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(
            Path(__file__).resolve().parents[2]
        )  # where this tilewright is, whether it is installed or not
        serving = (
            f"import sys; sys.path.insert(0, {root!r}); from tilewright.measure.worker import serve; serve()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", serving],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the one who asks
        )
        assert process.stdout is not None
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_forward, args=(process.stdout, self._lines), daemon=True).start()
        self._process = process
        return process


def _forward(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Every line, then an empty one for the end."""
    with contextlib.suppress(ValueError, OSError):  # closed on the other side
        for line in stream:
            lines.put(line)
    lines.put(b"")


# -- in the worker ----------------------------------------------------------------------------------------------------


def answer(question: Question, bench: Bench) -> Answer:
    errors = []
    bench.forget_except(question.configs)
    for number, config in enumerate(question.configs):
        if bench.knows(config):
            continue
        try:
            errors.append(bench.check(config))
        except WrongResult as error:
            return Answer(failed=number, kind="wrong", message=str(error))
        except (
            Exception
        ) as error:  # whatever a template or the code generator raises is this candidate's result
            return Answer(failed=number, kind="illegal", message=f"{type(error).__name__}: {error}")
    times = bench.race(question.configs, question.seconds)
    return Answer(tuple(map(tuple, times)), tuple(errors))


def serve() -> None:
    bench: Bench | None = None
    for line in sys.stdin.buffer:
        question = msgspec.json.decode(line, type=Question)
        if bench is None or bench.job != question.task:
            bench = Bench(question.task)
        sys.stdout.buffer.write(msgspec.json.encode(answer(question, bench)) + b"\n")
        sys.stdout.buffer.flush()
