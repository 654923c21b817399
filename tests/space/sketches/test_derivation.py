"""Which structures rules derive, how they are called, and what becomes of rules that users add."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from tests.space.checked import Inputs
from tests.space.sketches.meaning import check_meaning
from tests.space.sketches.tasks import EXAMPLES, conv, elementwise, linear, matmul, matmul_softmax, softmax
from tests.work import python_calls
from tilewright.errors import SketchError, TilewrightWarning
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.graph.text import parse_graph
from tilewright.hw import host
from tilewright.loops.ir import Kind, walk_stmts
from tilewright.loops.text import print_program
from tilewright.space.candidates import Candidates
from tilewright.space.sketches import Move, Sketch, derive, register, unregister
from tilewright.space.sketches.sketch import Values
from tilewright.space.space import Knob
from tilewright.space.template import Work


def names(task: Task) -> list[str]:
    return [applied.space.template for applied in derive(Work(task, host()))]


# -- what is derived --------------------------------------------------------------------------------------------------

DERIVED = {
    "matmul": ["micro+stage+pack", "micro+pack"],
    "matmul_bf16": ["tile+stage+pack", "tile+pack"],
    "matmul_prologue": ["micro+stage+pack"],
    "linear": ["micro+stage+pack", "micro+pack"],
    "vector": ["tile+stage+pack", "tile+pack"],
    "column": ["tile+copy+stage", "tile+copy", "rfactor"],
    "conv": ["micro+stage+pack"],
    "softmax": ["rfactor+rfactor"],
    "softmax_first": ["rows+rows"],
    "matmul_softmax": ["rfactor+rfactor+softmax+micro+copy", "rfactor+rfactor+softmax+micro"],
    "sum_last": ["rfactor"],
    "sum_middle": ["rows"],
    "elementwise": ["elementwise"],
    "transposed": ["elementwise"],
}


@pytest.mark.parametrize("name", DERIVED)
def test_what_rules_make_of_a_task(name: str) -> None:
    assert names(EXAMPLES[name]()) == [f"sketch:{each}" for each in DERIVED[name]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_same_task_gives_the_same_sketches(name: str) -> None:
    """Read from its text, as another process does: names of nodes play no part."""
    task = EXAMPLES[name]()
    again = Task(parse_graph(task.text, {}), task.constants)
    ours, theirs = derive(Work(task, host())), derive(Work(again, host()))
    assert [one.space.template for one in ours] == [one.space.template for one in theirs]
    assert len({one.space.template for one in ours}) == len(ours)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.space.knobs == other.space.knobs
        config = mine.space.sample(random.Random(0))
        assert config is not None and config in other.space
        assert print_program(mine.program(config)) == print_program(other.program(config))


def test_no_rule_knows_what_to_do_with_a_scan() -> None:
    x = Inputs()
    task = x.task(apply("cumsum", x(4, 12), axis=1))
    assert derive(Work(task, host())) == ()


def test_nothing_is_derived_for_an_empty_tensor() -> None:
    x = Inputs()
    assert derive(Work(x.task(apply("relu", x(0, 4))), host())) == ()


@pytest.mark.parametrize(
    "task",
    [
        conv((56, 56), (64, 64)),
        matmul(128, 768, 3072, epilogue=True),
        softmax(128, 1000),
        matmul_softmax(12, 128, 64, 128),
    ],
    ids=lambda task: task.label,
)
def test_derivation_takes_little_work(task: Task) -> None:
    """At most 35,000 calls of functions where this was written, about 50 ms: a rule that asks all others again, or
    builds every config, takes many times that."""
    assert python_calls(lambda: derive(Work(task, host()))) < 70_000


# -- what the structures are ------------------------------------------------------------------------------------------


def program_of(task: Task, name: str, **values: int) -> str:
    """The program of a sketch, with these values and the space's own for the rest."""
    applied = {one.space.template: one for one in derive(Work(task, host()))}[f"sketch:{name}"]
    config = next(
        config
        for config in applied.space.configs()
        if all(config[knob] == value for knob, value in values.items())
    )
    return print_program(applied.program(config))


def test_a_constant_weight_is_packed_when_the_model_is_linked() -> None:
    applied = derive(Work(linear(64, 32, 96), host()))[-1]
    program = applied.program(applied.space.default())
    assert program.packings[1] is not None and program.packings[1].shape == (96, 32)
    assert program.parallel_extent > 1


def test_accumulators_are_in_registers_and_all_levels_are_there() -> None:
    text = program_of(matmul(64, 192, 64), "micro+pack", rows=4, vectors=2, unroll=4, block=2, k_block=96)
    assert "register matmul.local.rf: f32[" in text and "scratch matmul.local: f32[" in text
    order = [
        "parallel p <",
        "serial matmul.r0.o.final < 2",
        "serial matmul.r0.i.o < 24",
        "unroll outer.m < 4",
    ]
    positions = [text.rindex(part) for part in order]
    assert positions == sorted(positions)


def test_a_border_is_made_once_for_a_block() -> None:
    text = program_of(conv((8, 8), (4, 32)), "micro+stage+pack", block=2)
    assert "scratch pad: f32[160]" in text  # 4 rows of 10 places of 4 channels
    assert text.index("pad[") < text.index("register") or "fma(pad[" in text


