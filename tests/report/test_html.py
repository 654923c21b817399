"""The file: sound HTML with every figure in it, nothing to fetch, nothing that a name could break; in a browser too."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.hw.gpu import H200
from tilewright.report.charts import memory, roofline, tuning_curve
from tilewright.report.code import Code, clipped, hot_loop
from tilewright.report.data import (
    Baseline,
    ConfigBelief,
    MachineSummary,
    ModelReport,
    Report,
    StepReport,
    TaskBeliefs,
    TaskReport,
    TrialPoint,
    gpu_machine_report,
    report,
)
from tilewright.report.figures import Label, Scale, bytes_text, count_text, rate_text, seconds_text
from tilewright.report.html import MAX_BYTES, render
from tilewright.runtime.plan import FusionReport, GroupReport, PartReport, RefusedGroup
from tilewright.support.trace import Trace

EVIL = "<script>alert('x')</script>\"><img src=http://evil.example/x onerror=alert(1)>"
BOLD = "<b>bold</b>"
MACHINE = MachineSummary("a processor", True, 2, 3e11, {"L2": 2e11, "L3": 8e10, "memory": 2e10}, 48 << 20)

FUSION = FusionReport(
    "dynamic", 3, 2, 1, 4e-5, 5e-5, 9, 7,
    considered=(
        GroupReport(
            "conv+relu+conv", "f32[1,64]", True, False, 1.21e-5, 2.31e-5, calls=2, layers=("a.conv1", "a.conv2"),
            parts=(PartReport("conv+relu", 1.11e-5, True), PartReport(BOLD, 1.2e-5, True)),
        ),
        GroupReport(
            "matmul+matmul", "f32[9]", False, False, 3.01e-5, 2e-5, measured=True, margin=0.05,
            parts=(PartReport("matmul", 1.5e-5), PartReport("matmul+add", 2.6e-5)), rest=(PartReport("add", 1e-5),),
        ),
    ),
    refused=(RefusedGroup("matmul+gelu+matmul", "f16[9]", f"it is {BOLD}", layers=("b",)),),
)  # fmt: skip


def task(
    number: int, *, trials: int = 20, code: str = "program p()\n", label: str | None = None
) -> TaskReport:
    seconds = 1e-4 / (number + 1)
    return TaskReport(
        key=f"{number:032x}",
        label=label or f"conv+relu {number}",
        text="%0 = input : f32[1]\nreturn %0\n",
        output="f32[1]",
        calls=2,
        flops=10_000_000,
        bytes=400_000,
        schedule="contraction: rows=8",
        seconds=seconds,
        error=1e-7,
        before=1.5 * seconds,
        after=seconds,
        effort="quick",
        limit=0.6 * seconds,
        trials=tuple(
            TrialPoint(
                f"contraction: rows={n}",
                None if n % 6 == 5 else seconds * (1 + 1 / (n + 1)),
                seconds * 1.3,
                "timeout" if n % 6 == 5 else "",
                "no answer" if n % 6 == 5 else "",
                1e9 + n,
                0.1,
            )
            for n in range(trials)
        ),
        code=Code("contraction: rows=8", code, "\tvfmadd231ps\t%zmm0, %zmm1, %zmm2\n", True),
        layers=() if label else (f"layer{number}.0.conv1 + bn1", f"layer{number}.1.conv1 + bn1"),
        default="contraction: rows=0",
        winner=f"contraction: rows={trials - 1}",
        beliefs=TaskBeliefs(
            trials,
            (
                ConfigBelief(
                    label or "contraction: rows=8", "chosen", 3e-4, 2e-4, 1.1e-4, 0.2, 0.98, seconds
                ),
                ConfigBelief("contraction: rows=4", "", 3e-4, 2e-4, 1.2e-4, 0.2, 0.98, None),
            ),
            (("terms", 0.5), (label or "rows=8", 0.3), ("machine", 0.2)),
        ),
    )


def sample(tasks: int = 4, **options: object) -> Report:
    made = [task(n, **options) for n in range(tasks)]  # type: ignore[arg-type]
    steps = [
        StepReport(one.layers[call] if one.layers else one.label, one.key, one.seconds or 0.0, (), 0)
        for call in range(2)
        for one in made
    ]
    # Each reads the step before it, and every third the model's input too; memory goes up and down.
    steps = [
        replace(step, reads=(*((max(n - 5, -1),) if n % 3 == 2 else ()), n - 1), alive=1000 * (1 + n % 4))
        for n, step in enumerate(steps)
    ]
    model = ModelReport(
        "net", "(x: f32[1]) -> (f32[1])", 3.21e-4, "2 (openmp)", "fast", "cpu", 4096, 2_000_000,
        Baseline("PyTorch", 8.346e-4, 3.21e-4), tuple(steps), FUSION,
    )  # fmt: skip
    return report("net", MACHINE, made, model)


class Reader(html.parser.HTMLParser):
    """Tags in pairs, attributes that would load something, and the text."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[tuple[str, str]] = []
        self.handlers: list[str] = []
        self.words = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.words += " "
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in ("src", "href", "srcset", "data", "action", "background", "xlink:href"):
                self.loaded.append((tag, value or ""))
            elif name.startswith("on"):
                self.handlers.append(name)
            elif name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words += data


