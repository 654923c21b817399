"""The layers that random networks are made of, as users write them in PyTorch.

Each is a function of a source of random numbers and of the values so far, the newest last; it gives a module that takes
these values and computes the next one, or None where it does not apply. What it draws depends on its own numbers and on
the shapes that it meets, so a network stays one when some of its layers are taken out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Values = Sequence[Tensor]
Layer = Callable[[Random, Values], "nn.Module | None"]

WIDTHS = (3, 8, 12, 16, 24, 32, 46, 48, 64)
LAYERS: list[tuple[Layer, float]] = []  # with how likely each is
TAILS: list[Layer] = []  # for the end of a network


def layer(weight: float) -> Callable[[Layer], Layer]:
    def registered(function: Layer) -> Layer:
        LAYERS.append((function, weight))
        return function

    return registered


def tail(function: Layer) -> Layer:
    TAILS.append(function)
    return function


class Of(nn.Module):
    """A function of the newest value, with the modules that it uses."""

    def __init__(self, text: str, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.text, self.function, self.used = text, function, nn.ModuleList(modules)

    def forward(self, values: Values) -> Tensor:
        return self.function(values[-1], *self.used)


class OfTwo(nn.Module):
    """A function of the newest value and of an earlier one."""

    def __init__(self, text: str, function: Callable[[Tensor, Tensor], Tensor], at: int) -> None:
        super().__init__()
        self.text, self.function, self.at = f"{text}, with value {at}", function, at

    def forward(self, values: Values) -> Tensor:
        return self.function(values[-1], values[self.at])


class Parameter(nn.Module):
    """Trained numbers, or such that do not change."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape))


def wrapped(module: nn.Module) -> Of:
    return Of(str(module).replace("\n", " "), lambda x, used: used(x), module)


def is_image(x: Tensor) -> bool:
    return x.ndim == 4


def divisor(draw: Random, number: int, most: int = 64) -> int:
    return draw.choice([n for n in range(1, min(number, most) + 1) if number % n == 0])


# -- convolutions -----------------------------------------------------------------------------------------------------