def test_the_scores_of_a_softmax_stay_in_scratch_memory() -> None:
    applied = derive(Work(matmul_softmax(2, 64, 16, 48), host()))[0]
    text = print_program(applied.program(applied.space.default()))
    assert "scratch matmul: f32[" in text and "register matmul.local: f32[" in text
    assert text.count("out[") == 0 and text.count("softmax[") >= 1


def test_a_sum_along_memory_is_taken_across_lanes() -> None:
    applied = derive(Work(EXAMPLES["sum_last"](), host()))[0]
    assert "across" in print_program(applied.program(applied.space.default()))


def test_elementwise_work_is_vectorised_and_parallel() -> None:
    applied = derive(Work(elementwise(64, 64), host()))[0]
    kinds = {
        getattr(stmt, "kind", None) for stmt in walk_stmts(applied.program(applied.space.default()).body)
    }
    assert {Kind.PARALLEL, Kind.VECTOR} <= kinds


def test_sketches_are_candidates() -> None:
    candidates = Candidates.of(Work(matmul(64, 64, 64), host()), templates=False)
    assert {applied.space.template for applied in candidates.applied} >= {"sketch:micro+pack"}


def test_costs_follow_the_tiles() -> None:
    """More rows in a tile are fewer loads; a sketch of one product knows its terms in closed form."""
    applied = derive(Work(matmul(256, 256, 256), host()))[-1]
    base = dict(applied.space.default().values) | {"vectors": 2, "block": 4}
    few, many = (
        applied.terms(type(applied.space.default()).of(applied.space.template, base | {"rows": n}))
        for n in (2, 8)
    )
    assert few is not None and many is not None and few.loads > 1.4 * many.loads
    assert few.arithmetic >= many.arithmetic


# -- rules of one's own -----------------------------------------------------------------------------------------------


class Columns:
    """An elementwise task, column by column."""

    name = "columns"
    alone = True

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        loops = [f"{sketch.output}.i1", f"{sketch.output}.i0"]
        if sketch.stage != sketch.output or sketch.start.loops != loops[::-1]:
            return ()
        transposed = Move(lambda schedule, values: schedule.reorder(*loops).parallel(loops[0]))
        return [sketch.visited(transposed, name=self.name)]


class Broken(Columns):
    name = "broken"

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        raise KeyError("nothing of that name")


class Lazy(Columns):
    name = "lazy"

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        return [sketch]


class Illegal(Columns):
    name = "illegal"

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        if sketch.stage != sketch.output:
            return ()
        return [sketch.visited(Move(lambda schedule, values: schedule.unroll("nowhere")), name=self.name)]


@pytest.fixture
def registered() -> Iterator[object]:
    added: list[str] = []

    def add(rule: Columns) -> None:
        register(rule)
        added.append(rule.name)

    yield add
    for name in added:
        unregister(name)


def one_stage() -> Task:
    x = Inputs()
    return x.task(apply("add", x(12, 20), x(20)))


def test_a_rule_of_ones_own(registered) -> None:  # type: ignore[no-untyped-def]
    registered(Columns())
    task = one_stage()
    (applied,) = derive(Work(task, host()))
    config = applied.space.default()
    assert config.template == "sketch:columns"
    check_meaning(applied, config, task)
    unregister("columns")
    assert names(task) == ["sketch:elementwise"]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (Broken(), r"rule 'broken' failed at add of add: KeyError"),
        (Lazy(), r"rule 'lazy' gave a sketch in which add"),
    ],
)
def test_a_broken_rule_is_named_and_left_out(registered, rule: Columns, says: str) -> None:  # type: ignore[no-untyped-def]
    without = names(one_stage())
    registered(rule)
    with pytest.warns(TilewrightWarning, match=says):
        assert names(one_stage()) == without


class WrongKnobs(Columns):
    name = "wrong knobs"

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        move = Move(lambda schedule, values: schedule, (Knob("x", (1.5, 2.5)),))  # type: ignore[arg-type]
        return [sketch.visited(move, name=self.name)]


class RaisesInMoves(Columns):
    name = "raises in moves"

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        def bug(values: Values) -> bool:
            raise KeyError("a bug of its author's")

        return [sketch.visited(Move(lambda schedule, values: schedule, legal=bug), name=self.name)]


def test_knobs_of_a_rule_that_are_none_are_left_out(registered) -> None:  # type: ignore[no-untyped-def]
    registered(WrongKnobs())
    with pytest.warns(TilewrightWarning, match="knob 'x' has choices that are not an int"):
        assert derive(Work(one_stage(), host())) == ()


def test_a_rule_whose_constraint_raises_has_no_legal_config(registered) -> None:  # type: ignore[no-untyped-def]
    registered(RaisesInMoves())
    candidates = Candidates.of(Work(one_stage(), host()))
    with pytest.warns(TilewrightWarning, match="sketch:raises in moves.* cannot say which configs are legal"):
        assert [applied.space.template for applied in candidates.applied] == ["default"]


def test_a_move_that_is_illegal_is_named_with_its_rule(registered) -> None:  # type: ignore[no-untyped-def]
    registered(Illegal())
    (applied,) = derive(Work(one_stage(), host()))
    with pytest.raises(
        SketchError,
        match=r"rule 'illegal' cannot go on in sketch:illegal with {}: the loop must be one of",
    ):
        applied.program(applied.space.default())


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(SketchError, match="a sketch rule has a name"):
        register(object())  # type: ignore[arg-type]
    with pytest.raises(SketchError, match="there is a sketch rule 'inline' already"):
        rule = Columns()
        rule.name = "inline"
        register(rule)
