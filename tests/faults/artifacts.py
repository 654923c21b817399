"""Artifacts that were changed and hashed again: none crashes, raises anything raw or touches memory alongside its own.

    python -m tests.faults.artifacts --files 2000
    python -m tests.faults.artifacts --files 200 --seed 7 --keep /tmp/bad      keep those that failed

A file is changed in one or a few places of its manifest, its header, the header of its constants, the structure of its
zip, or the headers, symbols and relocations of an object file, never in machine code or constants; then every checksum
is made to fit. It is loaded and called in another process, with memory between pages that cannot be read or written. It
must be refused with an error of Tilewright's, or run. What it computes then is counted: no check can know that a plan
was meant to subtract in the other order.

Half of the changed plans are changed as by one who writes new kernels for them: each object is sealed for the plan as
it is now, so that what refuses the file is what the plan says, and not that it is another one. These are counted apart.

Object files are changed in two ways: sealed as they were, and sealed again, as only one who writes a new kernel would.
The latter need not run (relocations are part of the machine code), but must load or be refused.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import hashlib
import io
import json
import mmap
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tilewright.errors import InternalError, TilewrightError
from tilewright.runtime import artifact, contract, executor
from tilewright.runtime.plan import Plan

ROOT = Path(__file__).parents[2]
SECONDS = 60  # that one file may take
_PAGE = mmap.PAGESIZE


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass
class Content:
    """An artifact taken apart."""

    manifest: Any
    constants: bytes  # of constants.safetensors
    objects: dict[str, bytes]  # by the digest that the plans use
    header: dict[str, int] = field(default_factory=dict)  # fields of the file's header to change
    part_changes: dict[int, dict[str, Any]] = field(default_factory=dict)  # by number
    keep_parts: bool = False  # the manifest's own list of parts stays as it is

    @staticmethod
    def of(data: bytes) -> Content:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            manifest = json.loads(archive.read("manifest.json"))
            names = {name: archive.read(name) for name in archive.namelist()}
        digests = {
            digest: names[name]
            for variant in manifest["variants"]
            for digest, name in variant["objects"].items()
        }
        return Content(manifest, names["constants.safetensors"], digests)

    def exchange(self, digest: str, data: bytes) -> None:
        """Another object in the place of one, under its own digest everywhere."""
        new = hashlib.sha256(data).hexdigest()
        self.objects = {new if key == digest else key: value for key, value in self.objects.items()}
        self.objects[new] = data
        for variant in self.manifest["variants"]:
            try:
                objects, kernels = variant["objects"], variant["plan"]["kernels"]
                kernels.items(), objects.items()
            except (TypeError, LookupError, AttributeError):
                continue  # changed too much already
            if digest in objects:
                objects[new] = f"objects/{new}.o"
                objects.pop(digest)
            for symbol, used in kernels.items():
                kernels[symbol] = new if used == digest else used

    def fit_contracts(self) -> bool:
        """Seals all kernels for the plans as they are now, where these can still be read as plans. Returns whether
        there was one."""
        fitted = False
        for variant in self.manifest["variants"]:
            try:
                plan = msgspec.convert(variant["plan"], Plan)
            except (msgspec.ValidationError, TypeError, LookupError):
                continue
            for digest in sorted(set(plan.kernels.values()) & set(self.objects)):
                code, made_for = contract.unsealed(self.objects[digest])
                made_for = msgspec.structs.replace(made_for, plan=contract.plan_digest(plan))
                self.exchange(digest, contract.sealed(code, made_for))
                fitted = True
        return fitted

    def written(self) -> bytes:
        """The file, with checksums that fit."""
        stream = io.BytesIO()
        stream.write(bytes(artifact.HEADER_SIZE))
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            whole = {"constants.safetensors": self.constants}
            whole |= {f"objects/{hashlib.sha256(data).hexdigest()}.o": data for data in self.objects.values()}
            parts = [artifact._write_part(archive, stream, name, [data]) for name, data in whole.items()]
            manifest = self.manifest
            if not self.keep_parts:
                manifest = {**manifest, "parts": [_plain(part) for part in parts]}
                for number, change in self.part_changes.items():
                    manifest["parts"][number % len(parts)].update(change)
            last = artifact._write_part(archive, stream, "manifest.json", [json.dumps(manifest).encode()])
        return resealed(stream.getvalue(), last.offset, last.bytes, self.header)


def _plain(part: artifact.ArchivePart) -> dict[str, Any]:
    return {"name": part.name, "offset": part.offset, "bytes": part.bytes, "sha256": part.sha256}


def resealed(data: bytes, at: int, size: int, header: dict[str, int] | None = None) -> bytes:
    header = header or {}
    fields = [
        artifact.MAGIC,
        header.get("version", artifact.FORMAT_VERSION) & 0xFFFFFFFF,
        header.get("header", artifact.HEADER_SIZE) & 0xFFFFFFFF,
        header.get("length", len(data)) & (2**64 - 1),
        header.get("at", at) & (2**64 - 1),
        header.get("bytes", size) & (2**64 - 1),
    ]
    signed = header.get("signed", 0) & 0xFFFFFFFF
    head = artifact._HEADER.pack(*fields, bytes(32), signed)[: artifact._DIGEST_AT]
    body = data[artifact.HEADER_SIZE :]
    digest = hashlib.sha256(head + body[: max(0, len(body) - signed)]).digest()
    return artifact._HEADER.pack(*fields, digest, signed) + body


# -- changes ----------------------------------------------------------------------------------------------------------

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    63,
    64,
    65,
    4096,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63,
    2**64,
    -(2**63),
    10**30,
)
TEXTS = (
    "",
    "f32",
    "i64",
    "bool",
    "f64",
    "input",
    "output",
    "constant",
    "arena",
    "x" * 5000,
    "\0",
    "../../x",
    "é",
)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += _leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += _leaves(item, (*path, index))
    return found


def change_json(rng: random.Random, value: Any) -> str:
    """One change somewhere inside; says what it was."""
    paths = _leaves(value)
    if not paths:
        return "nothing left"
    kinds = sorted({tuple(key for key in path if isinstance(key, str)) for path in paths})
    kind = rng.choice(kinds)  # fields first, so that shapes of constants do not take all the turns
    path = rng.choice([path for path in paths if tuple(key for key in path if isinstance(key, str)) == kind])
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    old, way = holder[path[-1]], rng.randrange(10)
    if way == 0:
        if isinstance(holder, list):
            holder.pop(path[-1])
        else:
            del holder[path[-1]]
    elif way == 1 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(old))
    elif way == 2 and isinstance(holder, list):
        rng.shuffle(holder)
    elif way == 3:
        holder[path[-1]] = rng.choice((None, [], {}, 1.5, True, "x", [[]], -1, {"kind": "leaf", "index": 0}))
    elif isinstance(old, bool) or old is None:
        holder[path[-1]] = not old
    elif isinstance(old, int):
        holder[path[-1]] = rng.choice(
            (old + 1, old - 1, 2 * old, old // 2, -old, old + 64, rng.choice(NUMBERS))
        )
    elif isinstance(old, str):
        others = [text for path in paths if isinstance(text := _at(value, path), str)]
        holder[path[-1]] = rng.choice((*TEXTS, rng.choice(others), old[::-1], old[:-1]))
    elif isinstance(old, list):
        rng.shuffle(old)
        if rng.random() < 0.5 and old:
            old.pop()
    elif isinstance(old, dict) and old:
        key = rng.choice(list(old))
        old[rng.choice((*TEXTS, key + "x"))] = old.pop(key)
    return f"{'.'.join(map(str, path))}: {str(old)[:40]}"


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def change_constants(rng: random.Random, content: Content) -> str:
    """Of the header of the constants."""
    (size,) = struct.unpack_from("<Q", content.constants)
    header = json.loads(content.constants[8 : 8 + size])
    if rng.random() < 0.2:
        new = rng.choice((0, 1, size - 1, size + 8, 2**63, 2**64 - 1, len(content.constants)))
        content.constants = struct.pack("<Q", new) + content.constants[8:]
        return f"constants' header has {new} bytes"
    what = change_json(rng, header)
    text = json.dumps(header).encode()
    text = text.ljust(max(size, -(-(8 + len(text)) // 64) * 64 - 8))
    content.constants = struct.pack("<Q", len(text)) + text + content.constants[8 + size :]
    return f"constants {what}"


def change_header(rng: random.Random, content: Content) -> str:
    name = rng.choice(("version", "header", "length", "at", "bytes", "signed"))
    content.header[name] = rng.choice((*NUMBERS[:18], rng.randrange(1 << 20), 33, 65))
    return f"header {name} {content.header[name]}"


def change_part(rng: random.Random, content: Content) -> str:
    change = {rng.choice(("offset", "bytes")): rng.choice((*NUMBERS, rng.randrange(1 << 16)))}
    if rng.random() < 0.2:
        change = {"name": rng.choice(("", "manifest.json", "constants.safetensors", "x"))}
    content.part_changes = {rng.randrange(100): change}
    return f"part {change}"


def change_object(rng: random.Random, content: Content, again: bool) -> str:
    """Of the headers, symbols, names and relocations of one. `again`: seal it as if it had always been so."""
    digest = rng.choice(sorted(content.objects))
    code, made_for = contract.unsealed(content.objects[digest])
    data = bytearray(code)
    (table,) = struct.unpack_from("<Q", data, 0x28)
    (count,) = struct.unpack_from("<H", data, 0x3C)
    spans = [(0, 64)] * 2 + [(table, table + 64 * count)] * 4
    for number in range(count):
        _, kind, _, _, offset, size, *_ = struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * number)
        if kind in (2, 3, 4) and size:  # symbols, names, relocations
            spans += [(offset, offset + size)] * (2 if kind != 3 else 1)
    changed = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        begin, end = rng.choice(spans)
        width = rng.choice((1, 2, 4, 8))
        place = begin + rng.randrange(max(1, (end - begin) // width)) * width
        if place + width > len(data):
            continue
        old = int.from_bytes(data[place : place + width], "little")
        new = rng.choice((old + 1, old - 1, old ^ (1 << rng.randrange(8 * width)), 0, rng.choice(NUMBERS)))
        data[place : place + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
        changed.append(f"{place:#x}+{width}")
    if rng.random() < 0.05:
        del data[rng.randrange(len(data)) :]
    content.exchange(
        digest,
        contract.sealed(bytes(data), made_for)
        if again
        else bytes(data) + content.objects[digest][len(code) :],
    )
    return f"object{' sealed again' if again else ''} {' '.join(changed)}"


@dataclass(frozen=True)
class Changed:
    """A file, what was changed in it, whether it may be run, and whether its kernels are sealed for its plan."""

    data: bytes
    what: str
    run: bool = True
    is_fitted: bool = False


def changed(rng: random.Random, original: bytes) -> Changed:
    content, turn = Content.of(original), rng.random()
    if turn < 0.5:
        what = "; ".join(
            change_json(rng, content.manifest["variants"]) for _ in range(rng.choice((1, 1, 1, 2, 3)))
        )
        if turn < 0.25:
            is_fitted = content.fit_contracts()
            return Changed(content.written(), what, is_fitted=is_fitted)
    elif turn < 0.55:
        what = change_json(rng, content.manifest)
        content.keep_parts = True
    elif turn < 0.62:
        what = change_constants(rng, content)
    elif turn < 0.67:
        what = change_header(rng, content)
    elif turn < 0.72:
        what = change_part(rng, content)
    elif turn < 0.75:
        return Changed(_broken_zip(rng, content), "zip")
    else:
        again = rng.random() < 0.6
        what = change_object(rng, content, again)
        return Changed(content.written(), what, run=not again)
    return Changed(content.written(), what)


def _broken_zip(rng: random.Random, content: Content) -> bytes:
    """The structure of the zip behind the manifest changed: `load` does not need it."""
    data = bytearray(content.written())
    _, _, _, _, at, size, *_ = artifact._HEADER.unpack(data[: artifact.HEADER_SIZE])
    for _ in range(4):
        data[rng.randrange(at + size, len(data))] ^= 1 << rng.randrange(8)
    return resealed(bytes(data), at, size)


# -- the process that loads -------------------------------------------------------------------------------------------


def fenced_empty(size: int) -> np.ndarray:
    """As `aligned_empty`, ending (to within its alignment) at a page that cannot be read or written."""
    room = -(-max(size, 1) // _PAGE) * _PAGE
    memory = mmap.mmap(-1, room + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(whole.ctypes.data + room), ctypes.c_size_t(_PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    begin = (room - size) // 64 * 64
    return whole[begin : begin + size]


def fenced(array: np.ndarray) -> np.ndarray:
    """A copy that ends exactly at a page that cannot be read or written."""
    room = fenced_empty(-(-array.nbytes // 64) * 64)
    place = room[room.size - array.nbytes :] if array.nbytes % array.itemsize == 0 else room
    result = place.view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def try_file(path: Path, inputs: list[np.ndarray], expected: list[np.ndarray], run: bool) -> str:
    try:
        model = artifact.load(path, threads=1)
        if not run:
            return "loaded"
        found = model(*map(fenced, inputs))
        str(model.explain(repeats=1))  # type: ignore[union-attr]
    except InternalError as error:
        return f"raw {type(error).__name__}: {error.message[:200]}"
    except TilewrightError as error:
        return f"refused {type(error).__name__}"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"raw {type(error).__name__}: {str(error)[:200]} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    found = flat(found)
    same = len(found) == len(expected) and all(
        one.shape == other.shape and np.array_equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )
    return "right" if same else "other result"


def serve(folder: Path, first: int, last: int) -> None:
    executor.aligned_empty = fenced_empty  # type: ignore[assignment]
    for number in range(first, last):
        order = json.loads((folder / f"{number}.json").read_text())
        with np.load(folder / f"model{order['model']}.npz") as kept:
            inputs = [kept[name] for name in kept.files if name.startswith("in")]
            expected = [kept[name] for name in kept.files if name.startswith("out")]
        print(f"{number} begins", flush=True)
        outcome = try_file(folder / f"{number}.tw", inputs, expected, order["run"])
        print(f"{number} {outcome}".replace("\n", " "), flush=True)


# -- the campaign -----------------------------------------------------------------------------------------------------


def originals() -> list[tuple[bytes, list[np.ndarray]]]:
    """Small models with constants, intermediate values, several inputs and outputs; and one for several shapes."""
    import torch

    import tilewright

    torch.manual_seed(0)

    class Several(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(9, 8)
            self.inner = torch.nn.Linear(8, 12)

        def forward(self, ids: Any, scale: Any) -> Any:
            x = torch.softmax(self.inner(self.table(ids)), -1)
            return {"x": x * scale, "both": (x.sum(-1), torch.exp(x).amax(1))}

    image = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        *(
            torch.nn.Conv2d(8, 8, 3, padding=1),
            torch.nn.Sigmoid(),
            torch.nn.Flatten(),
            torch.nn.Linear(128, 5),
        ),
    )
    generator = np.random.default_rng(0)
    examples: list[tuple[Any, list[np.ndarray], bool]] = [
        (image, [generator.standard_normal((1, 3, 8, 8), np.float32)], False),
        (
            Several(),
            [generator.integers(0, 9, (2, 5)), generator.standard_normal((2, 5, 1), np.float32)],
            False,
        ),
        (torch.nn.Linear(6, 4), [generator.standard_normal((3, 6), np.float32)], True),
    ]
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for model, inputs, dynamic in examples:
            given = tuple(map(torch.from_numpy, inputs))
            fast = tilewright.compile(model.eval(), given, dynamic=dynamic)
            if dynamic:
                fast(*given)
                fast(*(torch.cat([each, each]) for each in given))
            fast.save(Path(folder) / "model.tw")
            made.append(((Path(folder) / "model.tw").read_bytes(), inputs))
    return made


def flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return [array for item in items for array in flat(item)]
    return [np.asarray(value)]


@dataclass
class Result:
    """How many files came to what, how many of these are `fitted` (their kernels sealed for the changed plan), and what
    was changed in those that failed."""

    counts: Counter[str] = field(default_factory=Counter)
    fitted: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)


def campaign(count: int, seed: int, folder: Path, keep: Path | None = None) -> Result:
    rng = random.Random(seed)
    models = originals()
    for number, (data, inputs) in enumerate(models):
        path = folder / f"model{number}.tw"
        path.write_bytes(data)
        results = artifact.load(path)(*inputs)
        arrays = {f"in{n}": array for n, array in enumerate(inputs)}
        arrays |= {f"out{n}": array for n, array in enumerate(flat(results))}
        np.savez(folder / f"model{number}.npz", **arrays)  # type: ignore[arg-type]
    files = []
    for number in range(count):
        which = rng.randrange(len(models))
        each = changed(rng, models[which][0])
        (folder / f"{number}.tw").write_bytes(each.data)
        (folder / f"{number}.json").write_text(json.dumps({"model": which, "run": each.run}))
        files.append(each)
    result = Result()
    for number, (each, outcome) in enumerate(zip(files, run_all(folder, count), strict=True)):
        kind = outcome.split()[0]
        result.counts[kind] += 1
        result.fitted[kind] += each.is_fitted
        if kind in ("raw", "crash", "hang"):
            result.failed.append(f"{number}: {outcome}; changed: {each.what[:200]}")
            if keep is not None:
                keep.mkdir(exist_ok=True)
                (keep / f"{seed}-{number}.tw").write_bytes(each.data)
    result.fitted = +result.fitted
    return result


def run_all(folder: Path, count: int) -> list[str]:
    outcomes: list[str] = []
    while len(outcomes) < count:
        command = [sys.executable, "-m", "tests.faults.artifacts", "--serve", str(folder)]
        process = subprocess.Popen(
            [*command, str(len(outcomes)), str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
        )
        begun = False
        assert process.stdout is not None
        for line in _lines(process, SECONDS):
            number, _, outcome = line.partition(" ")
            begun = outcome == "begins"
            if not begun:
                assert int(number) == len(outcomes)
                outcomes.append(outcome)
        hung = process.poll() is None
        process.kill()
        code = process.wait()
        process.stdout.close()
        if len(outcomes) < count:
            if not begun:
                raise RuntimeError(f"the process that loads artifacts ended with {code}")
            outcomes.append("hang" if hung else f"crash {-code}")
    return outcomes


def _lines(process: subprocess.Popen[bytes], seconds: float) -> Iterator[str]:
    """What it says, until it ends or has said nothing for so long."""
    stream, rest = process.stdout, b""
    assert stream is not None
    while select.select([stream], [], [], seconds)[0]:
        more = os.read(stream.fileno(), 1 << 16)
        if not more:
            process.wait()
            return
        *lines, rest = (rest + more).split(b"\n")
        yield from (line.decode() for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the files that failed")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(Path(given.serve[0]), int(given.serve[1]), int(given.serve[2]))
        return 0
    with tempfile.TemporaryDirectory() as name:
        result = campaign(given.files, given.seed, Path(name), given.keep)
    for line in result.failed:
        print(line)
    fitted = f"{result.fitted.total()} of these with kernels sealed for the changed plan"
    for what, counts in ((f"{given.files} files", result.counts), (fitted, result.fitted)):
        print(f"{what}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return int(bool(result.failed))


if __name__ == "__main__":
    sys.exit(main())
