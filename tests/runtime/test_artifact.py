"""Saved models: what was written comes back, and whatever is damaged, foreign or too new is refused with a reason."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from tests.runtime import toys
from tilewright.errors import ArtifactError, ArtifactMachineError, ArtifactVersionError
from tilewright.runtime import artifact
from tilewright.runtime.artifact import HEADER_SIZE, MAGIC, Manifest, load
from tilewright.runtime.model import CompiledModel

ROOT = Path(__file__).resolve().parents[2]
X = np.random.default_rng(0).standard_normal((16, 32), dtype=np.float32)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.tw"
    toys.chain(5).save(path)
    return path


def resealed(data: bytes, manifest: bytes | None = None) -> bytes:
    """The file with another manifest, and a header that fits: what a buggy writer, not an accident, would produce."""
    fields = list(artifact._HEADER.unpack(data[:HEADER_SIZE]))
    if manifest is not None:
        fields[4], fields[5] = len(data), len(manifest)
        data += manifest
    fields[3] = len(data)
    fields[6] = bytes(32)
    head = artifact._HEADER.pack(*fields)
    fields[6] = hashlib.sha256(head[:40] + data[HEADER_SIZE:]).digest()
    return artifact._HEADER.pack(*fields) + data[HEADER_SIZE:]


def manifest_of(data: bytes) -> dict[str, Any]:
    _, _, _, _, at, size, *_ = artifact._HEADER.unpack(data[:HEADER_SIZE])
    decoded: dict[str, Any] = json.loads(data[at : at + size])
    return decoded


# -- round trips -----------------------------------------------------------------------------------------------------


def test_round_trip(saved: Path) -> None:
    original, loaded = toys.chain(5), load(saved)
    np.testing.assert_array_equal(loaded(X), original(X))
    assert loaded.plan == original.plan
    assert all(constant.ctypes.data % 64 == 0 for constant in loaded.executor.constants)
    assert load(saved, threads=3).threads == 3


def test_saving_again_gives_the_same_file(saved: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.tw"
    load(saved).save(again)
    assert again.read_bytes() == saved.read_bytes()


def test_constants_of_every_kind(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    toy = toys.Toy()
    outputs = []
    arrays = []
    for index, dtype in enumerate(
        [np.float32, np.float64, ml_dtypes.bfloat16, np.float16, np.int64, np.int8, np.bool_]
    ):
        for shape in [(7,), (64, 3), ()]:
            array = generator.integers(0, 2, shape).astype(dtype)
            arrays.append(array)
            name = "same" if index % 2 else f"weight.{len(arrays)}"
            outputs.append(toy.apply("copy", toy.constant(name, array)))
    path = tmp_path / "constants.tw"
    toy.model(outputs).save(path)
    loaded = load(path)
    for result, array in zip(loaded(), arrays, strict=True):
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(result, array)


def test_large_constants_are_views_of_one_read(tmp_path: Path) -> None:
    toy = toys.Toy()
    big = np.random.default_rng(0).standard_normal((1024, 1024), dtype=np.float32)
    toy.input("x", (1,))
    path = tmp_path / "big.tw"
    toy.model(
        [
            toy.apply("copy", toy.constant("small", np.ones(3, np.float32))),
            toy.apply("copy", toy.constant("big", big)),
        ]
    ).save(path)
    loaded = load(path)
    base = loaded.executor.constants[1]
    assert base.base is not None
    assert not base.flags.writeable
    np.testing.assert_array_equal(loaded(np.zeros(1, np.float32))[1], big)


def test_any_zip_tool_can_look_inside(saved: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    with zipfile.ZipFile(saved) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        manifest = msgspec.json.decode(archive.read("manifest.json"), type=Manifest)
        constants = safetensors.load(archive.read("constants.safetensors"))
    assert names[0] == "constants.safetensors"
    assert names[-1] == "manifest.json"
    assert any(name.startswith("objects/") for name in names)
    assert {part.name for part in manifest.parts} == set(names) - {"manifest.json"}
    np.testing.assert_array_equal(constants["c0"], toys.chain_constant(0, 16, 32))
    for part in manifest.parts:
        assert part.offset % 64 == 0


def test_entries_beyond_four_gigabytes_stay_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    stream = io.BytesIO()
    stream.write(bytes(HEADER_SIZE))
    with zipfile.ZipFile(stream, "w") as archive:
        part = artifact._write_part(archive, stream, "a", [bytes(range(200))])
    assert part.offset % 64 == 0
    assert stream.getvalue()[part.offset :][:200] == bytes(range(200))
    assert zipfile.ZipFile(stream).read("a") == bytes(range(200))


def test_writing_is_atomic(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, "_safetensors", fail)
    with pytest.raises(ArtifactError, match="No space left"):
        toys.chain(3).save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_a_saved_file_can_be_read_by_others(saved: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o666 & ~mask


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot write"):
        toys.chain(1).save(tmp_path / "none" / "model.tw")


# -- damage ----------------------------------------------------------------------------------------------------------


def check_refused(path: Path, data: bytes) -> ArtifactError:
    path.write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        load(path)
    return caught.value


def test_two_hundred_corruptions(saved: Path) -> None:
    data = saved.read_bytes()
    chance = random.Random(7)
    for number in range(200):
        damaged = bytearray(data)
        kind = number % 5
        position = chance.randrange(len(data))
        if kind == 0:  # one bit
            damaged[position] ^= 1 << chance.randrange(8)
        elif kind == 1:  # the end is missing
            del damaged[position:]
        elif kind == 2:  # a block is missing
            del damaged[position : position + chance.randint(1, 100)]
        elif kind == 3:  # a block has other data
            block = chance.randbytes(chance.randint(1, 50))
            if damaged[position : position + len(block)] == block:
                continue
            damaged[position : position + len(block)] = block
        else:  # a block too many
            damaged[position:position] = chance.randbytes(chance.randint(1, 50))
        if bytes(damaged) != data:
            check_refused(saved, bytes(damaged))


def test_every_bit_of_the_header_counts(saved: Path) -> None:
    data = saved.read_bytes()
    for position in range(HEADER_SIZE):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        check_refused(saved, bytes(damaged))


def test_every_short_truncation(saved: Path) -> None:
    data = saved.read_bytes()
    for length in range(HEADER_SIZE + 20):
        check_refused(saved, data[:length])
    check_refused(saved, data[:-1])
    assert "truncated" in str(check_refused(saved, data[: len(data) // 2]))


def test_the_damaged_part_is_named(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    at = manifest_of(bytes(data))["parts"][0]["offset"]
    data[at + 500] ^= 4
    assert "constants.safetensors" in str(check_refused(saved, bytes(data)))


def test_what_is_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "thing"
    assert "is empty" in str(check_refused(path, b""))
    assert "not a Tilewright model" in str(check_refused(path, b"PK\x03\x04" + bytes(200)))
    assert "not a Tilewright model" in str(check_refused(path, b"#"))
    assert "truncated" in str(check_refused(path, MAGIC))
    with pytest.raises(ArtifactError, match="is not a file"):
        load(tmp_path)
    with pytest.raises(ArtifactError, match="does not exist"):
        load(tmp_path / "missing")
    with pytest.raises(ArtifactError, match="is not a file"):
        load("/dev/null")


@pytest.mark.parametrize(
    ("version", "age"), [(artifact.FORMAT_VERSION + 1, "newer"), (4, "older"), (0, "older")]
)
def test_other_versions(saved: Path, version: int, age: str) -> None:
    data = bytearray(saved.read_bytes())
    struct.pack_into("<I", data, 8, version)
    error = check_refused(saved, resealed(bytes(data)))
    assert isinstance(error, ArtifactVersionError)
    assert f"the format {version}, which is {age}" in str(error)


def test_wrong_machine(saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    manifest = manifest_of(data)
    manifest["variants"][0]["plan"]["target"]["features"] = ["avx1024"]
    error = check_refused(tmp_path / "other", resealed(data, json.dumps(manifest).encode()))
    assert isinstance(error, ArtifactMachineError)
    assert "avx1024" in str(error)
    manifest["variants"] = []
    error = check_refused(tmp_path / "other", resealed(data, json.dumps(manifest).encode()))
    assert isinstance(error, ArtifactMachineError)


def test_the_first_variant_that_runs_here_is_taken(saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    manifest = manifest_of(data)
    foreign = json.loads(json.dumps(manifest["variants"][0]))
    foreign["plan"]["target"]["features"] = ["avx1024"]
    manifest["variants"].insert(0, foreign)
    path = tmp_path / "fat.tw"
    path.write_bytes(resealed(data, json.dumps(manifest).encode()))
    np.testing.assert_array_equal(load(path)(X), toys.chain_reference(X))


def edit(manifest: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    node: Any = manifest
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node[name]
    if value is None:
        del node[last]
    elif isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("variants/0/plan/steps/1/arguments/0/offset", 1 << 40),
        ("variants/0/plan/steps/1/arguments/0/offset", -64),
        ("variants/0/plan/steps/1/arguments/0/index", 99),
        ("variants/0/plan/steps/1/arguments/0/space", "moon"),
        ("variants/0/plan/steps/1/kernel", "nothing"),
        ("variants/0/plan/steps/1/extent", "many"),
        ("variants/0/plan/steps/1/extent", -4),
        ("variants/0/plan/inputs/0/shape", [1]),
        ("variants/0/plan/inputs/0/dtype", "f99"),
        ("variants/0/plan/memory/arena_bytes", 64),
        ("variants/0/plan/input_tree", {"kind": "leaf", "index": 0}),
        ("variants/0/plan/input_tree", 3),
        ("variants/0/plan/target", {}),
        ("variants/0/plan/kernels", {}),
        ("variants/0/plan/constants/0/shape", [5]),
        ("variants/0/constants", ["c0"]),
        ("variants/0/constants/0", "unknown"),
        ("variants/0/objects", {}),
        ("parts/0/offset", 1 << 50),
        ("parts/0/bytes", -1),
        ("parts/0/bytes", 3),
        ("parts/0/name", "other"),
        ("parts/1/bytes", 10),
        ("format", None),
    ],
)
def test_a_manifest_is_not_believed(saved: Path, path: str, value: Any) -> None:
    data = saved.read_bytes()
    manifest = manifest_of(data)
    edit(manifest, path, value)
    check_refused(saved, resealed(data, json.dumps(manifest).encode()))


def test_a_manifest_that_is_not_one(saved: Path) -> None:
    data = saved.read_bytes()
    for manifest in (b"{}", b"[]", b"\xff\xfe\x00", b"[" * 100_000):
        check_refused(saved, resealed(data, manifest))


# -- alone -----------------------------------------------------------------------------------------------------------

ALONE = """
import sys

