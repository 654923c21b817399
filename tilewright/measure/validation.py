"""Validation: the inputs a kernel must pass before its time counts, the oracle's answers, and the error each element
may have.

    ordinary   random numbers of both signs, where most of the result is a number then; also what is timed
    edges      zeros, equal numbers, very large and very small ones, stretches of another magnitude
    special    a few NaN and infinities
    rows       whole rows small, wide apart, far from zero to both sides, zero, and nearly constant: what an exponential
               without its maximum, or a variance of digits that cancel, does not survive
    far        of norms of few rows: every row farther from zero still, each elsewhere. How much of a variance is left
               there when its mean is wrong in the last digits is a matter of luck, so that one such row says little
    columns    the same along the last axis
    magnitudes of sums of products: elements that differ in size by many orders of magnitude, of weights too; each
               element of the result is held to the bound of its own products
    peaks      in every row one number far above all others, each time elsewhere: a maximum that misses one shows. In
               short rows every place has its turn in every row, since code for some of the rows may be wrong; in long
               ones the ends have, and some of every lane of a vector. Of different heights: where two products of
               peaks were nearly the same, the digits in which they differ would decide which counts

The last five are for tasks that they can tell anything of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from tilewright.dtypes import DType
from tilewright.graph.ir import Graph, Node, rebuild, toposort
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.measure.bounds import (
    CONTRACTIONS,
    channel_axes,
    may_be_rounded,
    may_be_transformed,
    rounding_errors,
)
from tilewright.measure.exactness import (
    RELATIVE,
    Errors,
    allowed_errors,
    changed_answer,
    rounded_nodes,
    typical_size,
)
from tilewright.measure.magnitudes import spread_out
from tilewright.measure.rows import few_rows
from tilewright.numerics import is_strict, may_lose_digits, may_round_to_tf32

# Relative errors in the L2 norm that a kernel may have on ordinary inputs, by the type of its result.
L2_BOUNDS = {DType.F64: 1e-5, DType.F32: 1e-5, DType.F16: 2e-3, DType.BF16: 2e-2}
# How far one element may be off, in units of its own size and of what the change of all values did to it. Kernels that
# multiply and add as the task says come to a twentieth of these. For sums of products see `bounds.py`.
ELEMENT_BOUNDS = {DType.F64: 1e-5, DType.F32: 1e-5, DType.F16: 2e-3, DType.BF16: 1.2e-2}
_RELAXED_BOUND = 1e-4  # of sums of products by algorithms whose error has no bound for each element
_TF32_BOUND = 1e-3  # the same where operands may be rounded to 10 bits of fraction too
# Times what rounding the answer itself comes to. A rounding between two operators that a kernel leaves out, or one that
# it adds, makes it 1.4 times that; of few elements it might do so by accident. An answer that needs no rounding, as
# that of a maximum, still depends on how what it is of was rounded. In a type finer than what lies between it is only
# that: all of it where the rounding is left out, a little where the last digits of some sums decide it otherwise.
_ROUNDED_ONCE, _ROUNDED_ELEMENTS, _TYPICAL_ROUNDING, _ROUNDED_OTHERWISE = 1.2, 256, 0.2, 0.1
_MIN_SHARE = 1e-2  # of the typical size of all elements, which each may count as its own
# The same with relaxed numerics, where an element's error may be that of a row that its own is added to.
_RELAXED_SHARE, _RELAXED_ODD_SHARE = 1.0, 5.0  # on inputs of one size, of several
_EPILOGUE = 1e-6  # error of an activation, alongside its operand
_OTHER_GELU = (
    1.25  # times what the approximate GELU differs by: its own hyperbolic tangent is approximate too
)
_SPREAD_TYPES = (DType.F32, DType.F16, DType.BF16)
_LARGE, _TINY = 1e3, 2.0**-120
_TINY_HALF = 2.0**-14  # what 16 bits can hold

_SMALL = 2.0**-9  # whose square is about what norms add to a variance
_WIDE, _FAR = 48.0, 150.0  # exponentials of such numbers are beyond single precision
# From here hardly a digit is left of a variance by sums of squares, and most of one by differences: for norms.
_FARTHER, _FAR_ROWS = 16000.0, 64
_TREATMENTS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    lambda x: x * _SMALL,
    lambda x: x + _FAR,
    lambda x: x * _WIDE,
    lambda x: 1.0 + x * _SMALL,
    lambda x: x - _FAR,
    lambda x: x * 0.0,
)
_ROWS = 4  # at least, for an axis to be one along which rows lie
_PEAK, _HIGHER = 300.0, 0.5  # and what the highest is above that, as a share
_GOLDEN = 0.5 * (5**0.5 - 1)  # multiples of which, taken modulo 1, stay apart
_MAX_TURNS, _ROTATED_ELEMENTS = 32, 1 << 17  # of peaks; in all, that several turns are taken of
_ROWS_AT_ONCE = 4  # for each of which a kernel may have code of its own
_POSITIONS_AT_ONCE = 64  # the same of places: some vectors of them
_CLASS_STEP = 17  # has no divisor in common with that, nor with any vector's width
_MAXIMA = {"softmax", "log_softmax", "attention", "amax", "argmax", "max_pool", "adaptive_max_pool"}
_MINIMA = {"amin", "argmin"}
# What these do to numbers of one size they do to those of any.
_SIZE_BLIND = {
    *("neg", "abs", "relu", "leaky_relu", "add", "sub", "mul", "maximum", "minimum", "batch_norm"),
    *("sum", "mean", "amax", "amin", "cumsum", "matmul", "linear", "conv", "conv_transpose"),
    *("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"),
}


class WrongResult(Exception):
    """A kernel ran and computed something else than the oracle."""


class OutOfBoundsWrite(WrongResult):
    """A kernel wrote where it must not: nothing in its process can be trusted any more."""


@dataclass(frozen=True)
class Repeats:
    """Which row of few each row of a task repeats, and the shapes of the inputs that have rows (None: others)."""

    rows: np.ndarray
    shapes: tuple[tuple[int, ...] | None, ...]

    def input(self, number: int, few: np.ndarray) -> np.ndarray:
        shape = self.shapes[number]
        return few if shape is None else few.reshape(len(few), -1)[self.rows].reshape(shape)

    def output(self, flat: np.ndarray) -> np.ndarray:
        """Flat values of the few rows, as those of all."""
        count = int(self.rows.max()) + 1
        return flat.reshape(count, -1)[self.rows].reshape(-1)


@dataclass(frozen=True)
class CheckCase:
    """Inputs and the answer to them. `allowed`: for each element how far it may be off; infinite where nothing can be
    said. Of a `nan_spreads` task a NaN or an infinity may make other elements so too.

    `repeats`: where a task has many rows, these arrays have few, and each row of the task is one of them (`rows.py`).
    """

    name: str
    stored: tuple[np.ndarray, ...]  # the inputs, those of many rows on few
    reference: np.ndarray
    allowed: np.ndarray
    nan_spreads: bool = False
    l2_bound: float = math.inf
    repeats: Repeats | None = None

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """As the task takes them."""
        return tuple(map(self.input, range(len(self.stored))))

    def input(self, number: int) -> np.ndarray:
        stored = self.stored[number]
        return stored if self.repeats is None else self.repeats.input(number, stored)

    def error(self, result: np.ndarray) -> float:
        """The relative L2 error of a flat result. Raises WrongResult where it, or any one element, is too large."""
        reference, limits = self.reference, self.allowed
        if self.repeats is not None:
            reference, limits = self.repeats.output(reference), self.repeats.output(limits)
        with np.errstate(all="ignore"):
            off = np.abs(result.astype(np.float64) - reference)
            wrong = ~(off <= limits)
            if wrong.any():
                self._check_odd_ones(result, wrong, reference, limits)
        if self.l2_bound == math.inf:
            return 0.0
        off[wrong | np.isinf(limits)] = 0.0
        size = float(np.linalg.norm(_finite(reference)))
        return self.checked_l2(float(np.linalg.norm(off)) / (size or 1.0))

    def checked_l2(self, error: float) -> float:
        if not error <= self.l2_bound:
            raise WrongResult(f"its relative error is {error:.1e} on {self.name} inputs")
        return error

    def _check_odd_ones(
        self, result: np.ndarray, wrong: np.ndarray, reference: np.ndarray, limits: np.ndarray
    ) -> None:
        """Elements that are not near the answer: both may be the same infinity, or no number."""
        (positions,) = np.nonzero(wrong)
        got, expected = result[positions].astype(np.float64), reference[positions].astype(np.float64)
        allowed = limits[positions]
        same = (got == expected) | (np.isnan(got) & np.isnan(expected)) | np.isinf(allowed)
        if self.nan_spreads:
            same |= ~np.isfinite(got)
        if not same.all():
            first = int(np.argmin(same))
            raise WrongResult(
                f"element {positions[first]} is {got[first]:.9g}, not {expected[first]:.9g}, and "
                f"{np.count_nonzero(~same)} of {result.size} are wrong, on {self.name} inputs"
            )


def _step(dtype: DType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy).eps)


def _finite(values: np.ndarray) -> np.ndarray:
    return values if values.dtype.kind != "f" else np.where(np.isfinite(values), values, 0.0)


@dataclass(frozen=True)
class Validation:
    """The cases of one task. Constants are the same arrays in all of them but those of "magnitudes"."""

    cases: tuple[CheckCase, ...]

    @property
    def ordinary(self) -> CheckCase:
        return self.cases[0]


def make_validation(task: Task, numerics: str, seed: int) -> Validation:
    rng = np.random.default_rng(seed)
    few = few_rows(task)
    draw = _CheckMaker(task if few is None else few.task, numerics, rng)
    names = ("ordinary", "edges", "special", *draw.treated_names(), *draw.peak_names(), *draw.spread_names())
    cases = [case for case in map(draw.case, names) if case is not None]
    if few is None:
        return Validation(tuple(cases))
    shapes = tuple(
        node.shape if repeated else None
        for node, repeated in zip(task.graph.inputs, few.repeated, strict=True)
    )
    return Validation(tuple(replace(case, repeats=Repeats(few.repeats(rng), shapes)) for case in cases))


# -- inputs -----------------------------------------------------------------------------------------------------------


class _CheckMaker:
    def __init__(self, task: Task, numerics: str, rng: np.random.Generator) -> None:
        self.task, self.rng = task, rng
        self.graph = task.graph
        dtype = task.output.dtype
        self.bound = ELEMENT_BOUNDS.get(dtype, 0.0)
        self.numerics = numerics
        self.sums = [node for node in self.graph.nodes() if node.op in CONTRACTIONS]
        self.relaxed = may_lose_digits(numerics) and any(node.dtype is DType.F32 for node in self.sums)
        if self.relaxed:
            self.bound = max(self.bound, _TF32_BOUND if may_round_to_tf32(numerics) else _RELAXED_BOUND)
        self.rounded = rounded_nodes(self.graph, numerics)
        for node in self.rounded:  # a sum whose last digits decide may be off by a whole step of this type
            self.bound = max(self.bound, ELEMENT_BOUNDS[node.dtype])
        self.overflowing = {
            node
            for total in self.sums
            for node in toposort(total.inputs)
            if node.dtype is DType.F16 and not (node.is_input or node.is_constant)
        } - self.rounded
        self.extents = _index_extents(self.graph)
        self.relative = any(node.op in RELATIVE for node in self.graph.nodes())
        self.treatments = (*_TREATMENTS, lambda x: x + _FARTHER) if self.relative else _TREATMENTS
        self.hides_keys = any(n.op == "attention" and n.attrs["causal"] for n in self.graph.nodes())
        self.nan_spreads = self.relaxed or any(node.op == "attention" for node in self.graph.nodes())
        # Both signs, unless most of the result is no number then: a logarithm's, say.
        self.positive = False
        self.inputs = self._ordinary()
        self.answer = self._answer(self.inputs)
        if self.answer.dtype.kind == "f" and self.answer.size and np.isfinite(self.answer).mean() <= 0.5:
            self.positive = True
            self.inputs = self._ordinary()
            self.answer = self._answer(self.inputs)

    def case(self, name: str) -> CheckCase | None:
        inputs, answer = self.inputs, self.answer
        if name == "magnitudes":
            inputs = self._spread()
        elif name != "ordinary":
            change = {"edges": self._edges, "special": self._special}.get(name) or self._treatment(name)
            inputs = [
                array if number in self.task.constants else change(array, node.dtype)
                for number, (array, node) in enumerate(zip(inputs, self.graph.inputs, strict=True))
            ]
        if name != "ordinary":
            if all(new is old for new, old in zip(inputs, self.inputs, strict=True)):
                return None  # nothing but constants and integers
            answer = self._answer(inputs)
        dtype = self.task.output.dtype
        allowed = self._allowed(name, inputs, answer)
        answer = answer.reshape(-1)
        if dtype.is_float:
            with np.errstate(all="ignore"):  # what the type cannot hold is infinite
                overflown = np.isinf(answer.astype(dtype.numpy)) & np.isfinite(answer)
            answer = np.where(overflown, np.copysign(np.inf, answer), answer)
        nan_spreads = self.nan_spreads and name == "special"
        if name == "special" and self.hides_keys:
            # What a query does not see may be multiplied by 0, or not read at all: then NaN does not reach it.
            allowed = np.where(np.isfinite(answer), allowed, np.float32(np.inf))
        if self.overflowing and name != "ordinary":
            # A kernel may round a computed operand to float16, where it overflows, or keep it in float32.
            (rounded,) = evaluate(self.graph, inputs, precise=True, rounded=self.overflowing)
            overflown = np.isfinite(answer) & ~np.isfinite(rounded.reshape(-1))
            allowed = np.where(overflown, np.float32(np.inf), allowed)
        bound = self._l2_bound(answer) if name == "ordinary" else math.inf
        return CheckCase(name, tuple(inputs), answer, allowed, nan_spreads, bound)

    def _allowed(self, name: str, inputs: Sequence[np.ndarray], answer: np.ndarray) -> np.ndarray:
        dtype, flat = self.task.output.dtype, answer.reshape(-1)
        typical = typical_size(answer, None if self.relaxed else _treated_axis(name, answer.shape)).reshape(
            -1
        )
        alone = name == "magnitudes"
        found = []
        for direction in (1.0, -1.0) if alone else (1.0,):
            changed = changed_answer(
                self.graph, inputs, self.rounded, self._errors(alone, direction)
            ).reshape(-1)
            share = 0.0 if alone else self._least_share(name)
            found.append(
                allowed_errors(self.graph, flat, changed, dtype, typical, self.bound, share, alone=alone)
            )
        allowed: np.ndarray = np.maximum.reduce(found)
        allowed = allowed + self._of_gelu(inputs, flat)
        return allowed + self._of_epilogue(inputs, allowed) if alone else allowed

    def _of_epilogue(self, inputs: Sequence[np.ndarray], allowed: np.ndarray) -> np.ndarray:
        """What an activation behind a sum adds: its own rounding is small compared with the sum, not alongside what is
        left of it (of a GELU far below zero, say)."""
        if all(map(self._is_size_blind, self.graph.nodes())):
            return np.zeros_like(allowed)
        (summed,) = evaluate(Graph(self.graph.inputs, (self.sums[-1],)), inputs, precise=True)
        sizes = np.abs(summed).reshape(-1)
        return _EPILOGUE * (sizes if sizes.size == allowed.size else sizes.max(initial=0.0)).astype(
            np.float32
        )

    def _of_gelu(self, inputs: Sequence[np.ndarray], answer: np.ndarray) -> np.ndarray | float:
        """What the approximation by a hyperbolic tangent adds, where an exact GELU of 16 bits may be computed so."""
        exact = [n for n in self.graph.nodes() if n.op == "gelu" and n.attrs["approximate"] == "none"]
        if is_strict(self.numerics) or not any(node.dtype.is_half for node in exact):
            return 0.0

        def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
            if node not in exact or not node.dtype.is_half:
                return None
            return apply("gelu", *operands, approximate="tanh")

        (other,) = evaluate(rebuild(self.graph, rule), inputs, precise=True)
        with np.errstate(all="ignore"):
            moved = np.abs(other.reshape(-1).astype(np.float64) - answer)
        return np.asarray(_OTHER_GELU * np.nan_to_num(moved, nan=0.0, posinf=0.0), np.float32)

    def _errors(self, every: bool, direction: float) -> Errors | None:
        """By how much sums of products may be off, in units of the change that is tried: every one, or those that may
        be computed in another basis, whose errors are not their own products' alone."""
        summed = [
            n
            for n in self.graph.nodes()
            if every or may_be_transformed(n, self.numerics) or may_be_rounded(n, self.numerics)
        ]
        if self.relaxed or not summed:
            return None

        def errors(node: Node, operands: Sequence[np.ndarray]) -> np.ndarray | None:
            found = rounding_errors(node, operands, self.numerics) if node in summed else None
            return None if found is None else direction / self.bound * found

        return errors

    def _answer(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        (answer,) = evaluate(self.graph, inputs, precise=True, rounded=self.rounded)
        return answer

    def _l2_bound(self, answer: np.ndarray) -> float:
        dtype = self.task.output.dtype
        bound = L2_BOUNDS.get(dtype, 0.0)
        if any(may_be_rounded(node, self.numerics) for node in self.sums):
            bound = max(bound, _TF32_BOUND)
        if not self.rounded or not dtype.is_float:
            return bound
        bound = max(bound, *(L2_BOUNDS[node.dtype] for node in self.rounded))
        if answer.size < _ROUNDED_ELEMENTS:
            return bound
        numbers = _finite(answer)
        off = numbers - numbers.astype(dtype.numpy).astype(np.float64)
        own = float(np.linalg.norm(off) / (np.linalg.norm(numbers) or 1.0))
        step, coarsest = _step(dtype), max(_step(node.dtype) for node in self.rounded)
        if step < coarsest:
            return min(bound, max(_ROUNDED_ONCE * own, _ROUNDED_OTHERWISE * coarsest))
        return min(bound, _ROUNDED_ONCE * max(own, _TYPICAL_ROUNDING * step))

    def treated_names(self) -> list[str]:
        """The cases of rows that are treated: of few rows several, until each has been treated in every way."""
        if all(self._is_size_blind(node) for node in self.graph.nodes()):
            return []
        shapes = [node.shape for node in self.graph.inputs if node.dtype.is_float]
        extents = [shape[axis] for shape in shapes if (axis := _treated_axis("rows", shape)) is not None]
        count = len(self.treatments)
        fewest = max(1, min(extents, default=count))
        far = 0
        if self.relative and fewest < count * _FAR_ROWS:
            most = max(1, _ROTATED_ELEMENTS // max(map(math.prod, shapes)))
            far = min(most, -(-_FAR_ROWS // fewest))
        return [*_turns("rows", -(-count // fewest)), *_turns("far", far), "columns"]

    def peak_names(self) -> list[str]:
        """Of small tasks as many as there are places in a row; of few rows several, until every place has had its peak
        in each of the rows that may be computed at once."""
        shapes = [node.shape for node in self.graph.inputs if node.dtype.is_float and node.type.size]
        if not shapes or not any(node.op in _MAXIMA | _MINIMA for node in self.graph.nodes()):
            return []
        largest = max(shapes, key=math.prod)
        positions, size = (largest[self._peak_axis(largest)] if largest else 1), math.prod(largest)
        most = max(1, min(_MAX_TURNS, _ROTATED_ELEMENTS // size))
        turns = (
            positions if positions <= most else min(most, -(-_ROWS_AT_ONCE * positions * positions // size))
        )
        return _turns("peaks", turns)

    def _peak_axis(self, shape: tuple[int, ...]) -> int:
        """The one along which a maximum of such an input is taken, as far as that is known; else the last."""
        for node in self.graph.nodes():
            if node.op in _MAXIMA | _MINIMA and node.inputs[0].shape == shape:
                axis = node.attrs.get("axis", (node.attrs.get("axes") or (-1,))[-1])
                return int(axis) % len(shape)
        return len(shape) - 1

    @staticmethod
    def _is_size_blind(node: Node) -> bool:
        if node.is_input or node.is_constant or node.op in _SIZE_BLIND:
            return True
        return op_of(node.op).fusion is Fusion.INJECTIVE

    def _least_share(self, name: str) -> float:
        if not self.relaxed:
            return _MIN_SHARE
        return _RELAXED_SHARE if name in ("ordinary", "special") else _RELAXED_ODD_SHARE

    def spread_names(self) -> list[str]:
        floats = all(node.dtype in _SPREAD_TYPES for node in self.sums)
        return ["magnitudes"] if self.sums and floats and not self.relaxed else []

    def _spread(self) -> list[np.ndarray]:
        """Inputs that sums of products are of, spread out along the axis that is summed over."""
        inputs = list(self.inputs)
        numbers = {node: number for number, node in enumerate(self.graph.inputs)}
        for node in self.sums:
            for operand, axis, weight in zip(node.inputs, channel_axes(node), (False, True), strict=False):
                for source in toposort([operand]):
                    alike = (
                        source.is_input and source.type.rank == operand.type.rank and source.dtype.is_float
                    )
                    if alike and source.shape[axis] == operand.shape[axis]:
                        number = numbers[source]
                        inputs[number] = spread_out(inputs[number], source.dtype, (axis,), weight, self.rng)
        return inputs

    def _treatment(self, name: str) -> Callable[[np.ndarray, DType], np.ndarray]:
        _, _, turn = name.partition("turn ")
        if name.startswith("peaks"):
            return lambda array, dtype: self._peaks(array, dtype, int(turn or 0))

        def treated(array: np.ndarray, dtype: DType) -> np.ndarray:
            axis = _treated_axis(name, array.shape)
            if not dtype.is_float or not array.size or axis is None:
                return array
            count, extent = len(self.treatments), array.shape[axis]
            positions = np.arange(extent)
            kinds = (
                positions * count // extent if extent >= count else positions + int(turn or 0) * extent
            ) % count
            rows = np.moveaxis(array.astype(np.float64), axis, 0)
            if name.startswith("far"):
                offsets = _FARTHER * self.rng.uniform(0.5, 1.0, extent)
                rows += np.expand_dims(offsets, tuple(range(1, rows.ndim)))
            else:
                for kind, treat in enumerate(self.treatments):
                    rows[kinds == kind] = treat(rows[kinds == kind])
            if self.positive:
                np.abs(rows, out=rows)
            return np.ascontiguousarray(np.moveaxis(rows, 0, axis).astype(array.dtype))

        return treated

    def _ordinary(self) -> list[np.ndarray]:
        return [
            self._drawn(node, number in self.task.constants, self.extents.get(node))
            for number, node in enumerate(self.graph.inputs)
        ]

    def _drawn(self, node: Node, constant: bool, extent: int | None) -> np.ndarray:
        dtype, shape, rng = node.dtype, node.shape, self.rng
        if dtype.is_float:
            values = rng.standard_normal(shape, dtype=np.float32)
            if constant and len(shape) > 1:
                values /= np.float32(math.sqrt(math.prod(shape[1:])))  # sums of products stay near one
            return np.asarray(np.abs(values) if self.positive else values, dtype.numpy)
        if dtype in (DType.I8, DType.U8):
            limits = np.iinfo(dtype.numpy)
            return rng.integers(limits.min, limits.max, shape, dtype=dtype.numpy, endpoint=True)
        if dtype is DType.BOOL:
            return rng.integers(0, 2, shape).astype(dtype.numpy)
        if extent is not None:  # from the end, too
            return rng.integers(-extent, extent, shape).astype(dtype.numpy)
        return rng.integers(0, 4, shape).astype(dtype.numpy)

    def _edges(self, array: np.ndarray, dtype: DType) -> np.ndarray:
        rng = self.rng
        if not array.size:
            return array
        flat = array.reshape(-1).copy()
        if dtype in (DType.I8, DType.U8):
            limits = np.iinfo(dtype.numpy)
            for limit in (limits.min, limits.max, 0):
                flat[rng.random(flat.size) < 0.15] = limit
            return flat.reshape(array.shape)
        if not dtype.is_float:
            return array
        if not self.positive:
            flat = -flat  # what was cut off by a relu shows now
        for magnitude in (2.0**-12, 2.0**-6, 8.0):
            flat[_stretch(rng, flat.size)] *= np.asarray(magnitude, flat.dtype)
        flat[_stretch(rng, flat.size)] = 1.0
        tiny = _TINY_HALF if dtype is DType.F16 else _TINY
        for value, share in ((0.0, 0.1), (1.0, 0.05), (tiny, 0.05)):
            flat[rng.random(flat.size) < share] = value
        # Side by side, so that elsewhere sums are not drowned by them.
        large = flat[_stretch(rng, flat.size)]
        large[rng.random(large.size) < 0.2] = _LARGE
        if not self.positive:
            large[rng.random(large.size) < 0.2] = -_LARGE
        return flat.reshape(array.shape)

    def _peaks(self, array: np.ndarray, dtype: DType, turn: int) -> np.ndarray:
        if not dtype.is_float or not array.size or not array.shape:
            return array
        moved = np.moveaxis(array, self._peak_axis(array.shape), -1)
        rows = moved.reshape(-1, moved.shape[-1]).copy()
        count, positions = rows.shape
        peak = _PEAK if any(node.op in _MAXIMA for node in self.graph.nodes()) else -_PEAK
        numbers = np.arange(count)
        heights = peak * (1.0 + _HIGHER * (numbers * _GOLDEN % 1.0))
        # As many turns as there are places bring a row to each of them; of many rows each residue class comes to each.
        step = next(n for n in itertools.count(min(count, positions)) if math.gcd(n, positions) == 1)
        rotated = (numbers + numbers // positions + turn * step) % positions
        rows[numbers, _order_of_positions(positions)[rotated]] += heights.astype(rows.dtype)
        return np.ascontiguousarray(np.moveaxis(rows.reshape(moved.shape), -1, self._peak_axis(array.shape)))

    def _special(self, array: np.ndarray, dtype: DType) -> np.ndarray:
        if not dtype.is_float or not array.size:
            return array
        flat = array.reshape(-1).copy()
        count = max(1, min(8, flat.size // 64))
        for value in (np.nan, np.inf) if self.positive else (np.nan, np.inf, -np.inf):
            flat[self.rng.integers(0, flat.size, count)] = value
        return flat.reshape(array.shape)


def _stretch(rng: np.random.Generator, size: int) -> slice:
    """An eighth of so many elements, side by side."""
    length = max(1, size // 8)
    begin = int(rng.integers(0, size - length + 1))
    return slice(begin, begin + length)


def _order_of_positions(positions: int) -> np.ndarray:
    """Those of a row: the ends, then one of each residue class, at random, then another of each, and so on."""
    rounds = -(-positions // _POSITIONS_AT_ONCE)
    classes = np.arange(_POSITIONS_AT_ONCE) * _CLASS_STEP % _POSITIONS_AT_ONCE
    starts = np.random.default_rng(positions).integers(0, rounds, _POSITIONS_AT_ONCE)
    every = (np.arange(rounds)[:, None] + starts) % rounds * _POSITIONS_AT_ONCE + classes
    inner = every[(every > 0) & (every < positions - 1)]
    return np.array([positions - 1, 0, *inner])[:positions]


def _index_extents(graph: Graph) -> dict[Node, int]:
    """For integer inputs that places are looked up by: how many places there are."""
    found: dict[Node, int] = {}
    for node in graph.nodes():
        if node.op not in ("take", "take_along"):
            continue
        extent = node.inputs[0].shape[node.attrs["axis"]]
        for source in toposort([node.inputs[1]]):
            if source.is_input and source.dtype.is_integer:
                found[source] = min(extent, found.get(source, extent))
    return found


def _turns(name: str, count: int) -> list[str]:
    return [name if turn == 0 else f"{name}, turn {turn}" for turn in range(count)]


def _treated_axis(name: str, shape: Sequence[int]) -> int | None:
    """The axis along which the rows of a case are told apart; None where there is none."""
    if name == "columns":
        return len(shape) - 1 if shape and shape[-1] >= _ROWS else None
    if not name.startswith(("rows", "far")) or not shape:
        return None
    return next((axis for axis, extent in enumerate(shape) if extent >= _ROWS), 0)
