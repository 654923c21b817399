"""The command that compares trained models with ONNX Runtime, on models of a few numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.outside.trained_models import (
    Input,
    Outcome,
    batch_names,
    choices,
    deviation,
    main,
    nudged,
    one_ulp,
    run_model,
    values_of,
)

DENSE = """
    <ir_version: 8, opset_import: ["" : 17]>
    graph (float[N, M] x) => (float[N, 3] y) <float[5, 3] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}>
    { y = MatMul (x, w) }
"""
UNIQUE = """
    <ir_version: 8, opset_import: ["" : 17]>
    graph (float[N] x) => (int64[1, M] y) { y = NonZero (x) }
"""


def test_open_dimensions_are_found_by_trying(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "dense.onnx"
    onnx.save(onnx.parser.parse_model(DENSE), path)
    done = [
        o for o in run_model(path, (1, 4), "strict", 1, 1e-5) if o.status not in ("reference", "compiling")
    ]
    assert [(outcome.batch, outcome.status) for outcome in done] == [(1, "right"), (4, "right")]
    assert all(outcome.compile_s > 0 and outcome.call_ms > 0 for outcome in done)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    onnx.save(onnx.parser.parse_model(UNIQUE), tmp_path / "unique.onnx")
    assert main([str(tmp_path), "--batch", "2", "--json", str(tmp_path / "out.json")]) == 0
    table = capsys.readouterr().out
    assert "refused" in table and "the shape of its result depends on data" in table
    assert "1 models, 1 runs: 0 right, 1 refused" in table
    assert '"status": "refused"' in (tmp_path / "out.json").read_text()


def test_results_of_several_runs_are_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        Outcome("b.onnx", 2, "right", error=2e-6, own=1e-6, call_ms=1.0, theirs_ms=4.0),
        Outcome("b.onnx", 1, "right", error=1e-6, own=3e-6, call_ms=1.0, theirs_ms=1.0),
        Outcome("a.onnx", 1, "refused", "Loop | If"),
    ]
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file, some in zip(files, (runs[:2], runs[2:]), strict=True):
        file.write_text(json.dumps([asdict(run) for run in some]))
    assert main(["--table", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| a | 1: refused |  |  | Loop \\| If |"
    assert lines[3] == "| b | 1: right, 2: right | 2.0e-06 | 3.0e-06 |  |"
    assert lines[5:] == [
        "2 models, 3 runs: 2 right, 1 refused, 0 skipped, 0 wrong, 0 error, 0 crash",
        "ONNX Runtime's time over ours, geometric mean: 2.00",
    ]
    files[0].write_text(json.dumps([asdict(Outcome("c.onnx", 1, "wrong", error=1.0))]))
    assert main(["--table", str(files[0])]) == 1
    with pytest.raises(SystemExit):
        main([])


def test_inputs() -> None:
    inputs = [
        Input("x", np.dtype(np.float32), ("N", "T")),
        Input("lengths", np.dtype(np.int64), ("N",)),
        Input("sr", np.dtype(np.int64), ()),
    ]
    assert batch_names(inputs) == {"N"}
    sizes = list(choices(inputs, 2, [7]))
    assert sizes[0] == {"T": 16} and {"T": 7} in sizes
    made = values_of(inputs, {"T": 7}, 2, 0, 9)
    assert made["x"].shape == (2, 7) and made["lengths"].tolist() == [7, 7] and made["sr"] == 16000


def test_deviation() -> None:
    right = np.array([1.0, -4.0, np.nan], np.float32)
    assert deviation([right], [right]) == (0.0, "")
    assert deviation([right + np.float32(0.5)], [right]) == (0.125, "")
    assert deviation([np.nan_to_num(right)], [right])[0] == np.inf
    assert "float64" in deviation([right.astype(np.float64)], [right])[1]


def test_sixteen_bits_may_differ_in_the_last_slot() -> None:
    right = np.array([0.87, 0.1], np.float16)
    beside = np.nextafter(right, np.float16(2), dtype=np.float16)
    assert 1e-4 < deviation([beside], [right])[0] <= one_ulp([right]) < 1e-3
    assert one_ulp([right.astype(np.float32), np.array([1, 2])]) == 0


def test_nudged_inputs_stay_arrays() -> None:
    """ONNX Runtime takes no NumPy scalar."""
    made = nudged({"threshold": np.array(0.5, np.float32), "x": np.ones((2, 3), np.float32)})
    assert all(isinstance(value, np.ndarray) and value.dtype == np.float32 for value in made.values())
    assert made["threshold"].shape == () and made["threshold"] != 0.5
