"""What the graph half of fusion gains: the partition by dynamic programming, and padded channels.

    python benchmarks/fusion.py --partition [--device cpu|cuda] [--models NAME ...] [--effort none|quick] [--budget 10s]
    python benchmarks/fusion.py --cuts [--models NAME ...]
    python benchmarks/fusion.py --padding [--device cuda|cpu]
    ... [--json FILE] [--markdown FILE]

`--partition` compiles each model with greedy fusion and with dynamic programming, checks both against PyTorch in
float64, and interleaves their calls. A row has the medians, the ratio with a 95% interval (bootstrap over turns), the
number of kernels, what the oracle predicted for the groups that differ, and the seconds of the partition itself.

`--cuts` cuts each model for this CPU both ways and compiles nothing: the seconds of the partition, the predicted times,
and the groups that differ. It needs no quiet machine, because it counts processor time.

`--padding` computes convolutions with 46 and 174 channels with Tilewright, with padding and without, and with PyTorch
(cuDNN on a GPU, oneDNN on a CPU) as they are and with channels that are padded by hand; copies count everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilewright
from baselines.intervals import interval
from tilewright.support.trace import Trace
from tilewright.zoo import registry

TURNS = 21
TURN_SECONDS = {"cpu": 0.05, "cuda": 0.01}
MODELS = (
    *("resnet50", "mobilenetv2", "vit-b16", "bert-base", "gpt2", "detr-3", "detr-6", "detr-12"),
    "setr-naive-base",
)
LARGE = ("setr-naive", "setr-pup")  # whose runs take minutes on a CPU; `--cuts` has them too
# Batch, height, width, channels in and out, window and padding of convolutions with unaligned channels, as the paper on
# Bolt (Xing et al., MLSys 2022) pads them.
CONVOLUTIONS = (
    (32, 20, 26, 46, 32, (3, 3), (1, 1)),
    (32, 20, 26, 46, 32, (5, 5), (2, 2)),
    (128, 14, 19, 46, 32, (5, 7), (0, 0)),
    (32, 20, 26, 46, 46, (3, 3), (1, 1)),
    (32, 20, 26, 174, 64, (3, 3), (1, 1)),
    (32, 20, 26, 174, 64, (5, 5), (2, 2)),
    (32, 20, 26, 174, 174, (3, 3), (1, 1)),
)


@dataclass(frozen=True)
class PartitionRow:
    model: str
    milliseconds: dict[str, float]
    ratio: float  # greedy over dynamic
    interval: tuple[float, float]
    kernels: dict[str, int]
    predicted: dict[str, float]  # microseconds of the groups that have alternatives
    changed: int
    partition_seconds: dict[str, float]
    compile_seconds: dict[str, float]
    errors: dict[str, float]
    summary: str


@dataclass(frozen=True)
class PaddingRow:
    convolution: str
    microseconds: dict[str, float]
    errors: dict[str, float]


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def seconds_of(call: Callable[[], object], calls: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


def interleaved(
    systems: dict[str, Callable[[], object]], device: str, turns: int = TURNS
) -> dict[str, list[float]]:
    calls = {}
    for name, call in systems.items():
        seconds_of(call, 3, device)
        calls[name] = max(1, int(TURN_SECONDS[device] / seconds_of(call, 3, device)))
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(turns):
        for name, call in systems.items():
            times[name].append(seconds_of(call, calls[name], device))
    return times


def first(result: Any) -> torch.Tensor:
    while not isinstance(result, torch.Tensor):
        result = next(iter(result.values())) if isinstance(result, dict) else result[0]
    return result.double()


def relative_error(result: Any, expected: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(first(result) - expected) / torch.linalg.vector_norm(expected))


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """The calls of a function from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def partition_row(name: str, device: str, effort: str, budget: str | None) -> PartitionRow:
    model, inputs = registry.build(name), registry.example_inputs(name)
    with torch.no_grad():
        expected = first(
            registry.build(name).double()(*(x.double() if x.is_floating_point() else x for x in inputs))
        )
        if device == "cuda":
            model = model.cuda().half()
            inputs = tuple(x.cuda().half() if x.is_floating_point() else x.cuda() for x in inputs)
            expected = expected.cuda()
    systems: dict[str, Any] = {}
    taken: dict[str, float] = {}
    cut: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, environment(TILEWRIGHT_CACHE_DIR=folder):
        for kind in ("greedy", "dynamic"):
            trace, began = Trace(), time.perf_counter()
            options: dict[str, Any] = {} if effort == "none" else {"budget": budget}
            systems[kind] = tilewright.compile(
                model, inputs, partition=kind, effort=effort, trace=trace, **options
            )
            taken[kind] = time.perf_counter() - began
            cut[kind] = sum(e.seconds or 0.0 for e in trace.events if e.name == "rewrites.partition")
        errors = {kind: relative_error(made(*inputs), expected) for kind, made in systems.items()}
        calls: dict[str, Callable[[], object]] = {
            kind: partial(made, *inputs) for kind, made in systems.items()
        }
        times = interleaved(calls, device)
    report = systems["dynamic"].plan.fusion
    return PartitionRow(
        name,
        {kind: statistics.median(each) * 1e3 for kind, each in times.items()},
        statistics.median(times["greedy"]) / statistics.median(times["dynamic"]),
        interval(times["greedy"], times["dynamic"]),
        {kind: len(made.plan.steps) for kind, made in systems.items()},
        {"greedy": report.greedy_seconds * 1e6, "dynamic": report.seconds * 1e6},
        report.changed,
        cut,
        taken,
        errors,
        str(report),
    )