def test_what_the_cost_model_believes_is_shown_if_it_was_used() -> None:
    found = sample(2)
    page = render(found)
    words = " ".join(Reader(page).words.split())
    assert 'href="#beliefs"' in page
    assert "chosen: contraction: rows=8 300 µs 200 µs 110 µs 1.22× 98% 100 µs" in words
    assert "contraction: rows=4 300 µs 200 µs 120 µs 1.22× 98% –" in words
    assert words.index("terms 50.0%") < words.index("rows=8 30.0%") < words.index("machine 20.0%")
    without = replace(found, tasks=tuple(replace(task, beliefs=None) for task in found.tasks))
    assert "beliefs" not in render(without)


def test_the_use_of_a_pools_devices_is_shown() -> None:
    trace = Trace()
    trace.mark("tune.begin")
    use = {
        f"cpu:{EVIL} on node0": {"trials": 12, "seconds": 3.25},
        "cpu:b on node1": {"trials": 7, "seconds": 0.0},
    }
    trace.mark("pool.end", use=use, given_again=1, aside={"timer/node2": "the disk is full"})
    found = report("a model", MACHINE, [task(0)], events=trace.chrome()["traceEvents"])
    assert [(device.trials, device.seconds) for device in found.devices] == [(12, 3.25), (7, 0.0)]
    page = render(found)
    assert "Devices of the pool" in page and "3.2 s" in page and EVIL not in page
    assert "Left out: timer/node2: the disk is full" in page
    assert "Devices of the pool" not in render(report("a model", MACHINE, [task(0)]))


def test_groups_and_their_alternatives_are_shown() -> None:
    page = render(sample())
    words = " ".join(Reader(page).words.split())
    assert "3 groups by dynamic programming, 2 by greedy fusion" in words
    assert (  # the layers, the operators, the result, and the two times
        "a.conv1 + conv2 conv+relu+conv f32[1,64]"
        f" yes 2 12.1 µs predicted 23.1 µs measured conv+relu 11.1 µs, {BOLD} 12.0" in words
    )
    assert (
        "matmul+matmul, f32[9] no 1 40.1 µs partly measured 41.0 µs predicted matmul 15.0 µs, matmul+add 26.0 µs"
        in words
    )
    assert f"b, f16[9]: it is {BOLD} (matmul+gelu+matmul)" in words
    assert BOLD not in page
    without = sample()
    assert without.model is not None
    bare = render(replace(without, model=replace(without.model, fusion=None)))
    assert 'href="#fusion"' not in bare and 'id="fusion"' not in bare


def test_it_is_sound_and_fetches_nothing() -> None:
    page = render(sample())
    found = Reader(page)
    assert found.open == [] and found.loaded == [] and found.handlers == []
    assert found.tags.count("script") == 1 and "link" not in found.tags
    assert not re.search(r"https?://|url\(|@import|\bfetch\(|XMLHttp", page)
    anchors = [link[1:] for link in found.links if link.startswith("#")]
    assert set(anchors) <= set(found.ids) and len(set(found.ids)) == len(found.ids)
    assert all(link.startswith(("#", "data:application/gzip;base64,")) for link in found.links)
    assert "default-src 'none'" in page


def test_every_figure_is_there() -> None:
    data = sample()
    words = Reader(render(data)).words
    assert "321 µs" in words and "1.50×" in words and "conv+relu 3" in words
    assert "layer3.0.conv1 + bn1 and 1 more" in words
    for one in data.tasks:
        assert seconds_text(one.total) in words and seconds_text(one.typical) in words
        assert rate_text(one.flops, one.typical, "").strip() in words
    assert "60%" in words  # of the limit
    assert "timeout" in words and "12 failed" in words
    assert "a factor of 1.2" in words or "a factor of 1.1" in words
    assert "vfmadd231ps" in words and "program p()" in words


def test_the_trace_can_be_taken_out() -> None:
    data = sample()
    (link,) = (one for one in Reader(render(data)).links if one.startswith("data:"))
    trace = json.loads(gzip.decompress(base64.b64decode(link.partition(",")[2])))
    assert trace["traceEvents"] == data.trace


