"""The node builder for the ONNX node that is being converted."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import onnx

from tilewright.dtypes import DType
from tilewright.errors import InternalError
from tilewright.frontend.builder import GraphBuilder, Ints, Number, Operand, Unsupported
from tilewright.frontend.onnx.statics import Statics
from tilewright.frontend.onnx.types import spanned
from tilewright.graph.ir import Node, constant
from tilewright.graph.provenance import Provenance
from tilewright.support.budget import MAX_RANK, Budget

Value = Any  # a Node, a list of values (a sequence), or None (an empty optional)

# Maximum elements of the comparison tables for scatter, sort and similar operators.
MAX_TABLE = 1 << 26

_FEW_OPERANDS = 16  # a node with more counts as several
_PER_ELEMENT = 32  # bytes per element while a table is made: 64 bits, with a few copies


class Context(GraphBuilder):
    """Builds the nodes of one ONNX node."""

    def __init__(
        self,
        proto: onnx.NodeProto,
        source: Provenance,
        opset: int,
        statics: Statics,
        run_graph: Callable[[onnx.GraphProto, Sequence[Value]], list[Value]],
        budget: Budget,
        quantised: dict[Node, Any] | None = None,
        failures: list[tuple[str, str]] | None = None,
    ) -> None:
        super().__init__(source)
        self.proto = proto
        self.opset = opset
        self.statics = statics
        self.run_graph = run_graph
        self.budget = budget
        self.quantised = {} if quantised is None else quantised  # see `products`
        self.failures = (
            [] if failures is None else failures
        )  # of the nodes so far, those of subgraphs included

    def wants(self, output: int) -> bool:
        """Whether the node's result at this position has a name, so that something may read it."""
        return output < len(self.proto.output) and bool(self.proto.output[output])

    # -- nodes ---------------------------------------------------------------------------------------------------

    def made(self, node: Node) -> None:
        self.budget.count(1 + len(node.inputs) // _FEW_OPERANDS, str(self.source))
        if node.type.rank > MAX_RANK:
            raise Unsupported(f"a result of {node.type.rank} axes, and a tensor has at most {MAX_RANK}")
        size = spanned(node.shape) * node.dtype.bytes
        if node.is_constant:
            self.budget.hold(size, f"{self.source}: a table")
        elif not self.budget.has_room(size):
            self.budget.fits(size, f"{self.source}: a result of type {node.type!r}")

    def own(self, value: np.ndarray) -> Node:
        """A constant from the model's own data, which was counted when it was read."""
        self.budget.count(1, str(self.source))
        return constant(value)

    def reserve(self, elements: int, what: str) -> None:
        """Announce a table of this many elements that the model requires."""
        self.budget.fits(_PER_ELEMENT * elements, f"{self.source}: {what}")
        self.budget.work(elements, f"{self.source}: {what}")

    def stray(self, op: str, operand: Any) -> Exception:
        return Unsupported(f"an operand that is not a tensor but {_kind(operand)}")

    def ints(self, values: Ints) -> Node:
        return self.constant(np.array(tuple(values), np.int64))

    # -- values that must be known -------------------------------------------------------------------------------

    def static(self, x: Node, *, pin: bool = True) -> np.ndarray:
        """The value of `x`, which must not depend on a call (see `statics`)."""
        return self.statics.value(x, pin=pin)

    def static_ints(self, x: Node) -> tuple[int, ...]:
        return tuple(int(value) for value in self.static(x).reshape(-1))

    def static_int(self, x: Node) -> int:
        values = self.static_ints(x)
        if len(values) != 1:
            raise Unsupported(f"{len(values)} numbers where there should be one")
        return values[0]

    def check_values(self, x: Node, least: int, most: int, what: str) -> None:
        """Raise Unsupported for integers fixed by the model that are outside `least` to `most`."""
        if x.type.size and self.statics.is_static(x):
            values = self.static(x)
            if values.min() < least or values.max() > most:
                raise Unsupported(f"{what} from {values.min()} to {values.max()}: must be {least} to {most}")

    def ints_or(self, x: Node | None, attribute: Ints | None) -> tuple[int, ...] | None:
        """A value that newer opsets have as an input and older ones as an attribute."""
        if x is not None:
            return self.static_ints(x)
        return None if attribute is None else tuple(attribute)

    # -- types ---------------------------------------------------------------------------------------------------

    def operand(self, x: Operand, dtype: DType) -> Node:
        return x if isinstance(x, Node) else self.full(x, dtype)

    def arithmetic(self, op: str, *operands: Operand) -> Node:
        """`op` on operands of which at least one is a node; numbers take its type."""
        dtype = next((x.dtype for x in operands if isinstance(x, Node)), None)
        if dtype is None:
            raise InternalError(f"{op} of numbers alone")
        return self.emit(op, *(self.operand(x, dtype) for x in operands))

    def both(self, a: Node, b: Node) -> Node:
        return self.emit("logical_and", a, b)

    def compare(self, op: str, a: Operand, b: Operand) -> Node:
        return self.arithmetic(op, a, b)

    def select(self, condition: Node, a: Operand, b: Operand) -> Node:
        dtype = next((x.dtype for x in (a, b) if isinstance(x, Node)), None)
        if dtype is None:
            raise InternalError("a select of numbers alone")
        return self.emit("select", condition, self.operand(a, dtype), self.operand(b, dtype))

    # -- reductions ----------------------------------------------------------------------------------------------

    def reduce(self, op: str, x: Node, axes: Ints, keepdims: bool) -> Node:
        axes = tuple(sorted(axes))
        if not axes:
            return x
        if op in _OF_NOTHING and any(x.shape[axis] == 0 for axis in axes):
            shape = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes]
            return self.full(_OF_NOTHING[op], x.dtype, shape)
        return self.emit(op, x, axes=axes, keepdims=keepdims)

    def check_table(self, elements: int, what: str) -> None:
        """Check the size of formulas that compare all elements with each other."""
        if elements > MAX_TABLE:
            raise Unsupported(f"{what} of this size: {elements} comparisons")


