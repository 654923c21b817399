"""Data sets: collected in parts, read in spite of damage, split without near copies, and learned from."""

from __future__ import annotations

import datetime
import math
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.machines import ICE_LAKE
from tilewright.cost.analytical import Analytical
from tilewright.cost.forest import Forest
from tilewright.dataset.collect import collect
from tilewright.dataset.sample import sample
from tilewright.dataset.split import clusters, families, folds
from tilewright.dataset.stats import stats
from tilewright.dataset.store import Writer, merge, read
from tilewright.dataset.tables import Table, label, tables_of
from tilewright.dataset.tasks import F32, SUITES, TaskSource, conv, gemm
from tilewright.dataset.train import TrainingSettings, about, predicted, train
from tilewright.db.record import Record
from tilewright.errors import DatasetError, MissingDependencyError
from tilewright.hw import host
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work


def records(m: int, n: int, k: int, count: int = 30, slow: str = "") -> list[Record]:
    """Made up: as predicted, except that values of a knob above four take twice as long."""
    work = Work(gemm(m, n, k, "none", F32), ICE_LAKE)
    candidates = Candidates.of(work, sketches=False)
    model = Analytical(candidates, 1)
    found = []
    for config in sample(candidates, count):
        wrong = 2.0 if slow and int(dict(config.values).get(slow, 0)) > 4 else 1.0
        found.append(Record.of(work, 1, config, times=(wrong * model.seconds(config),)))
    return found


@pytest.fixture(scope="module")
def some() -> list[Record]:
    return records(64, 96, 128)


def test_the_suites_have_as_many_tasks_as_a_data_set_needs() -> None:
    for kind, least in (("cpu", 40), ("cuda", 60)):
        sources = SUITES[kind]()
        assert len(sources) >= least and len({source.name for source in sources}) == len(sources)
        assert len({source.make().key for source in sources}) == len(sources)
        assert [s.name for s in SUITES[kind]()] == [s.name for s in sources]
        assert (
            len({source.family for source in sources[:12]}) >= 5
        )  # a part of the list has something of everything


def test_a_sample_is_the_same_again_and_has_no_config_twice() -> None:
    candidates = Candidates.of(Work(gemm(64, 96, 128, "none", F32), ICE_LAKE), sketches=False)
    found = sample(candidates, 40)
    assert found == sample(candidates, 40) and len(set(found)) == 40
    assert all(candidates.is_legal(config) for config in found)


def test_what_was_collected_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    sources = [TaskSource("gemm small", lambda: gemm(32, 32, 32, "none", F32))]
    first = collect(path, sources, host(), configs=3, seconds=60)
    assert (first.added, first.left) == (3, 0)
    assert collect(path, sources, host(), configs=3, seconds=60).added == 0
    found = read(path).records
    assert len({record.config for record in found}) == 3
    assert all(record.machine and record.versions.tilewright and record.when > 0 for record in found)
    assert all(record.times or record.failure for record in found)
    assert stats(found)[0].records == 3


def test_no_time_means_no_records_and_everything_left(tmp_path: Path) -> None:
    sources = [TaskSource("gemm small", lambda: gemm(32, 32, 32, "none", F32))]
    done = collect(tmp_path / "data.jsonl", sources, host(), configs=3, seconds=0)
    assert (done.added, done.left) == (0, 3)


def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path, some: list[Record]) -> None:
    path = tmp_path / "data.jsonl"
    Writer(path).add(some)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-2], lines[-2].replace(b'"failure"', b'"failuer"'), lines[-1][:40]]))
    found = read(path)
    assert len(found.records) == len(some) - 2 and found.damaged == 2


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.xz"])
def test_a_file_that_is_no_data_set_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"no\n" * 5)
    with pytest.raises(DatasetError):
        read(path)
    with pytest.raises(DatasetError, match="cannot read"):
        read(tmp_path / "missing.jsonl")


def test_merging_keeps_each_record_once(tmp_path: Path, some: list[Record]) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    Writer(paths[0]).add(some[:20])
    Writer(paths[1]).add(some[10:])
    to = tmp_path / "all.jsonl.xz"
    merge(paths, to)
    assert sorted(read(to).records, key=str) == sorted(some, key=str)
    assert to.stat().st_size < sum(path.stat().st_size for path in paths) / 4
    again = tmp_path / "again.jsonl.xz"
    merge([to], again)
    assert again.read_bytes() == to.read_bytes()


def test_records_that_cannot_be_learned_from_are_left_out_with_their_reasons(some: list[Record]) -> None:
    changed = [
        msgspec.structs.replace(some[0], times=(math.nan,)),
        msgspec.structs.replace(some[1], times=(-1.0,)),
        msgspec.structs.replace(some[2], failure="wrong", times=()),
        msgspec.structs.replace(
            some[3], machine={"of": "the future"}, key=msgspec.structs.replace(some[3].key, machine="x")
        ),
    ]
    tables, left = tables_of([*changed, *some[4:]])
    assert dict(left.counts) == {
        "with times that are not positive numbers": 2,
        "of a task or machine that this version does not know": 1,
    }
    (table,) = tables
    assert len(table.configs) == len(some) - 3 and table.known.sum() == len(some) - 4


