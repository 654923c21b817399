"""The workers of a pool as its driver sees them: who is there, who may be used, and how to ask them.

An actor's name says what it is: `builder/NODE/0`, `timer/NODE/cpu:znver4/0`. Actors are detached: they outlive drivers,
so several users share them. Who answers with another version, or does not answer, is set aside with a reason.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from tilewright.errors import PoolError
from tilewright.measure.pool.references import References
from tilewright.measure.pool.wire import Hello
from tilewright.support.fingerprint import fingerprint
from tilewright.support.version import VERSION

NAMESPACE = "tilewright-pool"
_HELLO_SECONDS = 30.0  # for those who are there to answer a greeting
_START_SECONDS = 180.0  # for one that is just starting, perhaps beside others
_CLOCK_SECONDS = 60.0  # by which a node's clock may be off
_UNREACHED = 2  # troubles in a row, after which a worker that cannot be reached is started anew
_PAUSE, _MAX_PAUSE = 1.0, 60.0  # seconds without work after trouble: at first, at most
_CONNECT_SECONDS = 2.0  # for one connection to the first node
_CONNECT_PAUSE = 0.1  # before it is tried again
_GONE_SECONDS = 20.0  # without an answer from the first node; Ray ends a driver after 60


def answers(address: str, patience: float) -> bool:
    """Whether something listens at HOST:PORT. It may be busy for so many seconds; a refusal is final."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + patience
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS):
                return True
        except ConnectionRefusedError:
            return False
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_CONNECT_PAUSE)


class LostObject(Exception):
    """What a request needs, or its answer, was on a node that died."""


@dataclass
class Worker:
    """A builder or a timer."""

    name: str
    handle: Any
    hello: Hello
    references: References  # times of its reference kernel, also from before it was away

    @property
    def is_timer(self) -> bool:
        return bool(self.hello.label)

    @property
    def host(self) -> str:
        return self.hello.host

    @property
    def machine(self) -> str:
        return self.hello.machine

    @property
    def variant(self) -> str:
        """Distinguishes different machines with the same label."""
        return fingerprint(self.hello.machine)[:8]

    @property
    def device(self) -> str:
        return f"{self.hello.label} on {self.hello.node}"

    def build(self, request: bytes) -> tuple[Any, Any]:
        answer, code = self.handle.build.options(num_returns=2).remote(request)
        return answer, code

    def ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self.handle, method).remote(*arguments)

    def tell(self, method: str, *arguments: Any) -> None:
        """Send a message without waiting for a reply."""
        self.ask(method, *arguments)


def _minor(version: str) -> str:
    """3.12.4 -> 3.12"""
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True)
class _Greeting:
    name: str
    handle: Any
    sent: float


