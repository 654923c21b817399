"""A bounded table of variants of one computation, for shapes that change.

Every variant is compiled for exact shapes. If shapes keep changing (a batch of any size, a growing sequence),
compilation must not go on endlessly, so a new shape must earn its compilation:

- the first `eager` shapes are compiled at once;
- a later one is compiled when it occurs at least the `patience`-th time, and its earlier calls together took at least
  `worth` times as long as compiling a variant: recurring sizes pay, rare ones do not;
- after `limit` variants nothing more is compiled, and nothing is evicted: further shapes use the fallback.

So the cost is bounded by `limit` compilations and the memory of their variants. The calls before a compilation are as
fast as without a compiler. With `worth` 1 no shape costs more than twice the optimum for its number of calls. The
counts of waiting shapes are bounded too. A sequence that grows from 1 to n costs `eager` compilations the first time,
none the second time, and never more than `limit`.

Nothing is padded to an existing size, because it would have to be proved for each model that more rows do not affect
the others.

This is the policy of `tilewright.compile(..., dynamic=True)` and of the backend for torch.compile. The fallback is
PyTorch for PyTorch models, and NumPy (the oracle) for ONNX models.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_WAITING = 1024  # maximum shapes that are counted but not compiled


@dataclass(frozen=True)
class Policy:
    """The number of shapes that are compiled, and when: `compile(..., dynamic=Policy(limit=4))`."""

    limit: int = 16  # maximum variants
    eager: int = 4  # compiled at their first occurrence
    patience: int = 2  # occurrences before a later shape is compiled
    worth: float = 1.0  # and the time of its calls, relative to a compilation


@dataclass
class _Wait:
    """A shape that is not compiled: its number of calls, and their total seconds."""

    calls: int = 0
    seconds: float = 0.0


class VariantTable(Generic[T]):
    """Variants by key. It is thread-safe; one thread compiles at a time."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._variants: dict[Hashable, T] = {}
        self._waiting: OrderedDict[Hashable, _Wait] = OrderedDict()
        self._spent: list[float] = []  # compile seconds of each variant
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._variants)

    def variants(self) -> tuple[T, ...]:
        """The variants in the order in which they were made."""
        with self._lock:
            return tuple(self._variants.values())

    def find(self, key: Hashable) -> T | None:
        return self._variants.get(key)

    def add(self, key: Hashable, variant: T) -> None:
        """Add an existing variant, whatever the policy says."""
        with self._lock:
            self._variants.setdefault(key, variant)

    def get(self, key: Hashable, make: Callable[[], T]) -> T | None:
        """The variant for `key`, compiled now if it has earned it; None: use the fallback."""
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
        """Record the duration of a call that used the fallback."""
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
