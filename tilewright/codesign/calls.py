"""Cycles of Gemmini's RTL in FireSim for a mapping, counted from what the RTL executes.

A mapping runs as a sequence of *calls* of Gemmini's looping instructions, one for each DRAM tile. The controller loads
the inputs and the weights of a call row by row, lets the array compute blocks, and stores rows of outputs when their
reduction is complete; loads and stores overlap with computation. So a call takes the longest of

    issue      cycles to issue one call, however small it is
    compute    for each block of weights the pixels that stream through it, at least `least_run` of the array's side,
               because weights of the next block are loaded meanwhile
    load       rows of inputs and weights, each with its own cost, however many words a row has; a row of weights
               also costs a part of a page miss, as many as rows begin in a page of memory
    store      rows of outputs, in the last call of a reduction

and the first call has nothing to overlap with. Each word of weights has a cost of its own, once: what is read again is
probably in the L2 of the system. These are cycles of the RTL that others measured with FireSim;
`codegen/gemmini/cycles.py` simulates Tilewright's RTL, whose constants differ.

Four rules of the programs that were measured, found in the residuals of the measured rows:

    the array is as large as the mapping's larger spatial factor, rounded up to 4, 8 or 16;
    a tile of a matmul is given in whole blocks of 16, and counts blocks of the array;
    a convolution's image is square: a narrow image takes as long as a square one with its longer side;
    with a kernel of even size the output is one pixel wider and higher.

There are eight constants for convolutions and eight for matmuls. `fit` finds them from measured rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from tilewright.codesign.mapping import DRAM, SCRATCHPAD, Hardware, Mappings
from tilewright.codesign.problem import C, K, Nests, P, Q, R, S

PAGE = 4096.0  # bytes
_BLOCK = 16  # in which the measured programs give tiles of matmuls
_ARRAYS = (4.0, 16.0)  # the least and the largest array that was measured

_CAP = (
    0.7  # largest error of a row, as a logarithm, that the fit counts: some rows ran on the host's processor
)


class Constants(NamedTuple):
    """Constants of the cycle model, in cycles, except `least_run`, which is a share of the array's side."""

    issue: float
    least_run: float
    input_row: float
    weight_row: float
    output_row: float
    page_miss: float
    between: float  # from one call to the next
    weight_word: float  # once for each word of weights


# Where a fit begins.
_CONVOLUTION = Constants(250.0, 0.5, 1.5, 1.5, 0.5, 8.0, 10.0, 1 / 16)
_MATMUL = Constants(125.0, 1.0, 1.5, 1.5, 0.5, 10.0, 2.0, 1 / 16)


@dataclass(frozen=True)
class Fitted:
    convolution: Constants = _CONVOLUTION
    matmul: Constants = _MATMUL


class Tile(NamedTuple):
    """Calls of one size. Each column is an array with one value per mapping."""

    calls: np.ndarray
    runs: np.ndarray  # blocks of weights times rows of pixels
    width: np.ndarray  # pixels in a row
    height: np.ndarray
    inputs: np.ndarray  # rows that the DMA moves
    weights: np.ndarray
    pages: np.ndarray  # of weights
    outputs: np.ndarray
    stores: np.ndarray  # the share of calls that store outputs: the last one of a reduction