def test_names_are_only_names() -> None:
    data = sample(1, label=EVIL, code=EVIL)
    evil = replace(
        data.tasks[0],
        text=EVIL,
        output=EVIL,
        schedule=EVIL,
        effort=EVIL,
        layers=(EVIL, EVIL + "2"),
        trials=tuple(
            replace(one, config=EVIL, message=EVIL, failure=one.failure and EVIL) for one in data.trials
        ),
    )
    assert data.model is not None
    steps = tuple(replace(step, layer=EVIL) for step in data.model.steps)
    model = replace(data.model, signature=EVIL, name=EVIL, steps=steps)
    page = render(replace(data, title=EVIL, tasks=(evil,), model=model))
    found = Reader(page)
    assert found.tags.count("script") == 1 and "img" not in found.tags
    assert found.loaded == [] and found.handlers == [] and found.open == []
    assert EVIL in found.words  # as text


@pytest.mark.parametrize(("tasks", "trials"), [(0, 0), (1, 0), (1, 1), (120, 48)])
def test_it_stays_small(tasks: int, trials: int) -> None:
    page = render(sample(tasks, trials=trials, code="  x[i] = a[i] * b[i]\n" * 150))
    assert len(page.encode()) < MAX_BYTES
    assert Reader(page).open == []


def test_a_task_without_any_figure() -> None:
    bare = replace(
        task(0, trials=0), seconds=None, error=None, before=None, after=None, effort="", limit=None, code=None,
        flops=0, bytes=0,
    )  # fmt: skip
    page = render(report("bare", MACHINE, [bare]))
    assert Reader(page).open == [] and "No trial was made." in page


# -- what it says -----------------------------------------------------------------------------------------------------


def test_the_headline_is_the_speed_beside_pytorch() -> None:
    data = sample()
    words = " ".join(Reader(render(data)).words.split())
    assert "2.60× the speed of PyTorch PyTorch 835 µs Tilewright 321 µs" in words
    assert data.model is not None
    alone = replace(data, model=replace(data.model, baseline=None))
    words = " ".join(Reader(render(alone)).words.split())
    assert "PyTorch was not timed" in words and "321 µs per call" in words


def test_a_tuning_curve_compares_with_the_untuned_choice_as_it_was_measured_among_the_trials() -> None:
    """In the model it takes half as long, as everything does: alongside the trials that would look like a loss."""
    one = replace(task(1), before=1.5e-5, after=1e-5)
    assert one.baseline == one.trials[0].seconds
    figure = tuning_curve(one)
    assert figure is not None
    first = next(point for point in figure.points if point.kind == "trial")
    (level,) = (
        {float(p.split(",")[1]) for p in line.points.split()}
        for line in figure.lines
        if line.kind == "before"
    )
    assert level == {first.y}
    assert all(point.y >= first.y for point in figure.points if point.kind == "trial"), (
        "no trial is slower here"
    )
    assert seconds_text(one.trials[0].seconds) in figure.description
    (ring,) = (point for point in figure.points if point.kind == "winner")
    assert ring.title.startswith("trial 20 (chosen)")
    unknown = tuning_curve(replace(one, default="another"))
    assert unknown is not None and not any(line.kind == "before" for line in unknown.lines)


def test_a_roofline_names_its_points_and_its_lines() -> None:
    figure = roofline(sample())
    assert figure is not None
    texts = [label.text for label in figure.labels]
    assert {"peak 300 GFLOP/s", "L2 200 GB/s", "L3 80.0 GB/s", "memory 20.0 GB/s"} <= set(texts)
    assert any(text.startswith("layer0.0.conv1") for text in texts)
    assert_apart(figure.labels)


def test_points_above_the_roof_are_marked_and_explained() -> None:
    data = sample()
    words = " ".join(Reader(render(data)).words.split())
    assert "above the roof." not in words
    fast = replace(data.tasks[0], limit=2 * data.tasks[0].total)
    page = render(replace(data, tasks=(fast, *data.tasks[1:])))
    words = " ".join(Reader(page).words.split())
    assert "1 kernel is above the roof." in words and "Winograd" in words
    assert page.count('class="contraction above"') == 2  # the kernel, and the legend
    on_a_gpu = render(replace(data, machine=gpu_machine_report(H200, False), tasks=(fast, *data.tasks[1:])))
    words = " ".join(Reader(on_a_gpu).words.split())
    assert "1 kernel is above the roof." in words
    assert "a library may use" in words and "Winograd" not in words and "by the data sheet" in words


def test_the_roof_of_a_gpu_is_its_fastest_instructions() -> None:
    """cuBLASLt reaches some 700 TFLOP/s on an H200, more than `mma.sync` can."""
    machine = gpu_machine_report(H200, False)
    assert machine.flops == H200.peak_tensor_flops > 900e12