PACKAGES = (
    "te graph frontend rewrites loops tile space codegen measure db cost search tune targets driver hw link".split()
)
FORBIDDEN = {"torch", "onnx", "lightgbm", "transformers", *("tilewright." + package for package in PACKAGES)}

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name in FORBIDDEN or any(name.startswith(one + ".") for one in FORBIDDEN):
            raise ImportError("forbidden: " + name)

sys.meta_path.insert(0, Forbid())
import numpy as np
import tilewright

model = tilewright.load(sys.argv[1])
x = np.load(sys.argv[2])
np.save(sys.argv[3], model(x))
print(model.explain(repeats=2))
model.bench(repeats=2)
assert not FORBIDDEN & set(sys.modules)
"""


def test_it_runs_without_torch_and_without_the_compiler(saved: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(saved), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "step0" in done.stdout and "total" in done.stdout
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), toys.chain_reference(X))


def test_importing_the_room_is_light() -> None:
    code = "import sys, tilewright.runtime; sys.exit('llvmlite' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_public_names() -> None:
    import tilewright.runtime as room

    assert room.CompiledModel is CompiledModel
    assert sorted(room.__all__) == sorted(room._HOMES)
    for name in room.__all__:
        assert getattr(room, name) is not None
    with pytest.raises(AttributeError):
        _ = room.nothing