@dataclass(frozen=True)
class Calls:
    """The calls that Gemmini executes for mappings."""

    matmul: np.ndarray  # [rows]: run as matmuls
    side: np.ndarray  # of the array, as far as the mapping uses it
    sizes: tuple[Tile, ...]  # whole tiles, then those at the borders of channels, rows and columns
    words: np.ndarray  # [rows, 7]: iterations of each loop in one tile
    weights: np.ndarray  # distinct words of the layer
    scratchpad: np.ndarray  # share of it that one call's tiles have
    accumulator: np.ndarray

    @property
    def count(self) -> np.ndarray:
        return np.asarray(sum(size.calls for size in self.sizes))

    @classmethod
    def of(cls, nests: Nests, mappings: Mappings, hardware: Hardware) -> Calls:
        words = mappings.factors[:, : SCRATCHPAD + 1].prod(axis=1)
        words[:, C] *= mappings.rows
        words[:, K] *= mappings.columns
        outer, extents = mappings.factors[:, DRAM], nests.extents
        used = np.maximum(mappings.rows, mappings.columns)
        side = np.maximum(_ARRAYS[0], 2.0 ** np.ceil(np.log2(used)))
        matmul = (extents[:, [R, S, Q]] == 1).all(axis=1)
        of_array = np.ceil(extents / side[:, None])
        blocks = np.minimum(np.maximum(np.floor(words / _BLOCK), 1.0), of_array)
        taps = words[:, R] * words[:, S]
        reduced = _parts(
            np.where(matmul, of_array[:, C] * side, extents[:, C]),
            np.where(matmul, blocks[:, C] * side, words[:, C]),
        )
        wide = np.where(matmul, blocks[:, K], _blocks(extents[:, K], words[:, K], side))
        repeats = np.where(matmul, np.ceil(of_array[:, K] / blocks[:, K]), outer[:, K])
        windows = outer[:, R] * outer[:, S]  # parts of the kernel, one after the other
        image = np.maximum(extents[:, P], extents[:, Q]) + (extents[:, R] % 2 == 0)
        across = _parts(
            np.where(matmul, extents[:, P], image),
            np.where(matmul, np.minimum(blocks[:, P] * side, extents[:, P]), words[:, P]),
        )
        down = _parts(np.where(matmul, 1.0, image), np.where(matmul, 1.0, words[:, Q]))
        sizes: list[Tile] = []
        for (columns, width), (rows, height), (parts, channels) in product(across, down, reduced):
            window = [
                (size - 1.0) * nests.stride[:, axis] + (words[:, tap] - 1.0) * nests.dilation[:, axis] + 1.0
                for axis, (size, tap) in enumerate(((width, R), (height, S)))
            ]
            deep = np.ceil(channels / side)
            # The last channels complete a sum: those of the tile at the border, if there is one.
            last = (reduced[1][0] == 0) if len(sizes) % 2 == 0 else np.ones(len(side))
            sizes.append(
                Tile(
                    columns * rows * parts * windows * repeats,
                    taps * deep * wide * height,
                    width,
                    height,
                    window[0] * window[1] * deep,
                    taps * channels * wide,
                    taps * channels * np.minimum(extents[:, K] / PAGE, 1.0),
                    width * height * wide,
                    last / (windows * np.maximum(parts, 1.0)),
                )
            )
        return cls(
            matmul,
            side,
            tuple(sizes),
            words,
            extents[:, [R, S, C, K]].prod(axis=1),
            (sizes[0].inputs + sizes[0].weights) * side / hardware.scratchpad,
            sizes[0].outputs * side / hardware.accumulator,
        )

    def take(self, rows: np.ndarray) -> Calls:
        sizes = tuple(Tile(*(column[rows] for column in size)) for size in self.sizes)
        columns = (self.words, self.weights, self.scratchpad, self.accumulator)
        return Calls(self.matmul[rows], self.side[rows], sizes, *(column[rows] for column in columns))

    def parts(self, size: Tile, constants: Constants) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cycles of one call for computing, for loads, and for stores if it is one that stores."""
        whole = np.floor(size.width / self.side)
        rest = size.width - whole * self.side
        run = whole * self.side + np.where(rest > 0, np.maximum(rest, constants.least_run * self.side), 0.0)
        transfer = (
            constants.input_row * size.inputs
            + constants.weight_row * size.weights
            + constants.page_miss * size.pages
        )
        return size.runs * run, transfer, constants.output_row * size.outputs

    def _of_one_kind(self, constants: Constants) -> np.ndarray:
        total = constants.weight_word * self.weights
        for index, size in enumerate(self.sizes):
            compute, transfer, store = self.parts(size, constants)
            longest = np.maximum(np.maximum(compute, transfer), constants.issue)
            stalled = np.maximum(store - longest, 0.0) * size.stores
            total += size.calls * (longest + stalled + constants.between)
            if index == 0:
                total += np.minimum(compute, transfer) + store
        return total

    def cycles(self, fitted: Fitted) -> np.ndarray:
        """The cycles: [rows]."""
        return np.where(self.matmul, self._of_one_kind(fitted.matmul), self._of_one_kind(fitted.convolution))


def _blocks(extent: np.ndarray, tile: np.ndarray, side: np.ndarray) -> np.ndarray:
    """Blocks of the array in a tile of channels, on average: the last tile ends with the layer's channels."""
    total = sum(count * np.ceil(size / side) for count, size in _parts(extent, tile))
    return np.asarray(total / np.ceil(extent / tile))


def _parts(extent: np.ndarray, tile: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """(how many, how large): whole tiles along an axis, and the remainder at its end."""
    whole = np.floor(extent / tile)
    rest = extent - whole * tile
    return (whole, np.asarray(tile)), ((rest > 0).astype(float), np.maximum(rest, 1.0))


def fit(calls: Calls, measured: np.ndarray) -> Fitted:
    """The constants that minimise the mean error of logarithms. A kind of layer without rows keeps its constants."""
    found = []
    for kind, first in ((~calls.matmul, _CONVOLUTION), (calls.matmul, _MATMUL)):
        if not kind.any():
            found.append(first)
            continue
        rows, logs = calls.take(kind), np.log(measured[kind])

        def loss(point: np.ndarray, rows: Calls = rows, logs: np.ndarray = logs) -> float:
            cycles = rows._of_one_kind(Constants(*np.exp(point)))
            return float(np.minimum(np.abs(np.log(cycles) - logs), _CAP).mean())

        found.append(Constants(*np.exp(_pattern_search(loss, np.log(np.array(first)))).tolist()))
    return Fitted(*found)


def _pattern_search(loss: Callable[[np.ndarray], float], point: np.ndarray) -> np.ndarray:
    """A local minimum: change one coordinate at a time, with steps that grow after a success."""
    best, steps = loss(point), np.full(len(point), 0.3)
    for _ in range(60):
        for axis in range(len(point)):
            for sign in (1.0, -1.0):
                moved = point.copy()
                moved[axis] += sign * steps[axis]
                value = loss(moved)
                if value < best - 1e-7:
                    point, best = moved, value
                    steps[axis] *= 1.3
                    break
            else:
                steps[axis] *= 0.5
        if steps.max() < 0.01:
            break
    return point
