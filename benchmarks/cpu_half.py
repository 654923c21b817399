#!/usr/bin/env python3
"""16-bit models on the CPU: float32, float16 and bfloat16 side by side, Tilewright's and PyTorch's own.

    python benchmarks/cpu_half.py                                  # operators and models
    python benchmarks/cpu_half.py --only linear,softmax            # cases whose name contains one of these words
    python benchmarks/cpu_half.py --models --markdown benchmarks/results/cpu_half.md
    python benchmarks/cpu_half.py --operators --no-torch --rounds 3

All implementations of a case run interleaved in one process: in every round each is called for a while, in another
order each time. A time is the median over all calls, and the claim is the ratio to Tilewright's float32 of the same
run. The exit status is 1 where a 16-bit type takes more than `--limit` times as long as float32.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from baselines.machine import describe
from tilewright import zoo

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# -- what is timed ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]  # in float32


class Function(nn.Module):
    """A function of its inputs as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def of(name: str, module: Callable[[], nn.Module], *shapes: Sequence[int]) -> Case:
    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return module().eval(), tuple(torch.randn(*shape) for shape in shapes)

    return Case(name, make)


def function(name: str, value: Callable[..., Tensor], *shapes: Sequence[int]) -> Case:
    return of(name, lambda: Function(value), *shapes)


def mlp(*widths: int) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


OPERATORS = (
    of("linear 128x768x3072", lambda: nn.Linear(768, 3072), (128, 768)),
    of("linear 1024x1024x1024", lambda: nn.Linear(1024, 1024), (1024, 1024)),
    of("linear 16x256x256", lambda: nn.Linear(256, 256), (16, 256)),
    of("linear 8x1024x4096", lambda: nn.Linear(1024, 4096), (8, 1024)),
    of("linear 1x2048x8192", lambda: nn.Linear(2048, 8192), (1, 2048)),
    of("mlp 64x256-256-256-10", lambda: mlp(256, 256, 256, 10), (64, 256)),
    function("matmul 512x512x512", torch.matmul, (512, 512), (512, 512)),
    function("bmm 12x128x64x128", torch.matmul, (12, 128, 64), (12, 64, 128)),
    function("bmm 12x1x64x512", torch.matmul, (12, 1, 64), (12, 64, 512)),
    of("conv 3x3 64>64 @56", lambda: nn.Conv2d(64, 64, 3, padding=1), (1, 64, 56, 56)),
    of("conv 3x3/2 128>128 @56", lambda: nn.Conv2d(128, 128, 3, 2, 1), (1, 128, 56, 56)),
    of("conv 1x1 256>64 @56", lambda: nn.Conv2d(256, 64, 1), (1, 256, 56, 56)),
    of("conv 7x7/2 3>64 @224", lambda: nn.Conv2d(3, 64, 7, 2, 3), (1, 3, 224, 224)),
    of("depthwise 3x3 144 @56", lambda: nn.Conv2d(144, 144, 3, padding=1, groups=144), (1, 144, 56, 56)),
    of("conv transposed 2x2/2 64>32 @56", lambda: nn.ConvTranspose2d(64, 32, 2, 2), (1, 64, 56, 56)),
    function("attention 12x197x64", F.scaled_dot_product_attention, *3 * [(1, 12, 197, 64)]),
    function(
        "attention causal 12x512x64",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *3 * [(1, 12, 512, 64)],
    ),
    function(
        "attention 12 of 1 query, 1024 keys",
        F.scaled_dot_product_attention,
        (1, 12, 1, 64),
        *2 * [(1, 12, 1024, 64)],
    ),
    function("softmax 4096x1024", lambda x: x.softmax(-1), (4096, 1024)),
    function("softmax 128x128", lambda x: x.softmax(-1), (128, 128)),
    of("layer norm 4096x768", lambda: nn.LayerNorm(768), (4096, 768)),
    of("group norm 8x256 @32", lambda: nn.GroupNorm(32, 256), (8, 256, 32, 32)),
    of("batch norm, relu 64 @112", lambda: nn.Sequential(nn.BatchNorm2d(64), nn.ReLU()), (4, 64, 112, 112)),
    function("gelu 4M", F.gelu, (4096, 1024)),
    function("add 4M", torch.add, (4096, 1024), (4096, 1024)),
    function("sum of rows 4096x1024", lambda x: x.sum(-1), (4096, 1024)),
    function("sum of columns 4096x1024", lambda x: x.sum(0), (4096, 1024)),
    of("max pool 3x3/2 64 @112", lambda: nn.MaxPool2d(3, 2, 1), (4, 64, 112, 112)),
    of("average pool 2x2 64 @112", lambda: nn.AvgPool2d(2), (4, 64, 112, 112)),
    of("global average pool 8x2048 @7", lambda: nn.AdaptiveAvgPool2d(1), (8, 2048, 7, 7)),
    of("nearest x2 64 @56", lambda: nn.Upsample(scale_factor=2), (4, 64, 56, 56)),
    of("bilinear x2 64 @56", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (4, 64, 56, 56)),
    function("transpose 2048x2048", lambda x: x.t().contiguous(), (2048, 2048)),
    function("permute 4x64x112x112", lambda x: x.permute(0, 2, 3, 1).contiguous(), (4, 64, 112, 112)),
    function("concat", lambda a, b: torch.cat([a, b], 1), (2048, 1024), (2048, 1024)),
    function("pad", lambda x: F.pad(x, (1, 1, 1, 1)), (4, 64, 112, 112)),
    function("cumsum 1024x1024", lambda x: x.cumsum(-1), (1024, 1024)),
)


