"""Launches recorded instead of run: how a function that launches kernels becomes data.

    with recorded() as launches:
        function(Placeholder(...), ...)

Every launch inside, of a kernel or of a tuned one, is added to `launches`. The tensors need no memory.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.dtypes import DType


@dataclass(frozen=True)
class _Device:
    type: str = "cpu"


@dataclass(frozen=True, eq=False)
class Placeholder:
    """Represents a dense tensor whose memory is not allocated yet. `operand`: its index among an operator's
    operands."""

    name: str
    element: DType
    shape: tuple[int, ...]
    operand: int
    dtype: Any = None  # as the user knows it
    device: _Device = field(default_factory=_Device)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, axis: int | None = None) -> Any:
        strides = tuple(math.prod(self.shape[at + 1 :]) for at in range(len(self.shape)))
        return strides if axis is None else strides[axis]

    def is_contiguous(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class RecordedLaunch:
    """A recorded launch. `kernel`: a Kernel, or a tuned one, whose knobs are not among the arguments. `options`: those
    of the launch."""

    kernel: Any
    grid: Any
    bound: Mapping[str, Any]
    is_tuned: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    def replay(self) -> None:
        """Launch it, on tensors. Its options may be those of another device than that of the tensors, and change no
        result: they are left out."""
        self.kernel[self.grid](**self.bound)


_active: contextvars.ContextVar[list[RecordedLaunch] | None] = contextvars.ContextVar(
    "launches", default=None
)


def active() -> list[RecordedLaunch] | None:
    """The list that launches are recorded in; None if launches run."""
    return _active.get()


@contextlib.contextmanager
def recorded() -> Iterator[list[RecordedLaunch]]:
    launches: list[RecordedLaunch] = []
    token = _active.set(launches)
    try:
        yield launches
    finally:
        _active.reset(token)
