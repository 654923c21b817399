"""What earlier runs have learned is begun with: of other tasks, and of this one before the sources changed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.db.samples import VERSIONS, work
from tilewright.cost.analytical import Analytical
from tilewright.cost.encoding import Encoder
from tilewright.db.database import Database
from tilewright.db.record import Record
from tilewright.hw.gpu import H200
from tilewright.space.candidates import Candidates
from tilewright.space.space import Config
from tilewright.tune.experience import PastRecords
from tilewright.tune.tunable import TunableTask


def test_trials_of_earlier_sources_and_of_other_tasks_count(tmp_path: Path) -> None:
    config = next(iter(Candidates.of(work()).configs()))
    with Database.open(tmp_path / "tuning.sqlite") as database:
        now = Record.of(work(), 2, config, times=(1e-5,))
        before = msgspec.structs.replace(now, versions=VERSIONS, times=(2e-5,))
        illegal = msgspec.structs.replace(before, config=Config("gone", ()))
        other = Record.of(work(9), 2, next(iter(Candidates.of(work(9)).configs())), times=(3e-5,))
        database.add([now, before, illegal, other])
        found = PastRecords(database).experience(TunableTask(work(), 2))
    times = [[outcome.seconds for outcome in one.outcomes] for one in found]
    assert times == [[2e-5], [3e-5]]


@pytest.mark.parametrize("threads", [0, 2], ids=["on a GPU", "on a processor"])
def test_trials_on_another_kind_of_machine_do_not_count(threads: int, tmp_path: Path) -> None:
    """A GPU has no threads to share the work of a processor's loops, and its times say nothing about them."""
    works = {0: replace(work(), machine=H200), 2: work()}
    records = [
        Record.of(of, of_threads, one, times=(1e-5 * number,))
        for of_threads, base in works.items()
        for of in (replace(base, task=work(9).task),)
        for number, one in enumerate(itertools.islice(Candidates.of(of).configs(), 5), 1)
    ]
    here = TunableTask(works[threads], threads)
    with Database.open(tmp_path / "tuning.sqlite") as database:
        database.add(records)
        found = PastRecords(database).experience(here)
    assert [one.candidates.machine.kind for one in found] == [here.work.machine.kind]
    configs = list(itertools.islice(here.candidates.configs(), 3))
    assert np.isfinite(here.model("boosted", 0, found).predict(configs).seconds).all()


def test_trials_with_another_number_of_threads_are_described_by_their_own() -> None:
    """How evenly a loop's iterations share the threads depends on how many there were."""
    configs = list(itertools.islice(Candidates.of(work()).configs(), 3))
    matrices = []
    for threads in (1, 4):
        model = Analytical(Candidates.of(work()), threads)
        encoder = Encoder()
        matrices.append(encoder.matrix(model, configs)[:, encoder.columns["rounds"]])
    one, four = matrices
    assert (one >= four).all() and (one > four).any()
