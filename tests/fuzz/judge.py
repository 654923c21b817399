"""Is what came of a graph what the oracle says? Results of machine code, and the graph after every pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.rewrites.oracles import Dice, RandomPrices
from tilewright.errors import VerificationError
from tilewright.graph.ir import Graph
from tilewright.graph.oracle import evaluate, evaluate_node
from tilewright.graph.task import Partition
from tilewright.hw import host
from tilewright.measure.check import relative_error
from tilewright.measure.passes import PassChecks
from tilewright.rewrites.oracle import CostOracle, GroupCosts
from tilewright.rewrites.pipeline import Abilities, run_pipeline
from tilewright.space.candidates import Candidates
from tilewright.space.catalog import catalog
from tilewright.space.template import Work
from tilewright.support.trace import Trace

NORMS = frozenset(["layer_norm", "group_norm"])
LIBRARIES = Abilities(chains=False, libraries=True, half=True, prologues=True)


def largest_value(graph: Graph, arrays: Sequence[np.ndarray]) -> float:
    """The largest finite magnitude among intermediate floats: where such values cancel, what is left is rounding."""
    floats = tuple(node for node in graph.nodes() if node.dtype.is_float and node.type.size)
    values = evaluate(Graph(graph.inputs, floats), arrays, precise=True)
    return max(
        (float(np.abs(v, where=np.isfinite(v), out=np.zeros_like(v)).max()) for v in values), default=0.0
    )


def deviation(result: np.ndarray, truth: np.ndarray, floor: float) -> float:
    """The relative error, where a truth that is small compared with `floor` counts as a hundredth of it."""
    error = relative_error(result, truth)
    if math.isinf(error) or result.dtype.kind in "iub" or not result.size:
        return error
    with np.errstate(all="ignore"):
        size = np.linalg.norm(truth[np.isfinite(truth)].astype(np.float64))
    if (
        not size and floor
    ):  # zeros that values of this size cancel to: a norm of equal values multiplies what is left
        return error / (floor * math.sqrt(result.size))
    if not size or math.isinf(size):
        return error
    return float(error * size / max(size, 0.01 * floor * math.sqrt(result.size)))


@dataclass
class Judge:
    """Compares results with the oracle's. Where large values cancel, what is left is rounding: a result that is small
    compared with the largest value inside counts as a hundredth of that."""

    graph: Graph
    inputs: Sequence[np.ndarray]
    bound: float

    def __post_init__(self) -> None:
        self.floor = largest_value(self.graph, self.inputs)
        self.exact = evaluate(self.graph, self.inputs, precise=True)
        rounded = evaluate(self.graph, self.inputs, precise=False)
        nudged = self.nudged()
        self.usual = [
            max(self.error(a, truth), self.error(b, truth))
            for a, b, truth in zip(rounded, nudged, self.exact, strict=True)
        ]

    def nudged(self) -> list[np.ndarray]:
        """The outputs if what norms read differs in the last digit: a norm of equal values multiplies the rounding of
        their mean."""
        rng, values = np.random.default_rng(0), dict(zip(self.graph.inputs, self.inputs, strict=True))
        for node in self.graph.nodes():
            if node.is_constant:
                assert node.data is not None
                values[node] = node.data
            elif not node.is_input:
                operands = [values[operand] for operand in node.inputs]
                if node.op in NORMS:
                    last = 2.0**-11 if node.dtype.is_half else 2.0**-23
                    operands[0] = operands[0] * (1.0 + last * rng.choice([-1.0, 1.0], operands[0].shape))
                values[node] = evaluate_node(node, operands)
        return [values[output] for output in self.graph.outputs]

    def error(self, result: np.ndarray, truth: np.ndarray) -> float:
        return deviation(np.asarray(result), truth, self.floor)

    def of(self, results: Sequence[np.ndarray], what: str) -> str:
        for position, (ours, truth, usual) in enumerate(zip(results, self.exact, self.usual, strict=True)):
            if ours.shape != truth.shape:
                return f"{what} {position} has the shape {ours.shape}, not {truth.shape}"
            error = self.error(ours, truth)
            if not error <= max(self.bound, 4 * usual) and not math.isinf(usual):
                return f"{what} {position} is off by {error:.1e}; rounding alone is off by {usual:.1e}"
        return ""


def after_passes(
    judge: Judge,
    numerics: str,
    oracle: CostOracle,
    abilities: Abilities,
    trace: Trace | None = None,
    costs: GroupCosts | None = None,
) -> str:
    """Which pass is wrong, or nothing."""
    checks, trace = PassChecks(judge.graph, judge.inputs, error=judge.error), trace or Trace()
    partition = run_pipeline(
        judge.graph, trace, numerics=numerics, oracle=oracle, abilities=abilities, observe=checks, costs=costs
    )
    checks.cut(partition)
    wrong = skipped(trace) or ("" if checks.report.ok else str(checks.report))
    return wrong or ("" if abilities.libraries else unlowered(partition, numerics))


def unlowered(partition: Partition, numerics: str) -> str:
    """The first group whose default program the verifier refuses, or nothing. Made-up times make groups that no
    machine would choose, and each must have a program that stays within its buffers."""
    for task, _ in partition.tasks().values():
        work = Work(task, host(), numerics)
        applied = catalog("cpu").default.apply(work)
        config = None if applied is None else next(iter(applied.space.configs()), None)
        if applied is None or config is None:
            continue
        try:
            Candidates(work, only=(applied,)).implementation(config)
        except VerificationError as error:
            return f"{task.label}: {error}"
    return ""


def skipped(trace: Trace) -> str:
    """The first pass that failed and was left out, or nothing: the model is right without it, the pass is not."""
    for event in trace.events:
        if event.name.endswith(".skipped"):
            return f"{event.name.removesuffix('.skipped')} failed: {event.notes['error']}"
    return ""


def with_dice(judge: Judge, numerics: str, number: int, trace: Trace | None = None) -> str:
    """The same with times that are dice, for a processor or for a machine with libraries."""
    dice, abilities = Dice(number), LIBRARIES if number % 4 == 1 else Abilities()
    groups = RandomPrices(number, favours=(1.0, 0.3)[number % 2])
    wrong = after_passes(judge, numerics, dice, abilities, trace, groups)
    return f"{wrong}\nwith made-up times {dice} and {abilities}" if wrong else ""
