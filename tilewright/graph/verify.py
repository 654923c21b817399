"""The graph verifier: what is legal at each stage, as data, and one function that checks it.

`verify` runs after every rewrite, so that an error names the pass that broke an invariant, not a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import TypeRuleError, VerificationError
from tilewright.graph.attention import fits_one_kernel
from tilewright.graph.ir import Graph, Node
from tilewright.graph.op import op_of, table

# -- what is legal when -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forbidden:
    """Applications of `op` that a stage forbids: all of them, or those for which `when` is true."""

    op: str
    why: str
    when: Callable[[Node], bool] = lambda node: True


def _padded(node: Node) -> bool:
    return any(low or high for low, high in node.attrs["padding"])


# A concat becomes a loop for each operand, and each is tested against all others. Wider ones are split.
MAX_CONCATENATED = 32

_DECOMPOSED = (
    Forbidden("batch_norm", "it is folded into weights or becomes a multiplication and an addition"),
    Forbidden(
        "attention",
        "it becomes two matmuls around a softmax, where no kernel computes all of it",
        lambda node: not fits_one_kernel(node),
    ),
    Forbidden("linear", "it becomes a matmul with a transposed weight"),
    Forbidden("conv_transpose", "it becomes a pad and a conv, or a matmul"),
    Forbidden("conv", "its padding becomes a pad", _padded),
    Forbidden("conv", "its bias becomes an addition", lambda node: len(node.inputs) > 2),
    Forbidden(
        "concat",
        f"one of more than {MAX_CONCATENATED} operands becomes several",
        lambda node: len(node.inputs) > MAX_CONCATENATED,
    ),
)


# In pipeline order. Each stage also forbids what earlier stages forbid.
STAGES: Mapping[str, tuple[Forbidden, ...]] = {
    "imported": (),
    "decomposed": _DECOMPOSED,
}


def forbidden_at(stage: str) -> tuple[Forbidden, ...]:
    """Everything that is forbidden once a graph has reached `stage`."""
    if stage not in STAGES:
        raise VerificationError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    names = list(STAGES)
    return tuple(rule for name in names[: names.index(stage) + 1] for rule in STAGES[name])


# -- the check ----------------------------------------------------------------------------------------------------


def verify(graph: Graph, stage: str, *, after: str = "") -> None:
    """Raise VerificationError unless `graph` is well-formed and legal at `stage`. `after` names the pass that made
    it."""
    rules: dict[str, list[Forbidden]] = {}
    for rule in forbidden_at(stage):
        rules.setdefault(rule.op, []).append(rule)
    moment = f"after {after} (stage {stage})" if after else f"at stage {stage}"
    lowered = stage != "imported"

    _check_inputs(graph, moment)
    for node in graph.nodes():
        problem = _problem(node)
        if problem is None and lowered and node.op in table() and op_of(node.op).lower is None:
            problem = "it has no lowering and should have been decomposed"
        for rule in rules.get(node.op, ()):
            if problem is None and rule.when(node):
                problem = f"illegal at this stage: {rule.why}"
        if problem is not None:
            raise VerificationError(f"{moment}, {describe(node)}: {problem}")


def describe(node: Node) -> str:
    """Describe a node: its operator, its name, and its origin in the user's model."""
    text = f"{node.op} {node.name}" if node.name else f"a {node.op} of type {node.type!r}"
    return f"{text} (from {node.source})" if node.source else text


def _check_inputs(graph: Graph, moment: str) -> None:
    for position, node in enumerate(graph.inputs):
        if not node.is_input:
            raise VerificationError(
                f"{moment}, {describe(node)}: it is listed as input {position} but is none"
            )
        if dict(node.attrs) != {"index": position}:
            raise VerificationError(
                f"{moment}, {describe(node)}: input {position} has the attributes {dict(node.attrs)}"
            )
    listed = set(graph.inputs)
    for node in graph.nodes():
        if node.is_input and node not in listed:
            raise VerificationError(f"{moment}, {describe(node)}: it is used but not listed among the inputs")


def _problem(node: Node) -> str | None:
    """The error in a node, independent of others; None if there is none."""
    if node.is_input:
        return "an input has no operands and no data" if node.inputs or node.data is not None else None
    if node.is_constant:
        return _constant_problem(node)
    if node.op not in table():
        return "the operator is not registered"
    if node.data is not None:
        return "only constants have data"
    record = op_of(node.op)
    if set(node.attrs) != set(record.attrs):
        return f"it takes the attributes {sorted(record.attrs)}, and has {sorted(node.attrs)}"
    for key, value in node.attrs.items():
        if not is_attr(value):
            return f"attribute {key} has the value {value!r}, a {type(value).__name__}"
    try:
        inferred = record.infer(tuple(operand.type for operand in node.inputs), node.attrs)
    except TypeRuleError as error:
        return f"the type rule refuses it: {error.message}"
    if inferred != node.type:
        return f"its type is {node.type!r}, and should be {inferred!r}"
    return None


def _constant_problem(node: Node) -> str | None:
    if node.inputs or node.attrs:
        return "a constant has no operands and no attributes"
    if not isinstance(node.data, np.ndarray):
        return "a constant has an array as its data"
    if node.data.shape != node.shape or node.data.dtype != node.dtype.numpy:
        return f"its data is {node.data.dtype}{list(node.data.shape)}, and should be {node.type!r}"
    if not node.data.flags.c_contiguous:
        return "its data is not contiguous"
    return None


def is_attr(value: Any) -> bool:
    """Whether `value` is plain data of the kinds that attributes have. NumPy scalars are not: they print and hash
    differently from equal numbers."""
    if isinstance(value, tuple):
        return all(is_attr(item) for item in value)
    return value is None or type(value) in (int, float, bool, str) or isinstance(value, DType)
