"""What a compiled model spends its time on, as data and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tilewright.dtypes import DType
from tilewright.runtime import notebook, threads
from tilewright.runtime.executor import Executor
from tilewright.runtime.plan import PREDICTED, MemoryReport, Origin, Plan, TaskInfo


class Checked(NamedTuple):
    """What a kernel made of its inputs: its relative error against the oracle, and of a paired product the share of
    register tiles that were certified (None: it is no such kernel)."""

    error: float
    certified: float | None = None


# (task, its inputs, its output) -> Checked. The compiler attaches one; it knows the oracle.
Checker = Callable[[TaskInfo, Sequence[np.ndarray], np.ndarray], Checked]


class StepRow(msgspec.Struct, frozen=True):
    step: int
    name: str
    label: str
    kernel: str
    program: str
    extent: int
    flops: int
    bytes: int
    seconds: float
    share: float  # of the sum over all steps
    error: float | None  # relative error against the oracle, where there is a checker
    certified: float | None = (
        None  # of a paired product's register tiles, those not computed product by product
    )
    origin: Origin = PREDICTED  # where the choice of the kernel came from


class Explanation(msgspec.Struct, frozen=True):
    rows: tuple[StepRow, ...]
    seconds: float  # sum over the steps
    flops: int
    bytes: int
    worst_error: float | None
    memory: MemoryReport
    threads: dict[str, Any]
    target: dict[str, Any]
    numerics: str
    inputs: str  # where the inputs came from
    # Bytes of constants by element type, of a model with 16-bit floats: on a CPU weights of theirs are stored as f32.
    constant_types: dict[str, int] = {}

    def to_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result

    def __str__(self) -> str:
        checked = any(row.error is not None for row in self.rows)
        header = ["step", "task", "kernel", "program", "chosen", "Mflop", "MB", "us", "%", "Gflop/s", "GB/s"]
        table = [header + (["error"] if checked else [])]
        for row in self.rows:
            cells = [
                str(row.step),
                _clip(row.label or row.name, 40),
                _clip(row.kernel, 28),
                _clip(row.program, 44),
                str(row.origin),
            ]
            cells += [f"{row.flops / 1e6:.2f}", f"{row.bytes / 1e6:.2f}", f"{row.seconds * 1e6:.1f}"]
            cells += [f"{row.share * 100:.1f}", _rate(row.flops, row.seconds), _rate(row.bytes, row.seconds)]
            if checked:
                cells.append("-" if row.error is None else f"{row.error:.1e}")
            table.append(cells)
        lines = _align(table, left=5)
        lines.append("")
        lines.append(
            f"total    {self.seconds * 1e6:.1f} us in {len(self.rows)} kernels, {self.flops / 1e6:.2f} Mflop"
            f" ({_rate(self.flops, self.seconds)} Gflop/s), inputs: {self.inputs}"
        )
        if self.worst_error is not None:
            lines.append(f"error    at most {self.worst_error:.1e} in any kernel, relative to the oracle")
        paired = [row for row in self.rows if row.certified is not None]
        if paired:
            seconds = sum(row.seconds for row in paired)
            share = sum(row.seconds * (row.certified or 0.0) for row in paired) / (seconds or 1.0)
            lines.append(
                f"paired   {len(paired)} kernels; {share:.1%} of their register tiles are certified, the rest are"
                " computed product by product"
            )
        kinds = Counter(row.origin.kind for row in self.rows)
        if kinds:
            lines.append("chosen   " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
        memory = self.memory
        lines.append(
            f"memory   arena {memory.arena_bytes / 1e6:.2f} MB (at least {memory.lower_bound / 1e6:.2f},"
            f" without reuse {memory.no_reuse / 1e6:.2f}), constants {memory.constant_bytes / 1e6:.2f} MB"
            + self._by_type()
        )
        library = f" ({self.threads['library']})" if self.threads["library"] else ""
        lines.append(
            f"threads  {self.threads['threads']}, {self.threads['runtime']}{library}: {self.threads['why']}"
        )
        lines.append(
            f"target   {self.target.get('cpu', '')} {self.target['triple']}, numerics {self.numerics}"
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return notebook.explanation_html(self)

    def _by_type(self) -> str:
        sizes = sorted(self.constant_types.items(), key=lambda item: -item[1])
        return f" ({', '.join(f'{name} {size / 1e6:.2f}' for name, size in sizes)})" if sizes else ""


class BenchResult(msgspec.Struct, frozen=True):
    """Seconds per call."""

    median: float
    minimum: float
    p90: float
    repeats: int

    def __str__(self) -> str:
        return (
            f"{self.median * 1e3:.3f} ms (fastest {self.minimum * 1e3:.3f}, 90% within {self.p90 * 1e3:.3f},"
            f" {self.repeats} calls)"
        )


def random_inputs(plan: Plan, seed: int = 0) -> list[np.ndarray]:
    """Inputs for a model when none are given: floats from the normal distribution, integers and bools 0 or 1.

    Integers are often indices, and 0 and 1 are valid ones nearly everywhere. What may have one value only has it.
    """
    generator = np.random.default_rng(seed)
    arrays = []
    pinned = {entry.index: entry.data for entry in plan.pinned}
    for index, spec in enumerate(plan.inputs):
        dtype = DType.parse(spec.dtype)
        if index in pinned:
            arrays.append(np.frombuffer(pinned[index], dtype.numpy).reshape(spec.shape))
        elif dtype.is_float:
            arrays.append(generator.standard_normal(spec.shape).astype(dtype.numpy))
        else:
            arrays.append(generator.integers(0, 2, spec.shape).astype(dtype.numpy))
    return arrays


def explain(
    executor: Executor,
    inputs: Sequence[np.ndarray],
    origin: str,
    checker: Checker | None = None,
    repeats: int = 10,
) -> Explanation:
    plan = executor.plan
    seconds = executor.time_steps(inputs, repeats)
    errors: list[float | None] = [None] * len(plan.steps)
    certified: list[float | None] = [None] * len(plan.steps)
    if checker is not None:
        for index, (step, arguments, output) in enumerate(executor.trace(inputs)):
            errors[index], certified[index] = checker(plan.tasks[step.task], arguments, output)
    total = sum(seconds)
    rows = []
    for index, step in enumerate(plan.steps):
        info = plan.tasks[step.task]
        rows.append(
            StepRow(
                step=index,
                name=step.name,
                label=info.label,
                kernel=step.kernel,
                program=info.program,
                extent=step.extent,
                flops=info.flops,
                bytes=info.bytes,
                seconds=seconds[index],
                share=seconds[index] / total if total else 0.0,
                error=errors[index],
                certified=certified[index],
                origin=info.origin,
            )
        )
    return Explanation(
        rows=tuple(rows),
        seconds=total,
        flops=sum(row.flops for row in rows),
        bytes=sum(row.bytes for row in rows),
        # max() alone would lose a NaN, the worst error of all.
        worst_error=_worst([error for error in errors if error is not None]),
        memory=plan.memory,
        threads=threads.describe(executor.threads),
        target=plan.target,
        numerics=plan.numerics,
        inputs=origin,
        constant_types=_constant_types(plan),
    )


def _constant_types(plan: Plan) -> dict[str, int]:
    """Bytes of the constants of each type; none where the model has no 16-bit floats."""
    seen = {spec.dtype for spec in (*plan.inputs, *plan.outputs, *plan.constants)}
    sizes: dict[str, int] = {}
    if any(DType.parse(name).is_half for name in seen):
        for spec in plan.constants:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.bytes
    return sizes


def _worst(errors: list[float]) -> float | None:
    return float(np.max(errors)) if errors else None


def _rate(amount: int, seconds: float) -> str:
    return f"{amount / seconds / 1e9:.1f}" if seconds else "-"


def _clip(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def _align(table: list[list[str]], left: int) -> list[str]:
    """Columns of equal width; the first `left` of them flush left, except the step number."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if 0 < column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
