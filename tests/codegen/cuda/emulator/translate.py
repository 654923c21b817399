"""CUDA C++ -> C++ for the emulator: asm statements become calls, shared memory a place in the emulated block."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ASM = re.compile(r"\basm\b\s*(?:volatile\b\s*)?\(")
_OPERAND = re.compile(r'\s*"(?P<constraint>[^"]*)"\s*\(')
_REFERENCE = re.compile(r"%(\d+)")
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?unsigned char shared\[\];")
_STATIC = re.compile(r"__shared__ (\w+) (\w+)((?:\[[^\]]+\])?);")


class Untranslated(Exception):
    """An asm statement that is not understood."""


def translated(text: str) -> str:
    """The same kernel for `cuda.h`."""
    text = _DYNAMIC.sub("unsigned char* const shared = emulator::dynamic_shared();", text)
    # A static variable tells the instances of a template apart, each of which has shared memory of its own.
    text = _STATIC.sub(
        r"static const char key_of_\2 = 0; using type_of_\2 = \1\3; type_of_\2& \2 ="
        r" *static_cast<type_of_\2*>(emulator::static_shared(&key_of_\2, sizeof(type_of_\2)));",
        text,
    )
    parts, begin = [], 0
    while (found := _ASM.search(text, begin)) is not None:
        end = _closing(text, found.end())
        parts += [text[begin : found.start()], _called(text[found.end() : end])]
        begin = end + 1
    return "".join([*parts, text[begin:]])


@dataclass(frozen=True)
class _Operand:
    constraint: str
    value: str

    @property
    def text(self) -> str:
        letter = self.constraint.lstrip("=+")
        return self.value if letter == "n" else f"ptx::operand<'{letter}'>({self.value})"


def _called(statement: str) -> str:
    """The inside of an asm statement as one expression: its instructions in order."""
    template, *sections = _split(statement, ":")
    code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).replace("\\n", "\n")
    operands = [_operand(text) for section in sections[:2] for text in _split(section, ",") if text.strip()]
    calls = [_instruction(line.strip(), operands) for line in code.split(";") if line.strip()]
    return f"({', '.join(calls)})"


def _instruction(line: str, operands: list[_Operand]) -> str:
    name, _, rest = line.partition(" ")
    arguments = []
    for word in (each.strip() for each in re.sub(r"[{}\[\]]", "", rest).split(",")):
        if not word:
            continue
        if (reference := _REFERENCE.fullmatch(word)) is not None:
            arguments.append(operands[int(reference[1])].text)
        elif re.fullmatch(r"\d+", word):
            arguments.append(word)
        else:
            raise Untranslated(f"{word!r} in {line!r}")
    return f"ptx::{re.sub(r'[.:]', '_', name)}({', '.join(arguments)})"


def _operand(text: str) -> _Operand:
    found = _OPERAND.match(text)
    if found is None:
        raise Untranslated(f"operand {text!r}")
    return _Operand(found["constraint"], text[found.end() : _closing(text, found.end())])


def _split(text: str, separator: str) -> list[str]:
    """At the separators that are in no string and no bracket."""
    parts, depth, quoted, begin = [], 0, False, 0
    for n, letter in enumerate(text):
        if letter == '"' and text[n - 1 : n] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == separator and not depth:
            parts.append(text[begin:n])
            begin = n + 1
    return [*parts, text[begin:]]


def _closing(text: str, begin: int) -> int:
    """Where the parenthesis closes that was opened before `begin`."""
    depth, quoted = 1, False
    for n in range(begin, len(text)):
        letter = text[n]
        if letter == '"' and text[n - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (letter == "(") - (letter == ")")
            if not depth:
                return n
    raise Untranslated(text[begin : begin + 60])