class Tokens(nn.Module):
    """The next token's logits of a decoder with a cache: the time is that of reading weights and cache."""

    def __init__(self, layers: int = 2, width: int = 768, heads: int = 12, vocabulary: int = 8192) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new_keys, new_values = [], []
        for n, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            q, k, v = (
                part.view(1, 1, self.heads, -1).transpose(1, 2)
                for part in qkv(self.norm[2 * n](x)).chunk(3, -1)
            )
            new_keys.append(torch.cat([keys[n], k], 2))
            new_values.append(torch.cat([values[n], v], 2))
            seen = F.scaled_dot_product_attention(q, new_keys[-1], new_values[-1])
            x = x + out(seen.transpose(1, 2).reshape(x.shape))
            x = x + mlp(self.norm[2 * n + 1](x))
        return self.head(x), torch.stack(new_keys), torch.stack(new_values)


def from_zoo(name: str, label: str = "", **options: Any) -> Case:
    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return zoo.build(name, **options), zoo.example_inputs(name, **options)

    return Case(label or name, make)


MODELS = (
    from_zoo("resnet18"),
    from_zoo("resnet50"),
    from_zoo("mobilenetv2"),
    from_zoo("unet", "unet (64 x 64)", image_size=64),
    from_zoo("bert-tiny"),
    from_zoo("bert-base", "bert-base (4 layers, 128 tokens)", layers=4),
    from_zoo("vit-b16", "vit (4 layers, 224 x 224)", layers=4),
    from_zoo("gpt2", "gpt2 (4 layers, 64 tokens)", layers=4, tokens=64),
    Case(
        "decoder, 1 token, 511 cached",
        lambda: (Tokens().eval(), (torch.randn(1, 1, 768), *torch.randn(2, 2, 1, 12, 511, 64))),
    ),
)


# -- timing -----------------------------------------------------------------------------------------------------------


