"""Files of weights: the safetensors format, with a version, the settings of the network and a checksum.

    8 bytes: length of the header | header as JSON | the tensors' bytes

The header's `__metadata__` has `format` (of this file), `features` (the version of `tokens.py`), `sha256` of the
tensors' bytes, and what the weights were trained on, for people.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.cost.tokens import VERSION as FEATURES_VERSION
from tilewright.errors import WeightsError
from tilewright.support.files import read_regular

FORMAT = "tilewright-attention-1"
_MAX_BYTES = 64 << 20
_MAX_HEADER = 1 << 20
_TYPES: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
SHIPPED = Path(__file__).with_name("attention.safetensors")


@dataclass(frozen=True)
class Weights:
    """The tensors by name, as float32, and what is said of them."""

    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]


def load(path: Path) -> Weights:
    """Raises WeightsError if the file is missing, damaged, or of another version."""
    try:
        data = read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise WeightsError(f"cannot read the weights {path}: {error.strerror}") from None
    try:
        length = int.from_bytes(data[:8], "little")
        if length > min(_MAX_HEADER, len(data) - 8):
            raise ValueError("the header does not fit")
        header = json.loads(data[8 : 8 + length])
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__").items()}
        body = data[8 + length :]
        _check(path, metadata, body)
        tensors = {name: _tensor(entry, body) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"cannot read weights from {path}: {error}") from None
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        raise WeightsError(f"{path} has weights that are not finite")
    return Weights(tensors, metadata)


def _check(path: Path, metadata: Mapping[str, str], body: bytes) -> None:
    if metadata.get("format") != FORMAT:
        raise WeightsError(
            f"{path} has the format {metadata.get('format')!r}, and this version reads {FORMAT!r}"
        )
    if metadata.get("features") != str(FEATURES_VERSION):
        raise WeightsError(
            f"{path} was trained on version {metadata.get('features')} of the features, "
            f"and this version of Tilewright has version {FEATURES_VERSION}"
        )
    if hashlib.sha256(body).hexdigest() != metadata.get("sha256"):
        raise WeightsError(f"{path} is damaged: its checksum is wrong")


def _tensor(entry: Mapping[str, object], body: bytes) -> np.ndarray:
    dtype = _TYPES[str(entry["dtype"])]
    shape = tuple(int(extent) for extent in entry["shape"])  # type: ignore[attr-defined]
    begin, end = (int(offset) for offset in entry["data_offsets"])  # type: ignore[attr-defined]
    if (
        min((*shape, begin), default=0) < 0
        or end > len(body)
        or end - begin != math.prod(shape) * dtype.itemsize
    ):
        raise ValueError("a tensor does not fit")
    return np.frombuffer(body[begin:end], dtype).reshape(shape).astype(np.float32)


def save(path: Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """Write the tensors as 16-bit floats where that loses nothing that matters: all but the normalisation and the
    trees."""
    header: dict[str, object] = {}
    chunks, at = [], 0
    for name, tensor in sorted(tensors.items()):
        kind = "F32" if name.startswith(("norm.", "forest.")) else "F16"
        raw = np.ascontiguousarray(tensor, _TYPES[kind]).tobytes()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)]}
        chunks.append(raw)
        at += len(raw)
    body = b"".join(chunks)
    checked = {
        "format": FORMAT,
        "features": str(FEATURES_VERSION),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    header["__metadata__"] = {**about, **checked}
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
