"""A waveform of the RTL as text: which unit is busy when.

Verilator writes VCD, the format of every waveform viewer; this reads the few signals that tell how a program runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tilewright.errors import RtlError

# What is shown, by the signal's name in the RTL.
UNITS = {
    "loader.busy": "load",
    "executer.preloading": "preload",
    "executer.computing": "compute",
    "storer.busy": "store",
}
_TIME_OF_CYCLE = 10  # as the harness counts


def changes(path: Path, wanted: Mapping[str, str] = UNITS) -> tuple[dict[str, list[tuple[int, int]]], int]:
    """The values of each wanted signal, each with its first cycle; and the last cycle."""
    scopes: list[str] = []
    codes: dict[str, list[str]] = {}
    found: dict[str, list[tuple[int, int]]] = {shown: [(0, 0)] for shown in wanted.values()}
    time = 0
    with path.open() as file:
        for line in file:
            words = line.split()
            if not words:
                continue
            if words[0] == "$scope":
                scopes.append(words[2])
            elif words[0] == "$upscope":
                scopes.pop()
            elif words[0] == "$var":
                name = ".".join([*scopes[-1:], words[4]])
                if name in wanted and wanted[name] not in codes.get(words[3], []):
                    codes.setdefault(words[3], []).append(wanted[name])
            elif words[0][0] == "#":
                time = int(words[0][1:])
            elif words[0][0] in "01" and (code := words[0][1:]) in codes:
                for shown in codes[code]:
                    found[shown].append((time // _TIME_OF_CYCLE, int(words[0][0])))
    missing = [shown for shown in wanted.values() if not any(shown in each for each in codes.values())]
    if missing:
        raise RtlError(f"the waveform in {path.name} has no signal for {', '.join(missing)}")
    return found, time // _TIME_OF_CYCLE


def drawn(path: Path, columns: int = 96, cycles: range | None = None) -> str:
    """One line for each unit, one character for several cycles: `#` busy in all of them, `+` in some, `.` in none.
    `cycles`: those to draw; None: all."""
    found, last = changes(path)
    shown_cycles = range(last + 1) if cycles is None else range(last + 1)[cycles.start : cycles.stop]
    if not shown_cycles:
        raise RtlError(
            f"the waveform in {path.name} has {last + 1:,} cycles, and none of {cycles} is among them"
        )
    each = -(-len(shown_cycles) // columns)
    lines = []
    for shown, values in found.items():
        busy = [0] * (last + 1)
        for (start, value), (end, _) in zip(values, [*values[1:], (last + 1, 0)], strict=True):
            for cycle in range(start, end):
                busy[cycle] = value
        drawn_part = busy[shown_cycles.start : shown_cycles.stop]
        marks = []
        for first in range(0, len(drawn_part), each):
            part = drawn_part[first : first + each]
            marks.append("#" if all(part) else "+" if any(part) else ".")
        lines.append(f"{shown:8}{''.join(marks)}  {sum(drawn_part)}")
    which = (
        f"{last} cycles" if cycles is None else f"cycles {shown_cycles[0]} to {shown_cycles[-1]} of {last}"
    )
    return "\n".join([*lines, f"{'':8}{which}, {each} a character; at the end: cycles that the unit is busy"])
