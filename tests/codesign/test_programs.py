"""From mappings to programs: tilings that fit and run, and a design that models are compiled for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewright
from tilewright.codegen.gemmini.cycles import simulate
from tilewright.codegen.gemmini.layers import layer_program
from tilewright.codegen.gemmini.rtl import Rtl, verilator
from tilewright.codesign.exact import best_mapping
from tilewright.codesign.mapping import Mappings
from tilewright.codesign.network import Design, Evaluator, Network
from tilewright.codesign.problem import Layer as Nest
from tilewright.codesign.problem import layers_of
from tilewright.codesign.programs import layer_of, nearest_tiling, program_of, programs_of, total_cycles
from tilewright.codesign.report import parameters
from tilewright.errors import DesignFileError
from tilewright.frontend import import_model
from tilewright.hw.gemmini import KIB, GemminiMachine
from tilewright.loops.gemmini.layer import Layer, matmul
from tilewright.runtime.gemmini import Functional
from tilewright.testing.gemmini import layer_memory, layer_results
from tilewright.testing.quantised import quantised

MACHINE = GemminiMachine(dim=6, scratchpad=8 * KIB, accumulator=3 * KIB)
NESTS = [
    Nest.matmul(40, 50, 30, count=2),
    Nest.convolution((12, 12), 20, 16, (3, 3), padding=((1, 1), (1, 1)), stride=(2, 2)),
    Nest.convolution((9, 9), 30, 20, (1, 1), batch=2),
]


def run(layer: Layer, tiling: object, machine: GemminiMachine) -> None:
    dram, at, size = layer_memory(layer, np.random.default_rng(0))
    expected = layer_results(layer, dram, at)
    Functional(machine, dram).run(layer_program(layer, tiling, machine, at))  # type: ignore[arg-type]
    np.testing.assert_array_equal(dram[at.results : at.results + size], expected)


@pytest.mark.parametrize("nest", NESTS, ids=str)
@pytest.mark.parametrize("dim", [6, 16])
def test_the_best_mapping_becomes_a_program(nest: Nest, dim: int) -> None:
    machine = GemminiMachine(dim=dim, scratchpad=8 * KIB, accumulator=3 * KIB)
    best = best_mapping(nest, machine)
    layer = layer_of(nest)
    assert layer is not None and layer.macs * nest.extents[6] == nest.macs
    tiling = nearest_tiling(layer, best.mapping, machine)
    assert tiling is not None
    run(layer, tiling, machine)
    found = program_of(nest, best.mapping, machine)
    assert found is not None and found.cycles is not None
    # The model is a roofline, from which a program cannot be far away nor much below.
    assert 0.9 * best.cycles < found.cycles < 6 * best.cycles


def test_the_tiling_is_the_mappings_where_that_fits() -> None:
    mapping = Mappings.parse(["L3[WIO] P4 K2 - L2[WI] K4X - L1[O] C2 C4X - L0[W] P8"])
    machine = GemminiMachine(dim=4, scratchpad=4 * KIB, accumulator=4 * KIB)
    tiling = nearest_tiling(matmul(32, 8, 8), mapping, machine)
    assert tiling is not None
    assert (tiling.rows, tiling.cols, tiling.in_blocks, tiling.out_blocks) == (1, 8, 2, 1)
    whole = Mappings.parse(["L3[WIO] K2 - L2[WI] K4X - L1[O] C2 C4X - L0[W] P32"])
    small = GemminiMachine(dim=4, scratchpad=256, accumulator=256)
    tiling = nearest_tiling(matmul(32, 8, 8), whole, small)
    assert tiling is not None and tiling.cols < 32
    run(matmul(32, 8, 8), tiling, small)


def test_what_the_accelerator_has_no_layer_for() -> None:
    dilated = Nest.convolution((9, 9), 4, 4, (3, 3), dilation=(2, 2))
    oblong = Nest.convolution((9, 9), 4, 4, (3, 3), stride=(1, 2))
    assert layer_of(dilated) is None and layer_of(oblong) is None
    network = Network.of([dilated, NESTS[0]])
    design = Evaluator(network, MACHINE).mapped(MACHINE)
    programs = programs_of(design)
    assert programs[0] is None and programs[1] is not None and total_cycles(design, programs) is None


# -- a model on a design ----------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(6, 10, 3, padding=1)
        self.second = torch.nn.Conv2d(10, 12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


@pytest.fixture(scope="module")
def explored() -> tuple[torch.nn.Module, torch.Tensor, Design]:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(1, 6, 10, 10)
    network = Network.of(layers_of(import_model(net, (x,)).graph))
    return net, x, Evaluator(network, MACHINE).mapped(MACHINE)


def test_a_model_runs_on_its_design(
    tmp_path: Path, explored: tuple[torch.nn.Module, torch.Tensor, Design]
) -> None:
    net, x, design = explored
    programs = programs_of(design)
    data = parameters(design, programs)
    assert data["simulated_cycles"] == total_cycles(design, programs)
    # Another tiling than the default one shows that the file decides.
    for layer in data["layers"]:
        layer["program"]["tiling"].update(rows=1, cols=3)
    file = tmp_path / "codesign.json"
    file.write_text(json.dumps(data))
    model = quantised(net, [(x,)])
    found = tilewright.compile(model, target=f"gemmini:{file}")
    assert torch.equal(found(x), tilewright.compile(model, target="cpu")(x))
    headers = [kernel.header for kernel in found.executor.accelerated.values()]
    assert len(headers) == 2 and all(header.dim == 6 for header in headers)
    assert any("tiles 1x3" in header.decisions for header in headers)


def _with_tiling(**changed: object) -> str:
    tiling = {"rows": 1, "cols": 1, "in_blocks": 1, "out_blocks": 1, "taps": None, "inner": "pixels"}
    tiling |= {"buffers": [2, 2, 2], **changed}
    return json.dumps({"machine": {}, "layers": [{"program": {"shape": "", "tiling": tiling}}]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "holds no design"),
        ("[]", "holds no design"),
        ('{"machine": {"dim": 4}}', "holds no design"),
        ('{"machine": {"sides": 4}, "layers": []}', "holds no design"),
        ('{"machine": {}, "layers": [{"program": {"shape": "", "tiling": {}}}]}', "holds no design"),
        *(
            (_with_tiling(**{name: value}), said)
            for name, value, said in [
                ("taps", [], "two numbers"),
                ("taps", [1, 1, 1], "two numbers"),
                ("taps", [0, 1], "positive integers"),
                ("buffers", [3, 2, 2], "one or two buffers"),
                ("inner", "rows", "'pixels' or 'channels'"),
            ]
        ),
    ],
)
def test_a_file_without_a_design(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "design.json"
    file.write_text(text)
    with pytest.raises(DesignFileError, match=said):
        tilewright.compile(Net().eval(), torch.zeros(1, 6, 10, 10), target=f"gemmini:{file}")
    with pytest.raises(DesignFileError, match="cannot read the design"):
        tilewright.compile(Net().eval(), torch.zeros(1, 6, 10, 10), target=f"gemmini:{tmp_path}/no.json")


@pytest.mark.skipif(verilator() is None, reason="Verilator is not installed")
@pytest.mark.slow  # Verilator builds for half a minute
def test_the_rtl_runs_a_design(
    tmp_path: Path, explored: tuple[torch.nn.Module, torch.Tensor, Design]
) -> None:
    _, _, design = explored
    rtl = Rtl(design.machine, tmp_path)
    for program in programs_of(design):
        assert program is not None
        dram, at, size = layer_memory(program.layer, np.random.default_rng(0))
        words = layer_program(program.layer, program.tiling, design.machine, at)
        expected = layer_results(program.layer, dram, at)
        result = rtl.run(words, dram)
        np.testing.assert_array_equal(result.dram[at.results : at.results + size], expected)
        assert result.cycles == simulate(words, design.machine).total == program.cycles
