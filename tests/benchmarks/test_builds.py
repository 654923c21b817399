"""Object code in files: what was made is found again, whatever became of the process that wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import builds as module
from benchmarks.builds import Builds, ManyRunner, Planned, read_plan, write_plan
from tests.faults.candidates import product, softmax
from tilewright.hw import host
from tilewright.measure.building import Made
from tilewright.measure.failed import Failed
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config
from tilewright.space.template import Work
from tilewright.space.templates.default import DEFAULT

NOBODY = Config("nobody", ())


def test_it_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = [
        Planned("product", TaskJob.of(Work(product(8, 8, 8), host()), 1), (DEFAULT, NOBODY)),
        Planned("softmax", TaskJob.of(Work(softmax(4, 8), host()), 1), (DEFAULT,)),
    ]
    write_plan(plan, tmp_path / "plan")
    assert read_plan(tmp_path / "plan") == plan
    builds = Builds(tmp_path / "builds")
    assert builds.of("product", [DEFAULT]) == {}
    with ManyRunner(1, builders=1) as runner:
        builds.complete(plan, runner)
        found = builds.of("product", [DEFAULT, NOBODY])
        assert isinstance(found[DEFAULT], Made) and isinstance(found[NOBODY], Failed)
        (path,) = tmp_path.glob("builds/product.*")
        whole = path.read_bytes()
        path.write_bytes(whole[:-3])
        assert len(builds.of("product", [DEFAULT, NOBODY])) == 1
        builds.complete(plan, runner)
        assert len(path.read_bytes()) > len(whole) - 3 and len(builds.of("product", [DEFAULT, NOBODY])) == 2
    monkeypatch.setattr(module, "sources", lambda: "those of another day")
    assert Builds(tmp_path / "builds").of("product", [DEFAULT, NOBODY]) == {}
