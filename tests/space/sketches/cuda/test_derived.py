"""Sketches for GPUs that rules derive: what they compute, what they cost, and how users and searches change them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from tests.loops.gpu.products import Product
from tests.nvrtc import needs_nvrtc
from tests.programs import GPU, program_text, validation
from tests.space.checked import Inputs
from tests.space.sketches.cuda.tasks import product_task
from tests.space.sketches.cuda.test_meaning import check
from tests.space.templates.cuda.test_convolution import Case
from tilewright.codegen.cuda.build import build, source_of
from tilewright.codegen.cuda.shared import shared_bytes
from tilewright.dtypes import DType
from tilewright.errors import SketchError
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw.gpu import H200
from tilewright.loops.ir import Copy, Program, Warp, walk_stmts
from tilewright.loops.verify import verify_program
from tilewright.space.candidates import Candidates
from tilewright.space.sketches import Sketch, derive, register, unregister
from tilewright.space.sketches.applied import AppliedSketch, BatchedSketch
from tilewright.space.sketches.block_frames import BLOCK, STEP, BlockFrame
from tilewright.space.sketches.cuda.tensorised import Tensorised
from tilewright.space.sketches.rules import rules_for
from tilewright.space.space import Config, combinations
from tilewright.space.template import GpuTerms, GpuWork
from tilewright.support.batch import narrowed
from tilewright.testing.emulator.run import COMPILER
from tilewright.testing.emulator.run import check as check_emulated
from tilewright.tune.choose import ranked

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
WARPS, THREADS, CROSS = "sketch:warps", "sketch:threads", "sketch:cross"
TASKS: dict[str, Callable[[], Task]] = {
    "nt": lambda: product_task(Product(9, 20, 40, transposed_b=False)),
    "tn-bf16": lambda: product_task(Product(12, 24, 36, transposed_a=True, dtype=BF16)),
    "batch": lambda: product_task(Product(5, 17, 21, batch=2)),
    "f32": lambda: product_task(Product(20, 40, 30, dtype=F32)),
    "one-row": lambda: product_task(Product(1, 24, 32)),
    "conv": lambda: Case((3, 4), (8, 12), stride=2).task(),
}
AT_STEPS: dict[str, object] = {"left_at": STEP, "right_at": STEP}
SMALL: dict[str, object] = {"bm": 16, "bn": 16, "wm": 16, "wn": 16, "bk": 32, "instruction_k": 16}


def derived(task: Task, numerics: str = "fast") -> dict[str, BatchedSketch]:
    found = derive(GpuWork(task, H200, numerics))
    assert all(isinstance(each, BatchedSketch) for each in found)
    return {each.space.template: each for each in found if isinstance(each, BatchedSketch)}


def program_of(applied: AppliedSketch, config: Config) -> Program:
    program = applied.program(config)
    verify_program(program)
    return program


def config_of(applied: AppliedSketch, **wanted: object) -> Config:
    """A legal config with these values, and the first choices of other knobs that go with them."""
    config = next(
        config
        for config in applied.space.configs()
        if all(dict(config.values)[name] == value for name, value in wanted.items())
    )
    assert config in applied.space
    return config


@pytest.mark.parametrize(
    ("task", "numerics", "names"),
    [
        ("nt", "fast", [WARPS, THREADS]),
        ("f32", "fast", [THREADS]),
        ("f32", "tf32", [WARPS, THREADS]),
        ("conv", "fast", [WARPS, THREADS, f"{WARPS}#2", f"{THREADS}#2"]),
    ],
)
def test_which_there_are(task: str, numerics: str, names: list[str]) -> None:
    """One of each rule for each mapping of the axes to m, n and k."""
    assert list(derived(TASKS[task](), numerics)) == names


@pytest.mark.parametrize("name", TASKS)
def test_they_mean_what_the_task_means(name: str) -> None:
    """Interpreted, with copies that come late, on small odd shapes."""
    task = TASKS[name]()
    for applied in derived(task).values():
        config = applied.space.sample(Random(3))
        assert config is not None
        check(program_of(applied, config), task)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(("dtype", "name"), [(F16, WARPS), (F32, THREADS)])
@pytest.mark.parametrize("of_rows", [False, True], ids=["columns", "rows"])
def test_results_of_one_vector(count: int, dtype: DType, name: str, of_rows: bool) -> None:
    """Fewer results along an axis than a tile has, and no more than a thread writes at once."""
    m, n = (count, 20) if of_rows else (20, count)
    task = product_task(Product(m, n, 24, dtype=dtype))
    applied = derived(task)[name]
    configs = list(applied.space.configs())
    for config in Random(0).sample(configs, min(2, len(configs))):
        check(program_of(applied, config), task)


@pytest.mark.parametrize(
    "values",
    [
        {"stages": 1, "prefetch": False, "left_at": STEP, "right_at": STEP},
        {"stages": 2, "prefetch": True, "left_at": STEP, "right_at": STEP},
        {"stages": 2, "prefetch": True, "left_at": BLOCK, "right_at": STEP},
        {"stages": 1, "prefetch": False, "left_at": BLOCK, "right_at": BLOCK},
    ],
    ids=str,
)
def test_every_level_and_location_on_tensor_cores(values: dict[str, object]) -> None:
    task = product_task(Product(9, 20, 70, transposed_b=False))
    applied = derived(task)[WARPS]
    program = program_of(applied, config_of(applied, **SMALL, **values))
    check(program, task)
    stmts = list(walk_stmts(program.body))
    assert any(isinstance(stmt, Warp) for stmt in stmts)
    assert any(isinstance(stmt, Copy) for stmt in stmts) == (values["stages"] != 1)


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
@pytest.mark.parametrize(
    ("name", "sketch", "values"),
    [
        ("nt", WARPS, {**SMALL, "stages": 2, "prefetch": True, "left_at": STEP, "right_at": STEP}),
        ("f32", THREADS, {"stages": 3, "prefetch": True, "left_at": STEP, "right_at": STEP}),
    ],
)
def test_the_cuda_text_computes_the_task(
    name: str, sketch: str, values: dict[str, object], tmp_path: Path
) -> None:
    task = TASKS[name]()
    applied = derived(task)[sketch]
    program = program_of(applied, config_of(applied, **values))
    check_emulated(source_of(program), validation(task, "fast")[:2], tmp_path)


@pytest.mark.parametrize("capability", ["sm_80", "sm_90a"])
def test_the_best_ranked_compile_without_spills(capability: str) -> None:
    """Within the registers and the shared memory that were counted, on both kinds of card."""
    needs_nvrtc()
    from dataclasses import replace

    machine = replace(H200, capability=capability)
    for dtype, name in ((F16, WARPS), (F32, THREADS)):
        work = GpuWork(product_task(Product(512, 512, 256, dtype=dtype)), machine)
        applied = next(each for each in derive(work) if each.space.template == name)
        _, config = ranked(applied, work)[0]
        program, terms = applied.program(config), applied.terms(config)
        assert isinstance(program, Program) and isinstance(terms, GpuTerms)
        kernel = build(source_of(program), machine, "fast", None)
        assert not kernel.resources.spilled_bytes, config
        assert kernel.shared_bytes <= terms.shared_bytes <= machine.shared_block
        assert machine.resident_blocks(kernel.threads, kernel.resources.registers, kernel.shared_bytes) >= 1


def test_same_sizes_have_the_terms_of_the_written_sketch() -> None:
    """So a model ranks them alike: the program differs in how its indices are written."""
    work = GpuWork(product_task(Product(64, 96, 256)), H200)
    written = Tensorised().apply(work)
    assert written is not None
    applied = derived(work.task)[WARPS]
    config = config_of(applied, stages=3, prefetch=True, left_at=STEP, right_at=STEP)
    values = {**dict(config.values), "mapping": 0, "fused": True}
    like = Config.of(written.space.template, {knob.name: values[knob.name] for knob in written.space.knobs})
    assert written.terms(like) == applied.terms(config)


def test_legality_and_terms_of_many_configs_at_once() -> None:
    applied = derived(TASKS["nt"]())[WARPS]
    values = combinations(applied.space.knobs)
    legal = applied.space.legal(values)
    few = Random(0).sample(range(len(legal)), 40)
    names = [knob.name for knob in applied.space.knobs]
    for at in few:
        one = {name: values[name][at].item() for name in names}
        assert bool(applied.space.legal(one)) == bool(legal[at])
    some = [at for at in range(len(legal)) if legal[at]][:8]
    together = applied.terms_of(narrowed(values, legal))
    assert isinstance(together, GpuTerms)
    for number, at in enumerate(some):
        terms = applied.terms(Config.of(WARPS, {name: values[name][at].item() for name in names}))
        assert isinstance(terms, GpuTerms)
        assert together.shared_bytes[number] == terms.shared_bytes  # type: ignore[index]


def test_a_whole_operand_must_fit_shared_memory() -> None:
    applied = derived(product_task(Product(64, 64, 8192)))[WARPS]
    assert not any(dict(config.values)["left_at"] == BLOCK for config in applied.space.configs()), (
        "8192 x 16 halves are 256 KiB"
    )
    frame = applied.sketch.frame
    assert isinstance(frame, BlockFrame)


def test_evolution_moves_where_a_tile_is_fetched() -> None:
    """The location is a knob: mutations change it, and both places build."""
    candidates = Candidates.of(GpuWork(TASKS["nt"](), H200))
    applied = derived(candidates.work.task)[WARPS]
    config = config_of(applied, stages=2, left_at=STEP, right_at=STEP)
    assert candidates.is_legal(config)
    rng = Random(0)
    moved = next(
        other
        for _ in range(500)
        if dict((other := candidates.mutate(config, rng)).values)["left_at"] == BLOCK
    )
    programs = [candidates.program(each) for each in (config, moved)]
    assert programs[0].body != programs[1].body


def normalised() -> Task:
    """Two reductions, the second of what the first makes."""
    x = Inputs()
    data = x(3, 150)
    apart = apply("sub", data, apply("mean", data, axes=(1,), keepdims=True))
    squares = apply("mean", apply("mul", apart, apart), axes=(1,), keepdims=True)
    return x.task(apply("mul", apart, apply("rsqrt", squares)))


def reduced(op: str, shape: tuple[int, ...], **attributes: object) -> Callable[[], Task]:
    def made() -> Task:
        x = Inputs()
        return x.task(apply(op, x(*shape), **attributes))

    return made


REDUCTIONS: dict[str, Callable[[], Task]] = {
    "softmax of rows": reduced("softmax", (5, 300), axis=1),
    "softmax of columns": reduced("softmax", (90, 7), axis=0),
    "sum of columns": reduced("sum", (300, 6), axes=(0,), keepdims=False),
    "sum of three axes": reduced("sum", (3, 4, 130), axes=(2,), keepdims=False),
    "mean of two axes": reduced("mean", (2, 3, 10, 13), axes=(2, 3), keepdims=False),
    "normalised": normalised,
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_across_threads(name: str) -> None:
    task = REDUCTIONS[name]()
    (applied,) = derived(task).values()
    assert applied.space.template == CROSS
    configs = list(applied.space.configs())
    for config in (configs[0], configs[-1]):
        program = program_of(applied, config)
        check(program, task)
        terms = applied.terms(config)
        assert isinstance(terms, GpuTerms)
        assert shared_bytes(program) <= terms.shared_bytes <= H200.shared_block


def test_a_reduction_of_many_rows_is_not_shared() -> None:
    """There are enough results to fill the card with a thread for each."""
    assert not derived(reduced("sum", (1 << 18, 64), axes=(1,), keepdims=False)())


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
def test_the_cuda_text_of_a_reduction_across_threads(tmp_path: Path) -> None:
    task = REDUCTIONS["softmax of rows"]()
    (applied,) = derived(task).values()
    program = program_of(applied, config_of(applied, group=32, results=2))
    check_emulated(source_of(program), validation(task, "fast")[:2], tmp_path)


CASES: list[tuple[Callable[[], Task], str, dict[str, object]]] = [
    (TASKS["nt"], WARPS, {**SMALL, "stages": 2, "prefetch": True, **AT_STEPS}),
    (TASKS["f32"], THREADS, {"stages": 2, "prefetch": True, **AT_STEPS}),
    (REDUCTIONS["softmax of rows"], CROSS, {"group": 64, "results": 2}),
]


@pytest.mark.parametrize(
    ("made", "sketch", "values"), CASES, ids=[case[1].partition(":")[2] for case in CASES]
)
def test_the_program_is_the_golden(
    made: Callable[[], Task], sketch: str, values: dict[str, object], golden: Callable[[str, str], None]
) -> None:
    task = made()
    applied = next(each for each in derive(GpuWork(task, GPU)) if each.space.template == sketch)
    assert isinstance(applied, AppliedSketch)
    config = config_of(applied, **values)
    golden(
        f"derived-{sketch.partition(':')[2]}.txt",
        program_text(task, program_of(applied, config), GPU, config),
    )


# -- rules by kind of machine -----------------------------------------------------------------------------------------


class Faulty:
    name = "faulty"
    alone = False
    kinds: Sequence[str] = ("cuda",)

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        raise ValueError("it does not work")


def test_each_kind_of_machine_has_rules_of_its_own() -> None:
    names = {kind: {rule.name for rule in rules_for(kind)} for kind in ("cpu", "cuda")}
    assert {"matrices", "warps", "threads", "fetch"} <= names["cuda"]
    assert not names["cpu"] & {"matrices", "warps", "threads", "fetch"} and "softmax" in names["cpu"]


def test_a_faulty_rule_for_gpus_costs_nothing_else() -> None:
    register(Faulty())
    try:
        with pytest.warns(UserWarning, match="it does not work"):
            assert list(derived(TASKS["f32"]())) == [THREADS]
    finally:
        unregister("faulty")


def test_a_rule_is_for_kinds_of_machines_that_there_are() -> None:
    rule = Faulty()
    rule.kinds = ("tpu",)
    with pytest.raises(SketchError, match="must be among cpu, cuda"):
        register(rule)
