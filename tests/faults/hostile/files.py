"""Data outside the model file, and files whose bytes are no model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from onnx import TensorProto, helper

from tests.faults.hostile.building import (
    Case,
    graph_model,
    raw,
)
from tests.frontend.onnx.checking import floats, model_of


def external(
    position: str = "w.bin",
    dims: Sequence[int] = (3, 4),
    size: int | None = 48,
    copies: int = 1,
    **entries: object,
) -> Case:
    """A weight (or several) said to be at `position`; a file of `size` bytes, with holes instead of bytes, is there."""

    def case(folder: Path) -> Path:
        nodes = [helper.make_node("ReduceSum", [f"w{n}"], [f"s{n}"]) for n in range(copies)]
        total = helper.make_node("Sum", ["x", *(f"s{n}" for n in range(copies))], ["y"])
        weights = []
        for n in range(copies):
            tensor = TensorProto(name=f"w{n}", data_type=TensorProto.FLOAT, dims=dims)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in {"location": position, **entries}.items():
                text = str(value).replace("NUMBER", str(n))
                tensor.external_data.add(key=key, value=text)
            weights.append(tensor)
        path = folder / "model.onnx"
        path.write_bytes(graph_model([*nodes, total], initialisers=weights).SerializeToString())
        if size is not None:
            with open(folder / "w.bin", "wb") as file:
                file.truncate(size)
        return path

    return case


def linked(how: Callable[[Path], None], position: str = "link.bin") -> Case:
    def case(folder: Path) -> Path:
        path = external(position)(folder)
        how(folder)
        return path

    return case


def files() -> Iterator[tuple[str, Case]]:
    yield "sound external data", external()
    yield "external data of 5 GB", external(dims=(1 << 30, 5), size=5 << 30)
    yield "external data of 5 GB that is not there", external(dims=(1 << 30, 5), size=48)
    yield (
        "external data of 200 MB in 30 tensors",
        external(dims=(50 << 20,), size=250 << 20, copies=30, offset="NUMBER"),
    )
    yield "30 tensors that share 200 MB", external(dims=(50 << 20,), size=200 << 20, copies=30)
    yield "external data that overlaps", external(size=96, copies=4, offset="NUMBER")
    yield "a negative offset", external(offset=-4)
    yield "an offset beyond the end", external(offset=1 << 40)
    yield "an offset near 2^64", external(offset=(1 << 64) - 8)
    yield "a length beyond the end", external(length=1 << 40)
    yield "a negative length", external(length=-48)
    yield "a length that is no number", external(length="forty")
    yield "a path out of the folder", external("../w.bin")
    yield "an absolute path", external("/etc/passwd")
    yield "a device", external("/dev/zero")
    yield "a path without a name", external("")
    yield "a path with a NUL", external("w\0.bin")
    yield "a path of a megabyte", external("w" * (1 << 20))
    yield "a missing file", external("missing.bin", size=None)
    yield "the model itself", external("model.onnx")
    yield "a symbolic link", linked(lambda folder: os.symlink("w.bin", folder / "link.bin"))
    yield "a symbolic link to itself", linked(lambda folder: os.symlink("link.bin", folder / "link.bin"))
    yield "a hard link", linked(lambda folder: os.link(folder / "w.bin", folder / "link.bin"))
    yield "a pipe", linked(lambda folder: os.mkfifo(folder / "link.bin"))
    yield "a folder", linked(lambda folder: (folder / "link.bin").mkdir())
    yield "an empty file", raw(lambda: b"")
    yield "a file of zeros", raw(lambda: bytes(1 << 20))
    yield "a text", raw(lambda: b"not a model\n" * 100)
    yield "a zip", raw(lambda: b"PK\x03\x04" + bytes(1000))
    yield "a file of 3 GB", lambda folder: _holes(folder, 3 << 30)
    yield "a file of 1.9 GB of zeros", lambda folder: _holes(folder, 1900 << 20)
    # Field 7 of a model is its graph, field 1 of that its nodes; each of them empty here.
    yield "30 million empty nodes", raw(lambda: _field(7, _field(1, b"") * 30_000_000))
    yield "a million empty nodes", raw(lambda: _field(7, _field(1, b"") * 1_000_000))
    yield "30 million empty names", raw(lambda: _field(7, _field(1, _field(1, b"") * 30_000_000)))
    yield "20 million empty attributes", raw(lambda: _field(7, _field(1, _field(5, b"") * 20_000_000)))
    yield (
        "an attribute of 60 million numbers",
        raw(
            lambda: _field(
                7, _field(1, _field(4, b"Neg") + _field(5, _field(1, b"k") + _field(8, b"\1" * 60_000_000)))
            )
        ),
    )
    yield "30 million weights without data", raw(lambda: _field(7, _field(5, b"") * 30_000_000))
    yield "a weight of 30 million varints", raw(_many_varints)
    yield "30 million opsets", raw(lambda: _field(8, b"") * 30_000_000)
    for depth in (90, 1000, 100_000):
        yield f"messages nested {depth} deep", raw(lambda n=depth: _nested(n))
    yield "a length that never ends", raw(lambda: b"\x3a" + b"\xff" * 100)
    yield "a group that is not closed", raw(lambda: b"\x3b" * 100_000)
    yield (
        "an unknown field of 100 MB",
        raw(
            lambda: (
                _field(1000, bytes(100 << 20)) + model_of("y = Neg (x)", {"x": floats(2)}).SerializeToString()
            )
        ),
    )


def _holes(folder: Path, size: int) -> Path:
    path = folder / "model.onnx"
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    return bytes(result) + bytes([value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _nested(depth: int) -> bytes:
    """Graphs in attributes of nodes of graphs. Built from the inside; lengths beyond 2^31 do not come up."""
    content = b""
    for _ in range(depth // 3):
        content = _field(1, _field(5, _field(6, content)))
        if len(content) > 1 << 20:
            break
    return _field(7, content)


def _many_varints() -> bytes:
    count = 30_000_000
    tensor = _varint(1 << 3) + _varint(count) + _varint(2 << 3) + _varint(7) + _field(7, b"\1" * count)
    node = _field(1, b"x") + _field(1, b"w") + _field(2, b"y") + _field(4, b"Add")
    model = model_of("y = Neg (x)", {"x": floats(2)})
    graph = model.graph
    del graph.node[:]
    body = graph.SerializeToString() + _field(1, node) + _field(5, tensor + _field(8, b"w"))
    del model.graph.input[:], model.graph.output[:]
    model.ClearField("graph")
    return bytes(model.SerializeToString() + _field(7, body))
