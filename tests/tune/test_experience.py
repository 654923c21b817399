"""What earlier runs have learned is begun with: of other tasks, and of this one before the sources changed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.db.samples import VERSIONS, work
from tilewright.db.database import Database
from tilewright.db.record import Record
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