class Workers:
    """The workers of the pool that this process is connected to."""

    def __init__(self) -> None:
        self._known: dict[str, Worker] = {}
        self.aside: dict[str, str] = {}  # why they get no work
        self._back: dict[str, float] = {}  # when those may be asked again that only had trouble
        self._troubles: Counter[str] = Counter()
        self._references: dict[str, References] = {}
        self._hellos: dict[str, Hello] = {}  # the last of each worker, also of those that are away
        self._greetings: dict[Any, _Greeting] = {}  # by reference: who was greeted and has not answered yet
        self._label = ""  # of the device that was chosen
        self._there: set[str] = set()  # the names of all workers, also of those that do not answer
        self.warnings: list[str] = []

    def refresh(self, wait: float = _HELLO_SECONDS) -> dict[str, str]:
        """Look for workers, and return those that are newly found unusable, with the reason. New ones are greeted; if a
        greeting is not answered within `wait` seconds, it is checked again next time."""
        names = self._there = self._named()
        now = time.monotonic()
        for name in [name for name in self._known if name not in names]:
            del self._known[name]
        for name in [name for name, when in self._back.items() if when <= now]:
            del self._back[name]
            self.aside.pop(name, None)
        greeted = {greeting.name for greeting in self._greetings.values()}
        for name in sorted(names - set(self._known) - set(self.aside) - greeted):
            handle = self._handle(name)
            if handle is not None:
                self._greetings[handle.hello.remote()] = _Greeting(name, handle, now)
        found: dict[str, str] = {}
        for reference in self.come(list(self._greetings), wait):
            greeting = self._greetings.pop(reference)
            if reason := self._met(greeting, self.answer(reference)):
                found[greeting.name] = reason
        now = time.monotonic()
        for reference, greeting in list(self._greetings.items()):
            if now - greeting.sent > _START_SECONDS or wait >= _HELLO_SECONDS:
                del self._greetings[reference]
                found[greeting.name] = f"no answer within {now - greeting.sent:.0f} s"
                self._pause(greeting.name)
        self.aside.update(found)
        return found

    def _pause(self, name: str) -> None:
        """Do not ask the worker for a while, longer each time."""
        self._troubles[name] += 1
        pause = min(_MAX_PAUSE, _PAUSE * 2 ** (self._troubles[name] - 1))
        self._back[name] = time.monotonic() + pause

    def _met(self, greeting: _Greeting, answer: Any) -> str:
        """Add a worker that answered; or return why it is unusable."""
        try:
            if isinstance(answer, BaseException):
                self._unreached(greeting, answer)
                raise ValueError(str(answer).splitlines()[0] if str(answer) else type(answer).__name__)
            hello = msgspec.msgpack.decode(answer, type=Hello)
        except (ValueError, TypeError) as error:  # msgspec's errors are among them
            self._pause(greeting.name)
            return f"it does not answer: {error}"
        where = f"the node {hello.node} on {hello.host}"
        for what, there, here in (
            ("tilewright", hello.version, VERSION),
            ("Ray", hello.ray, importlib.metadata.version("ray")),
            ("Python", _minor(hello.python), _minor(platform.python_version())),
        ):
            if there != here:
                return f"{where} has {what} {there or 'of an unknown version'}, the driver {here}"
        off = hello.clock - time.time()
        if not -_CLOCK_SECONDS - (time.monotonic() - greeting.sent) < off < _CLOCK_SECONDS:
            self.warnings.append(
                f"the clock of {where} is off by {off:.0f} s; records have the driver's time"
            )
        self._hellos[greeting.name] = hello
        remembered = self._references.setdefault(greeting.name, References(hello.speed))
        self._known[greeting.name] = Worker(greeting.name, greeting.handle, hello, remembered)
        return ""

    def _unreached(self, greeting: _Greeting, error: BaseException) -> None:
        """Start a worker anew that lives and cannot be reached, as when its connections broke: Ray does not end it
        either, so another worker of its node does. One that is starting is left alone; if it is not seen to be
        starting, the growing pauses give it the time."""
        hello = self._hellos.get(greeting.name)
        if self._troubles[greeting.name] < _UNREACHED or "restarting" in str(error) or hello is None:
            return
        for fellow in self._known.values():
            if fellow.hello.node == hello.node:
                fellow.tell("end", hello.pid)
                return

    @property
    def has_news(self) -> bool:
        """Whether a worker was greeted, or may be asked again."""
        return bool(self._greetings) or self.next_back == 0.0

    def set_aside(self, worker: Worker, reason: str, *, for_good: bool) -> None:
        """Give the worker no more work; unless `for_good`, for a while only, longer each time."""
        self.aside[worker.name] = reason
        self._known.pop(worker.name, None)
        if not for_good:
            self._pause(worker.name)

    def forgive(self, worker: Worker) -> None:
        """The worker did a work item: its next pause is short again."""
        self._troubles.pop(worker.name, None)

    @property
    def next_back(self) -> float | None:
        """Seconds until the first worker that had trouble may be asked again, or answers a greeting."""
        if self._greetings:
            return _PAUSE / 10
        return max(0.0, min(self._back.values()) - time.monotonic()) if self._back else None

    def builders(self) -> list[Worker]:
        return [worker for worker in self._known.values() if not worker.is_timer]

    def timers(self, machine: str | None = None) -> list[Worker]:
        """The timers of the chosen device, or of all devices; `machine`: only those of this kind of machine."""
        return [
            w
            for w in self._known.values()
            if w.is_timer and machine in (None, w.machine) and self._label in ("", w.hello.label)
        ]

    def are_away(self, label: str) -> bool:
        """Whether the pool has devices of this label that cannot be reached now, and will be asked again."""
        return any(
            name.startswith("timer/") and name.split("/")[2] == label
            for name in self._there - set(self._known)
            if name in self._back or name not in self.aside
        )

    def calibration(self, machine: str) -> str:
        """What a node measured of such a machine; "" if none is calibrated."""
        return next((w.hello.calibration for w in self.timers(machine) if w.hello.calibration), "")

    def choose(self, label: str | None) -> str:
        """Use only timers of this device, and return its description. Raises PoolError if no machine has it. If
        machines of one label differ, the most frequent kind is taken; `label#variant` names one."""
        self._label = ""
        wanted, _, variant = (label or "").partition("#")
        able = [
            w
            for w in self.timers()
            if (not wanted or w.hello.label == wanted) and (not variant or w.variant.startswith(variant))
        ]
        labels = sorted({w.hello.label for w in self.timers()})
        if not able or (not wanted and len(labels) > 1):
            there = f"it has {', '.join(labels)}" if labels else "it has no device at all"
            said = "names no device" if not wanted else f"has no device {label!r}"
            raise PoolError(
                f"the pool {said}; {there}", remedy="name one of them: --device LABEL, or device=..."
            )
        machines = sorted({w.machine for w in able}, key=lambda each: -sum(w.machine == each for w in able))
        if len(machines) > 1:
            others = ", ".join(
                sorted({f"{w.hello.label}#{w.variant}" for w in able if w.machine != machines[0]})
            )
            self.warnings.append(f"machines of the label {wanted or labels[0]} differ; not used: {others}")
        self._label = wanted or labels[0]
        return machines[0]

    # -- Ray, so that the driver needs no import of it -----------------------------------------------------------

    def _named(self) -> set[str]:
        """The actors of all nodes. Raises PoolError if the pool's first node is gone: Ray would wait for it for a
        minute, and then end this process."""
        import ray
        from ray.util import list_named_actors

        address = ray.get_runtime_context().gcs_address
        if not answers(address, _GONE_SECONDS):
            raise PoolError(
                f"the first node of the pool {address} does not answer any more: it was stopped, or died",
                remedy="start the pool again (tilewright pool up), and run this again: what was recorded is kept",
            )
        return {
            each["name"]
            for each in list_named_actors(all_namespaces=True)
            if each["namespace"] == NAMESPACE and each["name"].startswith(("builder/", "timer/"))
        }

    def _handle(self, name: str) -> Any:
        """The handle of an actor; None if it has ended."""
        import ray

        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except (ValueError, ray.exceptions.RayError):
            return None

    def restart(self, worker: Worker) -> None:
        """End an actor that hangs; Ray restarts it on its node."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(worker.handle, no_restart=False)

    def wait(self, references: list[Any], seconds: float) -> list[Any]:
        import ray

        if not references:
            time.sleep(seconds)
            return []
        first, _ = ray.wait(references, num_returns=1, timeout=seconds, fetch_local=False)
        return self.come(references, 0.0) if first else []

    def come(self, references: list[Any], seconds: float) -> list[Any]:
        """Wait up to this long, and return the references that have arrived."""
        import ray

        if not references:
            return []
        ready, _ = ray.wait(references, num_returns=len(references), timeout=seconds, fetch_local=False)
        return list(ready)

    def stored(self, data: bytes) -> Any:
        """A reference to these bytes in the object store."""
        import ray

        return ray.put(data)

    def answer(self, reference: Any) -> Any:
        """The answer, or the exception that took its place."""
        import ray

        try:
            return ray.get(reference, timeout=5.0)
        except ray.exceptions.ObjectLostError as error:
            return LostObject(str(error).splitlines()[0])
        except ray.exceptions.RayError as error:
            return error
