"""A compiled model as one file.

    bytes 0-127   magic, format version, length of the file, where the manifest is, SHA-256 of everything else
    then a zip    constants.safetensors, objects/<digest>.o, manifest.json; stored, not compressed
    at the end    the signature, if there is one: as the zip's comment

Any zip tool can list and unpack it (a zip may have a prefix). The digest covers every byte of the file, so that
truncation and corruption are detected before anything is parsed; the manifest also has a digest for each part, to
name the damaged one. Every plan is checked against its kernels, and every object file before it is loaded
(`contract.py`, `elf.py`). The file holds native code and must be trusted like a shared library: only a signature
(`signing.py`), which covers every byte, protects against changed code or constants. Nothing in it is unpickled or
evaluated.

The manifest is a list of variants, each a plan with its object code and its constants: for one instruction set and
one input signature (shapes and types). For each signature, the first variant that this machine can run is used.
`save` writes the variants of a `DynamicModel`, for one instruction set; shared constants are written once.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import msgspec
import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import (
    ArtifactError,
    ArtifactMachineError,
    ArtifactVersionError,
    CodegenError,
    VerificationError,
)
from tilewright.runtime import kinds, signing
from tilewright.runtime.executor import aligned_empty, content_key
from tilewright.runtime.plan import ALIGNMENT, FORMAT_VERSION, Plan, TensorSpec, aligned

if TYPE_CHECKING:
    from tilewright.runtime.dynamic import DynamicModel
    from tilewright.runtime.model import CompiledModel

# Like PNG's: not text, with line ends that a text-mode transfer would change.
MAGIC = b"\x89TWM\r\n\x1a\n"
# Magic, version, header size, file length, manifest offset and length, digest, bytes of the signature.
_HEADER = struct.Struct("<8sIIQQQ32sI52x")
_DIGEST_AT, _SIGNED_AT = 40, 72
HEADER_SIZE = 128
assert _HEADER.size == HEADER_SIZE

_CONSTANTS = "constants.safetensors"
_MANIFEST = "manifest.json"
_CHUNK = 16 << 20
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # a ValidationError is a DecodeError
_SAFETENSORS_NAMES = {dtype.short: dtype.short.upper() for dtype in DType}  # "F32", "BF16", "BOOL"


class ArchivePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    offset: int  # in the file
    bytes: int
    sha256: str


class SavedVariant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plan: Plan
    objects: dict[str, str]  # digest -> name of the part
    constants: tuple[str, ...]  # the names of the plan's constants in constants.safetensors


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    parts: tuple[ArchivePart, ...]
    variants: tuple[SavedVariant, ...]


# -- writing ---------------------------------------------------------------------------------------------------------


def save(
    model: CompiledModel | DynamicModel, path: str | os.PathLike[str], *, sign: signing.Key | None = None
) -> None:
    """Write a model atomically. `sign`: the key to sign it with."""
    from tilewright.runtime.dynamic import DynamicModel

    target = Path(path)
    key = None if sign is None else signing.signer(sign)
    models = model.variants if isinstance(model, DynamicModel) else (model,)
    if not models:
        raise ArtifactError(
            "nothing of the model is compiled yet, so that there is nothing to save",
            remedy="call it first, once with each shape that the file shall have",
        )
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "x+b") as stream:
            _write([variant for each in models for variant in each.saved()], stream, key)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {target}: {error.strerror or error}",
            remedy="choose a path in a folder that exists, that you can write, with room for the file",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # some systems cannot open folders
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _write(models: Sequence[CompiledModel], stream: BinaryIO, key: signing.Signer | None = None) -> None:
    stream.write(bytes(HEADER_SIZE))
    signature_bytes = 0 if key is None else key.size
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        keys, arrays = _all_constants(models)
        parts = {
            _CONSTANTS: _write_part(
                archive, stream, _CONSTANTS, _safetensors(list(arrays), list(arrays.values()))
            )
        }
        variants = []
        for model, constants in zip(models, keys, strict=True):
            kinds.check_contracts(model.plan, model.executor.objects)
            objects = {}
            for digest, data in model.executor.objects.items():
                objects[digest] = name = f"objects/{hashlib.sha256(data).hexdigest()}.o"
                if name not in parts:
                    parts[name] = _write_part(archive, stream, name, [data])
            variants.append(SavedVariant(model.plan, objects, constants))
        manifest = msgspec.json.encode(Manifest(FORMAT_VERSION, tuple(parts.values()), tuple(variants)))
        last = _write_part(archive, stream, _MANIFEST, [manifest])
        archive.comment = bytes(signature_bytes)  # reserves space for it
    length = stream.seek(0, os.SEEK_END)
    fields = (MAGIC, FORMAT_VERSION, HEADER_SIZE, length, last.offset, last.bytes)
    digest_so_far = hashlib.sha256(_HEADER.pack(*fields, bytes(32), signature_bytes)[:_DIGEST_AT])
    stream.seek(HEADER_SIZE)
    left = length - HEADER_SIZE - signature_bytes
    while chunk := stream.read(min(_CHUNK, left)):
        digest_so_far.update(chunk)
        left -= len(chunk)
    header = _HEADER.pack(*fields, digest_so_far.digest(), signature_bytes)
    if key is not None:
        stream.seek(length - signature_bytes)
        stream.write(key.sign(header))
    stream.seek(0)
    stream.write(header)


def _write_part(archive: zipfile.ZipFile, stream: BinaryIO, name: str, blocks: Sequence[Any]) -> ArchivePart:
    size = sum(memoryview(block).nbytes for block in blocks)
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))  # equal models give equal files
    info.file_size = size
    info.external_attr = 0o644 << 16
    wide = size >= zipfile.ZIP64_LIMIT // 2
    # An extra field pads the entry's header, so that its data is aligned in the file and in memory. It has the ID
    # that Android's zipalign uses.
    before = stream.tell() + 30 + len(name) + 4 + (20 if wide else 0)
    info.extra = struct.pack("<HH", 0xD935, -before % ALIGNMENT) + bytes(-before % ALIGNMENT)
    digest = hashlib.sha256()
    with archive.open(info, "w", force_zip64=wide) as part:
        offset = stream.tell()
        for block in blocks:
            part.write(block)
            digest.update(block)
    return ArchivePart(name, offset, size, digest.hexdigest())


def _constant_keys(specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """The names of the constants if usable, made unique by their position otherwise."""
    keys: dict[str, None] = {}
    for index, spec in enumerate(specs):
        name = spec.name or "constant"
        keys[f"{name}#{index}" if name in keys or name == "__metadata__" else name] = None
    if len(keys) != len(specs):
        return tuple(str(index) for index in range(len(specs)))
    return tuple(keys)


def _all_constants(models: Sequence[CompiledModel]) -> tuple[list[tuple[str, ...]], dict[str, np.ndarray]]:
    """(the names of each model's constants, the constants by name). Equal constants of several models share
    one name."""
    if len(models) == 1:
        keys = _constant_keys(models[0].plan.constants)
        return [keys], dict(zip(keys, models[0].executor.constants, strict=True))
    arrays: dict[str, np.ndarray] = {}
    known: dict[Any, str] = {}
    chosen: list[tuple[str, ...]] = []
    for number, model in enumerate(models):
        names = []
        for key, array in zip(_constant_keys(model.plan.constants), model.executor.constants, strict=True):
            name = known.setdefault(content_key(array), f"{number}/{key}")
            arrays.setdefault(name, array)
            names.append(name)
        chosen.append(tuple(names))
    return chosen, arrays


def _safetensors(keys: Sequence[str], arrays: Sequence[np.ndarray]) -> list[Any]:
    """The constants as chunks of a safetensors file.

    The safetensors package is not used, because it builds the whole file in memory and aligns to 8 bytes. The format
    allows no gaps; arrays whose size is a multiple of 64 come first, and the rest are usually few and small, and the
    executor copies those.
    """
    order = sorted(range(len(arrays)), key=lambda index: (arrays[index].nbytes % ALIGNMENT != 0, index))
    header: dict[str, Any] = {"__metadata__": {"format": "tilewright"}}
    position = 0
    for index in order:
        array = arrays[index]
        end = position + array.nbytes
        header[keys[index]] = {
            "dtype": _SAFETENSORS_NAMES[DType.of(array).short],
            "shape": list(array.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(aligned(8 + len(text)) - 8)
    return [
        struct.pack("<Q", len(text)),
        text,
        *(arrays[index].reshape(-1).view(np.uint8) for index in order),
    ]


# -- reading ---------------------------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str],
    threads: int | None = None,
    *,
    trusted: signing.Key | Sequence[signing.Key] | None = None,
) -> CompiledModel | DynamicModel:
    """Load a saved model. It needs neither PyTorch nor the compiler.

    - `threads`: the number of threads of a call; None uses `TILEWRIGHT_THREADS`, or all cores that this process may
      use.
    - `trusted`: a key or several; raises SignatureError unless the file is signed with one of them.

    The whole file is verified before anything of it runs; ArtifactError says what is wrong. The result is a
    `DynamicModel` if the file holds variants for several input signatures, and a `CompiledModel` otherwise.
    """
    from tilewright.runtime.dynamic import DynamicModel

    place = str(path)
    keys = None if trusted is None else signing.signers(trusted)
    memory, manifest_at, manifest_bytes = _read_verified(place, keys)
    manifest = _decode_manifest(place, memory, manifest_at, manifest_bytes)
    parts = {part.name: part for part in manifest.parts}
    models = []
    try:
        for variant in _choose(place, manifest):
            variant.plan.validate()
            constants = _constants(place, memory, parts, variant)
            objects = {
                digest: memory[parts[name].offset :][: parts[name].bytes].tobytes()
                for digest, name in variant.objects.items()
            }
            kinds.check_contracts(variant.plan, objects)
            models.append(kinds.model(variant.plan, constants, objects, threads))
    except (VerificationError, CodegenError, KeyError) as error:
        message = (
            error.message if isinstance(error, (VerificationError, CodegenError)) else f"no part {error}"
        )
        raise ArtifactError(f"{place} does not hold a sound model: {message}") from error
    return models[0] if len(models) == 1 else DynamicModel(models[0].plan.input_names, models)


def _read_verified(place: str, keys: Sequence[signing.Signer] | None) -> tuple[np.ndarray, int, int]:
    """Read the whole file once into aligned memory and verify it; return the manifest's position."""
    try:
        if not stat.S_ISREG(os.stat(place).st_mode):
            raise ArtifactError(f"{place} is not a file")
        with open(place, "rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            return _read_stream(place, stream, size, keys)
    except FileNotFoundError:
        raise ArtifactError(f"the file {place} does not exist", remedy="check the path") from None
    except OSError as error:
        raise ArtifactError(
            f"cannot read {place}: {error.strerror or error}", remedy="check the file"
        ) from error


def _read_stream(
    place: str, stream: Any, size: int, keys: Sequence[signing.Signer] | None
) -> tuple[np.ndarray, int, int]:
    if size == 0:
        raise ArtifactError(f"{place} is empty")
    head = stream.read(HEADER_SIZE)
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise ArtifactError(
            f"{place} is not a Tilewright model", remedy="pass a file that CompiledModel.save has written"
        )
    if len(head) < HEADER_SIZE:
        raise ArtifactError(f"{place} is truncated: {size} bytes, less than its header")
    _, version, header_size, length, manifest_at, manifest_bytes, digest, signed = _HEADER.unpack(head)
    if version != FORMAT_VERSION:
        age = "newer" if version > FORMAT_VERSION else "older"
        raise ArtifactVersionError(
            f"{place} has the format {version}, which is {age} than the format {FORMAT_VERSION} of this version"
        )
    if (
        header_size != HEADER_SIZE
        or any(head[_SIGNED_AT + 4 :])
        or signed not in (0, *signing.SIZES.values())
    ):
        raise ArtifactError(f"{place} is damaged: its header is not sound")
    if length != size:
        what = "truncated" if size < length else "damaged"
        raise ArtifactError(f"{place} is {what}: it has {size} bytes and should have {length}")
    if HEADER_SIZE + signed > size:
        raise ArtifactError(f"{place} is damaged: its signature is not within it")
    memory = aligned_empty(size)
    memory[:HEADER_SIZE] = np.frombuffer(head, np.uint8)
    view = memory.data
    found = hashlib.sha256(head[:_DIGEST_AT])
    position = HEADER_SIZE
    while position < size:
        count = stream.readinto(view[position : position + _CHUNK])
        if not count:
            raise ArtifactError(f"{place} became shorter while it was read")
        found.update(view[position : min(position + count, size - signed)])
        position += count
    if found.digest() != digest:
        where = _damaged_parts(memory, manifest_at, manifest_bytes)
        raise ArtifactError(f"{place} is damaged: its contents do not match its checksum{where}")
    if keys is not None:
        signing.verify(place, head, memory[size - signed :].tobytes(), keys)
    return memory, manifest_at, manifest_bytes


def _damaged_parts(memory: np.ndarray, manifest_at: int, manifest_bytes: int) -> str:
    """For the message: which parts of a damaged file do not match their own checksums, if that can be determined."""
    try:
        manifest = _decode_manifest("", memory, manifest_at, manifest_bytes)
    except ArtifactError:
        return " (the manifest, or where it is)"
    names = [
        part.name
        for part in manifest.parts
        if hashlib.sha256(memory[part.offset :][: part.bytes].data).hexdigest() != part.sha256
    ]
    return f" ({', '.join(names)})" if names else ""


def _decode_manifest(place: str, memory: np.ndarray, at: int, size: int) -> Manifest:
    if at < HEADER_SIZE or size < 2 or at + size > len(memory):
        raise ArtifactError(f"{place} is damaged: its manifest is not within the file")
    try:
        manifest = msgspec.json.decode(memory[at : at + size].tobytes(), type=Manifest)
    except _UNREADABLE as error:
        raise ArtifactError(f"{place} has a manifest that cannot be read: {error}") from None
    for part in manifest.parts:
        if part.offset < HEADER_SIZE or part.bytes < 0 or part.offset + part.bytes > len(memory):
            raise ArtifactError(f"{place} is damaged: {part.name} is not within the file")
    return manifest


def _choose(place: str, manifest: Manifest) -> list[SavedVariant]:
    """The first variant of each input signature that this machine can run."""
    problem = ArtifactMachineError("it holds no object code at all")
    chosen: dict[bytes, SavedVariant] = {}
    for variant in manifest.variants:
        target = variant.plan.target
        features = target.get("features")
        named = isinstance(features, list) and all(isinstance(feature, str) for feature in features)
        if not isinstance(target.get("triple"), str) or not named:
            raise ArtifactError(f"{place} has a variant without a target")
        try:
            kinds.check(target)
        except ArtifactMachineError as error:
            problem = error
            continue
        chosen.setdefault(msgspec.json.encode((variant.plan.input_tree, variant.plan.inputs)), variant)
    if not chosen:
        raise ArtifactMachineError(f"{place} cannot run here: {problem.message}", remedy=problem.remedy)
    return list(chosen.values())


def _constants(
    place: str, memory: np.ndarray, parts: dict[str, ArchivePart], variant: SavedVariant
) -> list[np.ndarray]:
    """The plan's constants as views of the file's memory."""
    part = parts[_CONSTANTS]
    data = memory[part.offset :][: part.bytes]

    def broken(why: str) -> NoReturn:
        raise ArtifactError(f"{place} is damaged: {_CONSTANTS}: {why}")

    if part.bytes < 8:
        broken("no header")
    (header_bytes,) = struct.unpack("<Q", data[:8].tobytes())
    if header_bytes > part.bytes - 8:
        broken("its header is not within it")
    try:
        entries = msgspec.json.decode(data[8 : 8 + header_bytes].tobytes(), type=dict[str, dict[str, Any]])
    except _UNREADABLE as error:
        broken(str(error))
    body = data[8 + header_bytes :]
    if len(variant.constants) != len(variant.plan.constants):
        broken("the number of constants differs from the plan's")
    arrays = []
    for key, spec in zip(variant.constants, variant.plan.constants, strict=True):
        entry = entries.get(key, {})
        span = entry.get("data_offsets")
        if entry.get("dtype") != _SAFETENSORS_NAMES[spec.dtype] or entry.get("shape") != list(spec.shape):
            broken(f"{key} is not {spec}")
        if not isinstance(span, list) or len(span) != 2 or not all(type(end) is int for end in span):
            broken(f"{key} has no data")
        if not 0 <= span[0] <= span[1] <= len(body) or span[1] - span[0] != spec.bytes:
            broken(f"the data of {key} is not within the file")
        array = body[span[0] : span[1]]
        # A view needs natural alignment; unaligned constants are copied.
        if array.ctypes.data % ALIGNMENT:
            array = _aligned(array)
        array = array.view(DType.parse(spec.dtype).numpy).reshape(spec.shape)
        array.flags.writeable = False
        arrays.append(array)
    return arrays


def _aligned(data: np.ndarray) -> np.ndarray:
    copy = aligned_empty(len(data))
    copy[:] = data
    return copy