@layer(6)
def convolution(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if not is_image(x):
        return None
    channels, width = x.shape[1], draw.choice(WIDTHS)
    size = draw.choice([(1, 1), (1, 1), (3, 3), (3, 3), (5, 5), (1, 3), (2, 2)])
    groups = draw.choice([1, 1, 1, channels, divisor(draw, math.gcd(channels, width))])
    if groups == channels:
        width = channels * draw.choice([1, 1, 2])
    dilation = draw.choice([1, 1, 1, 2])
    padding = [draw.choice([0, k // 2, k // 2]) * dilation for k in size]
    if any(n + 2 * p <= dilation * (k - 1) for n, p, k in zip(x.shape[2:], padding, size, strict=True)):
        return None
    return wrapped(
        nn.Conv2d(
            channels,
            width,
            size,
            stride=draw.choice([1, 1, 1, 2]),
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=draw.random() < 0.5,
        )
    )


@layer(1)
def transposed_convolution(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if not is_image(x) or x.shape[2] * x.shape[3] > 100:
        return None
    channels, width = x.shape[1], draw.choice((3, 8, 12, 16, 24))
    groups = draw.choice([1, 1, divisor(draw, math.gcd(channels, width), 8)])
    size, stride, padding, more = draw.choice([(2, 2, 0, 0), (3, 2, 1, 1), (4, 2, 1, 0), (3, 1, 1, 0)])
    common = {"stride": stride, "padding": padding, "output_padding": more, "groups": groups}
    return wrapped(nn.ConvTranspose2d(channels, width, size, bias=draw.random() < 0.5, **common))


@layer(1.5)
def separable_convolution(draw: Random, values: Values) -> nn.Module | None:
    """A block of MobileNet: 1x1, depthwise, 1x1."""
    x = values[-1]
    if not is_image(x):
        return None
    channels, inside = x.shape[1], draw.choice((16, 24, 32, 48, 64, 96))
    width = draw.choice([channels, *WIDTHS])
    act = draw.choice([nn.ReLU6(), nn.SiLU(), nn.Hardswish()])
    used = nn.Sequential(
        *(
            [nn.Conv2d(channels, inside, 1, bias=False), batch_norm(inside), act]
            if draw.random() < 0.7
            else []
        ),
    )
    inside = inside if len(used) else channels
    depthwise = nn.Conv2d(
        inside, inside, 3, stride=draw.choice([1, 1, 2]), padding=1, groups=inside, bias=False
    )
    used.extend(
        [depthwise, batch_norm(inside), act, nn.Conv2d(inside, width, 1, bias=False), batch_norm(width)]
    )
    return wrapped(used)


@layer(1.5)
def joined_convolutions(draw: Random, values: Values) -> nn.Module | None:
    """What a convolution gives, twice side by side, and a window over that: blocks of one size may meet another."""
    x = values[-1]
    if not is_image(x):
        return None
    width = draw.choice((8, 12, 16, 24))
    conv = nn.Conv2d(x.shape[1], width, 3, padding=1, bias=draw.random() < 0.5)
    after = draw.choice(
        [nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1), nn.Conv2d(2 * width, draw.choice((16, 24)), 1)]
    )

    def joined(x: Tensor, conv: nn.Module, after: nn.Module) -> Tensor:
        x = conv(x)
        return after(torch.cat([x, 0.5 * x], 1))

    return Of(f"{after} of cat([y, 0.5 * y]), y = {conv}", joined, conv, after)


@layer(1)
def squeeze_and_excitation(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if not is_image(x):
        return None
    channels, inside = x.shape[1], draw.choice((4, 8, 12))
    down, up = nn.Conv2d(channels, inside, 1), nn.Conv2d(inside, channels, 1)

    def gated(x: Tensor, down: nn.Module, up: nn.Module) -> Tensor:
        return x * torch.sigmoid(up(F.relu(down(x.mean((2, 3), keepdim=True)))))

    return Of(f"x * sigmoid(conv(relu(conv(mean(x))))), {inside} inside", gated, down, up)


# -- norms and activations --------------------------------------------------------------------------------------------


def batch_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 1.5)
        norm.weight.normal_(1, 0.3)
        norm.bias.normal_(0, 0.3)
    return norm


@layer(3)
def normalisation(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if x.ndim == 3:
        return wrapped(nn.LayerNorm(x.shape[-1]))
    if not is_image(x):
        return None
    channels, area = x.shape[1], x.shape[2] * x.shape[3]
    kind = draw.choice(["batch", "batch", "group", "instance", "layer", "channels"])
    if kind == "batch":
        return wrapped(batch_norm(channels))
    if kind == "group" and channels * area > 8:
        return wrapped(nn.GroupNorm(divisor(draw, channels, 8), channels))
    if kind == "instance" and area > 1:
        return wrapped(nn.InstanceNorm2d(channels, affine=draw.random() < 0.5))
    if kind == "layer":
        return wrapped(nn.LayerNorm(list(x.shape[draw.choice([1, 2, 3]) :])))
    if channels < 4:  # of so few the difference may be all rounding
        return None
    norm = nn.LayerNorm(channels)
    return Of(
        f"{norm} over the channels", lambda x, used: used(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm
    )


ACTIVATIONS: Sequence[Callable[[], nn.Module]] = (
    *(nn.ReLU, nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, lambda: nn.LeakyReLU(0.1), nn.Tanh, nn.ELU),
    *(nn.ReLU6, nn.Sigmoid, nn.Mish, nn.Hardsigmoid, nn.Softplus, nn.PReLU),
)


@layer(4)
def activation(draw: Random, values: Values) -> nn.Module | None:
    return wrapped(draw.choice(ACTIVATIONS)())


# -- joining and cutting ----------------------------------------------------------------------------------------------


@layer(4)
def concatenation(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if x.ndim < 2:
        return None
    axis = draw.choice([1, 1, 1, *range(x.ndim)])
    rest = [n for d, n in enumerate(x.shape) if d != axis]
    others = [
        at
        for at, value in enumerate(values[:-1])
        if value.ndim == x.ndim and [n for d, n in enumerate(value.shape) if d != axis] == rest
    ]
    if others and draw.random() < 0.5:
        at = draw.choice(others)
        first = draw.random() < 0.5
        return OfTwo(f"cat dim={axis}", lambda x, y: torch.cat([x, y] if first else [y, x], axis), at)
    text, function = draw.choice(
        [
            ("cat([x, 0.5 * x])", lambda x: torch.cat([x, 0.5 * x], axis)),
            ("cat([relu(x), -x, x])", lambda x: torch.cat([F.relu(x), -x, x], axis)),
            (
                "cat([cat([x, tanh(x)]), x])",
                lambda x: torch.cat([torch.cat([x, torch.tanh(x)], axis), x], axis),
            ),
            ("cat([x])", lambda x: torch.cat([x], axis)),
            ("cat([x, ones, x])", lambda x: torch.cat([x, torch.ones_like(x), x], axis)),
            ("cat of 34", lambda x: torch.cat([x.narrow(axis, 0, 1), -x.narrow(axis, 0, 1)] * 17, axis)),
            ("cat of single slices", lambda x: torch.cat([torch.sin(y) for y in x.split(1, axis)][:8], axis)),
        ]
    )
    return Of(f"{text} dim={axis}", function)


@layer(3)
def slicing(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    axis = draw.randrange(x.ndim) if draw.random() < 0.4 else min(1, x.ndim - 1)
    extent = x.shape[axis]
    if extent < 2:
        return None
    half = (extent + 1) // 2
    start = draw.randrange(extent)
    stop = draw.randrange(start + 1, extent + 1)
    step = draw.choice([1, 1, 2, 3])

    def window(x: Tensor) -> Tensor:
        return x[(slice(None),) * axis + (slice(start, stop, step),)]

    text, function = draw.choice(
        [
            (f"x[{start}:{stop}:{step}]", window),
            ("the first half", lambda x: x.narrow(axis, 0, half)),
            ("the second half", lambda x: x.narrow(axis, extent - half, half)),
            ("x[1:][:-1]", lambda x: x.narrow(axis, 1, extent - 1).narrow(axis, 0, max(extent - 2, 1))),
            ("sum of both halves", lambda x: x.narrow(axis, 0, half) + x.narrow(axis, extent - half, half)),
            ("halves in the other order", lambda x: torch.cat(x.split(half, axis)[::-1], axis)),
            ("halves together again", lambda x: torch.cat(x.split(half, axis), axis)),
            (
                "half of a cat",
                lambda x: torch.cat([x, torch.sigmoid(x)], axis).narrow(axis, start, extent - start),
            ),
            ("flip", lambda x: x.flip(axis)),
            ("roll", lambda x: x.roll(1, axis)),
            ("take", lambda x: x.index_select(axis, torch.tensor([extent - 1, 0, start]))),
        ]
    )
    return Of(f"{text} dim={axis}", function)


@layer(1)
def recurrence(draw: Random, values: Values) -> nn.Module | None:
    """A loop over the channels or the images, as a recurrent layer is exported: each step reads its own slice."""
    x = values[-1]
    axis = draw.randrange(min(2, x.ndim))
    if not 2 <= x.shape[axis] <= 24:
        return None
    share = draw.choice([0.25, 0.5])
    backward, keeps = draw.random() < 0.3, draw.random() < 0.8

    def loop(x: Tensor) -> Tensor:
        parts = list(x.split(1, axis))[:: -1 if backward else 1]
        states = [parts[0]]
        for part in parts[1:]:
            states.append(torch.tanh(part + share * states[-1]))
        return torch.cat(states, axis) if keeps else states[-1]

    return Of(f"recurrence dim={axis}{' backward' if backward else ''}", loop)


@layer(2)
def padding(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if not is_image(x):
        return None
    mode = draw.choice(["constant", "constant", "reflect", "replicate"])
    amounts = [draw.choice([0, 1, 2]) for _ in range(4)]
    if mode == "reflect" and (x.shape[3] <= max(amounts[:2]) or x.shape[2] <= max(amounts[2:])):
        return None
    if mode != "constant":
        return Of(f"pad {amounts} {mode}", lambda x: F.pad(x, amounts, mode=mode))
    if draw.random() < 0.3:
        amounts += [draw.choice([0, 1, 2, 4]), draw.choice([0, 0, 3])]  # of channels
    value = draw.choice([0.0, 0.0, 0.5])
    if draw.random() < 0.2:
        return Of(
            f"pad {amounts} twice", lambda x: F.pad(F.pad(x, amounts, value=value), amounts, value=value)
        )
    return Of(f"pad {amounts} value={value}", lambda x: F.pad(x, amounts, value=value))


@layer(2)
def branches(draw: Random, values: Values) -> nn.Module | None:
    """Convolutions of one value whose results are added, as RepVGG is trained."""
    x = values[-1]
    if not is_image(x):
        return None
    channels = x.shape[1]
    width, stride = draw.choice([(channels, 1), (channels, 1), (draw.choice(WIDTHS), 2)])
    large = nn.Conv2d(channels, width, 3, stride, padding=1, bias=draw.random() < 0.5)
    small = nn.Conv2d(channels, width, 1, stride, bias=draw.random() < 0.5)
    if width != channels or stride != 1:
        return Of("conv3x3(x) + conv1x1(x)", lambda x, large, small: large(x) + small(x), large, small)
    if draw.random() < 0.5:
        text = "conv3x3(x) + conv1x1(x) + x"
        return Of(text, lambda x, large, small: large(x) + small(x) + x, large, small)
    return Of(
        "conv3x3(x) + conv1x1(x) + norm(x)",
        lambda x, large, small, norm: large(x) + small(x) + norm(x),
        *(large, small, batch_norm(channels)),
    )


@layer(3)
def residual(draw: Random, values: Values) -> nn.Module | None:
    """An earlier value that is broadcast to this one, or of its shape."""
    x = values[-1]
    fitting = [
        at
        for at, value in enumerate(values[:-1])
        if value.ndim == x.ndim and all(n in (1, m) for n, m in zip(value.shape, x.shape, strict=True))
    ]
    if not fitting:
        return None
    text, function = draw.choice(
        [
            ("x + y", lambda x, y: x + y),
            ("relu(x + y)", lambda x, y: F.relu(x + y)),
            ("x - y", lambda x, y: x - y),
            ("x * sigmoid(y)", lambda x, y: x * torch.sigmoid(y)),
            ("maximum(x, y)", torch.maximum),
        ]
    )
    return OfTwo(text, function, draw.choice(fitting))


# -- windows and sizes ------------------------------------------------------------------------------------------------


@layer(3)
def pooling(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if not is_image(x):
        return None
    kind = draw.choice(["max", "avg", "avg", "adaptive avg", "adaptive max", "mean"])
    if kind == "mean":
        return Of("mean((2, 3), keepdim=True)", lambda x: x.mean((2, 3), keepdim=True))
    if kind.startswith("adaptive"):
        size = draw.choice([(1, 1), (2, 2), (2, 3), (x.shape[2], 1), (4, 4)])
        return wrapped(nn.AdaptiveAvgPool2d(size) if kind == "adaptive avg" else nn.AdaptiveMaxPool2d(size))
    kernel = draw.choice([2, 3, 3])
    pad = draw.choice([0, kernel // 2])
    if min(x.shape[2:]) + 2 * pad < kernel:
        return None
    stride, ceil = draw.choice([1, 2, kernel]), draw.random() < 0.2
    if kind == "max":
        return wrapped(nn.MaxPool2d(kernel, stride, pad, ceil_mode=ceil))
    return wrapped(nn.AvgPool2d(kernel, stride, pad, ceil_mode=ceil, count_include_pad=draw.random() < 0.5))


@layer(2.5)
def interpolation(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if not is_image(x) or x.shape[2] * x.shape[3] > 256:
        return None
    mode = draw.choice(["nearest", "nearest", "bilinear", "bicubic", "nearest-exact"])
    corners = draw.choice([False, True]) if mode in ("bilinear", "bicubic") else None
    size = draw.choice(
        [
            (2 * x.shape[2], 2 * x.shape[3]),
            (2 * x.shape[2], 2 * x.shape[3]),
            (x.shape[2], x.shape[3]),
            (x.shape[2] + 1, x.shape[3]),
            (max(x.shape[2] // 2, 1), max(x.shape[3] // 2, 1)),
            (3, 7),
        ]
    )
    return Of(
        f"interpolate {size} {mode} align_corners={corners}",
        lambda x: F.interpolate(x, size=size, mode=mode, align_corners=corners),
    )


# -- movement ---------------------------------------------------------------------------------------------------------


@layer(2.5)
def movement(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if not is_image(x):
        return Of("transpose of the last two", lambda x: x.transpose(-1, -2)) if x.ndim == 3 else None
    batch, channels, height, width = x.shape
    groups = divisor(draw, channels, 8)
    parts = channels // groups

    def shuffled(x: Tensor) -> Tensor:
        return x.view(batch, groups, parts, height, width).transpose(1, 2).reshape(x.shape)

    choices: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        (f"channel shuffle of {groups}", shuffled),
        ("transpose(2, 3)", lambda x: x.transpose(2, 3)),
        (
            "channels last, doubled, and back",
            lambda x: (x.permute(0, 2, 3, 1).contiguous() * 2).permute(0, 3, 1, 2),
        ),
        ("transpose(1, 2)", lambda x: x.transpose(1, 2)),
        ("permute(1, 0, 2, 3)", lambda x: x.permute(1, 0, 2, 3)),
        ("flatten(2) and back", lambda x: torch.tanh(x.flatten(2)).view(batch, channels, height, width)),
        ("unsqueeze, squeeze", lambda x: F.relu(x.unsqueeze(2)).squeeze(2)),
        ("flip(2).flip(2)", lambda x: x.flip(2).flip(2)),
        ("expand", lambda x: x.mean(1, keepdim=True).expand(batch, 16, height, width)),
        ("permute twice", lambda x: torch.sin(x.permute(0, 2, 3, 1)).permute(0, 1, 3, 2)),
    ]
    if channels % 4 == 0:
        choices.append(("pixel_shuffle(2)", lambda x: F.pixel_shuffle(x, 2)))
    if height % 2 == 0 and width % 2 == 0 and channels <= 16:
        choices.append(("pixel_unshuffle(2)", lambda x: F.pixel_unshuffle(x, 2)))
    return Of(*draw.choice(choices))


@layer(1)
def reduction(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if x.ndim < 3:
        return None
    axis = draw.choice([1, 1, *range(x.ndim)])
    choices: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("softmax", lambda x: x.softmax(axis)),
        ("log(softmax)", lambda x: torch.log(x.softmax(axis))),
        ("x - mean", lambda x: x - x.mean(axis, keepdim=True)),
        ("x / norm", lambda x: x / (x.square().sum(axis, keepdim=True) + 1).sqrt()),
        ("x * rsqrt(var + 1)", lambda x: x * torch.rsqrt(x.var(axis, keepdim=True, unbiased=False) + 1)),
        ("amax keepdim", lambda x: x.amax(axis, keepdim=True)),
        ("cumsum", lambda x: x.cumsum(axis)),
        ("mean", lambda x: x.mean(axis)),
    ]
    return Of(*draw.choice(choices)) if x.shape[axis] > 1 else None


# -- algebra ----------------------------------------------------------------------------------------------------------


@layer(4)
def arithmetic(draw: Random, values: Values) -> nn.Module | None:
    """What is left of configurations, ablations and exports: much of it does nothing."""
    x = values[-1]
    shape = draw.choice([(x.shape[-1],), tuple(1 if d != 1 else n for d, n in enumerate(x.shape)), ()])
    if is_image(x) and draw.random() < 0.5:
        shape = (x.shape[1], 1, 1)
    own = Parameter(*shape)
    choices: list[tuple[str, Callable[..., Tensor]]] = [
        ("x + 0", lambda x, p: x + 0),
        ("0 + x * 1", lambda x, p: 0 + x * 1),
        ("x - 0", lambda x, p: x - 0),
        ("x / 1", lambda x, p: x / 1),
        ("x / 3", lambda x, p: x / 3),
        ("x + (-tanh(x))", lambda x, p: x + (-torch.tanh(x))),
        ("sin(x) - (-x)", lambda x, p: torch.sin(x) - (-x)),
        ("neg(neg(x))", lambda x, p: x.neg().neg()),
        ("1 / (1 + x ** 2)", lambda x, p: 1 / (1 + x**2)),
        ("x ** 3", lambda x, p: x**3),
        ("1 / sqrt(x ** 2 + 1)", lambda x, p: 1 / torch.sqrt(x**2 + 1)),
        ("(x ** 2 + 1) ** -0.5", lambda x, p: (x**2 + 1) ** -0.5),
        ("relu(relu(x))", lambda x, p: F.relu(F.relu(x))),
        ("abs(abs(x))", lambda x, p: x.abs().abs()),
        ("clamp(relu(x), max=6)", lambda x, p: F.relu(x).clamp(max=6)),
        ("clamp twice", lambda x, p: x.clamp(-2, 1.5).clamp(-1, 2)),
        ("clamp(min=0)", lambda x, p: x.clamp(min=0)),
        ("maximum with a number", lambda x, p: torch.maximum(x, torch.tensor(0.1, dtype=x.dtype))),
        ("to float64 and back", lambda x, p: torch.sin(x.double()).to(x.dtype)),
        ("float().float()", lambda x, p: x.double().float().to(x.dtype)),
        ("where(true, x, -x)", lambda x, p: torch.where(torch.ones(1, dtype=torch.bool), x, -x)),
        ("where(x > 0, x, x / 10)", lambda x, p: torch.where(x > 0, x, x / 10)),
        ("x * p", lambda x, p: x * p.value),
        ("x + p", lambda x, p: x + p.value),
        ("x * p + p, p expanded", lambda x, p: x * p.value.expand(x.shape) + p.value),
        ("x * zeros.expand + x", lambda x, p: torch.zeros(1, dtype=x.dtype).expand(x.shape) + x),
        ("x + mean of a large full", lambda x, p: x + torch.full((160, 160), 0.25, dtype=x.dtype).flip(0).mean()),
        ("(x ** 2 + 1) ** tensor", lambda x, p: (x**2 + 1) ** torch.tensor(0.5, dtype=x.dtype)),
        ("expanded twice", lambda x, p: x + x.mean(-1, keepdim=True).expand(x.shape).expand(3, *x.shape).sum(0)),
        ("x + full", lambda x, p: x + torch.full(x.shape[-1:], 0.25, dtype=x.dtype).view(1, -1)[0]),
        ("x + full, permuted", lambda x, p: x + torch.full(x.shape[::-1], 2.0, dtype=x.dtype).mT.reshape(x.shape)),
        ("x + iota", lambda x, p: x + torch.arange(x.shape[-1], dtype=x.dtype)),
        ("exp(-x * x)", lambda x, p: torch.exp(-x * x)),
        ("x + expand of expand", lambda x, p: x + p.value.sum().expand(x.shape[-1]).expand(x.shape)),
        ("sum over nothing", lambda x, p: x.unsqueeze(0).sum(0)),
        ("reshape of reshape", lambda x, p: torch.cos(x.reshape(-1).reshape(x.shape[0], -1)).reshape(x.shape)),
        ("computed twice", lambda x, p: torch.sin(x) * torch.sin(x)),
    ]  # fmt: skip
    return Of(*draw.choice(choices), own)


# -- ends -------------------------------------------------------------------------------------------------------------


@tail
def classifier(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if not is_image(x):
        return None
    if draw.random() < 0.5:
        head = nn.Linear(x.shape[1], 10)
        return Of(f"{head} of mean((2, 3))", lambda x, head: head(x.mean((2, 3))), head)
    size = math.prod(x.shape[1:])
    if size > 4096:
        return None
    first, last = nn.Linear(size, draw.choice((10, 32))), nn.Linear(10, 7)
    if first.out_features == 10:
        return Of(f"{last} of relu({first})", lambda x, a, b: b(F.relu(a(x.flatten(1)))), first, last)
    return Of(f"{first} of flatten(1)", lambda x, head: head(torch.flatten(x, 1)), first)


class Attention(nn.Module):
    """Attention over the pixels of an image, written out or by PyTorch's own function."""

    def __init__(self, channels: int, heads: int, how: str) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        self.query, self.key, self.value = (nn.Linear(channels, channels) for _ in range(3))
        self.out, self.norm = nn.Linear(channels, channels), nn.LayerNorm(channels)

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(2).transpose(1, 2)
        batch, length, channels = x.shape
        normed = self.norm(x)
        q, k, v = (
            each(normed).view(batch, length, self.heads, channels // self.heads).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        if self.how == "own":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 4)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(channels // self.heads)
            if self.how == "masked":
                seen = torch.ones(length, length, dtype=torch.bool).tril()
                scores = scores.masked_fill(~seen, float("-inf"))
            y = scores.softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(batch, length, channels))


@tail
def attention(draw: Random, values: Values) -> nn.Module | None:
    x = values[-1]
    if not is_image(x) or x.shape[2] * x.shape[3] > 128 or x.shape[1] > 64:
        return None
    heads = divisor(draw, x.shape[1], 4)
    how = draw.choice(["own", "by hand", "masked"])
    return Of(f"attention {how} of {heads} heads", lambda x, used: used(x), Attention(x.shape[1], heads, how))


@tail
def as_it_is(draw: Random, values: Values) -> nn.Module | None:
    return None