def test_a_label_is_the_time_of_an_undisturbed_call(some: list[Record]) -> None:
    seconds = some[0].times[0]
    disturbed = msgspec.structs.replace(
        some[0], times=(seconds, seconds, 2 * seconds, 9 * seconds, 2 * seconds)
    )
    assert label(disturbed.times) == seconds == label((seconds,))
    (quiet,), (loaded,) = (tables_of([first, *some[1:]])[0] for first in (some[0], disturbed))
    np.testing.assert_array_equal(quiet.seconds, loaded.seconds)


def test_tables_have_the_seconds_of_the_builds(some: list[Record]) -> None:
    slow = [msgspec.structs.replace(r, build_seconds=0.5 + at) for at, r in enumerate(some)]
    (table,) = tables_of(slow)[0]
    wanted = {str(record.config): record.build_seconds for record in slow}
    assert [wanted[str(config)] for config in table.configs] == table.builds.tolist()


def made(*tasks: Work) -> list[Table]:
    found = []
    for work in tasks:
        candidates = Candidates.of(work, sketches=False)
        model = Analytical(candidates, 1)
        found += [Record.of(work, 1, c, times=(model.seconds(c),)) for c in sample(candidates, 5)]
    return tables_of(found)[0]


def test_near_copies_are_held_out_together() -> None:
    sizes = ((64, 96, 128), (64, 96, 120), (512, 512, 512), (500, 512, 512), (32, 32, 1024))
    tables = made(
        *(Work(gemm(*size, "none", F32), ICE_LAKE) for size in sizes),
        Work(conv(1, 14, 32, 32, 3, 1, F32), ICE_LAKE),
    )
    numbers = clusters(tables)
    names = [table.name for table in tables]
    by_name = dict(zip(names, numbers, strict=True))
    near = [name for name in names if "64x128" in name or "64x120" in name]
    assert len(near) == 2 and by_name[near[0]] == by_name[near[1]] and len(set(numbers)) == 4
    for held_out in folds(tables, 3, seed=1):
        inside = {numbers[at] for at in held_out}
        assert not inside & {numbers[at] for at in range(len(tables)) if at not in held_out}
    assert sorted(at for fold in folds(tables, 3) for at in fold) == list(range(len(tables)))
    assert set(families(tables)) == {"contraction", "convolution"}


def test_the_card_of_weights_names_machines_days_and_files(tmp_path: Path, some: list[Record]) -> None:
    path = tmp_path / "some.jsonl"
    noon = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.timezone.utc).timestamp()
    dated = [msgspec.structs.replace(r, when=noon + 86400 * (at % 3)) for at, r in enumerate(some)]
    Writer(path).add(dated)
    tables, _ = tables_of(read(path).records)
    card = about(tables, [path], 7, 1)
    assert ICE_LAKE.describe() in card["machines"] and tables[0].machine in card["machines"]
    assert card["measured"] == "2026-03-01 to 2026-03-03"
    assert card["data"] == f"some.jsonl sha256:{sha256(path.read_bytes()).hexdigest()}"
    assert (card["tasks"], card["steps"], card["seed"]) == ("1", "7", "1")


def test_a_task_on_two_machines_is_one_task(some: list[Record]) -> None:
    again = replace(ICE_LAKE, cpu="znver4")
    work = Work(gemm(64, 96, 128, "none", F32), again)
    configs = sample(Candidates.of(work, sketches=False), 5)
    elsewhere = [Record.of(work, 1, config, times=(1e-5,)) for config in configs]
    tables, _ = tables_of([*some, *elsewhere])
    card = about(tables, [], 7, 1)
    assert (card["tasks"], card["tables"]) == ("1", "2")


def test_training_finds_what_the_analytical_model_gets_wrong() -> None:
    pytest.importorskip("torch")
    tables, _ = tables_of([r for m in (32, 64, 128) for r in records(m, 96, 64, 40, "rows")])
    test, _ = tables_of(records(256, 128, 96, 40, "rows"))
    settings = TrainingSettings(steps=60, tables=3, configs=32, decay=0.02, shrunk=1.0, averaged=0.9)
    tensors = train(tables, settings)
    said = predicted(tensors, test[0], settings) - np.log(test[0].seconds)
    assert np.std(said) < 0.8 * np.std(test[0].residuals)
    forest = Forest.of(tensors)
    assert forest is not None and forest.feature.shape[0] == settings.trees
    unchanged = train(tables, TrainingSettings(steps=0), start=tensors)  # what is kept was shrunk once
    for name, tensor in tensors.items():
        np.testing.assert_allclose(unchanged[name], tensor, rtol=1e-6)
    assert Forest.of(train(tables, replace(settings, steps=0, trees=0), start=tensors)) is None
    with pytest.raises(DatasetError, match="nothing to learn from"):
        train([], settings)


def test_training_without_lightgbm_names_the_extra(
    some: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("tilewright.dataset.forest.lightgbm", lambda: None)
    with pytest.raises(MissingDependencyError, match=r"needs LightGBM.*tune") as raised:
        train(tables_of(some)[0], TrainingSettings(steps=1))
    assert "pip install 'tilewright[tune]'" in str(raised.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_processes_that_make_tables_import_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, some: list[Record]
) -> None:
    (tmp_path / "pickle.py").write_text("open('imported', 'w').close()\nraise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    both = [*some, *records(32, 96, 64, 5)]
    tables, _ = tables_of(both, processes=2)
    assert not (tmp_path / "imported").exists()
    assert [table.name for table in tables] == [table.name for table in tables_of(both)[0]]
