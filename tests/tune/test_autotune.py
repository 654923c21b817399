"""`@tilewright.autotune`: launches, tuning in processes, records, mistakes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import tilewright
import tilewright.tile as tl
from tilewright.db.database import Database
from tilewright.errors import AutotuneError, LockError, OptionError, ReferenceMismatchError
from tilewright.measure.measurement import Measurement
from tilewright.measure.shared_runner import end_idle_runners
from tilewright.support.trace import Trace
from tilewright.tune.autotune import Autotuned
from tilewright.tune.effort import Tuning
from tilewright.tune.tuner import tune

SPACE = {"BLOCK": (16, 32, 64, 128, 256, 512)}


@tilewright.kernel
def scale(x, out, n, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=inside) * factor, mask=inside)


@tilewright.kernel
def treacherous(x, out, n, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    """One value of FAULT is right; others are wrong, fault or hang."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    value = tl.load(x + offsets, mask=inside) + 1.0
    if FAULT == "wrong":
        value += 0.5
    if FAULT == "crash":
        far = tl.full((BLOCK,), 1 << 45, tl.int64)
        tl.store(out + far, value)
    if FAULT == "hang":
        turns = 0
        while turns < n + 1:
            turns += tl.minimum(tl.load(x), 0.0).to(tl.int32)
    tl.store(out + offsets, value, mask=inside)


