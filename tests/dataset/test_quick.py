"""Quick trials with processes that misbehave in place of a GPU: no task and no config is lost without a word."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tilewright.dataset import collect as collecting
from tilewright.dataset.collect import collect
from tilewright.dataset.quick import (
    QuickLimits,
    QuickTimes,
    QuickTrial,
    Request,
    Running,
    Sample,
    Sampled,
    quick_trials,
)
from tilewright.dataset.store import read
from tilewright.dataset.tasks import F16, TaskSource, gemm
from tilewright.hw.gpu import H200
from tilewright.measure.failed import Failed
from tilewright.measure.trial import TaskJob
from tilewright.space.space import Config
from tilewright.support.process import Channel

SERVE = "tests.dataset.test_quick:serve"
USUAL = QuickLimits()
SHORT = QuickLimits(run=1.5)  # a fake trial takes no time, unless it hangs


def serve(channel: Channel) -> None:
    """In the process: does what the request says. The time of a trial is the number of the process."""
    while True:
        request = msgspec.msgpack.decode(channel.receive()[0], type=Request)
        answer = _sampled(request) if isinstance(request, Sample) else _tried(channel, request)
        channel.send(b"\xc1" if answer is None else msgspec.msgpack.encode(answer))


def _sampled(request: Sample) -> Sampled | Failed:
    text = request.job.text
    if text == "no configs" or "f16[7," in text:
        return Failed("illegal", "on purpose")
    if text == "no process":
        os.abort()
    plans = ["time"] * request.count if "\n" in text else text.split()
    return Sampled(tuple(Config.of(plan, {"number": at}) for at, plan in enumerate(plans)))


def _tried(channel: Channel, request: QuickTrial) -> QuickTimes | Failed | None:
    plan = request.config.template
    channel.send(msgspec.msgpack.encode(Running(False)))
    assert Path(request.lock).parent.is_dir()
    channel.send(msgspec.msgpack.encode(Running(True)))
    if plan == "hang":
        time.sleep(600)
    if plan == "die":
        os.abort()
    if plan == "damage":
        return None
    if plan == "corrupt":
        return Failed("crash", "on purpose", corrupted=True)
    if plan == "refuse":
        return Failed("build", "on purpose")
    return QuickTimes((float(os.getpid()),), 0.0)


def job(text: str) -> TaskJob:
    return TaskJob(text, (), "", "fast", 0)


def tried(
    *texts: str, count: int, seconds: float = 120, limits: QuickLimits = USUAL
) -> tuple[dict[tuple[str, int], QuickTimes | Failed], dict[str, Failed], int]:
    """(what came of each config, tasks without a sample, configs that were left)."""
    found: dict[tuple[str, int], QuickTimes | Failed] = {}
    unsampled: dict[str, Failed] = {}
    left = quick_trials(
        [job(text) for text in texts],
        count,
        lambda job, config: False,
        lambda job, config, reply: found.update({(job.text, config.int("number")): reply}),
        lambda job, failure: unsampled.update({job.text: failure}),
        seconds=seconds,
        processes=1,
        serve=SERVE,
        limits=limits,
    )
    return found, unsampled, left


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("hang", "timeout"),
        ("die", "crash"),
        ("damage", "crash"),
        ("corrupt", "crash"),
        ("refuse", "build"),
    ],
)
def test_a_trial_that_fails_is_a_result_and_the_others_go_on(plan: str, kind: str) -> None:
    text = f"time {plan} time"
    found, unsampled, left = tried(text, count=3, limits=SHORT if plan == "hang" else USUAL)
    before, failure, after = (found[text, at] for at in range(3))
    assert isinstance(failure, Failed) and failure.kind == kind
    assert isinstance(before, QuickTimes) and isinstance(after, QuickTimes)
    assert (before.times == after.times) == (plan == "refuse")  # otherwise the process is another
    assert (unsampled, left) == ({}, 0)


@pytest.mark.parametrize(("text", "kind"), [("no configs", "illegal"), ("no process", "crash")])
def test_a_task_without_a_sample_is_reported_and_its_configs_are_left(text: str, kind: str) -> None:
    found, unsampled, left = tried("time time", text, "time", count=2)
    assert {name: failure.kind for name, failure in unsampled.items()} == {text: kind}
    assert len(found) == 3 and left == 2


def test_no_time_leaves_everything() -> None:
    assert tried("time time", "time time", count=2, seconds=0) == ({}, {}, 4)


def test_a_collection_keeps_failures_and_names_tasks_without_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "quick_trials", partial(quick_trials, serve=SERVE))
    sources = [
        TaskSource(f"gemm {m}", partial(gemm, m, 32, 32, "none", F16))
        for m in (7, 16)  # the fake has no configs of the first
    ]
    said: list[str] = []
    done = collect(tmp_path / "data.jsonl", sources, H200, configs=2, seconds=120, say=said.append)
    assert (done.added, done.failed, done.left, done.unsampled) == (2, 0, 2, 1)
    assert said == ["gemm 7: no configs were chosen (illegal): on purpose"]
    assert len(read(tmp_path / "data.jsonl").records) == 2
