"""`benchmarks/tile_*.py`: the cases are launches that compute what PyTorch does, and the tools run."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.tile.kernels import KERNELS
from tilewright import knobs

sys.path.append(
    str(Path(__file__).parent.parent.parent / "benchmarks")
)  # where the tools import each other from

tile_cases, tile_gpu, tile_kernels, tile_replay = map(
    import_module, ("tile_cases", "tile_gpu", "tile_kernels", "tile_replay")
)

_SMALL = {"softmax": {"rows": 6, "columns": 100}, "cross_entropy": {"rows": 3, "classes": 700},
          "add_row": {"rows": 5, "columns": 33}, "layer_norm": {"rows": 4, "columns": 70}}  # fmt: skip


def test_every_space_for_gpus_has_48_to_96_configs() -> None:
    assert set(tile_cases.SPACES) == set(KERNELS) == set(tile_cases.CPU)
    for kernel, space in tile_cases.SPACES.items():
        assert 48 <= sum(1 for _ in tile_cases.configs(space)) <= 96, kernel


@pytest.mark.parametrize("kernel", _SMALL)
def test_a_case_computes_what_pytorch_does(kernel: str) -> None:
    case = tile_cases.TileCase(kernel, tuple(_SMALL[kernel].items()))
    tensors = case.tensors("cpu", torch.float32)
    grid, arguments, constants = case.launch(tensors, tile_cases.CPU[kernel])
    KERNELS[kernel][grid](*arguments, **constants)
    wanted = case.reference()(*(value for name, value in tensors.items() if name != "out"))
    torch.testing.assert_close(tensors["out"], wanted.reshape(tensors["out"].shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tool", [tile_kernels, tile_gpu])
def test_the_tools_list_their_cases(
    tool: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", "--shapes"])
    assert tool.main() == 0  # type: ignore[attr-defined]
    shown = capsys.readouterr().out
    assert "softmax 4096 x 1000" in shown and "configs:" in shown


def test_times_are_collected_and_replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(knobs.variable("threads"), "1")
    monkeypatch.setattr(tile_replay, "ROUNDS", 1)
    monkeypatch.setattr(tile_replay, "SEEDS", 1)
    times = str(tmp_path / "times.json")
    assert tile_replay.main(["--collect", times, "--kernels", "softmax"]) == 0
    assert tile_replay.main(["--from", times]) == 0
    assert "softmax: 3 configs" in (shown := capsys.readouterr().out)
    assert "predicted" in shown and "guided" in shown
