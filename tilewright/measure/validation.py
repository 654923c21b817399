"""Validation: the inputs a kernel must pass before its time counts, the oracle's results, and the error each element
may have.

    ordinary   random numbers of both signs, if most of the result is finite then; also used for timing
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

The last five are used only for tasks to which they apply.
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
from tilewright.graph.tile_operator import has_tile_kernels, inlined
from tilewright.measure.bounds import (
    CONTRACTIONS,
    channel_axes,
    may_be_rounded,
    may_be_transformed,
    rounding_errors,
)
from tilewright.measure.chained import chain_errors, overflown_results
from tilewright.measure.check_inputs import index_extents, random_values, with_edges, with_specials
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

# Allowed relative L2 errors of a kernel on ordinary inputs, by the type of its result.
L2_BOUNDS = {DType.F64: 1e-5, DType.F32: 1e-5, DType.F16: 2e-3, DType.BF16: 2e-2}
# The allowed error of one element, in units of its own size and of its change under the perturbation. Kernels that
# multiply and add as defined reach a twentieth of these. For contractions see `bounds.py`.
ELEMENT_BOUNDS = {DType.F64: 1e-5, DType.F32: 1e-5, DType.F16: 2e-3, DType.BF16: 1.2e-2}
_RELAXED_BOUND = 1e-4  # for contractions by algorithms without an error bound for each element
_TF32_BOUND = 1e-3  # the same if operands may also be rounded to 10 fraction bits
# Multiples of the error of rounding the result itself. A rounding between operators that a kernel omits or adds gives
# 1.4 times that; with few elements it might happen by accident. A result without its own rounding, such as a maximum,
# still depends on the rounding of its operands. In a type finer than the intermediate ones it is only that: the full
# error if the rounding is omitted, a little if the last digits of some sums differ.
_ROUNDED_ONCE, _ROUNDED_ELEMENTS, _TYPICAL_ROUNDING, _ROUNDED_OTHERWISE = 1.2, 256, 0.2, 0.1
_MIN_SHARE = 1e-2  # minimum size of an element, as a share of the typical size of all elements
# The same with relaxed numerics, where an element may have the error of another row that is added to its own.
_RELAXED_SHARE, _RELAXED_ODD_SHARE = 1.0, 5.0  # for inputs of one magnitude, and of several
_EPILOGUE = 1e-6  # error of an activation, besides its operand's
_OTHER_GELU = 1.25  # factor of the difference to the approximate GELU, whose tanh is approximate too
_SPREAD_TYPES = (DType.F32, DType.F16, DType.BF16)
_SMALL = 2.0**-9  # its square is about the epsilon that norms add to a variance
_WIDE, _FAR = 48.0, 150.0  # exponentials of these are outside single precision
# From here on, hardly any digits remain of a variance by sums of squares, and most of one by differences: for norms.
_FARTHER, _FAR_ROWS = 16000.0, 64
_TREATMENTS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    lambda x: x * _SMALL,
    lambda x: x + _FAR,
    lambda x: x * _WIDE,
    lambda x: 1.0 + x * _SMALL,
    lambda x: x - _FAR,
    lambda x: x * 0.0,
)
_ROWS = 4  # minimum for an axis of rows
_PEAK, _HIGHER = 300.0, 0.5  # and the relative excess of the highest
_GOLDEN = 0.5 * (5**0.5 - 1)  # its multiples modulo 1 are well spread
_MAX_TURNS, _ROTATED_ELEMENTS = 32, 1 << 17  # maximum turns of peaks; maximum elements for several turns
_ROWS_AT_ONCE = 4  # rows for each of which a kernel may have separate code
_POSITIONS_AT_ONCE = 64  # the same for positions: some vectors
_CLASS_STEP = 17  # coprime to that and to any vector width
_MAXIMA = {"softmax", "log_softmax", "attention", "amax", "argmax", "max_pool", "adaptive_max_pool"}
_MINIMA = {"amin", "argmin"}
# Operators that act the same on numbers of any magnitude.
_SIZE_BLIND = {
    *("neg", "abs", "relu", "leaky_relu", "add", "sub", "mul", "maximum", "minimum", "batch_norm"),
    *("sum", "mean", "amax", "amin", "cumsum", "matmul", "linear", "conv", "conv_transpose"),
    *("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool"),
}


class WrongResult(Exception):
    """A kernel's result differs from the oracle's."""


class OutOfBoundsWrite(WrongResult):
    """A kernel wrote out of bounds: nothing in its process can be trusted any more."""


@dataclass(frozen=True)
class Repeats:
    """The distinct row that each row of a task repeats, and the shapes of the inputs that have rows (None for
    others)."""

    rows: np.ndarray
    shapes: tuple[tuple[int, ...] | None, ...]

    def input(self, number: int, few: np.ndarray) -> np.ndarray:
        shape = self.shapes[number]
        return few if shape is None else few.reshape(len(few), -1)[self.rows].reshape(shape)

    def output(self, flat: np.ndarray) -> np.ndarray:
        """Expand flat values of the few rows to all rows."""
        count = int(self.rows.max()) + 1
        return flat.reshape(count, -1)[self.rows].reshape(-1)


@dataclass(frozen=True)
class CheckCase:
    """Inputs and the reference result. `allowed`: the allowed error of each element; infinite if unknown. In a
    `nan_spreads` task, a NaN or an infinity may spread to other elements.

    `repeats`: if a task has many rows, these arrays have few, and each row of the task is one of them (`rows.py`).
    """

    name: str
    stored: tuple[np.ndarray, ...]  # the inputs; those with many rows on few
    reference: np.ndarray
    allowed: np.ndarray
    nan_spreads: bool = False
    l2_bound: float = math.inf
    repeats: Repeats | None = None

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """In the task's shapes."""
        return tuple(map(self.input, range(len(self.stored))))

    def input(self, number: int) -> np.ndarray:
        stored = self.stored[number]
        return stored if self.repeats is None else self.repeats.input(number, stored)

    def error(self, result: np.ndarray) -> float:
        """The relative L2 error of a flat result. Raises WrongResult if it, or the error of any element, is too
        large."""
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
        """Check elements that are far from the reference: both may be the same infinity, or NaN."""
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
    """The cases of one task. Constants are the same arrays in all of them, except in "magnitudes"."""

    cases: tuple[CheckCase, ...]

    @property
    def ordinary(self) -> CheckCase:
        return self.cases[0]