def partition_table(rows: Sequence[PartitionRow], effort: str) -> list[str]:
    lines = [
        f"Effort {effort!r}, batch 1; milliseconds, medians of {TURNS} turns. The predicted times are of the groups"
        " that have an alternative.",
        "",
        "| model | greedy ms | dynamic ms | greedy / dynamic | 95% | kernels | groups that differ | predicted us"
        " | s of partition | s to compile | errors |",
        "| --- " * 11 + "|",
    ]
    for row in rows:
        pair = lambda values, form: " -> ".join(format(values[kind], form) for kind in ("greedy", "dynamic"))  # noqa: E731
        lines.append(
            f"| {row.model} | {row.milliseconds['greedy']:.3f} | {row.milliseconds['dynamic']:.3f} | {row.ratio:.3f}x"
            f" | {row.interval[0]:.3f}-{row.interval[1]:.3f} | {pair(row.kernels, 'd')} | {row.changed}"
            f" | {pair(row.predicted, '.1f')} | {pair(row.partition_seconds, '.2f')}"
            f" | {pair(row.compile_seconds, '.1f')} | {pair(row.errors, '.1e')} |"
        )
    if rows:
        mean = math.exp(statistics.fmean(math.log(row.ratio) for row in rows))
        slower = [row.model for row in rows if row.interval[1] < 1.0]
        lines += [
            "",
            f"Geometric mean of {len(rows)} rows: {mean:.3f}x. Slower: {', '.join(slower) or 'none'}.",
        ]
    return lines


@dataclass(frozen=True)
class CutRow:
    model: str
    groups: dict[str, int]
    predicted: dict[str, float]  # microseconds of the groups that have alternatives
    priced: int
    states: int
    partition_seconds: dict[str, float]  # of a processor
    note: str
    removed: dict[str, int]  # calls of greedy fusion that dynamic programming has not, by label and shape
    added: dict[str, int]


def cut_row(name: str) -> CutRow:
    """Both partitions for this CPU, without compiling them."""
    from tilewright import frontend
    from tilewright.hw import host
    from tilewright.targets.cpu import CpuTarget
    from tilewright.targets.target import Cutting
    from tilewright.tune import oracle

    imported = frontend.import_model(registry.build(name), registry.example_inputs(name))
    target = CpuTarget(host())
    seconds: dict[str, float] = {}
    calls: dict[str, Counter[str]] = {}
    report = None
    for kind in ("greedy", "dynamic"):
        oracle._prediction.cache_clear()
        began: list[float] = []

        def listen(moment: str, event: Any, kind: str = kind, began: list[float] = began) -> None:
            if event.name == "rewrites.partition":
                if moment == "begin":
                    began.append(time.process_time())
                else:
                    seconds[kind] = time.process_time() - began[-1]

        found = target.partition(
            imported, "fast", Trace(listener=listen), cutting=Cutting(kind, measured=False)
        )
        calls[kind] = Counter(f"{call.task.label} {call.task.output.type!r}" for call in found.calls)
        report = found.fusion
    assert report is not None
    return CutRow(
        name,
        {kind: sum(each.values()) for kind, each in calls.items()},
        {"greedy": report.greedy_seconds * 1e6, "dynamic": report.seconds * 1e6},
        report.priced,
        report.states,
        seconds,
        report.note,
        dict(calls["greedy"] - calls["dynamic"]),
        dict(calls["dynamic"] - calls["greedy"]),
    )


def cut_table(rows: Sequence[CutRow]) -> list[str]:
    lines = [
        "Processor time of the partition itself, with the predictions that earlier passes made; predicted times are of"
        " the groups that have an alternative.",
        "",
        "| model | groups, greedy | dynamic | predicted us, greedy | dynamic | ratio | priced | states"
        " | s, greedy | s, dynamic | |",
        "| --- " * 11 + "|",
    ]
    for row in rows:
        us, s = row.predicted, row.partition_seconds
        ratio = f"{us['greedy'] / us['dynamic']:.3f}x" if us["dynamic"] else ""
        lines.append(
            f"| {row.model} | {row.groups['greedy']} | {row.groups['dynamic']} | {us['greedy']:.1f}"
            f" | {us['dynamic']:.1f} | {ratio} | {row.priced} | {row.states} | {s['greedy']:.2f}"
            f" | {s['dynamic']:.2f} | {row.note} |"
        )
    for row in rows:
        if row.removed or row.added:
            lines += ["", f"{row.model}, the calls that differ:", ""]
            for title, some in (("greedy", row.removed), ("dynamic", row.added)):
                lines += [f"- {title}: {count} x {label}" for label, count in some.items()]
    return lines


