"""Shows how a compiled model spends its time, as data and as a table."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tilewright.dtypes import DType
from tilewright.runtime import notebook, threads
from tilewright.runtime.executor import Executor
from tilewright.runtime.plan import PREDICTED, FusionReport, MemoryReport, Origin, Plan, TaskInfo

WIDTH = 80  # default terminal width
_LAYER, _TEMPLATE = 31, 12  # minimum widths of a layer's name and a template's
_GROUPS = 3  # of each kind: fused, not fused, without a kernel; all are in `to_dict`
_GAP = "  "


class Checked(NamedTuple):
    """A kernel's relative error against the oracle and, for a paired product, the share of certified register tiles
    (None: not a paired product)."""

    error: float
    certified: float | None = None


# (task, its inputs, its output) -> Checked. The compiler attaches one, because it knows the oracle.
Checker = Callable[[TaskInfo, Sequence[np.ndarray], np.ndarray], Checked]


class StepRow(msgspec.Struct, frozen=True):
    """One kernel of a model: what it computes, its time and its error."""

    step: int
    name: str
    layer: str  # the layers that it computes: "layer1.0.conv1 + bn1 + relu"
    task: str  # its key
    label: str
    kernel: str
    program: str
    extent: int
    flops: int
    bytes: int
    seconds: float
    share: float  # of the sum over all steps
    error: float | None  # relative error against the oracle, if there is a checker
    certified: float | None = (
        None  # share of a paired product's register tiles that use the inner-product trick
    )
    origin: Origin = PREDICTED  # where the choice of the kernel came from


class Explanation(msgspec.Struct, frozen=True):
    """Where a model's time goes, kernel by kernel. `print` shows a table; `to_dict` returns data."""

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
    # Bytes of constants by element type, for a model with 16-bit floats: on a CPU their weights are stored as f32.
    constant_types: dict[str, int] = {}
    accelerator: str = ""  # what of the model an accelerator runs
    fusion: FusionReport | None = None  # how operators were grouped into kernels, and the alternatives

    def to_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result

    def __str__(self) -> str:
        return self.table()

    def table(self, width: int | None = WIDTH, *, hashes: bool = False) -> str:
        """The table as text with at most `width` columns: layers and times always, other columns if they fit; None:
        all columns. `hashes`: also the names of the machine code and the task keys, beyond the width."""
        blocks = ["\n".join(self._rows(width, hashes))]
        blocks += [_filled(head, text, width) for head, text in self._totals()]
        return "\n".join([blocks[0], "", *blocks[1:]])

    def _rows(self, width: int | None, hashes: bool) -> list[str]:
        rows = self.rows
        columns = [
            _Column("layer", [row.layer or row.label for row in rows], _LAYER, left=True),
            _Column("operators", [row.label for row in rows], left=True, rank=1),
            _Column("kernel", [_template(row.program) for row in rows], _TEMPLATE, left=True),
            _Column("chosen", [str(row.origin) for row in rows], left=True, rank=3),
            _Column("Mflop", [f"{row.flops / 1e6:.2f}" for row in rows], rank=4),
            _Column("MB", [f"{row.bytes / 1e6:.2f}" for row in rows], rank=5),
            _Column("us", [f"{row.seconds * 1e6:.1f}" for row in rows]),
            _Column("%", [f"{row.share * 100:.1f}" for row in rows]),
            _Column("Gflop/s", [_rate(row.flops, row.seconds) for row in rows]),
            _Column("GB/s", [_rate(row.bytes, row.seconds) for row in rows], rank=2),
        ]
        if any(row.error is not None for row in rows):
            errors = ["-" if row.error is None else f"{row.error:.1e}" for row in rows]
            columns.append(_Column("error", errors))
        columns.append(_Column("schedule", [row.program for row in rows], left=True, rank=6))
        shown = _fitting(columns, width)
        if hashes:
            shown.append(_Column("machine code", [row.kernel for row in rows], left=True))
            shown.append(_Column("task", [row.task for row in rows], left=True))
        return [_GAP.join(cells).rstrip() for cells in zip(*(each.cells() for each in shown), strict=True)]

    def _totals(self) -> list[tuple[str, str]]:
        lines = [
            (
                "total",
                f"{self.seconds * 1e6:.1f} us in {len(self.rows)} kernels, {self.flops / 1e6:.2f} Mflop"
                f" ({_rate(self.flops, self.seconds)} Gflop/s)",
            ),
            ("inputs", self.inputs),
        ]
        if self.worst_error is not None:
            lines.append(("error", f"at most {self.worst_error:.1e} in any kernel, relative to float64"))
        paired = [row for row in self.rows if row.certified is not None]
        if paired:
            seconds = sum(row.seconds for row in paired)
            share = sum(row.seconds * (row.certified or 0.0) for row in paired) / (seconds or 1.0)
            text = f"{len(paired)} kernels; {share:.1%} of their register tiles are certified"
            lines.append(("paired", f"{text}, the rest are computed product by product"))
        if self.fusion is not None:
            lines.append(("fusion", str(self.fusion)))
            lines += _alternatives(self.fusion)
        if self.accelerator:
            lines.append(("gemmini", self.accelerator))
        kinds = Counter(row.origin.kind for row in self.rows)
        if kinds:
            lines.append(("chosen", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())))
        memory = self.memory
        lines.append(
            (
                "memory",
                f"arena {memory.arena_bytes / 1e6:.2f} MB (at least {memory.lower_bound / 1e6:.2f},"
                f" without reuse {memory.no_reuse / 1e6:.2f}), constants {memory.constant_bytes / 1e6:.2f} MB"
                + self._by_type(),
            )
        )
        library = f" ({os.path.basename(self.threads['library'])})" if self.threads["library"] else ""
        why = f"{self.threads['threads']}, {self.threads['runtime']}{library}: {self.threads['why']}"
        target = f"{self.target.get('cpu', '')} {self.target['triple']}, numerics {self.numerics}"
        return [*lines, ("threads", why), ("target", target.strip())]

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
    """Default inputs of a model: normally distributed floats, integers and bools 0 or 1.

    Integers are often indices, and 0 and 1 are valid nearly everywhere. Pinned inputs have their value.
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
                layer=step.layer,
                task=step.task,
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
        # max() alone would drop a NaN, the worst error.
        worst_error=_worst([error for error in errors if error is not None]),
        memory=plan.memory,
        threads=threads.describe(executor.threads),
        target=plan.target,
        numerics=plan.numerics,
        inputs=origin,
        constant_types=_constant_types(plan),
        accelerator=getattr(executor, "summary", str)(),
        fusion=None if isinstance(plan.fusion, msgspec.UnsetType) else plan.fusion,
    )


def _alternatives(fusion: FusionReport) -> list[tuple[str, str]]:
    """The groups that matter most: the largest gains, then the closest of those that are not used, then chains without
    a kernel."""
    fused = sorted(
        (g for g in fusion.considered if g.used), key=lambda g: -g.gain * g.parts_seconds * g.calls
    )
    apart = sorted((g for g in fusion.considered if not g.used), key=lambda g: -g.gain)
    lines = []
    for head, groups in (("fused", fused), ("unfused", apart), ("unfused", fusion.refused)):
        lines += [(head, str(group)) for group in groups[:_GROUPS]]
        if len(groups) > _GROUPS:
            lines.append(("", f"{len(groups) - _GROUPS} more are in the report and in to_dict()"))
    return lines


def _constant_types(plan: Plan) -> dict[str, int]:
    """Bytes of constants by type; none if the model has no 16-bit floats."""
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
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return text if len(text) <= width else text[: width - 1] + "…"


def _template(program: str) -> str:
    """The template of a kernel, without its knob values."""
    return program.partition(":")[0].partition(" ")[0]


def _filled(head: str, text: str, width: int | None) -> str:
    head = f"{head:<8} "
    if width is None:
        return head + text
    lines = textwrap.wrap(
        text,
        max(width, len(head) + 20),
        initial_indent=head,
        subsequent_indent=" " * 9,
        break_on_hyphens=False,
    )
    return "\n".join(lines or [head])


def _fitting(columns: Sequence[_Column], width: int | None) -> list[_Column]:
    """The columns that fit this width; the first one in full if possible."""
    if width is None:
        for column in columns:
            column.most = None
        return list(columns)
    shown = [column for column in columns if not column.rank]
    room = width - sum(column.width + len(_GAP) for column in shown[1:])
    shown[0].most = max(room, _LAYER)
    for column in sorted((column for column in columns if column.rank), key=lambda column: column.rank):
        taken = sum(each.width + len(_GAP) for each in shown)
        if taken + column.width <= width:
            shown.append(column)
    return [column for column in columns if column in shown]


@dataclass(eq=False)
class _Column:
    """A table column: cells have at most `most` characters, aligned left or right."""

    head: str
    texts: list[str]
    most: int | None = None
    left: bool = False
    rank: int = 0  # 0: always shown; others if there is room, the smallest first

    @property
    def natural(self) -> int:
        return max(map(len, (self.head, *self.texts)))

    @property
    def width(self) -> int:
        return self.natural if self.most is None else min(self.natural, self.most)

    def cells(self) -> list[str]:
        texts = [_clip(text, self.width) for text in (self.head, *self.texts)]
        return [text.ljust(self.width) if self.left else text.rjust(self.width) for text in texts]