def test_shapes_tell_kinds_apart_beside_colours() -> None:
    labels = ["conv+relu", "softmax", "add+relu"]
    tasks = [replace(task(n), label=label) for n, label in enumerate(labels)]
    figure = roofline(report("net", MACHINE, tasks))
    assert figure is not None
    assert {point.shape for point in figure.points} == {"circle", "square", "diamond"}


def test_memory_over_the_steps() -> None:
    data = sample()
    figure = memory(data)
    assert figure is not None and data.model is not None
    (area,) = (line for line in figure.lines if line.kind == "alive")
    heights = {point.split(",")[1] for point in area.points.split()}
    assert len(heights) == len({step.alive for step in data.model.steps}) + 1
    assert "at most 4.00 kB alive, while layer3.0.conv1 + bn1 runs" in figure.description
    assert memory(replace(data, model=None)) is None


def test_the_graph_has_a_row_for_every_call_and_a_line_for_every_read() -> None:
    data = sample()
    assert data.model is not None
    page = render(data)
    assert page.count('class="edge"') == sum(len(step.reads) for step in data.model.steps)
    assert page.count('class="node"') == len(data.model.steps) + 1
    words = " ".join(Reader(page).words.split())
    assert "layer2.0.conv1 + bn1 reads the input, layer1.0.conv1 + bn1" in words


def test_everything_has_a_name_that_can_be_read_out() -> None:
    page = render(sample())
    for tag in ("a", "th", "button", "summary"):
        for inner in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.S):
            assert re.sub("<[^>]*>", "", inner).strip(), (tag, inner)
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        if 'aria-hidden="true"' not in svg.partition(">")[0]:
            named = re.search(r'role="img" aria-labelledby="(\S+) (\S+)"', svg)
            assert named is not None
            for part in named.groups():
                assert re.search(rf'id="{part}">[^<]+<', svg), part


def assert_apart(labels: tuple[Label, ...]) -> None:
    def box(label: Label) -> tuple[float, float, float, float]:
        width = 6 * len(label.text)
        left = label.x - {"start": 0, "middle": width / 2, "end": width}[label.anchor]
        return left, label.y - 9, left + width, label.y + 2

    boxes = [box(label) for label in labels]
    for n, one in enumerate(boxes):
        for other in boxes[:n]:
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


# -- parts ------------------------------------------------------------------------------------------------------------


def test_words_for_figures() -> None:
    assert [seconds_text(s) for s in (1.5, 0.0234, 1.2e-4, 5e-9, None)] == [
        "1.50 s",
        "23.4 ms",
        "120 µs",
        "5.00 ns",
        "–",
    ]
    assert rate_text(1e9, 0.5, "GFLOP/s") == "2.00 GFLOP/s" and rate_text(0, 1.0, "") == "–"
    assert count_text(12_300_000) == "12.3 M" and count_text(12) == "12 "
    assert [bytes_text(n) for n in (12, 4096, 5e6, 2e9)] == ["12 bytes", "4.10 kB", "5.00 MB", "2.00 GB"]


def test_scales() -> None:
    scale = Scale(1.0, 100.0, 0.0, 200.0)
    assert (scale(1), scale(10), scale(100), scale(1000)) == (0, 100, 200, 200)
    assert scale.ticks() == [1, 10, 100]
    assert Scale(4e-6, 6.2e-6, 0, 100).ticks() == pytest.approx([4e-6, 5e-6, 6e-6])
    assert Scale(0, 24, 0, 100, log=False).ticks() == [0, 10, 20]


@given(st.floats(1e-9, 1e3), st.floats(1.2, 1e6))
def test_a_scale_can_be_read_off(low: float, factor: float) -> None:
    """A single tick says nothing of a logarithmic axis."""
    scale = Scale(low, low * factor, 0, 300)
    ticks = scale.ticks()
    assert 3 <= len(ticks) <= 17 and ticks == sorted(set(ticks))
    assert all(0 <= scale(tick) <= 300 for tick in ticks)


def test_the_innermost_loop_is_found() -> None:
    assembly = (
        "kernel:\n\tmov\trax, 1\n.LBB0_1:\n\tvfmadd231ps\tzmm0, zmm1, zmm2\n\tjne\t.LBB0_1\n.LBB0_2:\n\tret\n"
    )
    assert hot_loop(assembly) == ".LBB0_1:\n\tvfmadd231ps\tzmm0, zmm1, zmm2\n\tjne\t.LBB0_1"
    assert hot_loop("") == "" and clipped("a\nb\nc", 2) == "a\nb\n... 1 more lines"