@tilewright.kernel
def row_sum(x, out, columns, BLOCK: tl.constexpr):
    """Only right where a block holds a row."""
    n = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    tl.store(out + row, tl.sum(tl.load(x + row * columns + n, mask=n < columns, other=0.0), axis=0))


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (-(-meta["n"] // meta["BLOCK"]),)


def arguments(n: int) -> tuple[np.ndarray, np.ndarray, int]:
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    return x, np.zeros_like(x), n


def scaled(db: Path, space: Any = SPACE, **options: Any) -> Autotuned:
    return tilewright.autotune(space, key=["n"], db=db, **options)(scale)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


def records(db: Path) -> list[Any]:
    with Database.open(db) as database:
        return database.records()


# -- launches without measuring ---------------------------------------------------------------------------------------


def test_a_launch_measures_nothing(db: Path) -> None:
    x, out, n = arguments(1000)
    kernel = scaled(db)
    kernel[grid](x, out, n, 2.0)
    assert np.array_equal(out, 2 * x)
    assert not db.exists()
    assert "predicted" in kernel.explain()
    assert kernel.best(grid, x, out, n, 2.0)["BLOCK"] in SPACE["BLOCK"]


def test_debug_mode_and_keywords_reach_the_kernel(db: Path) -> None:
    x, out, n = arguments(100)
    scaled(db)[grid](x, out=out, n=n, factor=3.0, debug=True, unwritten=["out"])
    assert np.array_equal(out, 3 * x)


def test_a_list_of_configs_is_a_space(db: Path) -> None:
    x, out, n = arguments(100)
    kernel = scaled(db, [{"BLOCK": 64}, {"BLOCK": 32}])
    kernel[grid](x, out, n, 2.0)
    assert kernel.best(grid, x, out, n, 2.0)["BLOCK"] in (32, 64)
    assert np.array_equal(out, 2 * x)


def test_options_of_other_devices_do_not_count(db: Path) -> None:
    x, out, n = arguments(100)
    kernel = scaled(db, {"BLOCK": (32, 64), "warps": (1, 2), "threads": (1, 2)})
    kernel[grid](x, out, n, 2.0)
    assert set(kernel.best(grid, x, out, n, 2.0)) == {"BLOCK", "threads"}
    assert np.array_equal(out, 2 * x)


# -- tuning -----------------------------------------------------------------------------------------------------------


def test_tuning_keeps_records_and_a_winner(db: Path) -> None:
    x, out, n = arguments(4096)
    before = out.copy()
    kernel = scaled(db, reference=lambda x, factor: x * factor)
    tuned = kernel.tune(grid, x, out, n, 2.0, budget=20)
    assert np.array_equal(out, before), "the user's tensors are not written to"
    assert tuned.origin.kind == "tuned" and not tuned.failures and tuned.trials >= 4
    assert "tuned" in kernel.explain() and "us" in kernel.explain(grid, x, out, n, 2.0)

    # Another process, or the same source again: the winner is known, and nothing is measured.
    again = scaled(db)
    assert again.best(grid, x, out, n, 2.0) == tuned.config
    measured = records(db)
    assert again.tune(grid, x, out, n, 2.0, budget=20).config == tuned.config
    assert len(records(db)) == len(measured)

    # A config more: what was measured is not measured again.
    wider = scaled(db, {"BLOCK": (*SPACE["BLOCK"], 1024)})
    wider.tune(grid, x, out, n, 2.0, budget=20)
    counts = Counter(record.config.values for record in records(db))
    assert counts[(("BLOCK", 1024),)] == 1
    assert max(counts.values()) == 1

    # A size in between is predicted from the neighbour, and nothing is measured.
    measured = records(db)
    x, out, n = arguments(6000)
    kernel[grid](x, out, n, 2.0)
    assert np.array_equal(out, 2 * x)
    assert "neighbour" in kernel.explain(grid, x, out, n, 2.0)
    assert len(records(db)) == len(measured)


class Counting:
    """A runner without processes: larger blocks take less time."""

    ahead = 0
    devices = 1
    spent = False

    def __init__(self) -> None:
        self.measured: list[Any] = []

    def __call__(self, threads: int) -> Counting:
        return self

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def expect(self, job: Any) -> None:
        pass

    def prepare(self, job: Any, configs: Any, *, best: Any) -> None:
        pass

    def acknowledge(self, job: Any, measured: Any) -> None:
        pass

    def measure(self, job: Any, configs: Any, *, best: Any, deadline: Any) -> list[Measurement]:
        self.measured += configs
        return [Measurement(config, (1.0 / config["BLOCK"],) * 5, 0.0) for config in configs]

    def race(self, job: Any, configs: Any, seconds: float, *, deadline: Any) -> list[list[float]]:
        return [[1.0 / config["BLOCK"]] * 5 for config in configs]


@pytest.mark.parametrize(("options", "count"), [({"search": "exhaustive"}, 11), ({"trials": 5}, 5)])
def test_no_trial_is_lost_and_none_is_added(db: Path, options: dict[str, Any], count: int) -> None:
    """An exhaustive search of eleven configs, in rounds of eight, measures eleven."""
    x, out, n = arguments(4096)
    kernel = scaled(
        db, {"BLOCK": tuple(1 << k for k in range(3, 14))}, reference=lambda x, factor: x * factor
    )
    call = kernel._call(grid, {"x": x, "out": out, "n": n, "factor": 2.0})
    runner = Counting()
    tuning = Tuning("full", 60.0, db=db, **options)
    try:
        chosen = tune({"scale": (call.tunable(), 1)}, tuning, threads=1, trace=Trace.off(), runner=runner)
    finally:
        call.close()
    assert len(runner.measured) == len(set(runner.measured)) == len(records(db)) == count
    assert chosen["scale"].config in runner.measured


def test_tunings_share_their_processes(db: Path) -> None:
    end_idle_runners()
    others = {child.pid for child in psutil.Process().children()}  # builders of other tests
    x, out, n = arguments(1000)
    found = []
    for factor in (2.0, 3.0):
        kernel = scaled(db.with_name(f"{factor}.db"), reference=lambda x, factor: x * factor)
        tuned = kernel.tune(grid, x, out, n, factor, budget=20, trials=2)
        assert tuned.trials == 2 and not tuned.failures
        found.append({child.pid for child in psutil.Process().children()} - others)
    assert found[0] and found[0] == found[1]
    end_idle_runners()
    assert not found[0] & {child.pid for child in psutil.Process().children()}


def test_a_bad_config_costs_one_candidate(db: Path) -> None:
    x, out, n = arguments(512)
    space = {"BLOCK": (64,), "FAULT": ("none", "wrong", "crash", "hang")}
    kernel = tilewright.autotune(space, key=["n"], db=db)(treacherous)
    tuned = kernel.tune(grid, x, out, n, budget=40)
    assert tuned.config == {"BLOCK": 64, "FAULT": "none"}
    assert tuned.failures == {"wrong": 1, "crash": 1, "timeout": 1}
    assert "crash" in kernel.explain(grid, x, out, n)


def test_without_a_reference_configs_must_agree_with_the_default(db: Path) -> None:
    x = np.random.default_rng(1).standard_normal((40, 100)).astype(np.float32)
    out = np.zeros(40, np.float32)
    kernel = tilewright.autotune({"BLOCK": (128, 64, 96, 256)}, key=["columns"], db=db)(row_sum)
    tuned = kernel.tune((40,), x, out, 100, budget=20)
    assert tuned.config["BLOCK"] in (128, 256)
    assert tuned.failures == {"wrong": 1, "illegal": 1}  # 64 holds no row, 96 is no power of two


def test_a_reference_that_disagrees(db: Path) -> None:
    x, out, n = arguments(512)
    kernel = scaled(db, reference=lambda x, factor: x * factor + 1)
    with pytest.raises(ReferenceMismatchError, match="agrees with the reference") as caught:
        kernel.tune(grid, x, out, n, 2.0, budget=20, trials=4)
    assert_underlined(caught.value, "lambda x, factor: x * factor + 1")


def assert_underlined(error: ReferenceMismatchError, text: str) -> None:
    *_, line, carets, _remedy = str(error).splitlines()
    begin, end = carets.index("^"), len(carets)
    # Before Python 3.11 a function does not know its column.
    assert line[begin:end].startswith(text) if sys.version_info >= (3, 11) else text in line


# -- lock files -------------------------------------------------------------------------------------------------------


def test_a_lock_file_is_written_and_obeyed(db: Path, tmp_path: Path) -> None:
    x, out, n = arguments(1000)
    path = tmp_path / "kernels.lock"
    chosen = scaled(db, lock=path).best(grid, x, out, n, 2.0)
    text = path.read_text().replace(f'"BLOCK": {chosen["BLOCK"]}', '"BLOCK": 16')
    path.write_text(text)
    locked = scaled(db, lock=path)
    assert locked.best(grid, x, out, n, 2.0) == {"BLOCK": 16}
    assert "lock" in locked.explain()
    with pytest.raises(LockError, match="has no config of scale for n=2000"):
        locked.best(grid, *arguments(2000), 2.0)
    path.write_text(text.replace('"BLOCK": 16', '"BLOCK": 7'))
    with pytest.raises(LockError, match="not a legal config"):
        scaled(db, lock=path).best(grid, x, out, n, 2.0)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        ({"BLOK": (16, 32)}, {}, "'BLOK' is not a constexpr parameter of scale"),
        ({"n": (16, 32)}, {}, "'n' is not a constexpr parameter"),
        ({"BLOCK": ()}, {}, "nothing to choose from"),
        ({"BLOCK": 16}, {}, "a sequence of choices"),
        ({"BLOCK": (1.5,)}, {}, "must be a whole number"),
        ({}, {}, "no knob"),
        ([], {}, "a dict of knobs or a list"),
        ([{"BLOCK": 16}, {}], {}, "every config must have"),
        (SPACE, {"key": ["m"]}, "key 'm' is a knob or not a parameter of scale"),
        (SPACE, {"key": ["BLOCK"]}, "is a knob or not a parameter"),
        (SPACE, {"where": lambda WARPS: True}, "neither a knob nor a parameter"),
        (SPACE, {"where": lambda **all: True}, "by name"),
        (SPACE, {"where": [3]}, "must be a function"),
    ],
)
def test_a_space_that_does_not_fit(space: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AutotuneError, match=message):
        tilewright.autotune(space, **options)(scale)


