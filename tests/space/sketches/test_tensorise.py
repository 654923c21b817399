"""Intrinsics of the registry as candidates: offered, right in every config, and what becomes of those that are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

import tilewright
from tests.hw.declared import ABSENT, FMA, MUL, NONSENSE, WRONG, assembly, fma
from tests.space.checked import Inputs, results
from tests.space.sketches.tasks import conv, matmul
from tilewright import frontend
from tilewright.codegen.llvm.build import kernel_key, llvm_ir
from tilewright.errors import IntrinsicError
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.hw.intrinsics import ExternalSymbol, register_intrinsic, unregister_intrinsic
from tilewright.loops.ir import Invoke, walk_stmts
from tilewright.measure.measurement import Measurement
from tilewright.measure.runner import Runner
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.template import Applied, Work
from tilewright.support.trace import Trace
from tilewright.targets.resolve import resolve_target

pytestmark = pytest.mark.skipif(bool(FMA.missing(host())), reason="needs AVX2 and FMA")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    every = (FMA, MUL, WRONG, NONSENSE, ABSENT)
    for intrinsic in every:
        register_intrinsic(intrinsic, "tests.hw.registering")
    yield
    for intrinsic in every:
        unregister_intrinsic(intrinsic.name)


def offered(task: Task, name: str, **changes: object) -> list[Applied]:
    work = Work(task, replace(host(), **changes))  # type: ignore[arg-type]
    return [a for a in Candidates.of(work).applied if a.space.template.startswith(f"sketch:{name}@")]


def product() -> Task:
    x = Inputs()
    return x.task(apply("mul", x(5, 40), x(5, 40)))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("fma_8xf32", matmul(12, 16, 48, epilogue=True)),
        ("fma_8xf32", matmul(7, 9, 21, constant=False)),
        ("fma_8xf32", matmul(5, 12, 19, prologue=True)),
        ("fma_8xf32", conv((6, 7), (5, 24))),
        ("mul_8xf32", product()),
    ],
    ids=["matmul", "odd", "prologue", "conv", "elementwise"],
)
def test_every_config_is_right(name: str, task: Task) -> None:
    found = offered(task, name)
    assert found
    for applied in found:
        for seed in range(3):
            config = applied.space.sample(Random(seed))
            assert config is not None
            program = applied.program(config)
            assert any(isinstance(stmt, Invoke) for stmt in walk_stmts(program.body))
            got, expected = results(program, task)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_match_is_not_offered() -> None:
    assert not offered(product(), "fma_8xf32")
    assert not offered(matmul(12, 16, 48), "mul_8xf32")
    assert not offered(matmul(12, 16, 6), "fma_8xf32")  # narrower than a vector
    assert not offered(matmul(12, 16, 48), "fma_8xf32", features=("avx", "avx2"))
    assert not offered(matmul(12, 16, 48), "absent_8xf32")


def measured(task: Task, name: str) -> Measurement:
    job = TaskJob.of(Work(task, host()), 1)
    (applied, *_) = offered(task, name)
    config = applied.space.sample(Random(0))
    assert config is not None
    with Runner(1, builders=1) as runner:
        return runner.measure(job, [config])[0]


def test_one_that_is_right_is_timed() -> None:
    found = measured(matmul(12, 16, 48), "fma_8xf32")
    assert not found.failure, found.message
    assert found.seconds is not None


def test_one_that_computes_something_else_is_wrong() -> None:
    assert measured(matmul(12, 16, 48), "wrong_8xf32").failure == "wrong"


def test_one_that_does_not_assemble_fails_to_build() -> None:
    found = measured(matmul(12, 16, 48), "nonsense_8xf32")
    assert found.failure == "build"
    assert "invalid instruction mnemonic 'vfmaddfoops'" in found.message


def test_neither_ends_the_process_that_emits_it() -> None:
    (applied, *_) = offered(matmul(12, 16, 48), "nonsense_8xf32")
    config = applied.space.sample(Random(0))
    assert config is not None
    with pytest.raises(IntrinsicError, match="nonsense_8xf32: LLVM cannot compile it"):
        llvm_ir(applied.program(config), host(), "fast", "kernel")


def test_object_code_calls_no_function_of_anyone() -> None:
    foreign = fma("foreign_8xf32", ExternalSymbol("system", ("a", "b", "c")))
    register_intrinsic(foreign)
    try:
        (applied, *_) = offered(matmul(12, 16, 48), "foreign_8xf32")
        config = applied.space.sample(Random(0))
        assert config is not None
        with pytest.raises(IntrinsicError, match="may not call system"):
            llvm_ir(applied.program(config), host(), "fast", "kernel")
    finally:
        unregister_intrinsic("foreign_8xf32")


def test_another_declaration_is_another_kernel() -> None:
    """Object code is kept by the program's text."""
    task, work = matmul(12, 16, 48), Work(matmul(12, 16, 48), host())
    keys = set()
    for text in ("vfmadd231ps $2, $1, $0", "vfmadd231ps $1, $2, $0"):
        unregister_intrinsic("fma_8xf32")
        register_intrinsic(fma("fma_8xf32", assembly(text)))
        (applied, *_) = offered(task, "fma_8xf32")
        config = applied.space.sample(Random(0))
        assert config is not None
        keys.add((config.template, kernel_key(applied.program(config), work.machine, "fast")))
    assert len({template for template, _ in keys}) == len({key for _, key in keys}) == 2


def test_a_model_is_compiled_with_it(tmp_path: Path) -> None:
    """A lock file names it, as one that tuning writes would."""
    torch = pytest.importorskip("torch")
    model, example = torch.nn.Linear(64, 48).eval(), torch.randn(24, 64)
    path = tmp_path / "model.lock"
    tilewright.compile(model, (example,), target="cpu", lock=path)
    lock = json.loads(path.read_text())
    ((key, locked),) = lock["tasks"].items()
    imported = frontend.import_model(model, (example,))
    partition = resolve_target("cpu", model).partition(imported, lock["numerics"], Trace.off())
    (task,) = (call.task for call in partition.calls)
    assert task.key == key
    (applied, *_) = offered(task, "fma_8xf32")
    config = applied.space.sample(Random(0))
    assert config is not None
    program = applied.program(config)
    locked |= {"template": config.template, "values": dict(config.values)}
    locked["kernel"] = kernel_key(program, host(), lock["numerics"])
    path.write_text(json.dumps(lock))
    compiled = tilewright.compile(model, (example,), target="cpu", lock=path)
    np.testing.assert_allclose(compiled(example), model(example).detach(), rtol=1e-4, atol=1e-4)
    assert "fma_8xf32@" in compiled.explain().table(None)
