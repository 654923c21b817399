"""Where in the user's model a node comes from: for messages, `explain` and reports, never for what is computed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tilewright.support.layers import merged

_TEXT = re.compile(r"(?P<layers>.*?)\s*(?P<line>\S+:\d+|-> \S+)?")


@dataclass(frozen=True)
class Provenance:
    """The layers that a node does work of, and a line of the user's code or of the model's file; both may be unknown.

    A rewrite that makes one node of several joins theirs: `conv.source | norm.source`.
    """

    layers: tuple[str, ...] = ()
    line: str = ""

    @classmethod
    def parse(cls, text: str) -> Provenance:
        """What `str` has written."""
        found = _TEXT.fullmatch(text.strip())
        assert found is not None  # the pattern takes any line
        layers = tuple(filter(None, (found["layers"] or "").split(" + ")))
        return cls(layers, found["line"] or "")

    def __or__(self, other: Provenance) -> Provenance:
        return Provenance(merged(self.layers, other.layers), self.line or other.line)

    def __bool__(self) -> bool:
        return bool(self.layers or self.line)

    def __str__(self) -> str:
        return " ".join(filter(None, (" + ".join(self.layers), self.line)))


UNKNOWN = Provenance()