def converted(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if not isinstance(value, Tensor) or value.is_floating_point() else value


def error(got: Any, truth: Any) -> float:
    """Relative L2 error over all results."""
    leaves = torch.utils._pytree.tree_leaves
    pairs = list(zip(leaves(got), leaves(truth), strict=True))
    distance = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return (distance / max(1e-300, sum(float(b.double().square().sum()) for _, b in pairs))) ** 0.5


@dataclass(frozen=True)
class Row:
    name: str
    seconds: dict[str, float]  # by system and type, as "tilewright float16"
    errors: dict[str, float]  # the same
    megabytes: dict[str, float]  # of constants, by type

    def ratio(self, dtype: str) -> float:
        return self.seconds[f"tilewright {dtype}"] / self.seconds["tilewright float32"]


@dataclass(frozen=True)
class Prepared:
    """A case with all of its implementations ready to be called."""

    name: str
    calls: dict[str, Callable[[], Any]]
    errors: dict[str, float]
    megabytes: dict[str, float]

    def timed(self, rounds: int, turn: float, clock: Callable[[], float]) -> Row:
        samples: dict[str, list[float]] = {name: [] for name in self.calls}
        order = list(self.calls)
        for number in range(rounds):
            random.Random(number).shuffle(order)
            for name in order:
                samples[name] += _turn(self.calls[name], turn, clock)
        medians = {name: statistics.median(taken) for name, taken in samples.items()}
        return Row(self.name, medians, self.errors, self.megabytes)


def prepared(case: Case, with_torch: bool, threads: int) -> Prepared:
    torch.manual_seed(0)
    model, inputs = case.make()
    calls: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    megabytes: dict[str, float] = {}
    for label, dtype in DTYPES.items():
        own_inputs = tuple(converted(x, dtype) for x in inputs)
        own = copy.deepcopy(model).to(dtype)
        truth = copy.deepcopy(own).double()(*(converted(x, torch.float64) for x in own_inputs))
        compiled = tilewright.compile(own, own_inputs)
        compiled.threads = threads
        megabytes[label] = compiled.plan.memory.constant_bytes / 1e6
        calls[f"tilewright {label}"] = _call(compiled, own_inputs)
        if with_torch:
            calls[f"torch {label}"] = _call(own, own_inputs)
        for name in [name for name in calls if name.endswith(" " + label)]:
            errors[name] = error(calls[name](), truth)
    return Prepared(case.name, calls, errors, megabytes)


def _call(model: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    return lambda: model(*inputs)


def _turn(call: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> list[float]:
    call()
    taken: list[float] = []
    begin = clock()
    while not taken or clock() - begin < seconds:
        start = clock()
        call()
        taken.append(clock() - start)
    return taken


# -- the table --------------------------------------------------------------------------------------------------------


def header(with_torch: bool) -> list[str]:
    columns = ["ms", *DTYPES, "float16 / float32", "bfloat16 / float32"]
    columns += [f"PyTorch {name}" for name in DTYPES] if with_torch else []
    columns += ["errors 16-bit", *(["PyTorch's"] if with_torch else []), "constants MB"]
    return [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]


def line(row: Row, with_torch: bool) -> str:
    def milliseconds(system: str) -> list[str]:
        return [f"{1e3 * row.seconds[f'{system} {name}']:.3f}" for name in DTYPES]

    def mistakes(system: str) -> str:
        return ", ".join(f"{row.errors[f'{system} {name}']:.1e}" for name in ("float16", "bfloat16"))

    cells = [
        row.name,
        *milliseconds("tilewright"),
        f"{row.ratio('float16'):.2f}",
        f"{row.ratio('bfloat16'):.2f}",
    ]
    cells += milliseconds("torch") if with_torch else []
    cells += [mistakes("tilewright"), *([mistakes("torch")] if with_torch else [])]
    cells.append(", ".join(f"{row.megabytes[name]:.1f}" for name in DTYPES))
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--operators", action="store_true", help="operators alone")
    parser.add_argument("--models", action="store_true", help="models alone")
    parser.add_argument(
        "--only", default="", help="words, separated by commas: cases whose names contain one"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--turn", type=float, default=0.1, help="seconds that each implementation runs for in a round"
    )
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch's own times out")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's CPU time: for a machine that others use too"
    )
    parser.add_argument("--limit", type=float, default=1.1)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    both = options.operators == options.models
    cases = (*(OPERATORS if both or options.operators else ()), *(MODELS if both or options.models else ()))
    words = [word for word in options.only.split(",") if word]
    cases = tuple(case for case in cases if not words or any(word in case.name for word in words))
    if options.cpu_time:
        torch.set_num_threads(1)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    machine = describe()
    text = [
        f"{machine['cpu']}, {machine['cores']} cores, {torch.get_num_threads()} threads, {machine['date']}.",
        "",
    ]
    text += header(not options.no_torch)
    print("\n".join(text), flush=True)
    slow = []
    with torch.inference_mode():
        for case in cases:
            ready = prepared(case, not options.no_torch, torch.get_num_threads())
            row = ready.timed(options.rounds, options.turn, clock)
            text.append(line(row, not options.no_torch))
            print(text[-1], flush=True)
            slow += [
                f"{row.name} in {name}" for name in ("float16", "bfloat16") if row.ratio(name) > options.limit
            ]
    if options.markdown is not None:
        options.markdown.write_text("\n".join(text) + "\n")
    for name in slow:
        print(f"slower than float32: {name}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
