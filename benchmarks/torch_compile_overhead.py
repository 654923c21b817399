"""The cost of torch.compile alongside tilewright.compile: the same model through both, and Dynamo's own part apart.

    python benchmarks/torch_compile_overhead.py [--seconds 3] [--threads 1] [--models mlp cnn] [--json FILE]

Timed interleaved, some calls of each in a row: the model that `tilewright.compile` gives; torch.compile with the
backend "tilewright"; and torch.compile with a backend that does nothing but call the model that `tilewright.compile`
gives. What the last takes longer than the first is the cost of Dynamo, its guards and frames, in caches that the same
kernels have used. `beyond guards` is (torch.compile - Dynamo) / tilewright.compile. PyTorch itself comes after them,
since its threads go on spinning alongside whoever comes next. Times are medians in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilewright
from tilewright import zoo
from tilewright.integrations.torch_compile import register

_RUN = 24  # calls of one way in a row


def mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(8, 64)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 64), *head), torch.randn(1, 3, 32, 32)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(1, 32, 128)


def of_zoo(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Models of some hundred weights, each of which a call looks at."""
    return zoo.build(name, seed=0), zoo.example_inputs(name, seed=1)[0]


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "mobilenetv2": partial(of_zoo, "mobilenetv2"),
    "resnet50": partial(of_zoo, "resnet50"),
}


def measured(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], seconds: float, threads: int | None
) -> dict[str, float]:
    """Microseconds of a call, by way; of `dynamo`, what it adds."""
    torch.manual_seed(0)
    model, x = make()
    model.eval()
    torch._dynamo.reset()
    direct = tilewright.compile(model, (x,), threads=threads)
    modes: dict[str, Callable[[torch.Tensor], Any]] = {
        "tilewright": direct,
        "torch_compile": torch.compile(model, backend="tilewright", options={"threads": threads}),
        "around": torch.compile(model, backend=lambda graph, examples: lambda *arguments: [direct(x)]),
        "pytorch": model,
    }
    with torch.no_grad():
        compiled = {name: mode for name, mode in modes.items() if name != "pytorch"}
        row = {**_timed(compiled, x, seconds), **_timed({"pytorch": model}, x, seconds / 3)}
    row["dynamo"] = row.pop("around") - row["tilewright"]
    return row


def _timed(
    modes: Mapping[str, Callable[[torch.Tensor], Any]], x: torch.Tensor, seconds: float
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in modes}
    for mode in modes.values():
        for _ in range(20):
            mode(x)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, mode in modes.items():
            for number in range(_RUN):
                began = time.perf_counter()
                mode(x)
                took = time.perf_counter() - began
                if number >= _RUN // 4:  # the caches hold what this way needs
                    times[name].append(took)
    return {name: statistics.median(each) * 1e6 for name, each in times.items()}


def beyond_guards(row: Mapping[str, float]) -> float:
    return (row["torch_compile"] - row["dynamo"]) / row["tilewright"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="for each model")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME")
    options = parser.parse_args()
    register()
    rows = {name: measured(MODELS[name], options.seconds, options.threads) for name in options.models}
    print("| model | tilewright.compile | torch.compile | Dynamo alone | beyond guards | PyTorch |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, row in rows.items():
        print(
            f"| {name} | {row['tilewright']:.1f} | {row['torch_compile']:.1f} | {row['dynamo']:.1f} |"
            f" {beyond_guards(row):.2f}x | {row['pytorch']:.1f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
