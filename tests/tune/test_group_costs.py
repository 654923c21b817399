"""Times of groups: measured where the database has them, otherwise predicted on the same scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.db.samples import work
from tests.rewrites.helpers import array, graph_of, x_input
from tilewright.cost.predictor import kernel_seconds
from tilewright.db.database import Database
from tilewright.db.record import Decision, Key
from tilewright.db.versions import Versions
from tilewright.graph.ir import constant
from tilewright.graph.op import apply
from tilewright.hw import host
from tilewright.rewrites.fuse import Group
from tilewright.rewrites.partition import make_task
from tilewright.space.space import Config
from tilewright.tune.choose import choose
from tilewright.tune.oracle import KnownCosts, PredictedCosts


def test_measured_times_and_predictions_on_their_scale(tmp_path: Path) -> None:
    tuned, other = work(8), work(64)
    predicted = PredictedCosts(host())
    path = tmp_path / "tuning.sqlite"
    with Database.open(path) as database:
        seconds = 3 * predicted.seconds(tuned.task)
        decision = Decision(Key.of(tuned, 2), choose(tuned).config, seconds, "quick", 60.0, 12)
        database.decide(decision)
    costs = KnownCosts(host(), threads=2, db=path)
    costs.prepare([tuned.task, other.task])
    between = kernel_seconds(host())
    measured, scaled = costs.price(tuned.task), costs.price(other.task)
    assert measured is not None and measured.measured
    assert measured.seconds == pytest.approx(seconds + between)
    assert scaled is not None and not scaled.measured
    assert scaled.seconds == pytest.approx(3 * predicted.seconds(other.task) + between)


def test_times_of_another_number_of_threads_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    with Database.open(path) as database:
        database.decide(Decision(Key.of(work(), 2), choose(work()).config, 1.0, "quick", 60.0, 12))
    costs = KnownCosts(host(), threads=1, db=path)
    costs.prepare([work().task])
    price = costs.price(work().task)
    assert price is not None and not price.measured and price.seconds < 1.0


def test_times_of_other_code_do_not_count(tmp_path: Path) -> None:
    """The config is no longer legal, or builds another program than the one that was timed."""
    path = tmp_path / "tuning.sqlite"
    tuned, illegal = work(8), Config.of("nothing", {})
    other = Versions("0.0.1", "3.11", "0" * 32)
    for config, code, versions in ((illegal, "", Versions.now()), (choose(tuned).config, "0" * 32, other)):
        with Database.open(path) as database:
            key = Key.of(tuned, 1)
            database.decide(Decision(key, config, 1.0, "quick", 60.0, 12, code=code, versions=versions))
        costs = KnownCosts(host(), threads=1, db=path)
        costs.prepare([tuned.task])
        price = costs.price(tuned.task)
        assert price is not None and not price.measured and price.seconds < 1.0


def test_a_chain_without_a_kernel_cannot_be_computed() -> None:
    x = x_input(16, 24)
    first = apply("matmul", x, constant(array(24, 24)))
    second = apply("matmul", apply("softmax", first, axis=0), constant(array(24, 8)))
    nodes = [node for node in graph_of(second).nodes() if not (node.is_input or node.is_constant)]
    chain, _ = make_task(Group(second, None, nodes))
    assert chain.label == "matmul+softmax+matmul"
    assert not PredictedCosts(host()).can_compute(chain)
    alone, _ = make_task(Group(first, None, nodes[:1]))
    assert PredictedCosts(host()).can_compute(alone)
