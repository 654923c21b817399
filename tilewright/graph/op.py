"""The record of an operator in the op table, and the functions that look it up.

An operator is defined in one place, a file of `graph/ops`: its type rule, its meaning in NumPy, its fusion class and
its lowering to tensor expressions. Everything else (verifier, oracle, fusion, code generation, `explain`) reads the
table.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright import te
from tilewright.errors import InternalError, TypeRuleError
from tilewright.graph.ir import Attrs, Node, TensorType
from tilewright.graph.provenance import UNKNOWN, Provenance


class Fusion(enum.Enum):
    """How an operator may share a kernel with its neighbours."""

    ELEMENTWISE = "elementwise"  # one output element from the same element of each input (after broadcasting)
    INJECTIVE = "injective"  # one output element from one element of each input, at another index: movement
    REDUCTION = (
        "reduction"  # an output element from many; fuses with producers, and with consumers of its rows
    )
    COMPLEX = (
        "complex-out-fusable"  # a contraction: elementwise consumers are applied to its result in registers
    )
    OPAQUE = "opaque"  # never fused


TypeRule = Callable[[Sequence[TensorType], Attrs], TensorType]
Oracle = Callable[..., np.ndarray]  # oracle(attrs, *arrays); floats may be f64, whatever the type says
Lowering = Callable[["Application", Sequence[te.Tensor]], te.Tensor]


@dataclass(frozen=True)
class Application:
    """An applied operator, as a lowering sees it."""

    inputs: tuple[TensorType, ...]
    type: TensorType
    attrs: Attrs
    name: str


@dataclass(frozen=True)
class Op:
    name: str
    infer: TypeRule
    oracle: Oracle
    fusion: Fusion
    lower: Lowering | None = None  # None: `rewrites/decompose.py` replaces it before lowering
    flops: Callable[[Application], int] | None = None  # None: one per output element if it computes anything
    attrs: tuple[str, ...] = ()  # the names of its attributes; all of them must be given


_TABLE: dict[str, Op] = {}


def register(op: Op) -> Op:
    assert op.name not in _TABLE, f"operator {op.name} registered twice"
    _TABLE[op.name] = op
    return op


def table() -> dict[str, Op]:
    """Every operator by name."""
    import tilewright.graph.ops  # noqa: F401  (fills the table)

    return _TABLE


def op_of(name: str) -> Op:
    found = table().get(name)
    if found is None:
        raise InternalError(f"no operator is called {name!r}")
    return found


def apply(op: str, *inputs: Node, name: str = "", source: Provenance = UNKNOWN, **attrs: Any) -> Node:
    """Make the node that applies `op` to `inputs`; the op's type rule gives its type. All nodes are made this way."""
    record = op_of(op)
    if set(attrs) != set(record.attrs):
        raise InternalError(f"{op} takes attributes {record.attrs}, got {tuple(attrs)}")
    types = tuple(node.type for node in inputs)
    try:
        type = record.infer(types, attrs)
    except TypeRuleError as error:
        where = f" at {name}" if name else ""
        raise TypeRuleError(f"{op}{where} of {', '.join(map(repr, types))}: {error.message}") from None
    return Node(op, inputs, type, attrs, name=name, source=source)


def application(node: Node) -> Application:
    return Application(tuple(i.type for i in node.inputs), node.type, node.attrs, node.name)


def flops_of(node: Node) -> int:
    """Arithmetic operations that the node's definition needs; an FMA counts as two."""
    if node.is_input or node.is_constant:
        return 0
    record = op_of(node.op)
    if record.flops is not None:
        return record.flops(application(node))
    return 0 if record.fusion is Fusion.INJECTIVE else node.type.size
