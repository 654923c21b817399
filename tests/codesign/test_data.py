"""Files of measured mappings."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from tilewright.codesign.data import read_points
from tilewright.errors import MappingError, MeasuredDataError

HEAD = (
    "target.cycle,mapping.mapping,arch.meshX,arch.mem1_entries,arch.mem2_entries,prob.C,prob.Hdilation,prob.Hstride,"
    "prob.K,prob.N,prob.P,prob.Q,prob.R,prob.S,prob.Wdilation,prob.Wstride"
)
ROW = (
    "4096,L3[WIO] K8 - L2[WI] N1 K16X - L1[O] C4 P8 C16X - L0[W] P16,16,256,110592,64,1,2,128,1,128,1,1,1,1,1"
)


def written(folder: Path, *lines: str) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join([*lines, ""]))
    return path


def test_rows_are_layers_mappings_and_hardware(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, ROW, ROW)
    points = read_points(path, ["cycle"])
    assert len(points) == 2 and points.targets["cycle"].tolist() == [4096, 4096]
    assert points.layers()[0].extents == (1, 1, 128, 1, 64, 128, 1) and points.layers()[0].stride == (1, 2)
    assert [column[0] for column in points.hardware] == [16, 110592, 256 * 16]
    assert (points.mappings.padded() == points.nests.extents).all()
    assert len(points.take(np.array([True, False]))) == 1
    with tarfile.open(tmp_path / "rows.csv.tar.gz", "w:gz") as archive:
        archive.add(path, "rows.csv")
    packed = read_points(tmp_path / "rows.csv.tar.gz", ["cycle"])
    assert (packed.mappings.factors == points.mappings.factors).all()


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD.replace("prob.Q", "prob.X").replace("arch.meshX", "pe"), ROW)
    with pytest.raises(MeasuredDataError, match=r"has no column prob\.Q, arch\.meshX, target\.energy"):
        read_points(path, ["cycle", "energy"])


def test_wrong_rows_are_named_by_their_line(tmp_path: Path) -> None:
    with pytest.raises(MeasuredDataError, match="line 3: a number is missing"):
        read_points(written(tmp_path, HEAD, ROW, ROW.replace("4096", "soon")), ["cycle"])
    with pytest.raises(MeasuredDataError, match="line 3: a number is missing"):
        read_points(written(tmp_path, HEAD, ROW, ROW.rpartition(",")[0]), ["cycle"])
    with pytest.raises(MeasuredDataError, match=r"line 2: sizes .* at least 1"):
        read_points(written(tmp_path, HEAD, ROW.replace("110592", "0")), ["cycle"])
    with pytest.raises(MappingError, match="is not a mapping"):
        read_points(written(tmp_path, HEAD, ROW.replace("L3[WIO]", "L9")), ["cycle"])


def test_a_file_without_rows_or_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(MeasuredDataError, match="has no rows"):
        read_points(written(tmp_path, HEAD), ["cycle"])
    with pytest.raises(MeasuredDataError, match="cannot be read"):
        read_points(tmp_path / "absent.csv", ["cycle"])
    (tmp_path / "broken.tar.gz").write_bytes(b"nothing")
    with pytest.raises(MeasuredDataError, match="cannot be read"):
        read_points(tmp_path / "broken.tar.gz", ["cycle"])