# The result of a reduction over no elements.
_OF_NOTHING: dict[str, Number] = {"sum": 0, "prod": 1, "any": False, "all": True}

_F = TypeVar("_F", bound=Callable[..., Node])


def widened(function: _F) -> _F:
    """A converter whose formula is computed in f32 for 16-bit floats and rounded once, at its end, to the type of its
    first operand."""

    @functools.wraps(function)
    def convert(ctx: Context, x: Node, *arguments: Any, **keywords: Any) -> Node:
        wide = (ctx.widen(a) if isinstance(a, Node) else a for a in arguments)
        return ctx.cast(function(ctx, ctx.widen(x), *wide, **keywords), x.dtype)

    return cast(_F, convert)


def axis_of(axis: int, rank: int) -> int:
    """Normalise an axis that may be counted from the end."""
    if not -rank <= axis < rank:
        raise Unsupported(f"axis {axis} of a tensor of rank {rank}")
    return int(axis) + rank if axis < 0 else int(axis)


def axes_of(axes: Ints, rank: int) -> tuple[int, ...]:
    """The sorted axes that are named."""
    return tuple(sorted(distinct_axes(axes, rank)))


def distinct_axes(axes: Ints, rank: int) -> list[int]:
    """The axes that are named, in that order."""
    found = [axis_of(axis, rank) for axis in axes]
    if len(set(found)) != len(found):
        raise Unsupported(f"axes {tuple(axes)}, one of them twice")
    return found


def lowest(dtype: DType) -> Number:
    """The least value of a type, the initial value of a maximum."""
    if dtype is DType.BOOL:
        return False
    return -math.inf if dtype.is_float else int(np.iinfo(dtype.numpy).min)


def highest(dtype: DType) -> Number:
    if dtype is DType.BOOL:
        return True
    return math.inf if dtype.is_float else int(np.iinfo(dtype.numpy).max)


def _kind(value: Any) -> str:
    if value is None:
        return "absent"
    return "a sequence" if isinstance(value, list) else f"a {type(value).__name__}"
