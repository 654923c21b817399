"""At which sizes: the cases of each section. Convolutions are taken from the models by hooks, not from a table."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baselines.job import Files
from operators import MACHINE, NUMPY, ONNX_RUNTIME, OURS, OURS_FP32, TORCH
from operators.table import OPERATORS, Arrays, Operator, Sizes, operands

CONV_MODELS = ("resnet50", "vgg16", "mobilenetv2")
PLAIN_3X3 = "3x3 stride 1"  # a group of convolutions


@dataclass(frozen=True)
class Case:
    name: str
    operator: str
    sizes: Sizes
    groups: frozenset[str] = frozenset()  # which criteria ask about it
    int8: bool = False
    dtype: str = "float32"  # of inputs, weights and what is computed of them

    @property
    def flops(self) -> int:
        return OPERATORS[self.operator].flops(self.sizes)

    def operands(self) -> tuple[Arrays, Arrays]:
        seed = int.from_bytes(hashlib.sha256(repr(sorted(self.sizes.items())).encode()).digest()[:4], "big")
        return operands(self.formula, self.sizes, seed)

    @property
    def formula(self) -> Operator:
        return OPERATORS[self.operator]


@dataclass(frozen=True)
class Section:
    """Some cases, who computes them, and what of the machine bounds them: "flops", "read" or "copy"."""

    name: str
    bound: str
    systems: tuple[str, ...]
    cases: Callable[[Options], Sequence[Case]]

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(name for name in self.systems if name in (NUMPY, TORCH, ONNX_RUNTIME))


@dataclass(frozen=True)
class Options:
    quick: bool
    seed: int


@dataclass(frozen=True)
class OperatorJob(Files):
    case: Case
    bound: str
    threads: int
    folder: Path
    effort: str = "none"
    budget: float | None = None

    @property
    def moved_file(self) -> Path:
        """How many bytes have to be read and written."""
        return self.folder / "moved.npz"


# -- matmuls --------------------------------------------------------------------------------------------------

NAMED_PRODUCTS = (
    (128, 768, 768),
    (128, 3072, 768),
    (128, 768, 3072),
    (197, 2304, 768),
    (3136, 64, 576),
    (127, 769, 511),
)
RANDOM_PRODUCTS = 40


def product(m: int, n: int, k: int, *groups: str) -> Case:
    return Case(f"{m}x{n}x{k}", "matmul", {"m": m, "n": n, "k": k}, frozenset(groups))


def gemm_cases(options: Options) -> list[Case]:
    if options.quick:
        return [
            product(128, 256, 256, "square"),
            product(63, 129, 65, "named"),
            product(31, 70, 45, "random"),
        ]
    return [
        *(product(size, size, size, "square") for size in (1024, 2048)),
        *(product(*sizes, "named") for sizes in NAMED_PRODUCTS),
        *random_products(options.seed),
    ]


def random_products(seed: int) -> list[Case]:
    """Sizes whose logarithms are uniform, and which are enough work to be worth two threads."""
    rng = random.Random(seed)
    found: list[Case] = []
    while len(found) < RANDOM_PRODUCTS:
        m, n, k = (round(2 ** rng.uniform(*limits)) for limits in ((4, 11.5), (5, 11.5), (5, 11.5)))
        if 2e7 <= 2 * m * n * k <= 8e9:
            found.append(product(m, n, k, "random"))
    return found


def gemv_cases(options: Options) -> list[Case]:
    """Weights that no cache holds: square, of a wide and a narrow hidden layer, of a vocabulary."""
    if options.quick:
        return [product(1, 512, 512)]
    return [product(1, n, k) for n, k in ((4096, 4096), (11008, 4096), (4096, 11008), (50257, 768))]


# -- convolutions -----------------------------------------------------------------------------------------------------


def conv_cases(options: Options) -> list[Case]:
    models = CONV_MODELS[-1:] if options.quick else CONV_MODELS
    found: dict[str, Case] = {}
    for model in models:
        for case in convolutions_of(model, small=options.quick):
            alike = found.setdefault(repr(case.sizes), case)
            found[repr(case.sizes)] = replace(alike, groups=alike.groups | case.groups)
    cases = list(found.values())
    return cases[:3] if options.quick else cases


def convolutions_of(model: str, small: bool) -> list[Case]:
    """Every convolution that a call of the model meets, in order, with the sizes of its input there."""
    import torch

    from tilewright import zoo

    network = zoo.build(model, seed=0, small=small).eval()
    found: list[Case] = []

    def note(layer: Any, inputs: tuple[Any, ...], _: Any) -> None:
        found.append(conv_case(layer, inputs[0].shape, model))

    for layer in network.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(note)
    with torch.inference_mode():
        network(*zoo.example_inputs(model, small=small))
    return found


def conv_case(layer: Any, shape: Sequence[int], model: str) -> Case:
    sizes = {
        "in": layer.in_channels,
        "out": layer.out_channels,
        "image": tuple(shape[2:]),
        "kernel": tuple(layer.kernel_size),
        "stride": tuple(layer.stride),
        "padding": tuple(layer.padding),
        "dilation": tuple(layer.dilation),
        "groups": layer.groups,
    }
    plain = sizes["kernel"] == (3, 3) and sizes["stride"] == (1, 1) and layer.groups == 1
    height, width = sizes["image"]
    window = "x".join(map(str, sizes["kernel"]))
    stride = "" if sizes["stride"] == (1, 1) else f"/{layer.stride[0]}"
    groups = "" if layer.groups == 1 else f" g{layer.groups}"
    name = f"{layer.in_channels}>{layer.out_channels} {window}{stride}{groups} @{height}x{width}"
    return Case(name, "conv", sizes, frozenset({model, PLAIN_3X3} if plain else {model}))


# -- attention, rows, movement ----------------------------------------------------------------------------------------


def attention_cases(options: Options) -> list[Case]:
    shapes = [(2, 33, 16)] if options.quick else [(12, 128, 64), (12, 197, 64), (12, 512, 64), (8, 1050, 32)]
    return [
        Case(f"{heads}x{length}x{size}", "attention", {"heads": heads, "length": length, "size": size})
        for heads, length, size in shapes
    ]


def bandwidth_cases(options: Options) -> list[Case]:
    """Of 128 MiB and more: what is read and what is written are each beyond every cache."""
    scale = 16 if options.quick else 1

    def rows(operator: str, count: int, columns: int) -> Case:
        sizes = {"rows": count // scale, "columns": columns}
        return Case(f"{operator} {count // scale}x{columns}", operator, sizes)

    def whole(operator: str, shape: tuple[int, ...], what: str, **sizes: Any) -> Case:
        shape = (shape[0] // scale, *shape[1:])
        name = f"{operator} {'x'.join(map(str, shape))} {what}"
        return Case(name, operator, {"shape": shape, **sizes})

    def permute(shape: tuple[int, ...], order: tuple[int, ...], dtype: str = "float32") -> Case:
        case = whole("permute", shape, f"to {','.join(map(str, order))}", order=order)
        return case if dtype == "float32" else replace(case, name=f"{case.name}, {dtype}", dtype=dtype)

    def concat(axis: int, *shapes: tuple[int, ...]) -> Case:
        shapes = tuple((shape[0] // scale, *shape[1:]) for shape in shapes)
        name = f"concat {' + '.join('x'.join(map(str, shape)) for shape in shapes)} on {axis}"
        return Case(name, "concat", {"shapes": shapes, "axis": axis})

    def pool(kind: str, shape: tuple[int, ...], kernel: int, stride: int, padding: int) -> Case:
        sizes = {"kind": kind, "kernel": kernel, "stride": stride, "padding": padding}
        return whole("pool", shape, f"{kind} {kernel}x{kernel}/{stride}", **sizes)

    tokens = {"count": 65536 // scale, "rows": 50257, "columns": 768}
    return [
        rows("softmax", 32768, 1024),
        rows("softmax", 262144, 197),
        rows("layer_norm", 32768, 1024),
        rows("layer_norm", 49152, 768),
        rows("rms_norm", 8192, 4096),
        whole("group_norm", (32, 256, 64, 64), "in 32", groups=32),
        rows("gated", 16384, 2048),
        permute((8192, 4096), (1, 0)),
        permute((64, 64, 96, 96), (0, 2, 3, 1)),
        permute((64, 96, 96, 64), (0, 3, 1, 2)),
        permute((64, 512, 16, 64), (0, 2, 1, 3)),
        permute((5001, 7003), (1, 0)),
        permute((8192, 8192), (1, 0), "float16"),
        permute((7777, 8889), (1, 0), "bfloat16"),
        concat(0, (8192, 2048), (8192, 2048)),
        concat(1, (8192, 2048), (8192, 2048)),
        concat(1, (64, 48, 96, 96), (64, 16, 96, 96)),
        pool("max", (64, 64, 112, 112), 3, 2, 1),
        pool("avg", (64, 64, 112, 112), 2, 2, 0),
        whole("resize", (32, 64, 64, 64), "nearest x2", factor=2, mode="nearest"),
        whole("resize", (32, 64, 64, 64), "bilinear x2", factor=2, mode="bilinear"),
        whole("pad", (64, 64, 96, 96), "by 1", padding=(1, 1, 1, 1)),
        Case(f"gather {tokens['count']} of {tokens['rows']}x{tokens['columns']}", "gather", tokens),
    ]


def reading_cases(options: Options) -> list[Case]:
    """Of 256 MiB, and almost nothing is written."""
    rows = 4096 if options.quick else 65536

    def reduced(operator: str, shape: tuple[int, ...], axis: int) -> Case:
        name = f"{operator} {'x'.join(map(str, shape))} on {axis}"
        return Case(name, operator, {"shape": shape, "axis": axis})

    return [
        reduced("mean", (rows, 1024), 1),
        reduced("mean", (rows, 1024), 0),
        reduced("mean", (64, rows // 64, 1024), 1),
        reduced("argmax", (rows, 1024), 1),
        reduced("argmax", (rows, 1024), 0),
    ]


# -- int8 -------------------------------------------------------------------------------------------------------------


def int8_cases(options: Options) -> list[Case]:
    """Bytes times bytes, exact in 32 bits; the same product in fp32 is what it is compared with."""
    products = ((64, 96, 80),) if options.quick else ((1024, 1024, 1024), *NAMED_PRODUCTS)
    images = ((8, 16, 3, 1, 14),) if options.quick else (
        (64, 64, 3, 1, 56), (256, 64, 1, 1, 56), (128, 128, 3, 2, 56), (512, 512, 3, 1, 7)
    )  # fmt: skip
    found = [product(*sizes) for sizes in products]
    for channels, out, kernel, stride, image in images:
        sizes = {
            "in": channels,
            "out": out,
            "image": (image, image),
            "kernel": (kernel, kernel),
            "stride": (stride, stride),
            "padding": (kernel // 2, kernel // 2),
            "dilation": (1, 1),
            "groups": 1,
        }
        found.append(Case(f"{channels}>{out} {kernel}x{kernel}/{stride} @{image}x{image}", "conv", sizes))
    return [replace(case, groups=frozenset({case.operator}), int8=True) for case in found]


SECTIONS: dict[str, Section] = {
    s.name: s
    for s in (
        Section("gemm", "flops", (NUMPY, TORCH, ONNX_RUNTIME, OURS, MACHINE), gemm_cases),
        Section("gemv", "read", (NUMPY, TORCH, ONNX_RUNTIME, OURS, MACHINE), gemv_cases),
        Section("conv", "flops", (TORCH, ONNX_RUNTIME, OURS, MACHINE), conv_cases),
        Section("attention", "flops", (NUMPY, TORCH, ONNX_RUNTIME, OURS, MACHINE), attention_cases),
        Section("bandwidth", "copy", (NUMPY, TORCH, ONNX_RUNTIME, OURS, MACHINE), bandwidth_cases),
        Section("reading", "read", (NUMPY, TORCH, ONNX_RUNTIME, OURS, MACHINE), reading_cases),
        Section("int8", "flops", (ONNX_RUNTIME, OURS, OURS_FP32), int8_cases),
    )
}
