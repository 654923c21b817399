"""The origin of a node in the user's model: for messages, `explain` and reports; it never affects results."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tilewright.support.layers import merged

_TEXT = re.compile(r"(?P<layers>.*?)\s*(?P<line>\S+:\d+|-> \S+)?")


@dataclass(frozen=True)
class Provenance:
    """The layers that a node is part of, and a line of the user's code or model file; both may be unknown.

    A rewrite that merges nodes joins their origins: `conv.source | norm.source`.
    """

    layers: tuple[str, ...] = ()
    line: str = ""

    @classmethod
    def parse(cls, text: str) -> Provenance:
        """Parse what `str` has written."""
        found = _TEXT.fullmatch(text.strip())
        assert found is not None  # the pattern matches any line
        layers = tuple(filter(None, (found["layers"] or "").split(" + ")))
        return cls(layers, found["line"] or "")

    def __or__(self, other: Provenance) -> Provenance:
        return Provenance(merged(self.layers, other.layers), self.line or other.line)

    def __bool__(self) -> bool:
        return bool(self.layers or self.line)

    def __str__(self) -> str:
        return " ".join(filter(None, (" + ".join(self.layers), self.line)))


UNKNOWN = Provenance()
