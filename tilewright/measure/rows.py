"""Validate large tasks on few distinct rows, which makes a float64 oracle affordable for batches.

If the leading axes of a task are a batch of independent rows, the oracle computes a few rows, and the inputs of the
whole task repeat these rows in random order. Every element of the whole result is then known, so a kernel that mixes
up rows, or is wrong at an edge, is still caught.

    x[rows, ...] = small[repeat[row], ...]    ->    answer[rows, ...] = small_answer[repeat[row], ...]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.op import Fusion, apply, op_of
from tilewright.graph.task import Task

_MAX_FLOPS = 2.5e8  # maximum for one oracle run; above it, rows are repeated
_MAX_ELEMENTS = 1e6  # maximum elements of its result, likewise
_MIN = 2  # minimum distinct rows, if there are more
_POOLS = ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "resize")


@dataclass(frozen=True)
class FewRows:
    """The task on few rows. `batch`: the leading extents that are a batch; `repeated`: for each input, whether its
    rows are those of the batch, not the same for all."""

    task: Task
    batch: tuple[int, ...]
    repeated: tuple[bool, ...]

    @property
    def count(self) -> int:
        return self.task.output.shape[0]

    def repeats(self, rng: np.random.Generator) -> np.ndarray:
        """The row that each row of the whole repeats: each at least once, in random order."""
        rows = math.prod(self.batch)
        found = np.concatenate([np.arange(self.count), rng.integers(0, self.count, rows - self.count)])
        return np.asarray(rng.permutation(found), np.int64)


def few_rows(task: Task) -> FewRows | None:
    """The task on few rows; None if the task is small, or its rows are not independent."""
    if task.flops <= _MAX_FLOPS and task.output.type.size <= _MAX_ELEMENTS:
        return None
    for leading in (2, 1):
        found = _shrunk(task, leading)
        if found is not None:
            return found
    return None


def _shrunk(task: Task, leading: int) -> FewRows | None:
    output = task.output
    batch = output.shape[:leading]
    rows = math.prod(batch)
    if output.type.rank <= leading or rows < 2:
        return None
    cost = max(task.flops / _MAX_FLOPS, output.type.size / _MAX_ELEMENTS)
    count = max(1, min(rows, max(int(rows / cost), min(_MIN, rows // 2))))
    if count >= rows:
        return None
    lead = (count, *(1,) * (leading - 1))
    batched = _Batched(batch, lead)
    weights = {
        node.inputs[1] for node in task.graph.nodes() if node.op in ("linear", "conv", "conv_transpose")
    }
    weights |= {n.inputs[1] for n in task.graph.nodes() if n.op == "matmul" and n.inputs[1].type.rank == 2}
    made: dict[Node, Node] = {}
    repeated: list[bool] = []
    for number, node in enumerate(task.graph.inputs):
        splits = node not in weights and number not in task.constants and batched.has(node.shape)
        type = TensorType((*lead, *node.shape[leading:]), node.dtype) if splits else node.type
        made[node] = input_node(number, type)
        repeated.append(splits)
        if splits:
            batched.split.add(node)
    for node in task.graph.nodes():
        if node in made:
            continue
        if node.is_constant:
            made[node] = node
            continue
        again = batched.again(node, made)
        if again is None:
            return None
        made[node] = again
    if output not in batched.split:
        return None
    graph = Graph(tuple(made[node] for node in task.graph.inputs), (made[output],))
    return FewRows(Task(graph, task.constants), batch, tuple(repeated))


class _Batched:
    """The nodes of a graph whose leading axes are the batch; the others are the same for all rows."""

    def __init__(self, batch: tuple[int, ...], lead: tuple[int, ...]) -> None:
        self.batch, self.lead = batch, lead
        self.split: set[Node] = set()

    def has(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > len(self.batch) and shape[: len(self.batch)] == self.batch

    def again(self, node: Node, made: Mapping[Node, Node]) -> Node | None:
        """The node on few rows; None if its rows depend on each other, or that is unknown."""
        if not any(operand in self.split for operand in node.inputs):
            return apply(node.op, *(made[x] for x in node.inputs), **node.attrs)
        attrs = self._attrs(node)
        if attrs is None or not self.has(node.shape):
            return None
        self.split.add(node)
        return apply(node.op, *(made[x] for x in node.inputs), **attrs)

    def _attrs(self, node: Node) -> dict[str, Any] | None:
        """The attributes on few rows."""
        attrs, leading = dict(node.attrs), len(self.batch)
        if op_of(node.op).fusion is Fusion.ELEMENTWISE:
            return attrs if all(self._broadcasts(x, node.type.rank) for x in node.inputs) else None
        if any(operand in self.split for operand in node.inputs[1:]) and node.op not in (
            "matmul",
            "attention",
        ):
            return None
        rule = _RULES.get(node.op)
        if rule is not None:
            return attrs if rule(node, leading) else None
        if node.op == "reshape":
            return {**attrs, "shape": (*self.lead, *node.shape[leading:])}
        if node.op == "broadcast_to" and node.inputs[0].type.rank == node.type.rank:
            return {**attrs, "shape": (*self.lead, *node.shape[leading:])}
        if node.op == "slice":
            whole = node.attrs["starts"][:leading] == (0,) * leading
            stops = (*self.lead, *node.attrs["stops"][leading:])
            return (
                {**attrs, "stops": stops}
                if whole and node.attrs["steps"][:leading] == (1,) * leading
                else None
            )
        if node.op in ("matmul", "attention"):
            return attrs if self._multiplies(node, leading) else None
        return None

    def _broadcasts(self, operand: Node, rank: int) -> bool:
        """Whether it has the batch, or is the same for all rows of a result of this rank."""
        if operand in self.split:
            return operand.type.rank == rank
        missing = rank - operand.type.rank
        return all(extent == 1 for extent in operand.shape[: max(0, len(self.batch) - missing)])

    def _multiplies(self, node: Node, leading: int) -> bool:
        if node.inputs[0] not in self.split:
            return False
        if node.op == "matmul" and node.inputs[1] not in self.split:
            return node.inputs[1].type.rank == 2 and node.type.rank > leading
        products, masks = node.inputs[:3], node.inputs[3:]
        return (
            node.type.rank >= leading + 2
            and all(operand in self.split and operand.type.rank == node.type.rank for operand in products)
            and all(self._broadcasts(mask, node.type.rank) for mask in masks)
        )


def _axes_beyond(name: str) -> Callable[[Node, int], bool]:
    def rule(node: Node, leading: int) -> bool:
        axes = node.attrs[name]
        return min(axes if isinstance(axes, tuple) else (axes,), default=leading) >= leading

    return rule


def _of_images(node: Node, leading: int) -> bool:
    return leading == 1


_RULES: dict[str, Callable[[Node, int], bool]] = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "prod", "var"), _axes_beyond("axes")),
    **dict.fromkeys(("argmax", "argmin", "softmax", "log_softmax", "cumsum"), _axes_beyond("axis")),
    **dict.fromkeys(("conv", "conv_transpose", "group_norm", "batch_norm", *_POOLS), _of_images),
    **dict.fromkeys(
        ("layer_norm", "rms_norm"), lambda node, leading: node.type.rank - node.attrs["dims"] >= leading
    ),
    "linear": lambda node, leading: node.type.rank > leading,
    "permute": lambda node, leading: node.attrs["axes"][:leading] == tuple(range(leading)),
    "pad": lambda node, leading: (
        not any(any(node.attrs[side][:leading]) for side in ("low", "high", "interior"))
    ),
}
