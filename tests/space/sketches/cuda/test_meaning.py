"""What sketches make means what the task means: interpreted, with copies that come late, on small odd shapes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.loops.gpu.products import Product
from tests.rewrites.helpers import array
from tests.space.checked import Inputs
from tests.space.sketches.cuda.tasks import product_task
from tests.space.templates.cuda.test_convolution import Case
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.oracle import evaluate
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200
from tilewright.loops.interpret import UnorderedAccess, interpret_program
from tilewright.loops.ir import Await, Block, For, Program, Stmt, block, walk_stmts
from tilewright.loops.verify import verify_program
from tilewright.measure.check import relative_error
from tilewright.space.sketches.cuda.block_reduction import BlockReduction
from tilewright.space.sketches.cuda.tensorised import Tensorised
from tilewright.space.sketches.cuda.tiled import Tiled
from tilewright.space.template import GpuTerms, GpuWork, Template

BOUNDS = {DType.F32: 1e-6, DType.F16: 1e-3, DType.BF16: 8e-3}


def program_of(sketch: Template, task: Task, numerics: str = "fast", **wanted: object) -> Program:
    """The program of a config with these values, drawn among those that have them."""
    applied = sketch.apply(GpuWork(task, H200, numerics))
    assert applied is not None
    fitting = [
        config
        for config in applied.space.configs()
        if all(dict(config.values)[name] == value for name, value in wanted.items())
    ]
    assert fitting, wanted
    program = applied.program(Random(0).choice(fitting))
    assert isinstance(program, Program)
    verify_program(program)
    return program


def check(program: Program, task: Task) -> None:
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    (reference,) = evaluate(task.graph, arrays, precise=True)
    got = interpret_program(program, arrays).reshape(reference.shape).astype(np.float64)
    assert relative_error(got, reference) < BOUNDS[task.graph.outputs[0].dtype], program.decisions


SMALL = {"bm": 16, "bn": 32, "wm": 16, "wn": 16, "bk": 32}


@pytest.mark.parametrize(
    ("case", "values"),
    [
        (Product(9, 20, 40, transposed_b=False), {"stages": 2, "prefetch": True, "instruction_k": 16}),
        (
            Product(12, 24, 36, transposed_a=True, dtype=DType.BF16),
            {"stages": 3, "prefetch": False, "instruction_k": 8},
        ),
        (Product(5, 17, 21, batch=2), {"stages": 1, "prefetch": False, "instruction_k": 16}),
        (
            Product(16, 24, 70, transposed_a=True, transposed_b=False),
            {"stages": 4, "prefetch": True, "instruction_k": 16},
        ),
        (
            Product(9, 20, 70, transposed_b=False),
            {"stages": 3, "prefetch": True, "fused": False, "instruction_k": 16},
        ),
        (Product(9, 20, 40), {"stages": 1, "prefetch": True, "instruction_k": 16}),
        (Product(9, 20, 180), {"stages": 6, "prefetch": True, "instruction_k": 16}),
    ],
    ids=lambda x: x.name if isinstance(x, Product) else "",
)
def test_products_on_tensor_cores(case: Product, values: dict[str, object]) -> None:
    task = product_task(case)
    check(program_of(Tensorised(), task, **{**SMALL, **values}), task)


def test_what_is_said_of_a_pipeline_is_what_the_program_and_the_model_have() -> None:
    """A product of one step has no pipeline, and only a pipeline of both levels is fused."""
    applied = Tensorised().apply(GpuWork(product_task(Product(32, 32, 64)), H200))
    assert applied is not None
    seen = set()
    for config in applied.space.configs():
        values = dict(config.values)
        assert values["bk"] < 64 or values["stages"] == 1, "the next step does not exist"
        kind = values["bk"], values["stages"], values["prefetch"], values["fused"]
        if kind in seen:
            continue
        seen.add(kind)
        program, terms = applied.program(config), applied.terms(config)
        assert isinstance(program, Program) and isinstance(terms, GpuTerms) and terms.inner is not None
        copies = [stmt for stmt in walk_stmts(program.body) if isinstance(stmt, Await) and stmt.pending > 0]
        said = program.decisions.partition(";")[0]
        assert (f"{values['stages']} stages" in said) == (terms.stages > 1), said
        assert bool(copies) == (terms.stages > 2), said
        assert ("fused" in said) == terms.inner.fused, said
    assert {stages for _, stages, _, _ in seen} == {1, 2, 3}


@pytest.mark.parametrize("transposed_b", [False, True])
def test_rounded_products(transposed_b: bool) -> None:
    """The interpreter does not round: what is tested is which element meets which."""
    task = product_task(Product(9, 20, 18, transposed_b=transposed_b, dtype=DType.F32))
    sizes = {**SMALL, "bk": 16, "instruction_k": 8, "stages": 2}
    check(program_of(Tensorised(), task, "tf32", **sizes), task)


@pytest.mark.parametrize("mapping", [0, 1])
def test_convolutions_on_tensor_cores(mapping: int) -> None:
    task = Case((3, 4), (8, 12), stride=2).task()
    check(program_of(Tensorised(), task, bm=16, bn=16, mapping=mapping, stages=2, instruction_k=16), task)


@pytest.mark.parametrize(
    ("case", "values"),
    [
        (Product(7, 18, 11, transposed_b=False, dtype=DType.F32), {"vm": 4, "stages": 2}),
        (Product(10, 18, 9, transposed_a=True, dtype=DType.F16), {"vm": 1, "stages": 1}),
        (Product(7, 18, 21, dtype=DType.F32), {"vm": 2, "stages": 3, "prefetch": True, "fused": True}),
        (Product(7, 18, 21, dtype=DType.F32), {"vm": 2, "stages": 2, "prefetch": True, "fused": False}),
        (Product(7, 18, 21, dtype=DType.F32), {"vm": 2, "stages": 1, "prefetch": True}),
    ],
    ids=lambda x: x.name if isinstance(x, Product) else "",
)
def test_products_on_ordinary_units(case: Product, values: dict[str, object]) -> None:
    task = product_task(case)
    check(program_of(Tiled(), task, tm=4, tn=8, vn=1, bk=8, **values), task)


def test_convolutions_on_ordinary_units() -> None:
    task = Case((2, 2), (3, 5), window=(2, 2), edge=0, dtype=DType.F32).task()
    check(program_of(Tiled(), task, tm=4, tn=8, vn=1, vm=4, bk=8, stages=3), task)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_factor_is_computed_on_the_way(prefetch: bool) -> None:
    """relu(x) * scale, of which every block computes what it needs."""
    x = Inputs()
    scaled = apply("mul", apply("relu", x(9, 40, dtype=DType.F16)), x(9, 40, dtype=DType.F16))
    task = x.task(apply("matmul", scaled, x(40, 20, dtype=DType.F16)))
    check(program_of(Tensorised(), task, **SMALL, stages=2, prefetch=prefetch, instruction_k=16), task)


def normalised(rows: int, columns: int, axis: int) -> Task:
    x = Inputs()
    return x.task(apply("softmax", x(rows, columns), axis=axis))


@pytest.mark.parametrize("task", [normalised(3, 70, 1), normalised(70, 4, 0)], ids=["rows", "columns"])
def test_sums_that_threads_share(task: Task) -> None:
    check(program_of(BlockReduction(), task, group=32, results=2), task)


def _without(stmt: Stmt, which: int) -> Stmt:
    """A program's body without one of the places where threads meet."""
    count = iter(range(1_000))

    def visit(each: Stmt) -> Stmt:
        if isinstance(each, For):
            return For(each.var, each.kind, visit(each.body))
        if isinstance(each, Block):
            kept = [visit(s) for s in each.stmts if not (isinstance(s, Await) and next(count) == which)]
            return block(*kept)
        return each

    return visit(stmt)