def test_options_that_do_not_exist() -> None:
    with pytest.raises(OptionError, match="effort must be one of"):
        tilewright.autotune(SPACE, effort="some")
    with pytest.raises(OptionError, match="trials must be"):
        tilewright.autotune(SPACE, trials=0)
    with pytest.raises(AutotuneError, match="needs a tile kernel"):
        tilewright.autotune(SPACE)(print)  # type: ignore[arg-type]


def test_a_space_that_predicates_leave_empty(db: Path) -> None:
    x, out, n = arguments(100)
    kernel = scaled(db, where=lambda BLOCK, n: n < BLOCK)
    kernel[grid](*arguments(20), 2.0)
    kernel = scaled(db, where=lambda BLOCK, n: 100 * n < BLOCK)
    with pytest.raises(AutotuneError, match=r"no config of scale is legal for n=100 .* 6 combinations"):
        kernel[grid](x, out, n, 2.0)


def test_a_knob_in_a_launch(db: Path) -> None:
    x, out, n = arguments(100)
    with pytest.raises(AutotuneError, match="`BLOCK` is a knob of scale"):
        scaled(db)[grid](x, out, n, 2.0, BLOCK=16)
    with pytest.raises(AutotuneError, match="takes 4 arguments, got 5"):
        scaled(db)[grid](x, out, n, 2.0, 16)


def test_a_grid_that_fails(db: Path) -> None:
    x, out, n = arguments(100)
    with pytest.raises(AutotuneError, match="the grid of scale failed: KeyError"):
        scaled(db).tune(lambda meta: (meta["nothing"],), x, out, n, 2.0, budget=5)


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        (lambda BLOCK: BLOCK, AutotuneError, "takes `BLOCK`"),
        (lambda x: (x, x), ReferenceMismatchError, "returns 2 arrays, and the kernel stores to out"),
        (lambda x: x[:-1], ReferenceMismatchError, r"returns shape \[511\]"),
        (lambda x: {"x": x}, ReferenceMismatchError, "returns `x`"),
        (lambda x: x.no_such_thing, ReferenceMismatchError, "failed: AttributeError"),
    ],
)
def test_a_reference_that_cannot_be_one(db: Path, reference: Any, error: Any, message: str) -> None:
    x, out, n = arguments(512)
    with pytest.raises(error, match=message) as caught:
        scaled(db, reference=reference).tune(grid, x, out, n, 2.0, budget=5)
    if error is ReferenceMismatchError:
        assert_underlined(caught.value, "lambda x:")
