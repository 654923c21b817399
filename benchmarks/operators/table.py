"""The operators: shapes of their operands, their formula in torch and in NumPy, and how many operations they are.

Every operand is drawn from one generator per case, so each process makes the same ones without being sent any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Sizes = Mapping[str, Any]
Shape = tuple[int, ...]
Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Operator:
    inputs: Callable[[Sizes], Sequence[Shape]]
    weights: Callable[[Sizes], Sequence[Shape]]
    torch: Callable[[Any, Any, Sizes], Any]  # (inputs, weights, sizes) -> result
    flops: Callable[[Sizes], int]
    numpy: Callable[[Arrays, Arrays, Sizes], Callable[[], np.ndarray]] | None = (
        None  # None: NumPy has no such thing
    )
    below: Callable[[Sizes], int] | None = None  # inputs are integers from 0 to before it
    read: Callable[[Sizes], int] | None = None  # elements of the weights that are read; None: each once


def operands(operator: Operator, sizes: Sizes, seed: int) -> tuple[Arrays, Arrays]:
    """(inputs, weights), random and of a scale at which sums stay near one."""
    rng = np.random.default_rng(seed)
    below = None if operator.below is None else operator.below(sizes)
    inputs: Arrays = [
        rng.standard_normal(shape, dtype=np.float32) if below is None else rng.integers(below, size=shape)
        for shape in operator.inputs(sizes)
    ]
    weights = [
        rng.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(max(1, math.prod(shape[1:]))))
        for shape in operator.weights(sizes)
    ]
    return inputs, weights


# -- products ---------------------------------------------------------------------------------------------------------


def _linear(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.nn.functional.linear(inputs[0], weights[0])


def _numpy_linear(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    x, w = inputs[0], np.ascontiguousarray(weights[0].T)
    return lambda: x @ w


def _conv(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.nn.functional.conv2d(
        inputs[0],
        weights[0],
        weights[1],
        sizes["stride"],
        sizes["padding"],
        sizes["dilation"],
        sizes["groups"],
    )


def _conv_weights(sizes: Sizes) -> list[Shape]:
    return [(sizes["out"], sizes["in"] // sizes["groups"], *sizes["kernel"]), (sizes["out"],)]


def conv_output(sizes: Sizes) -> tuple[int, int]:
    """Height and width of the result."""
    height, width = (
        (extent + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for extent, kernel, stride, pad, dilation in zip(
            sizes["image"], sizes["kernel"], sizes["stride"], sizes["padding"], sizes["dilation"], strict=True
        )
    )
    return height, width


def _conv_flops(sizes: Sizes) -> int:
    window = math.prod(sizes["kernel"]) * sizes["in"] // sizes["groups"]
    return 2 * math.prod(conv_output(sizes)) * sizes["out"] * window


def _attention(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.nn.functional.scaled_dot_product_attention(*inputs)


def _numpy_attention(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    q, k, v = inputs
    k, scale = k.swapaxes(-1, -2), np.float32(1 / math.sqrt(sizes["size"]))
    return lambda: _softmax_rows(q @ k * scale) @ v


def _softmax_rows(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


# -- rows and movement ------------------------------------------------------------------------------------------------


def _softmax(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    return inputs[0].softmax(-1)


def _numpy_softmax(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    return lambda: _softmax_rows(inputs[0])


def _layer_norm(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.nn.functional.layer_norm(inputs[0], (sizes["columns"],), weights[0], weights[1])


def _numpy_layer_norm(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    (x,), (scale, shift) = inputs, weights

    def run() -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        return centred / np.sqrt(variance + np.float32(1e-5)) * scale + shift

    return run


def _rms_norm(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.nn.functional.rms_norm(inputs[0], (sizes["columns"],), weights[0], 1e-6)


def _numpy_rms_norm(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    (x,), (scale,) = inputs, weights
    return lambda: x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(1e-6)) * scale


def _group_norm(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.nn.functional.group_norm(inputs[0], sizes["groups"], *weights)


def _gated(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.nn.functional.silu(inputs[0]) * inputs[1]


def _numpy_gated(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    x, gate = inputs
    return lambda: x / (1 + np.exp(-x)) * gate


def _mean(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    return inputs[0].mean(sizes["axis"])


def _numpy_mean(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    return lambda: inputs[0].mean(axis=sizes["axis"])


def _argmax(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    return inputs[0].argmax(sizes["axis"])


def _numpy_argmax(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    return lambda: np.asarray(inputs[0].argmax(axis=sizes["axis"]))


def _pool(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    kind = {"max": torch.nn.functional.max_pool2d, "avg": torch.nn.functional.avg_pool2d}[sizes["kind"]]
    return kind(inputs[0], sizes["kernel"], sizes["stride"], sizes["padding"])


def _resize(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.nn.functional.interpolate(inputs[0], scale_factor=sizes["factor"], mode=sizes["mode"])


def _pad(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.nn.functional.pad(inputs[0], sizes["padding"])


def _gather(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.nn.functional.embedding(inputs[0], weights[0])


def _numpy_gather(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    return lambda: weights[0][inputs[0]]


def _permute(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    return inputs[0].permute(sizes["order"]).contiguous()


def _numpy_permute(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    return lambda: np.ascontiguousarray(inputs[0].transpose(sizes["order"]))


def _concat(inputs: Any, weights: Any, sizes: Sizes) -> Any:
    import torch

    return torch.cat(list(inputs), dim=sizes["axis"])


def _numpy_concat(inputs: Arrays, weights: Arrays, sizes: Sizes) -> Callable[[], np.ndarray]:
    return lambda: np.concatenate(inputs, axis=sizes["axis"])


OPERATORS: dict[str, Operator] = {
    "matmul": Operator(
        inputs=lambda s: [(s["m"], s["k"])],
        weights=lambda s: [(s["n"], s["k"])],
        torch=_linear,
        numpy=_numpy_linear,
        flops=lambda s: 2 * s["m"] * s["n"] * s["k"],
    ),
    "conv": Operator(
        inputs=lambda s: [(1, s["in"], *s["image"])], weights=_conv_weights, torch=_conv, flops=_conv_flops
    ),
    "attention": Operator(
        inputs=lambda s: [(1, s["heads"], s["length"], s["size"])] * 3,
        weights=lambda s: [],
        torch=_attention,
        numpy=_numpy_attention,
        flops=lambda s: 4 * s["heads"] * s["length"] ** 2 * s["size"],
    ),
    "softmax": Operator(
        inputs=lambda s: [(s["rows"], s["columns"])],
        weights=lambda s: [],
        torch=_softmax,
        numpy=_numpy_softmax,
        flops=lambda s: 5 * s["rows"] * s["columns"],
    ),
    "layer_norm": Operator(
        inputs=lambda s: [(s["rows"], s["columns"])],
        weights=lambda s: [(s["columns"],), (s["columns"],)],
        torch=_layer_norm,
        numpy=_numpy_layer_norm,
        flops=lambda s: 8 * s["rows"] * s["columns"],
    ),
    "permute": Operator(
        inputs=lambda s: [tuple(s["shape"])],
        weights=lambda s: [],
        torch=_permute,
        numpy=_numpy_permute,
        flops=lambda s: 0,
    ),
    "concat": Operator(
        inputs=lambda s: [tuple(shape) for shape in s["shapes"]],
        weights=lambda s: [],
        torch=_concat,
        numpy=_numpy_concat,
        flops=lambda s: 0,
    ),
    "rms_norm": Operator(
        inputs=lambda s: [(s["rows"], s["columns"])],
        weights=lambda s: [(s["columns"],)],
        torch=_rms_norm,
        numpy=_numpy_rms_norm,
        flops=lambda s: 4 * s["rows"] * s["columns"],
    ),
    "group_norm": Operator(
        inputs=lambda s: [tuple(s["shape"])],
        weights=lambda s: [(s["shape"][1],), (s["shape"][1],)],
        torch=_group_norm,
        flops=lambda s: 8 * math.prod(s["shape"]),
    ),
    "gated": Operator(
        inputs=lambda s: [(s["rows"], s["columns"])] * 2,
        weights=lambda s: [],
        torch=_gated,
        numpy=_numpy_gated,
        flops=lambda s: 5 * s["rows"] * s["columns"],
    ),
    "mean": Operator(
        inputs=lambda s: [tuple(s["shape"])],
        weights=lambda s: [],
        torch=_mean,
        numpy=_numpy_mean,
        flops=lambda s: math.prod(s["shape"]),
    ),
    "argmax": Operator(
        inputs=lambda s: [tuple(s["shape"])],
        weights=lambda s: [],
        torch=_argmax,
        numpy=_numpy_argmax,
        flops=lambda s: math.prod(s["shape"]),
    ),
    "pool": Operator(
        inputs=lambda s: [tuple(s["shape"])],
        weights=lambda s: [],
        torch=_pool,
        flops=lambda s: math.prod(s["shape"]) * s["kernel"] ** 2 // s["stride"] ** 2,
    ),
    "resize": Operator(
        inputs=lambda s: [tuple(s["shape"])], weights=lambda s: [], torch=_resize, flops=lambda s: 0
    ),
    "pad": Operator(
        inputs=lambda s: [tuple(s["shape"])], weights=lambda s: [], torch=_pad, flops=lambda s: 0
    ),
    "gather": Operator(
        inputs=lambda s: [(s["count"],)],
        weights=lambda s: [(s["rows"], s["columns"])],
        torch=_gather,
        numpy=_numpy_gather,
        flops=lambda s: 0,
        below=lambda s: s["rows"],
        read=lambda s: s["count"] * s["columns"],
    ),
}
