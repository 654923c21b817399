"""The failure of a candidate as plain data, for messages between processes."""

from __future__ import annotations

import msgspec

from tilewright.support.process import Dead


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The failure of a candidate: a kind of space.outcome.FAILURES, and what happened. After a `corrupted` one,
    nothing in its process can be trusted."""

    kind: str
    message: str
    corrupted: bool = False

    @classmethod
    def of(cls, death: Dead) -> Failed:
        return cls(death.kind, death.message)
