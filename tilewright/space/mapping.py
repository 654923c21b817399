"""Map the iterations of a contraction to those of an instruction.

A matching assigns to each iteration of the instruction a set of the algorithm's axes, fused into one. All candidates
are generated, and those that pass a test on access matrices are kept. A (tensors x axes) and T (tensors x iterations)
say which tensor depends on which axis or iteration, and I (iterations x axes) is the matching:

    A = T x I    and    T = A x I'

in Boolean arithmetic. Then each tensor of the algorithm is accessed as the instruction accesses the corresponding
operand. Axes that are not matched become loops around the instruction and are not in A.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.hw.intrinsics import Intrinsic
from tilewright.loops.tiling import extent_of
from tilewright.space.contraction import Factor, TwoFactorContraction
from tilewright.te.index import coefficient

Matrix = tuple[tuple[bool, ...], ...]
_MIN = 8  # minimum iterations per instruction dimension if axes are left out
_MAX = 4  # maximum mappings of one contraction
TENSOR_TILE = (16, 8, 16)  # m, n and k of a tensor core's smallest instruction


@dataclass(frozen=True)
class Mapping:
    """The axes assigned to the instruction's m, n and k, outermost first. Blocks iterate over `batch`; `outer` are
    reduction loops around the instruction. `left` depends on m and k, `right` on n and k."""

    left: Factor
    right: Factor
    m: tuple[te.Var, ...]
    n: tuple[te.Var, ...]
    k: tuple[te.Var, ...]
    batch: tuple[te.Var, ...]
    outer: tuple[te.Var, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return extent_of(self.m), extent_of(self.n), extent_of(self.k)

    def padded(self, tile: tuple[int, int, int]) -> int:
        """Multiplications of the smallest instruction tiles that cover everything."""
        m, n, k = (-(-size // least) * least for size, least in zip(self.sizes, tile, strict=True))
        return m * n * k * extent_of(self.batch) * extent_of(self.outer)


def times(a: Matrix, b: Matrix) -> Matrix:
    return tuple(
        tuple(any(x and y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True))
        for row in a
    )


def transposed(a: Matrix) -> Matrix:
    return tuple(zip(*a, strict=True))


def is_valid(algorithm: Matrix, instruction: Matrix, matching: Matrix) -> bool:
    return times(instruction, matching) == algorithm and times(algorithm, transposed(matching)) == instruction


def access_matrix(instruction: Intrinsic) -> tuple[tuple[te.Var, ...], Matrix]:
    """The iterations of an instruction, and which of them its result and operands depend on."""
    stage = instruction.stage
    reduction = stage.reduction
    assert reduction is not None
    iterations = (*stage.axes, *reduction.axes)
    walked = {load.source: te.variables(load) for load in te.loads(reduction.body)}
    rows = [set(stage.axes), *(walked[tensor] for tensor in instruction.inputs)]
    return iterations, tuple(tuple(axis in row for axis in iterations) for row in rows)


def matchings(
    axes: Sequence[te.Var], reduced: Sequence[te.Var], iterations: int
) -> Iterator[dict[te.Var, int]]:
    """All assignments of axes to iterations or to none; the last iteration is the reduction."""
    choices: list[Sequence[int | None]] = [
        (None, iterations - 1) if axis in reduced else (None, *range(iterations - 1)) for axis in axes
    ]
    for combination in itertools.product(*choices):
        yield {axis: at for axis, at in zip(axes, combination, strict=True) if at is not None}


def mappings(
    work: TwoFactorContraction, instruction: Intrinsic, tile: tuple[int, int, int] = TENSOR_TILE
) -> list[Mapping]:
    """The valid and useful mappings, those with the fewest axes left out first. If results can be contiguous along n,
    only such mappings are returned. `tile` is the smallest instruction's m, n and k."""
    iterations, target = access_matrix(instruction)
    found: dict[Mapping, None] = {}
    reduced = work.reduction.axes
    for swapped in (False, True):
        for matching in matchings(work.axes, reduced, len(iterations)):
            axes = tuple(matching)
            matrix = tuple(tuple(matching[axis] == at for axis in axes) for at in range(len(iterations)))
            if axes and is_valid(work.access_matrix(axes, swapped), target, matrix):
                mapping = _mapping(work, matching, swapped)
                if _is_sensible(work, mapping):
                    found[mapping] = None
    along = [mapping for mapping in found if coefficient(work.formula.store, mapping.n[-1]) == 1]
    return sorted(along or found, key=lambda mapping: (mapping.padded(tile), -extent_of(mapping.k)))[:_MAX]


def _mapping(work: TwoFactorContraction, matching: dict[te.Var, int], swapped: bool) -> Mapping:
    left, right = (work.right, work.left) if swapped else (work.left, work.right)
    store = work.formula.store

    def walked(at: int, *steps: Factor) -> tuple[te.Var, ...]:
        """The axes of an iteration, ordered by the largest strides of the factors and the output."""
        axes = [axis for axis in matching if matching[axis] == at]
        along = [[factor.stride(axis) for axis in axes] for factor in steps]
        keys = {axis: tuple(-abs(step[n]) for step in along) for n, axis in enumerate(axes)}
        if at < 2:
            keys = {axis: (-abs(coefficient(store, axis) or 0),) for axis in axes}
        return tuple(sorted(axes, key=lambda axis: keys[axis]))

    return Mapping(
        left,
        right,
        walked(0),
        walked(1),
        walked(2, right, left),
        tuple(axis for axis in work.formula.axes if axis not in matching),
        tuple(axis for axis in work.reduction.axes if axis not in matching),
    )


def _is_sensible(work: TwoFactorContraction, mapping: Mapping) -> bool:
    """Whether the axes left out could not be included as well, or enclose enough work; and whether results are
    contiguous along m or n."""
    both = mapping.left.variables & mapping.right.variables
    if not set(mapping.batch) <= both or (mapping.outer and extent_of(mapping.k) < _MIN):
        return False
    around, inside = (
        [abs(mapping.right.stride(axis)) for axis in axes] for axes in (mapping.outer, mapping.k)
    )
    if around and min(around) < max(inside):
        return False
    return any(coefficient(work.formula.store, axes[-1]) == 1 for axes in (mapping.m, mapping.n))
