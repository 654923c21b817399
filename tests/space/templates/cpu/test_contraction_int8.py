"""Products and convolutions of bytes: every config's sums are the oracle's integers."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.space.checked import Inputs, legal_configs, stored_for
from tests.space.spills import spilled_vectors_in_loops
from tilewright.dtypes import DType
from tilewright.graph.ir import Node
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw import CpuMachine, host
from tilewright.loops.interpret import interpret_program
from tilewright.loops.ir import Program
from tilewright.loops.verify import verify_program
from tilewright.measure.single import SingleKernel
from tilewright.space.template import Applied, Work
from tilewright.space.templates.cpu.contraction_int8 import ContractionInt8
from tilewright.tune.choose import choose, descend

QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
KINDS = list(itertools.product((DType.U8, DType.I8), repeat=2))
HERE = host()
LACKING = ("avx512vnni", "avxvnni", "i8mm")
WITHOUT_DOT4 = dataclasses.replace(
    HERE,
    features=tuple(f for f in HERE.features if f not in LACKING),
    absent=(*HERE.absent, *(f for f in LACKING if f in HERE.features)),
)
NARROW = dataclasses.replace(HERE, vector_bytes=16, vector_registers=16)

kinds = st.sampled_from(KINDS)


def applied_to(task: Task, machine: CpuMachine = HERE) -> Applied:
    applied = ContractionInt8().apply(Work(task, machine))
    assert applied is not None
    return applied


def drawn(node: Node, seed: int, extreme: bool) -> np.ndarray:
    """Any bytes, or only those whose products are largest; other integers are small."""
    rng = np.random.default_rng(seed)
    if node.dtype not in (DType.I8, DType.U8):
        return rng.integers(-1000, 1000, node.shape).astype(node.dtype.numpy)
    limits = np.iinfo(node.dtype.numpy)
    if extreme:
        return rng.choice([limits.min, limits.max], node.shape).astype(node.dtype.numpy)
    return rng.integers(limits.min, limits.max, node.shape, endpoint=True).astype(node.dtype.numpy)


def operands(task: Task, program: Program, extreme: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """(inputs in the order that the program wants, the exact result)."""
    arrays = [drawn(node, seed, extreme) for seed, node in enumerate(task.graph.inputs)]
    (exact,) = evaluate(task.graph, arrays, precise=True)
    stored = stored_for(program, arrays)
    return stored, exact.reshape(-1)


def check_exact(program: Program, task: Task, *, machine: CpuMachine = HERE) -> None:
    verify_program(program)
    kernel = SingleKernel(program, machine)
    for extreme, threads in ((False, 1), (False, 2), (True, 2)):
        stored, exact = operands(task, program, extreme)
        kernel.executor.threads = threads
        np.testing.assert_array_equal(kernel(stored), exact)


def matmul_task(m: int, n: int, k: int, data: DType, weight: DType, *, batch: tuple[int, ...] = ()) -> Task:
    x = Inputs()
    a, b = x(*batch, m, k, dtype=data), x(k, n, constant=True, dtype=weight)
    product = apply("matmul", a, b)
    bias = x(n, constant=True, dtype=DType.I32)
    return x.task(apply("add", product, apply("broadcast_to", bias, shape=product.shape)))


def conv_task(
    size: tuple[int, int],
    channels: tuple[int, int],
    window: tuple[int, int],
    data: DType,
    weight: DType,
    *,
    stride: int = 1,
    dilation: int = 1,
    pad: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0)),
    border: int = 0,
    groups: int = 1,
) -> Task:
    x = Inputs()
    image = x(1, *size, channels[0], dtype=data)
    weights = x(*window, channels[0] // groups, channels[1], constant=True, dtype=weight)
    low, high = (0, pad[0][0], pad[1][0], 0), (0, pad[0][1], pad[1][1], 0)
    if any(low + high):
        image = apply("pad", image, low=low, high=high, interior=(0, 0, 0, 0), value=border)
    attrs = {"stride": (stride,) * 2, "dilation": (dilation,) * 2, "groups": groups}
    conv = apply("conv", image, weights, padding=((0, 0), (0, 0)), layout="channels_last", **attrs)
    return x.task(conv)


@given(data=st.data(), m=st.integers(1, 40), n=st.integers(4, 120), k=st.integers(2, 140), kind=kinds)
@QUICK
def test_matrix_products(data: st.DataObject, m: int, n: int, k: int, kind: tuple[DType, DType]) -> None:
    task = matmul_task(m, n, k, *kind)
    applied = applied_to(task)
    check_exact(applied.program(data.draw(legal_configs(applied.space))), task)


CONVOLUTIONS = {
    "size": st.tuples(st.integers(5, 15), st.integers(5, 15)),
    "channels": st.tuples(st.integers(2, 20), st.integers(4, 40)),
    "window": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "stride": st.integers(1, 2),
    "dilation": st.integers(1, 2),
    "pad": st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2),
    "border": st.sampled_from([0, 1, 127]),
    "kind": kinds,
}


def test_convolutions() -> None:
    """What the template declines another one computes, as exactly; it takes most of them."""
    taken: Counter[bool] = Counter()

    @given(data=st.data(), **CONVOLUTIONS)
    @QUICK
    def check(data: st.DataObject, size, channels, window, kind, **attributes) -> None:
        work = Work(conv_task(size, channels, window, *kind, **attributes), HERE)
        applied = ContractionInt8().apply(work)
        taken[applied is not None] += 1
        if applied is None:
            check_exact(choose(work).program, work.task)
        else:
            check_exact(applied.program(data.draw(legal_configs(applied.space))), work.task)

    check()
    assert taken[True] > taken[False], taken


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_chosen_for_common_shapes(kind: tuple[DType, DType]) -> None:
    one = ((1, 1), (1, 1))
    tasks = [
        matmul_task(33, 96, 256, *kind),
        matmul_task(7, 40, 33, *kind, batch=(2,)),
        conv_task((14, 14), (32, 48), (3, 3), *kind, pad=one),
        conv_task((14, 14), (32, 48), (3, 3), *kind, pad=one, border=114),
        conv_task((14, 14), (32, 48), (1, 1), *kind),
        conv_task((15, 14), (32, 48), (1, 1), *kind, stride=2),
        conv_task((24, 24), (3, 32), (7, 7), *kind, pad=((3, 3), (3, 3)), stride=2),
        conv_task((9, 9), (32, 32), (3, 3), *kind, pad=one, groups=2),
    ]
    for task in tasks:
        choice = choose(Work(task, HERE))
        assert choice.config is not None and choice.config.template == "contraction_int8"
        check_exact(choice.program, task)


@pytest.mark.parametrize("machine", [WITHOUT_DOT4, NARROW], ids=["without-dot4", "narrow"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_other_instruction_sets(machine: CpuMachine, kind: tuple[DType, DType]) -> None:
    for task in (
        matmul_task(9, 40, 70, *kind),
        conv_task((7, 8), (12, 24), (3, 3), *kind, pad=((1, 1), (1, 1))),
    ):
        work = Work(task, machine)
        applied = applied_to(task, machine)
        best = descend(applied, work)
        assert best is not None
        check_exact(applied.program(best[1]), task, machine=machine)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_program_means_the_task_without_a_machine(kind: tuple[DType, DType]) -> None:
    task = matmul_task(3, 18, 10, *kind)
    applied = applied_to(task)
    best = descend(applied, Work(task, HERE))
    assert best is not None
    program = applied.program(best[1])
    stored, exact = operands(task, program, extreme=True)
    np.testing.assert_array_equal(interpret_program(program, stored), exact)


def test_requantisation_is_in_the_same_kernel() -> None:
    x = Inputs()
    a, b = x(20, 64, dtype=DType.U8), x(64, 48, constant=True, dtype=DType.I8)
    scaled = apply("mul", apply("cast", apply("matmul", a, b), dtype=DType.F32), x(48, constant=True))
    kept = apply("clamp", apply("round", scaled), min=0.0, max=255.0)
    task = x.task(apply("cast", apply("cast", kept, dtype=DType.I32), dtype=DType.U8))
    program = choose(Work(task, HERE)).program
    arrays = [drawn(node, seed, False) for seed, node in enumerate(task.graph.inputs[:2])]
    arrays.append(np.linspace(1e-4, 1e-3, 48).astype(np.float32))
    expected = np.clip(
        np.rint((arrays[0].astype(np.int32) @ arrays[1].astype(np.int32)).astype(np.float32) * arrays[2]),
        0,
        255,
    )
    packings = (*program.packings, *[None] * (3 - len(program.packings)))
    stored = [(a if p is None else p.pack(a)).reshape(-1) for a, p in zip(arrays, packings, strict=True)]
    np.testing.assert_array_equal(
        SingleKernel(program, HERE)(stored).reshape(20, 48), expected.astype(np.uint8)
    )


def test_what_it_leaves_to_others() -> None:
    def declined(task: Task, machine: CpuMachine = HERE) -> bool:
        return ContractionInt8().apply(Work(task, machine)) is None

    x = Inputs()
    assert declined(x.task(apply("matmul", x(8, 16), x(16, 32, constant=True))))  # of floats
    x = Inputs()
    from_outside = apply("matmul", x(8, 16, dtype=DType.U8), x(16, 32, dtype=DType.I8))
    assert declined(x.task(from_outside))  # its columns lie side by side
    task = matmul_task(8, 32, 16, DType.U8, DType.I8)
    assert not declined(task)
    assert declined(task, dataclasses.replace(HERE, triple="aarch64-unknown-linux-gnu", features=("neon",)))


@pytest.mark.skipif(not HERE.dot4_bytes, reason="the loops are counted by the instruction")
def test_nothing_is_spilled() -> None:
    for kind in KINDS:
        task = matmul_task(128, 768, 768, *kind)
        assert spilled_vectors_in_loops(choose(Work(task, HERE)).program, HERE) == 0