def padding_row(shape: tuple[Any, ...], device: str, effort: str) -> PaddingRow:
    batch, height, width, channels, results, window, border = shape
    dtype = torch.float16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    exact = nn.Conv2d(channels, results, window, padding=border).double().eval()
    x = torch.randn(batch, channels, height, width, dtype=torch.float64)
    with torch.no_grad():
        expected = exact(x).to(device)
    conv = nn.Conv2d(channels, results, window, padding=border).eval()
    conv.load_state_dict({key: value.float() for key, value in exact.state_dict().items()})
    conv = conv.to(device, dtype).to(memory_format=torch.channels_last)
    given = x.to(device, dtype).to(memory_format=torch.channels_last)
    more, wider = -(-channels // 8) * 8, -(-results // 8) * 8
    by_hand = nn.Conv2d(more, wider, window, padding=border).to(device, dtype)
    by_hand = by_hand.to(memory_format=torch.channels_last).eval()
    with torch.no_grad():
        by_hand.weight.zero_()
        by_hand.bias.zero_()
        by_hand.weight[:results, :channels] = conv.weight
        by_hand.bias[:results] = conv.bias
    libraries: dict[str, Callable[[], Any]] = {
        "vendor": lambda: conv(given),
        "vendor, padded by hand": lambda: by_hand(nn.functional.pad(given, (0, 0, 0, 0, 0, more - channels)))[
            :, :results
        ],
    }
    systems: dict[str, Callable[[], Any]] = {}
    errors = {}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for name, call in libraries.items():
            errors[name] = relative_error(call(), expected)
            systems[name] = replayed(call) if device == "cuda" else call
        for name, pads in (("unpadded", "off"), ("padded", "on")):
            with environment(TILEWRIGHT_CACHE_DIR=folder, TILEWRIGHT_PADDING=pads):
                # Channels last in and out, as the vendor has them.
                model = _ChannelsLast(conv).to(device).eval()
                x_last = given.permute(0, 2, 3, 1).contiguous()
                options: dict[str, Any] = {} if effort == "none" else {"budget": "8s"}
                made: Any = tilewright.compile(model, (x_last,), effort=effort, **options)
                errors[name] = relative_error(made(x_last).permute(0, 3, 1, 2), expected)
                systems[name] = partial(made, x_last)
        times = interleaved(systems, device)
    title = f"{batch}x{height}x{width}, {channels} -> {results}, {window[0]}x{window[1]}"
    return PaddingRow(title, {name: statistics.median(each) * 1e6 for name, each in times.items()}, errors)


class _ChannelsLast(nn.Module):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def padding_table(rows: Sequence[PaddingRow], effort: str) -> list[str]:
    names = ("vendor", "vendor, padded by hand", "unpadded", "padded")
    lines = [
        f"Effort {effort!r}; microseconds, medians of {TURNS} turns, copies included. Tilewright pads where that is"
        " predicted to be faster.",
        "",
        "| convolution | vendor | vendor, padded by hand | Tilewright, no padding | Tilewright | vs vendor"
        " | vs own unpadded | error |",
        "| --- " * 8 + "|",
    ]
    for row in rows:
        us = row.microseconds
        cells = " | ".join(f"{us[name]:.1f}" for name in names)
        lines.append(
            f"| {row.convolution} | {cells} | {us['vendor'] / us['padded']:.2f}x"
            f" | {us['unpadded'] / us['padded']:.2f}x | {row.errors['padded']:.1e} |"
        )
    if rows:
        ratios = [row.microseconds["vendor"] / row.microseconds["padded"] for row in rows]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        lines += ["", f"Geometric mean over the vendor: {mean:.2f}x."]
    return lines


def machine_of(device: str) -> str:
    if device == "cuda":
        from tilewright.hw.gpu import detect

        return detect().describe()
    from tilewright.hw import host

    return host().describe()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--partition", action="store_true")
    parser.add_argument("--cuts", action="store_true")
    parser.add_argument("--padding", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--effort", default="none")
    parser.add_argument("--budget", default="10s")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row after this many")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    lines = [f"{machine_of(options.device)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}.", ""]
    found: dict[str, list[Any]] = {}
    if options.partition:
        names = options.models or MODELS
        rows = []
        for name in names:
            if time.monotonic() - began > options.seconds:
                lines += [f"No time for {name} and what follows.", ""]
                break
            rows.append(partition_row(name, options.device, options.effort, options.budget))
            print(rows[-1], flush=True)
        lines += partition_table(rows, options.effort)
        found["partition"] = [asdict(row) for row in rows]
    if options.cuts:
        cuts = []
        for name in options.models or (*MODELS, *LARGE):
            cuts.append(cut_row(name))
            print(cut_table(cuts[-1:])[4], flush=True)
        lines += ["", *cut_table(cuts)]
        found["cuts"] = [asdict(row) for row in cuts]
    if options.padding:
        padded = [padding_row(shape, options.device, options.effort) for shape in CONVOLUTIONS]
        lines += ["", *padding_table(padded, options.effort)]
        found["padding"] = [asdict(row) for row in padded]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
