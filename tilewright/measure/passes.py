"""Find a wrong rewrite: compare the graph after every pass, run by the oracle, with the imported graph.

    checks = PassChecks(graph, inputs)
    partition = run_pipeline(graph, observe=checks)
    checks.cut(partition)
    print(checks.report)

Both graphs run in float64, so the remaining differences are roundings by passes: folded weights, reciprocals of
constants. A graph that a pass did not change is not run again. Finally the partitioned graph runs task by task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.graph.ir import Graph, Node
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Partition
from tilewright.measure.check import relative_error

# Bounds on the relative L2 error of a graph after passes, by the element type of the result; or four times the effect
# of one rounding per operator on the imported graph. Integers and bools may differ as far as that makes them differ.
BOUNDS = {"f64": 1e-11, "f32": 1e-5, "f16": 5e-3, "bf16": 4e-2}
PARTITION = "partition"

Error = Callable[[np.ndarray, np.ndarray], float]  # error of a result against the exact one


@dataclass(frozen=True)
class PassCheck:
    """The graph after one pass."""

    number: int  # of the pass, starting at 1
    name: str
    changed: bool  # whether the pass did anything; if not, the errors are the previous ones
    error: float  # of the worst output, those beyond their bound first
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class PassReport:
    passes: tuple[PassCheck, ...]

    @property
    def ok(self) -> bool:
        return self.first is None

    @property
    def first(self) -> PassCheck | None:
        """The first pass after which a result is wrong."""
        return next((each for each in self.passes if not each.ok), None)

    def __str__(self) -> str:
        first, count = self.first, len(self.passes)
        if first is not None:
            before = self.passes[first.number - 2].error if first.number > 1 else 0.0
            return (
                f"WRONG after pass {first.number} of {count}, {first.name}: an error of {first.error:.1e} (at most"
                f" {first.bound:.1e}), before it {before:.1e}"
            )
        worst = max(self.passes, key=lambda each: each.error, default=None)
        if worst is None or not worst.error:
            return f"OK after each of {count} passes, to the last bit of float64"
        return f"OK after each of {count} passes, the largest error is {worst.error:.1e} after {worst.name}"


class PassChecks:
    """An observer for `run_passes`, for one set of inputs. `error`: how two results are compared; `slack`: the
    allowed multiple of the effect of one rounding per operator."""

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[np.ndarray],
        *,
        error: Error = relative_error,
        slack: float = 4.0,
    ) -> None:
        self._inputs = inputs
        self._error = error
        self._outputs = graph.outputs
        self._exact = evaluate(graph, inputs)
        rounded = evaluate(graph, inputs, precise=False)
        self._bounds = [
            max(BOUNDS.get(node.dtype.short, 0.0), slack * error(own, exact))
            for node, own, exact in zip(graph.outputs, rounded, self._exact, strict=True)
        ]
        self._passes: list[PassCheck] = []

    @property
    def report(self) -> PassReport:
        return PassReport(tuple(self._passes))

    def __call__(self, name: str, graph: Graph) -> None:
        changed = any(a is not b for a, b in zip(graph.outputs, self._outputs, strict=True))
        self._outputs = graph.outputs
        self._add(name, evaluate(graph, self._inputs) if changed else None)

    def cut(self, partition: Partition) -> None:
        """Run the partitioned graph: each task on the results of the earlier ones."""
        self._add(PARTITION, run_calls(partition, self._inputs))

    def _add(self, name: str, results: Sequence[np.ndarray] | None) -> None:
        number = len(self._passes) + 1
        if results is None:
            error, bound = (self._passes[-1].error, self._passes[-1].bound) if self._passes else (0.0, 0.0)
            self._passes.append(PassCheck(number, name, False, error, bound))
            return
        found = [
            (math.inf if got.shape != exact.shape else self._error(got, exact), bound)
            for got, exact, bound in zip(results, self._exact, self._bounds, strict=True)
        ]
        error, bound = max(found, key=lambda each: (not each[0] <= each[1], each[0]), default=(0.0, 0.0))
        self._passes.append(PassCheck(number, name, True, error, bound))


def run_calls(
    partition: Partition, inputs: Sequence[np.ndarray], *, precise: bool = True
) -> list[np.ndarray]:
    """The outputs of a partitioned graph, each call run by the oracle on buffers, as in the runtime."""
    buffers: dict[Node, np.ndarray] = dict(zip(partition.graph.inputs, inputs, strict=True))

    def read(node: Node) -> np.ndarray:
        base = partition.buffer_of(node)
        flat = (buffers[base] if base.data is None else base.data).reshape(-1)
        begin = partition.offsets.get(node, 0) // node.dtype.bytes
        return flat[begin : begin + node.type.size].reshape(node.shape)

    for call in partition.calls:
        (result,) = evaluate(call.task.graph, [read(n) for n in call.inputs], precise=precise)
        assert call.output not in buffers, f"{call.name} is computed twice"
        buffers[call.output] = result
    return [buffers[node].reshape(node.shape) for node in partition.graph.outputs]
