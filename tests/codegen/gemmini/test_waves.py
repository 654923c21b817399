"""Waveforms as text, from a file as Verilator writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.codegen.gemmini.waves import changes, drawn
from tilewright.errors import RtlError

HEAD = """$timescale 1ps $end
 $scope module TOP $end
  $scope module gemmini $end
   $scope module loader $end
    $var wire  1 a busy $end
   $upscope $end
   $scope module executer $end
    $var wire  1 b preloading $end
    $var wire  1 c computing $end
    $var wire 32 d a_row [31:0] $end
   $upscope $end
   $scope module storer $end
    $var wire  1 e busy $end
   $upscope $end
  $upscope $end
 $upscope $end
$enddefinitions $end
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_units_are_busy_when_their_signals_are(tmp_path: Path) -> None:
    body = "#0\n0a\n0b\n0c\n0e\nb1010 d\n#10\n1a\n#40\n0a\n1c\n#60\n0c\n1e\n#80\n0e\n"
    path = written(tmp_path / "w.vcd", HEAD + body)
    found, last = changes(path)
    assert last == 8 and found["load"] == [(0, 0), (0, 0), (1, 1), (4, 0)]
    assert drawn(path).splitlines()[:4] == [
        "load    .###.....  3",
        "preload .........  0",
        "compute ....##...  2",
        "store   ......##.  2",
    ]


def test_a_waveform_of_something_else(tmp_path: Path) -> None:
    path = written(tmp_path / "w.vcd", HEAD.replace("computing", "idle") + "#0\n")
    with pytest.raises(RtlError, match="no signal for compute"):
        changes(path)


def test_several_cycles_in_a_character(tmp_path: Path) -> None:
    body = "#0\n0a\n0b\n0c\n0e\n#10\n1a\n#60\n0a\n#70\n0e\n"
    lines = drawn(written(tmp_path / "w.vcd", HEAD + body), columns=4).splitlines()
    assert lines[0] == "load    +##.  5" and "2 a character" in lines[-1]


def test_some_cycles_of_a_long_program(tmp_path: Path) -> None:
    body = "#0\n0a\n0b\n0c\n0e\n#10\n1a\n#60\n0a\n1e\n#90\n0e\n#200\n0b\n"
    path = written(tmp_path / "w.vcd", HEAD + body)
    lines = drawn(path, cycles=range(4, 8)).splitlines()
    assert lines[0] == "load    ##..  2" and lines[3] == "store   ..##  2"
    assert "cycles 4 to 7 of 20" in lines[-1]
    with pytest.raises(RtlError, match="has 21 cycles, and none of range"):
        drawn(path, cycles=range(30, 40))
