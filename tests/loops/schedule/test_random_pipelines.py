"""Random schedules with pipelines: on processors, where tiles are packed ahead, and on GPUs with every level."""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.loops import formulas
from tests.loops.schedule.examples import Task, check_meaning, conv2d
from tests.loops.schedule.gpu import operands, product_of, tensorised
from tilewright.codegen.cuda.build import source_of
from tilewright.errors import PipelineError, ScheduleError
from tilewright.loops.interpret import interpret_program
from tilewright.loops.schedule import Schedule
from tilewright.testing.emulator.run import COMPILER, Emulated

# -- processors -------------------------------------------------------------------------------------------------------


def packed_ahead(rng: Random, start: Schedule, stage: str) -> Schedule:
    """An input of the stage goes through a tile, at any of its loops in any order, in any number of stages."""
    schedule = start.cache_read(rng.choice([tile.name for tile in start.nest.inputs]), stage)
    tile = next(each for each in schedule.stages if each not in start.stages)
    loops = [name for name in schedule.loops if name.startswith(f"{stage}.")]
    for name in rng.sample(loops, 1):
        schedule = schedule.split(name, rng.choice([2, 3, 4]), rng.choice(["guard", "exact", "narrow"]))
    loops = [name for name in schedule.loops if name.startswith(f"{stage}.")]
    schedule = schedule.reorder(*rng.sample(loops, len(loops)))
    return schedule.compute_at(tile, rng.choice(loops)).pipeline(tile, rng.choice([2, 3, 4]))


@pytest.mark.parametrize(
    ("task", "stage"),
    [(formulas.matmul(7, 12, 5), "product"), (conv2d(4), "conv")],
    ids=["matmul", "three reduction loops"],
)
def test_random_tiles_are_packed_ahead(task: Task, stage: str) -> None:
    made = 0
    for seed in range(60):
        try:
            schedule = packed_ahead(Random(seed), Schedule.of(*task), stage)
            schedule.program()
        except ScheduleError:
            continue
        check_meaning(schedule, task)
        made += 1
        if made == 5:
            return
    raise AssertionError(f"only {made} of 60 schedules are legal")


# -- GPUs -------------------------------------------------------------------------------------------------------------


def on_tensor_cores(rng: Random) -> tuple[tuple[int, int, int], Schedule | None]:
    """The sizes of a matmul and a random schedule of it; None where its pipeline is refused."""
    wm, wn, bk = 16, rng.choice([8, 16]), rng.choice([16, 32])
    block = wm * rng.choice([1, 2]), wn * rng.choice([1, 2]), bk
    threads = 32 * (block[0] // wm) * (block[1] // wn)
    if any(rows * bk % (8 * threads) for rows in block[:2]):
        return block, None  # some threads would have nothing to copy
    steps, stages, registers = rng.choice([1, 2, 3, 5]), rng.randint(1, 6), rng.choice([1, 2])
    shape = block[0] * rng.choice([1, 2]), block[1], bk * steps
    legal = (stages == 1 or (steps > 1 and stages <= steps + 1)) and (registers == 1 or bk > 16)
    try:
        schedule = tensorised(shape, block, (wm, wn), stages, registers, swizzled=rng.choice([True, False]))
        schedule.program()
    except PipelineError:
        assert not legal
        return shape, None
    assert legal
    return shape, schedule


def several(first: int, wanted: int) -> list[tuple[tuple[int, int, int], Schedule]]:
    drawn = (on_tensor_cores(Random(seed)) for seed in count(first))
    legal = ((shape, schedule) for shape, schedule in drawn if schedule is not None)
    return list(islice(legal, wanted))


def test_random_schedules_for_tensor_cores_mean_the_matmul() -> None:
    for shape, schedule in several(0, 3):
        arrays = operands(shape)
        got = interpret_program(schedule.program(), arrays).reshape(shape[:2])
        np.testing.assert_array_equal(got.astype(np.float64), product_of(arrays), str(schedule))


@pytest.mark.skipif(COMPILER is None, reason="no g++ here to compile the emulator with")
def test_the_cuda_text_of_a_random_schedule_computes_the_matmul(tmp_path: Path) -> None:
    ((shape, schedule),) = several(100, 1)
    arrays = operands(shape)
    (got,) = Emulated(source_of(schedule.program()), tmp_path)([arrays])
    np.testing.assert_array_equal(
        got.reshape(shape[:2]).astype(np.float64), product_of(arrays), str(schedule)
    )