def make_validation(task: Task, numerics: str, seed: int) -> Validation:
    rng = np.random.default_rng(seed)
    if has_tile_kernels(
        task.graph
    ):  # a user's kernel answers for ordinary numbers; what else it takes is up to it
        maker = _CheckMaker(Task(inlined(task.graph), task.constants), numerics, rng)
        return Validation(tuple(case for case in (maker.case("ordinary"),) if case is not None))
    few = few_rows(task)
    maker = _CheckMaker(task if few is None else few.task, numerics, rng)
    names = (
        "ordinary",
        "edges",
        "special",
        *maker.treated_names(),
        *maker.peak_names(),
        *maker.spread_names(),
    )
    cases = [case for case in map(maker.case, names) if case is not None]
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
        for node in self.rounded:  # a sum whose last digits matter may be off by a whole step of this type
            self.bound = max(self.bound, ELEMENT_BOUNDS[node.dtype])
        self.overflowing = {
            node
            for total in self.sums
            for node in toposort(total.inputs)
            if node.dtype is DType.F16 and not (node.is_input or node.is_constant)
        } - self.rounded
        self.extents = index_extents(self.graph)
        self.relative = any(node.op in RELATIVE for node in self.graph.nodes())
        self.treatments = (*_TREATMENTS, lambda x: x + _FARTHER) if self.relative else _TREATMENTS
        self.hides_keys = any(n.op == "attention" and n.attrs["causal"] for n in self.graph.nodes())
        self.nan_spreads = self.relaxed or any(node.op == "attention" for node in self.graph.nodes())
        # Both signs, unless most of the result is then not finite: a logarithm's, say.
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
            change = self._treatment(name)
            inputs = [
                array if number in self.task.constants else change(array, node.dtype)
                for number, (array, node) in enumerate(zip(inputs, self.graph.inputs, strict=True))
            ]
        if name != "ordinary":
            if all(new is old for new, old in zip(inputs, self.inputs, strict=True)):
                return None  # only constants and integers
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
            # Keys that a query does not see may be multiplied by 0, or not read at all; then NaN does not reach it.
            allowed = np.where(np.isfinite(answer), allowed, np.float32(np.inf))
        if self.overflowing and name != "ordinary":
            # A kernel may round a computed operand to float16, where it overflows, or keep it in float32.
            overflown = np.isfinite(answer) & overflown_results(self.graph, self.overflowing, inputs)
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
        allowed = allowed + self._of_gelu(inputs, flat) + chain_errors(self.graph, inputs, self.numerics)
        return allowed + self._of_epilogue(inputs, allowed, alone)

    def _of_epilogue(self, inputs: Sequence[np.ndarray], allowed: np.ndarray, alone: bool) -> np.ndarray:
        """The error that activations after a sum add: the rounding inside one is small relative to its operand, bias
        included, but not relative to a small result (a GELU far below zero). Other operators count only where each
        element is judged `alone`; otherwise the typical size of the results covers them."""
        before = {node for total in self.sums for node in toposort([total])}
        operands = {
            operand
            for node in self.graph.nodes()
            if node not in before and not self._is_size_blind(node)
            if alone or op_of(node.op).fusion is Fusion.ELEMENTWISE
            for operand in node.inputs
            if operand.dtype.is_float and not before.isdisjoint(toposort([operand]))
        }
        sizes = np.zeros_like(allowed)
        if not operands:
            return sizes
        for value in evaluate(Graph(self.graph.inputs, tuple(operands)), inputs, precise=True):
            size = np.abs(_finite(np.asarray(value, np.float64))).reshape(-1)
            sizes = np.maximum(sizes, size if size.size == allowed.size else size.max(initial=0.0))
        return (_EPILOGUE * sizes).astype(np.float32)

    def _of_gelu(self, inputs: Sequence[np.ndarray], answer: np.ndarray) -> np.ndarray | float:
        """The error of the tanh approximation, where an exact GELU in 16 bits may use it."""
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
        """The allowed errors of contractions in units of the perturbation: all of them, or those that may be computed
        in another basis, whose errors depend on other products too."""
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
        """The cases with modified rows: several if there are few rows, until each row has had every modification."""
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
        """In small tasks, as many cases as positions in a row; with few rows several, until every position has had
        its peak in each row that may be computed at once."""
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
        """The axis along which a maximum of this input is taken, if known; otherwise the last."""
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
        """Inputs of contractions, with magnitudes spread along the reduction axis."""
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
        if name == "edges":
            return lambda array, dtype: with_edges(array, dtype, self.rng, self.positive)
        if name == "special":
            return lambda array, dtype: with_specials(array, dtype, self.rng, self.positive)
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
            random_values(
                node, self.rng, number in self.task.constants, self.extents.get(node), self.positive
            )
            for number, node in enumerate(self.graph.inputs)
        ]

    def _peaks(self, array: np.ndarray, dtype: DType, turn: int) -> np.ndarray:
        if not dtype.is_float or not array.size or not array.shape:
            return array
        moved = np.moveaxis(array, self._peak_axis(array.shape), -1)
        rows = moved.reshape(-1, moved.shape[-1]).copy()
        count, positions = rows.shape
        peak = _PEAK if any(node.op in _MAXIMA for node in self.graph.nodes()) else -_PEAK
        numbers = np.arange(count)
        heights = peak * (1.0 + _HIGHER * (numbers * _GOLDEN % 1.0))
        # As many turns as positions bring a row's peak to each of them; with many rows, each residue class reaches
        # each.
        step = next(n for n in itertools.count(min(count, positions)) if math.gcd(n, positions) == 1)
        rotated = (numbers + numbers // positions + turn * step) % positions
        rows[numbers, _order_of_positions(positions)[rotated]] += heights.astype(rows.dtype)
        return np.ascontiguousarray(np.moveaxis(rows.reshape(moved.shape), -1, self._peak_axis(array.shape)))


def _order_of_positions(positions: int) -> np.ndarray:
    """The positions of a row: the ends, then one of each residue class, at random, then another of each, and
    so on."""
    rounds = -(-positions // _POSITIONS_AT_ONCE)
    classes = np.arange(_POSITIONS_AT_ONCE) * _CLASS_STEP % _POSITIONS_AT_ONCE
    starts = np.random.default_rng(positions).integers(0, rounds, _POSITIONS_AT_ONCE)
    every = (np.arange(rounds)[:, None] + starts) % rounds * _POSITIONS_AT_ONCE + classes
    inner = every[(every > 0) & (every < positions - 1)]
    return np.array([positions - 1, 0, *inner])[:positions]


def _turns(name: str, count: int) -> list[str]:
    return [name if turn == 0 else f"{name}, turn {turn}" for turn in range(count)]


def _treated_axis(name: str, shape: Sequence[int]) -> int | None:
    """The axis of a case's rows; None if there is none."""
    if name == "columns":
        return len(shape) - 1 if shape and shape[-1] >= _ROWS else None
    if not name.startswith(("rows", "far")) or not shape:
        return None
    return next((axis for axis, extent in enumerate(shape) if extent >= _ROWS), 0)
