"""The program of every CPU template, as the analytical model chooses it for two described machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.programs import AVX2, AVX512, AVX_VNNI, CPU_TEMPLATES, ZEN4, cpu_program, program_text
from tests.space.checked import Inputs
from tests.space.templates.cpu.chains import Chain
from tests.space.templates.cpu.images import Image
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine


def linear(m: int, n: int, k: int, *, constant: bool = True) -> Task:
    """relu(a @ b + bias)."""
    x = Inputs()
    total = apply("matmul", x(m, k), x(k, n, constant=constant))
    return x.task(apply("relu", apply("add", total, x(n, constant=True))))


def convolution(size: int, channels: tuple[int, int]) -> Task:
    """3 x 3, with a border, channels last."""
    x = Inputs()
    edge, none = (0, 1, 1, 0), (0, 0, 0, 0)
    image = apply("pad", x(1, size, size, channels[0]), low=edge, high=edge, interior=none, value=0.0)
    attrs: dict[str, Any] = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    return x.task(apply("conv", image, x(3, 3, *channels, constant=True), layout="channels_last", **attrs))


def int8_linear(m: int, n: int, k: int) -> Task:
    x = Inputs()
    total = apply("matmul", x(m, k, dtype=DType.U8), x(k, n, constant=True, dtype=DType.I8))
    return x.task(apply("add", total, x(n, constant=True, dtype=DType.I32)))


def attention(queries: int, keys: int, width: int, causal: bool) -> Task:
    x = Inputs()
    q, k, v = x(2, queries, width), x(2, keys, width), x(2, keys, width)
    return x.task(apply("attention", q, k, v, scale=width**-0.5, causal=causal))


def feed_forward() -> Task:
    """relu(x @ a) @ b + x."""
    x = Inputs()
    source = x(40, 32)
    wide = apply("relu", apply("matmul", source, x(32, 64, constant=True)))
    return x.task(apply("add", apply("matmul", wide, x(64, 32, constant=True)), source))


@dataclass(frozen=True)
class Case:
    template: str
    label: str
    machine: CpuMachine
    task: Callable[[], Task]
    numerics: str = "fast"
    values: Mapping[str, object] = field(default_factory=dict)  # that the config must have

    @property
    def algorithm(self) -> str:
        """The template, and its own algorithm if it has several."""
        return f"{self.template}, paired" if self.values.get("paired") else self.template

    @property
    def file(self) -> str:
        return f"{self.template}-{self.label}.txt"


def on_both(template: str, task: Callable[[], Task], numerics: str = "fast") -> list[Case]:
    return [
        Case(template, name, machine, task, numerics)
        for name, machine in (("avx2", AVX2), ("avx512", AVX512))
    ]


PAIRED = {"paired": True, "vectors": 1}
CASES = [
    *on_both("attention", lambda: attention(8, 32, 16, causal=False)),
    Case("attention", "causal", AVX512, lambda: attention(8, 32, 16, causal=True)),
    Case("attention", "paired", ZEN4, lambda: attention(8, 32, 32, causal=False), "relaxed", PAIRED),
    Case("attention", "paired-causal", ZEN4, lambda: attention(8, 32, 32, causal=True), "relaxed", PAIRED),
    *on_both("contraction", lambda: linear(12, 64, 48)),
    Case("contraction_int8", "avx-vnni", AVX_VNNI, lambda: int8_linear(12, 64, 64)),
    Case("contraction_int8", "avx512", AVX512, lambda: int8_linear(12, 64, 64)),
    *on_both("depthwise", lambda: Chain(1, 8, 8, None, 32, None).task()),
    Case("paired", "zen4", ZEN4, lambda: linear(48, 192, 64)),
    Case("paired", "zen4-odd", ZEN4, lambda: linear(97, 197, 131)),
    *on_both(
        "depthwise_channels_first",
        lambda: Image(1, (14, 14), (4, 4), (3, 3), low=(1, 1), high=(1, 1), groups=4).task(),
    ),
    *on_both("row_block_chain", feed_forward),
    *on_both("separable", lambda: Chain(1, 8, 8, 8, 32, 16).task()),
    *on_both("strassen", lambda: linear(24, 32, 96), "relaxed"),
    *on_both("strassen_packed", lambda: linear(24, 32, 96, constant=False), "relaxed"),
    *on_both("strassen_transposed", lambda: Image(1, (8, 8), (96, 32), (1, 1)).task(), "relaxed"),
    *on_both(
        "contraction_transposed", lambda: Image(1, (8, 8), (8, 32), (3, 3), low=(1, 1), high=(1, 1)).task()
    ),
    *on_both("winograd", lambda: convolution(12, (16, 32))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file.removesuffix(".txt"))
def test_the_program_is_the_golden(case: Case, golden: Callable[[str, str], None]) -> None:
    task = case.task()
    config, program = cpu_program(case.template, task, case.machine, case.numerics, **case.values)
    golden(case.file, program_text(task, program, case.machine, config))


def test_every_template_has_two_goldens() -> None:
    counts = Counter(case.algorithm for case in CASES)
    assert {name for name, count in counts.items() if count >= 2} == {*CPU_TEMPLATES, "attention, paired"}
