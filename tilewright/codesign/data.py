"""Measured and simulated mappings from files in the format of DOSA's data sets.

A file is CSV, or a .tar.gz with one CSV file in it, with these columns: `mapping.mapping`, `prob.R` .. `prob.N`,
`prob.Wstride`, `prob.Hstride`, `prob.Wdilation`, `prob.Hdilation`; of the hardware `arch.meshX` (the array's side),
`arch.mem1_entries` (words of one column's accumulator) and `arch.mem2_entries` (words of the scratchpad); and the
`target.` columns that the caller wants.
"""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from tilewright.codesign.mapping import Hardware, Mappings
from tilewright.codesign.problem import LOOPS, Layer, Nests
from tilewright.errors import MeasuredDataError

_STRIDES = ("prob.Wstride", "prob.Hstride")
_DILATIONS = ("prob.Wdilation", "prob.Hdilation")
_HARDWARE = ("arch.meshX", "arch.mem1_entries", "arch.mem2_entries")
_NUMBERS = (*(f"prob.{loop}" for loop in LOOPS), *_STRIDES, *_DILATIONS, *_HARDWARE)
_MAPPING = "mapping.mapping"


@dataclass(frozen=True)
class Points:
    """The rows of a file: each is a mapping of a layer on a hardware point, with its measured results."""

    nests: Nests
    mappings: Mappings
    hardware: Hardware
    targets: dict[str, np.ndarray]  # by name without `target.`

    def __len__(self) -> int:
        return len(self.mappings)

    def take(self, rows: np.ndarray | slice) -> Points:
        return Points(
            self.nests.take(rows),
            self.mappings.take(rows),
            self.hardware.take(rows),
            {name: values[rows] for name, values in self.targets.items()},
        )

    def layers(self) -> list[Layer]:
        """The layer of each row."""
        return [
            Layer(tuple(map(int, extents)), tuple(map(int, stride)), tuple(map(int, dilation)))  # type: ignore[arg-type]
            for extents, stride, dilation in zip(*self.nests, strict=True)
        ]


def read_points(path: Path, targets: Sequence[str]) -> Points:
    """Read a file. Raises MeasuredDataError if it lacks columns, or a row is invalid."""
    wanted = [f"target.{name}" for name in targets]
    with _opened(path) as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or ()
        if missing := [name for name in (_MAPPING, *_NUMBERS, *wanted) if name not in columns]:
            raise MeasuredDataError(f"{path} has no column {', '.join(missing)}")
        texts: list[str] = []
        numbers: list[list[float]] = []
        for line, row in enumerate(reader, start=2):
            try:
                numbers.append([float(row[name]) for name in (*_NUMBERS, *wanted)])
            except (TypeError, ValueError) as error:
                raise MeasuredDataError(
                    f"{path}, line {line}: a number is missing or wrong ({error})"
                ) from None
            texts.append(row[_MAPPING])
    if not texts:
        raise MeasuredDataError(f"{path} has no rows")
    table = np.array(numbers)
    if not (table[:, : len(_NUMBERS)] >= 1).all():
        line = 2 + int(np.flatnonzero((table[:, : len(_NUMBERS)] < 1).any(axis=1))[0])
        raise MeasuredDataError(f"{path}, line {line}: sizes of layers and hardware must be at least 1")
    found = dict(zip((*_NUMBERS, *wanted), table.T, strict=True))

    def stacked(names: Sequence[str]) -> np.ndarray:
        return np.stack([found[name] for name in names], axis=1)

    dim, column_words, scratchpad = (found[name] for name in _HARDWARE)
    return Points(
        Nests(stacked([f"prob.{loop}" for loop in LOOPS]), stacked(_STRIDES), stacked(_DILATIONS)),
        Mappings.parse(texts),
        Hardware(dim, scratchpad, column_words * dim),
        {name: found[f"target.{name}"] for name in targets},
    )


def spearman(left: np.ndarray, right: np.ndarray) -> float:
    """The correlation of ranks; equal values share the mean of theirs."""
    return float(np.corrcoef(_ranks(left), _ranks(right))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts + 1) / 2.0)[inverse])


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        if not path.name.endswith(".tar.gz"):
            with path.open(newline="") as file:
                yield file
            return
        with tarfile.open(path) as archive:
            tables = [member for member in archive if member.isfile() and member.name.endswith(".csv")]
            packed = archive.extractfile(tables[0]) if len(tables) == 1 else None
            if packed is None:
                raise MeasuredDataError(f"{path} must hold one .csv file, and holds {len(tables)}")
            yield io.TextIOWrapper(packed, newline="")
    except (OSError, tarfile.TarError) as error:
        raise MeasuredDataError(f"{path} cannot be read: {error}") from None
