"""Calls of a function in a process of their own: one that crashes it or takes too long costs the call alone."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


class Killable:
    """`function` is a module's own, its arguments and results can be pickled. The process starts with the first call
    and stays; after one that killed it the next call starts another."""

    def __init__(self, function: Callable[..., Any], seconds: float) -> None:
        self._function, self._seconds = function, seconds
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __call__(self, *arguments: Any) -> tuple[bool, Any]:
        """(True, what it returned), or (False, in words why there is nothing)."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._function), daemon=True)
            self._process.start()
            theirs.close()
        assert self._pipe is not None
        try:
            self._pipe.send(arguments)
            if not self._pipe.poll(self._seconds):
                self.close()
                return False, f"it took longer than {self._seconds:g} s"
            worked, result = self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            return False, "its process ended"
        if not worked:  # what it has left behind, a context of a card for one, is not trusted
            self.close()
        return worked, result

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection, function: Callable[..., Any]) -> None:
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        try:
            reply = True, function(*arguments)
        except Exception as error:
            reply = False, f"{type(error).__name__}: {error}"
        pipe.send(reply)
