"""A bounded table of variants of one computation, for shapes that change.

Every variant is compiled for exact shapes. A program whose shapes keep changing (a batch of any size, a sequence that
grows) must not be compiled for ever, so a new shape earns its compilation:

- the first `eager` shapes are compiled when they come;
- a later one is compiled when it comes the `patience`-th time or later, and its calls before took together at least
  `worth` times as long as compiling a variant takes: a size that recurs often pays, one that passes does not;
- after `limit` variants nothing more is compiled, and nothing is thrown away: further shapes run by other means.

So the cost is bounded by `limit` compilations and the memory of their variants, and the regret by the calls that a
shape had to wait for, which are as fast as they were without a compiler. With `worth` 1 no shape costs more than twice
what it would have cost had its number of calls been known from the start. The counts of waiting shapes are bounded too.
A sequence that grows from 1 to n costs `eager` compilations the first time, none the second time (each length has then
been waited for once, for milliseconds), and never more than `limit`.

Nothing is padded to a size that is there already: that more rows leave the others as they are would have to be proved
for each model.

This is the policy of `tilewright.compile(..., dynamic=True)` and of the backend for torch.compile. The other means are
PyTorch where the model is its own, and NumPy (the graph run by the oracle) for ONNX models.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_WAITING = 1024  # shapes that are counted but not compiled


@dataclass(frozen=True)
class Policy:
    """How many shapes are compiled, and when: `compile(..., dynamic=Policy(limit=4))`."""

    limit: int = 16  # variants at most
    eager: int = 4  # so many are compiled at once
    patience: int = 2  # a later one not before its shape comes for this time
    worth: float = 1.0  # nor before its calls took this many times as long as a compilation


@dataclass
class _Wait:
    """Of a shape that is not compiled: how often it came, and the seconds that these calls took."""

    calls: int = 0
    seconds: float = 0.0


class VariantTable(Generic[T]):
    """Variants by key. Safe to use from several threads; one compiles at a time."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._variants: dict[Hashable, T] = {}
        self._waiting: OrderedDict[Hashable, _Wait] = OrderedDict()
        self._spent: list[float] = []  # seconds that each variant took to make
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._variants)

    def variants(self) -> tuple[T, ...]:
        """Those that there are, in the order in which they were made."""
        with self._lock:
            return tuple(self._variants.values())

    def find(self, key: Hashable) -> T | None:
        return self._variants.get(key)

    def add(self, key: Hashable, variant: T) -> None:
        """A variant that there is already, whatever the policy says."""
        with self._lock:
            self._variants.setdefault(key, variant)

    def get(self, key: Hashable, make: Callable[[], T]) -> T | None:
        """The variant for `key`, made now if it has earned it; None: run by other means."""
        found = self._variants.get(key)
        if found is not None:
            return found
        with self._lock:
            found = self._variants.get(key)
            if found is not None or not self._earned(key):
                return found
            began = time.perf_counter()
            made = self._variants[key] = make()
            self._spent.append(time.perf_counter() - began)
            return made

    @property
    def is_full(self) -> bool:
        return len(self._variants) >= self.policy.limit

    def waited(self, key: Hashable, seconds: float) -> None:
        """A call for which `get` gave nothing took so long by other means."""
        with self._lock:
            if key in self._waiting:
                self._waiting[key].seconds += seconds

    def clear(self) -> None:
        with self._lock:
            self._variants.clear()
            self._waiting.clear()

    def _earned(self, key: Hashable) -> bool:
        if self.is_full:
            return False
        if len(self._variants) < self.policy.eager:
            return True
        wait = self._waiting.pop(key, None) or _Wait()
        wait.calls += 1
        price = sum(self._spent) / max(len(self._spent), 1)
        if wait.calls >= self.policy.patience and wait.seconds >= self.policy.worth * price:
            return True
        self._waiting[key] = wait
        if len(self._waiting) > _WAITING:
            self._waiting.popitem(last=False)
        return False
