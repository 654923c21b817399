"""The report's page, the file of parameters, and the command that writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewright.cli.app import app
from tilewright.cli.options import OutputFileError
from tilewright.codesign.mapping import Hardware, Mappings, check
from tilewright.codesign.network import Network
from tilewright.codesign.problem import LOOPS, Layer, Nests
from tilewright.codesign.programs import programs_of
from tilewright.codesign.report import parameters, reasons, render
from tilewright.codesign.search import Budget, explore
from tilewright.errors import HardwareRangeError
from tilewright.hw.gemmini import GemminiMachine

NETWORK = Network.of(
    [
        Layer.matmul(32, 48, 64, count=2, name="<b>linear</b>"),
        Layer.convolution((12, 12), 8, 16, (3, 3), name="conv"),
    ]
)


def test_the_page_shows_every_layer_escaped_and_fetches_nothing() -> None:
    found = explore(NETWORK, Budget(evaluations=300), steps=10)
    page = render(found, "Co-design of <models>", programs_of(found.best))
    assert "&lt;models&gt;" in page and "&lt;b&gt;linear" in page and "<b>linear" not in page
    assert "http" not in page.replace("http-equiv", "") and "default-src 'none'" in page
    for index in range(len(NETWORK)):
        assert found.best.mappings.text(index) in page
    assert page.count("<svg") == 1 + len(NETWORK)
    why = reasons(found.best, found.designs)
    assert any("decides the cycles" in reason for reason in why) and any(
        "scratchpad has" in reason for reason in why
    )


def test_the_parameters_make_the_machine_and_its_mappings_again() -> None:
    design = explore(NETWORK, Budget(evaluations=200), steps=5).best
    data = json.loads(json.dumps(parameters(design, programs_of(design))))
    assert GemminiMachine(**data["machine"]) == design.machine
    assert data["module"]["SP_ROWS"] == design.machine.scratchpad_rows
    for layer in data["layers"]:
        extents = tuple(layer["extents"][loop] for loop in LOOPS)
        nests = Nests.of([Layer(extents, tuple(layer["stride"]), tuple(layer["dilation"]))])
        check(nests, Mappings.parse([layer["mapping"]]), Hardware.of([design.machine]))


def test_one_command_from_a_model_to_parameters(tmp_path: Path) -> None:
    page, file = tmp_path / "page.html", tmp_path / "parameters.json"
    arguments = ["codesign", "resnet18", "--small", "--evaluations", "150", "--budget", "5s", "--area", "0.8"]
    done = CliRunner().invoke(app, [*arguments, "-o", str(page), "--parameters", str(file)])
    assert done.exit_code == 0, done.output
    assert "times better than the default Gemmini" in " ".join(done.output.split())
    data = json.loads(file.read_text())
    assert data["area_mm2"] <= 0.8 and len(data["layers"]) == 12 and "<svg" in page.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--area", "0.0001"], "too small"),
        (["--dim", "0"], "dim must be between"),
        (["--dim", "8", "--correct"], "dim must be at least 16"),
        (["--dram", "0"], "dram_bytes_per_cycle must be between"),
        (["--dram", "6"], "dram_bytes_per_cycle must be a multiple of 4 for the RTL's bus, got 6"),
    ],
)
def test_hardware_out_of_range_is_refused_before_the_search(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["codesign", "resnet18", "--small", *options])
    assert isinstance(done.exception, HardwareRangeError) and message in str(done.exception)


def test_a_place_that_cannot_be_written_is_refused_before_the_search(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["codesign", "resnet18", "-o", str(tmp_path / "no" / "page.html")])
    assert isinstance(done.exception, OutputFileError)