@pytest.mark.parametrize("prefetch", [False, True])
def test_what_nothing_orders_is_noticed(prefetch: bool) -> None:
    """Without any one of its waits but the last, which nothing is left to wait for, a pipeline is wrong."""
    task = product_task(Product(9, 20, 70, transposed_b=False))
    program = program_of(
        Tensorised(), task, **SMALL, stages=2, prefetch=prefetch, instruction_k=16, mapping=0
    )
    arrays = [array(*n.shape, seed=i, dtype=n.dtype) for i, n in enumerate(task.graph.inputs)]
    waits = sum(isinstance(stmt, Await) for stmt in walk_stmts(program.body))
    for which in range(waits - 1):
        broken = Program(program.name, program.params, _without(program.body, which))
        with pytest.raises(UnorderedAccess):
            interpret_program(broken, arrays)


def test_other_tasks_are_declined() -> None:
    x = Inputs()
    product = x.task(apply("matmul", x(8, 8), x(8, 8)))
    assert Tensorised().apply(GpuWork(product, H200)) is None, "fp32 is not for these instructions"
    x = Inputs()
    sums = x.task(apply("softmax", x(8, 100, dtype=DType.F16), axis=1))
    assert Tensorised().apply(GpuWork(sums, H200)) is None and Tiled().apply(GpuWork(sums, H200)) is None
