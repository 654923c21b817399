"""The configs that no other does better by construction: few, legal, and with what is good among them."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.nondominated import NondominatedContraction, nondominated
from tests.faults.candidates import convolution
from tests.machines import ZEN_4
from tests.space.checked import Inputs
from tilewright.cost.analytical import Analytical
from tilewright.dtypes import DType
from tilewright.graph.op import apply
from tilewright.graph.task import Task
from tilewright.hw import host
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.space.templates.cpu.contraction import AppliedContraction, Contraction

THREADS = 2


def product(m: int, n: int, k: int, constant: bool = True) -> Task:
    x = Inputs()
    return x.task(apply("matmul", x(m, k), x(k, n, constant=constant)))


def whole(task: Task, numerics: str = "fast") -> Candidates:
    return Candidates.of(Work(task, host(), numerics), sketches=False)


def test_they_are_few_and_the_best_is_predicted_as_good_as_the_best_of_all() -> None:
    candidates = whole(product(256, 64, 192))
    few = nondominated(candidates)
    listed = list(few.configs())
    assert 20 < len(listed) < 8000 < candidates.size
    model = Analytical(candidates, THREADS)
    sampled = min(map(model.seconds, candidates.sample(Random(0), 400)))
    assert min(map(model.seconds, Random(1).sample(listed, min(400, len(listed))))) <= 1.02 * sampled


@settings(max_examples=20)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 300), st.booleans())
def test_there_always_are_some_and_each_is_legal(m: int, n: int, k: int, constant: bool) -> None:
    candidates = whole(product(m, n, k, constant))
    few = nondominated(candidates)
    named = {applied.space.template for applied in candidates.applied}
    assert {applied.space.template for applied in few.applied} == named
    for config in few.sample(Random(0), 5):
        assert candidates.is_legal(config)


def test_columns_behind_whole_vectors_need_no_other_tiles() -> None:
    lanes = host().lanes(DType.F32)

    def tiles(columns: int) -> set[tuple[object, object]]:
        applied = Contraction().apply(Work(product(64, columns, 256), host()))
        assert isinstance(applied, AppliedContraction) and applied.tail == columns % lanes
        return {
            (config["rows"], config["vectors"]) for config in NondominatedContraction(applied).space.configs()
        }

    assert tiles(4 * lanes + 1) == tiles(4 * lanes)


def test_data_is_not_copied_to_lie_as_it_does() -> None:
    (contraction,) = (
        a for a in nondominated(whole(product(64, 96, 64))).applied if a.space.template == "contraction"
    )
    assert {config["stage"] for config in contraction.space.configs()} == {False}


def test_of_winograds_algorithm_there_are_a_part_and_the_best() -> None:
    candidates = whole(convolution(14, 32, 32))
    few, all_of_it = (
        {config for a in some.applied if a.space.template == "winograd" for config in a.space.configs()}
        for some in (nondominated(candidates), candidates)
    )
    assert few < all_of_it and len(few) < len(all_of_it) / 2
    assert {config["outputs"] for config in few} == {config["outputs"] for config in all_of_it}
    model = Analytical(candidates, THREADS)
    assert min(map(model.seconds, few)) <= 1.02 * min(map(model.seconds, all_of_it))


def test_of_blocks_that_come_to_the_same_size_there_is_one() -> None:
    candidates = whole(product(60, 64, 64))
    (contraction,) = (a for a in nondominated(candidates).applied if a.space.template == "contraction")
    programs = [
        str(contraction.program(config).body)
        for config in contraction.space.configs()
        if (config["rows"], config["vectors"], config["chunks"], config["prefetch"]) == (6, 4, 1, 0)
    ]
    assert len(programs) == len(set(programs)) > 0


def test_of_seven_products_there_are_a_part_and_the_best() -> None:
    candidates = whole(product(256, 128, 384), "relaxed")
    few, all_of_it = (
        {config for a in some.applied if a.space.template == "strassen" for config in a.space.configs()}
        for some in (nondominated(candidates), candidates)
    )
    assert few < all_of_it and len(few) < len(all_of_it) / 4
    model = Analytical(candidates, THREADS)
    assert min(map(model.seconds, few)) <= 1.02 * min(map(model.seconds, all_of_it))


def test_of_products_in_pairs_there_are_a_part_and_the_best() -> None:
    work = Work(product(256, 256, 384), ZEN_4)
    candidates = Candidates.of(work, sketches=False)
    few, all_of_it = (
        {config for a in some.applied if a.space.template == "paired" for config in a.space.configs()}
        for some in (nondominated(candidates), candidates)
    )
    assert few < all_of_it and len(few) < len(all_of_it) / 2
    model = Analytical(candidates, THREADS)
    assert min(map(model.seconds, few)) <= 1.02 * min(map(model.seconds, all_of_it))
