"""External data: read where it is sound, refused where its location or its size is not, each in its own words."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import tilewright
from tests.frontend.onnx.checking import floats, model_of
from tilewright.errors import ExternalDataError, ModelSizeError
from tilewright.frontend.onnx import import_onnx

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


def write(folder: Path, location: str = "weights.bin", **entries: object) -> Path:
    """A model in `folder` whose weight is said to be at `location`."""
    model = model_of("y = MatMul (x, w)", {"x": floats(2, 3)})
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=WEIGHT.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    model.graph.initializer.append(tensor)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def refused(path: Path, words: str) -> None:
    with pytest.raises(ExternalDataError, match=words):
        import_onnx(path)


def test_data_beside_the_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"head" * 2 + WEIGHT.tobytes() + b"tail")
    fast = tilewright.compile(write(tmp_path, offset=8, length=WEIGHT.nbytes))
    x = floats(2, 3)
    np.testing.assert_allclose(fast(x), x @ WEIGHT, rtol=1e-5, atol=1e-5)


def test_data_in_a_folder_beside_the_model(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "weights.bin").write_bytes(WEIGHT.tobytes())
    import_onnx(write(tmp_path, "data/weights.bin"))


def test_onnx_writes_what_we_read(tmp_path: Path) -> None:
    model = model_of("y = MatMul (x, w)", {"x": floats(2, 3)})
    model.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "w"))
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    import_onnx(tmp_path / "m.onnx")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A secret outside the model's folder."""
    secret = tmp_path / "secret.bin"
    secret.write_bytes(WEIGHT.tobytes())
    (tmp_path / "model").mkdir()
    return secret


def test_paths_out_of_the_folder(outside: Path) -> None:
    folder = outside.parent / "model"
    refused(write(folder, "../secret.bin"), "outside the model's folder")
    refused(write(folder, "a/../../secret.bin"), "outside the model's folder")
    refused(write(folder, "..\\secret.bin"), "outside the model's folder")
    refused(write(folder, str(outside)), "an absolute path")
    refused(write(folder, "C:\\secret.bin"), "an absolute path")


LINKS: list[tuple[str, Callable[[Path, Path], None], str, str]] = [
    ("symbolic", lambda secret, folder: (folder / "w.bin").symlink_to(secret), "w.bin", "symbolic link"),
    (
        "of a folder",
        lambda secret, folder: (folder / "d").symlink_to(secret.parent),
        "d/secret.bin",
        "symbolic link",
    ),
    ("hard", lambda secret, folder: os.link(secret, folder / "w.bin"), "w.bin", "hard links"),
]


@pytest.mark.parametrize(
    ("make", "location", "words"), [link[1:] for link in LINKS], ids=[link[0] for link in LINKS]
)
def test_links(outside: Path, make: Callable[[Path, Path], None], location: str, words: str) -> None:
    folder = outside.parent / "model"
    make(outside, folder)
    refused(write(folder, location), words)


def test_what_is_no_plain_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    refused(write(tmp_path, "folder"), "not a plain file")
    os.mkfifo(tmp_path / "pipe")
    refused(write(tmp_path, "pipe"), "not a plain file")
    refused(write(tmp_path, "missing.bin"), "does not exist")
    refused(write(tmp_path, ""), "names no file")
    refused(write(tmp_path, "."), "names no file|not a plain file")


def test_sizes_and_offsets(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    refused(write(tmp_path, offset=4), "bytes 4 to 52 of 'weights.bin', which has 48")
    refused(write(tmp_path, offset=10**17), "which has 48")
    refused(write(tmp_path, offset=-4), "the offset '-4'")
    refused(write(tmp_path, offset="0x10"), "the offset '0x10'")
    refused(write(tmp_path, offset="9" * 30), "the offset")
    refused(write(tmp_path, length=16), "has 16 bytes, and its shape and type need 48")
    refused(write(tmp_path, length=10**15), "its shape and type need 48")


def test_an_oversized_tensor_is_refused_before_its_file_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path, "missing.bin")
    with pytest.raises(ModelSizeError, match="more than the limit"):
        import_onnx(path, max_bytes=40)


def test_a_model_in_memory_has_no_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
    model = onnx.load(write(tmp_path), load_external_data=False)
    with pytest.raises(ExternalDataError, match="without a place on disk"):
        import_onnx(model)
