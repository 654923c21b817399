"""CUDA C++ -> C++ for the emulator: asm statements become calls, shared memory a place in the emulated block."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ASM = re.compile(r"\basm\b\s*(?:volatile\b\s*)?\(")
_OPERAND = re.compile(r'\s*"(?P<constraint>[^"]*)"\s*\(')
_REFERENCE = re.compile(r"%(\d+)")
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?unsigned char shared\[\];")
_WGMMA = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k16\.f32\.(?P<type>\w+)\.\w+ \{(?P<sums>[^}]*)\},"
    r" (?P<left>\{[^}]*\}|%\d+), (?P<right>%\d+), p, 1, 1, (?P<across>[01, ]+)"
)
_PREDICATE = re.compile(r"setp\.ne\.b32 p, (%\d+), 0")
# An instruction whose result is a predicate, which becomes a number.
_TESTED = re.compile(
    r"(?P<name>mbarrier\.try_wait\S+) p, (?P<rest>[^;]*);\s*selp\.b32 (?P<into>%\d+), 1, 0, p"
)
_RANK = re.compile(r"mov\.u32 (%\d+), %%cluster_ctarank;")
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
    if (multiplied := _WGMMA.search(code)) is not None:
        return _multiplied(multiplied, code, operands)
    if (tested := _TESTED.search(code)) is not None:
        line = "{name} {into}, {rest}".format(**tested.groupdict())
        return f"({_instruction(line, operands)})"
    if (ranked := _RANK.search(code)) is not None:
        return f"(ptx::cluster_rank({operands[int(ranked[1][1:])].text}))"
    calls = [_instruction(line.strip(), operands) for line in code.split(";") if line.strip()]
    return f"({', '.join(calls)})"


def _multiplied(found: re.Match[str], code: str, operands: list[_Operand]) -> str:
    """A multiplication of a warpgroup: its sums are passed as one array, whose elements they are in order."""
    predicate = _PREDICATE.search(code)
    count = int(found["columns"]) // 2
    sums = [operands[int(each)].value for each in _REFERENCE.findall(found["sums"])]
    name = sums[0].removesuffix("[0]")
    if predicate is None or sums != [f"{name}[{n}]" for n in range(count)]:
        raise Untranslated(code[:80])
    left = [operands[int(each)].text for each in _REFERENCE.findall(found["left"])]
    right = operands[int(found["right"][1:])].text
    adds = operands[int(predicate[1][1:])].text
    held = len(left) == 4
    across = [each.strip() for each in found["across"].split(",")]
    flags = ", ".join(("true" if held else "false", *(("0", *across) if held else across)))
    given = f"{{{', '.join(left)}}}, 0" if held else f"{{}}, {left[0]}"
    kind = found["type"].upper()
    return (
        f'(ptx::wgmma<{kind}, {count * 2}, {flags}>("{found[0][:40]}", {name},'
        f" ptx::Operands{{{given}, {right}, {adds}}}))"
    )


def _instruction(line: str, operands: list[_Operand]) -> str:
    name, _, rest = line.partition(" ")
    arguments = []
    for word in (each.strip() for each in re.sub(r"[{}\[\]]", "", rest).split(",")):
        if word in ("", "_"):
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
