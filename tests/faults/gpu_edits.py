"""CUDA text with one mistake in it: an index, a bound, an operator, a barrier or a wait that is not as it was.

The text of a kernel holds all that is compiled, helpers too. A mistake in a helper that the kernel does not use leaves
the machine code as it was: such a mutant is no mutant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tilewright.codegen.cuda import toolchain
from tilewright.codegen.cuda.build import SYMBOL
from tilewright.errors import TilewrightError

Changed = Callable[[re.Match[str]], str]


@dataclass(frozen=True)
class Edit:
    """A mistake: what stands between two places of the text is replaced."""

    kind: str
    begin: int
    end: int
    by: str
    line: str

    @property
    def where(self) -> str:
        return self.line.strip()[:100]

    def made(self, text: str) -> str:
        return text[: self.begin] + self.by + text[self.end :]


def _plus(step: int) -> Changed:
    return lambda match: f"[({match[1]}) + {step}]" if step > 0 else f"[({match[1]}) - {-step}]"


def _number(match: re.Match[str]) -> str:
    return str(int(match[0]) + 1)


def _float(match: re.Match[str]) -> str:
    return f"{float(match[1]) * 1.01 + 0.01}f"


_INDEX = r"\[([^\[\]\"]*[a-z_][^\[\]\"]*)\]"  # has a name in it: the size of an array seldom does
_WORD = r"[A-Za-z_][\w.]*(?:\([\w, ]*\))?|\d+"

# (kind, what is looked for, what stands there instead)
OPERATORS: tuple[tuple[str, str, Changed], ...] = (
    ("index + 1", _INDEX, _plus(1)),
    ("index - 1", _INDEX, _plus(-1)),
    ("bound", r"(?<=[<>]) (\d+)(?=[;)&| ])", lambda match: f" {max(0, int(match[1]) - 1)}"),
    ("comparison", r" < ", lambda match: " <= "),
    ("comparison", r" <= ", lambda match: " < "),
    ("comparison", r" >= ", lambda match: " > "),
    ("comparison", r" == ", lambda match: " != "),
    ("operator", r" \+ ", lambda match: " - "),
    ("operator", r" - ", lambda match: " + "),
    ("operator", r" \* ", lambda match: " + "),
    ("division", r" / ", lambda match: " % "),
    ("division", r" % ", lambda match: " / "),
    ("shift", r" << ", lambda match: " >> "),
    ("logic", r" && ", lambda match: " || "),
    ("accumulation", r" \+= ", lambda match: " -= "),
    ("minimum", r"\bmin\(", lambda match: "max("),
    ("minimum", r"\bmax\(", lambda match: "min("),
    ("minimum", r"\bfmaxf\(", lambda match: "fminf("),
    ("constant", r"(?<![\w.\"%])\d+(?![\w.\"])", _number),
    ("float constant", r"(?<![\w.])(\d+\.\d+(?:e[-+]?\d+)?)f\b", _float),
    ("operands", rf"({_WORD}) ([-/<]) ({_WORD})", lambda match: f"{match[3]} {match[2]} {match[1]}"),
    ("branches", r"\? ([^:?;]+) : ([^;,:?]+)(?=[;,])", lambda match: f"? {match[2]} : {match[1]}"),
    ("barrier", r"__syncthreads\(\);|__syncwarp\(\);|meet_cluster\(\);", lambda match: ";"),
    ("wait", r"await_\w+(?:<[^>]*>)?\([^;]*\);", lambda match: ";"),
    ("commit", r"commit_\w+\(\);", lambda match: ";"),
    ("dropped", r"(?<=\n)( +)[\w.\[\]()+* ]+ (?:[-+*]?=) [^;{}\n]+;(?=\n)", lambda match: f"{match[1]};"),
)
KINDS = tuple(dict.fromkeys(kind for kind, _, _ in OPERATORS))

_SKIPPED = re.compile(r"//[^\n]*|/\*.*?\*/|#[^\n]*|\"[^\"\n]*\"", re.DOTALL)


def edits(text: str) -> list[Edit]:
    """Every mistake, in the order of the text. Not in comments, directives and strings."""
    quiet = _SKIPPED.sub(lambda match: re.sub(r"[^\n]", "\0", match[0]), text)
    found = []
    for kind, pattern, change in OPERATORS:
        for match in re.finditer(pattern, quiet):
            if "\0" in match[0] or SYMBOL in match[0]:
                continue
            begin = text.rfind("\n", 0, match.start()) + 1
            line = text[begin : text.find("\n", match.start())]
            found.append(Edit(kind, match.start(), match.end(), change(match), line))
    return sorted(found, key=lambda edit: (edit.begin, edit.end, edit.by))


def shuffled(found: Sequence[Edit], rng: Random) -> Iterator[int]:
    """The numbers of all edits: a kind of mistake at random, then a place for it that is new."""
    by_kind: dict[str, list[int]] = {}
    for number, edit in enumerate(found):
        by_kind.setdefault(edit.kind, []).append(number)
    for numbers in by_kind.values():
        rng.shuffle(numbers)
    while by_kind:
        kind = rng.choice(sorted(by_kind))
        yield by_kind[kind].pop()
        if not by_kind[kind]:
            del by_kind[kind]


def compiled(text: str, capability: tuple[int, int]) -> bytes | None:
    """None where that is no CUDA."""
    try:
        return toolchain.compile_source(text, capability).cubin
    except TilewrightError:
        return None
