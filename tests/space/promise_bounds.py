"""What the default numerics promise for each element, worked out apart from the compiler's own validation.

A task is computed in float64, node by node, and with each value goes the largest error that a kernel may have made by
then. float64's own rounding, 2^-53, is too small to matter beside u = 2^-24.

    contraction      sum |a| err_b + err_a |b|, carried in, and what its own sum adds:
      direct           K u sum |a_k b_k|
      paired           32 K u sum |a_k b_k| + K 2^-78
      F(m, 3)          c_m sqrt(C + n_m) u sum_c max_tile |d_c| sum |g_c|, of the very tile that the result lies in
    a + b            err_a + err_b, and u |a + b|
    relu, clamp      err_a
    attention        the direct bound for both products, carried through the scores

The constants are those of `docs/numerics.md`; `test_promise.py` holds the compiler's to them. Winograd's is less than
what is guaranteed, 2 c_m (C + n_m) for C channels, where all roundings add up: those of a kernel partly cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tilewright.graph.ir import Node
from tilewright.graph.task import Task
from tilewright.space.space import Config

UNIT = 2.0**-24
PAIRED_FACTOR = 32.0
WINOGRAD_FACTORS = {2: (8.0, 12), 4: (430.3, 20), 6: (802.3, 28)}  # c_m and n_m
_UNDERFLOW = 2.0**-126  # for each product that may become zero
_UNDERFLOW_SCALED = 2.0**-78  # the same of rows and columns that are scaled by up to 2^24
_EXPONENTIAL = 2.0**-19  # relative error of a weight of attention: exponentials have 20 bits


@dataclass(frozen=True)
class Rule:
    """How a kernel sums: `tile` is Winograd's m, or 0."""

    factor: float = 1.0
    underflow: float = _UNDERFLOW
    tile: int = 0


DIRECT = Rule()
EXACT = Rule(0.0, 0.0)
PAIRED = Rule(PAIRED_FACTOR, _UNDERFLOW_SCALED)

# The rule of every template. One that is missing here has no promise yet, and fails the run.
RULES: Mapping[str, Callable[[Config], Rule]] = {
    **dict.fromkeys(
        (
            *("attention", "contraction", "contraction_transposed", "default", "depthwise"),
            *("depthwise_channels_first", "row_block_chain", "separable", "sketch"),
        ),
        lambda config: DIRECT,
    ),
    "contraction_int8": lambda config: EXACT,
    "paired": lambda config: PAIRED,
    "winograd": lambda config: Rule(0.0, _UNDERFLOW_SCALED, int(str(config["outputs"]))),
}


def rule_of(config: Config) -> Rule:
    return RULES[config.template.split(":")[0]](config)


def winograd_factor(outputs: int, channels: int) -> float:
    factor, others = WINOGRAD_FACTORS[outputs]
    return factor * math.sqrt(channels + others)


class Reference:
    """A task on some inputs: its exact result, and the error that each rule allows."""

    def __init__(self, task: Task, arrays: Sequence[np.ndarray]) -> None:
        self.task = task
        self.exact: dict[Node, np.ndarray] = {}
        for node, array in zip(task.graph.inputs, arrays, strict=True):
            self.exact[node] = array.astype(np.float64)
        for node in task.graph.nodes():
            if node not in self.exact:
                self.exact[node] = _exact(node, [self.exact[each] for each in node.inputs])
        self._sizes: dict[Node, np.ndarray] = {}
        self._allowed: dict[Rule, np.ndarray] = {}

    @property
    def result(self) -> np.ndarray:
        return self.exact[self.task.output]

    def allowed(self, rule: Rule) -> np.ndarray:
        if rule not in self._allowed:
            errors: dict[Node, np.ndarray | None] = dict.fromkeys(self.task.graph.inputs)
            for node in self.task.graph.nodes():
                if node not in errors:
                    errors[node] = self._error(node, rule, [errors[each] for each in node.inputs])
            found = errors[self.task.output]
            assert found is not None
            self._allowed[rule] = found
        return self._allowed[rule]

    def _error(self, node: Node, rule: Rule, carried: Sequence[np.ndarray | None]) -> np.ndarray | None:
        """None: exact."""
        operands = [self.exact[each] for each in node.inputs]
        if node.op == "attention":
            return _error_of_attention(node, *operands)
        if node.op in _SUMS:
            return self._error_of_sum(node, rule, operands, carried)
        if node.op == "add":
            before = sum(each for each in carried if each is not None)
            return np.asarray(before + UNIT * (np.abs(self.exact[node]) + before))
        (error,) = carried
        return None if error is None else _MOVED[node.op](node, error)

    def _error_of_sum(
        self, node: Node, rule: Rule, operands: Sequence[np.ndarray], carried: Sequence[np.ndarray | None]
    ) -> np.ndarray:
        data, *rest = (np.abs(each) for each in operands)
        assert all(each is None for each in carried[1:]), "only data is computed"
        count = terms(node)
        extra = np.zeros(())
        if carried[0] is not None:
            extra = _SUMS[node.op](node, carried[0], *rest)
        if rule.tile:
            factor = winograd_factor(rule.tile, data.shape[_channel_axis(node)])
            own = UNIT * factor * largest_in_tiles(node, data, rest[0], rule.tile)
        else:
            if node not in self._sizes:
                self._sizes[node] = _SUMS[node.op](node, data, *rest)
            own = rule.factor * count * UNIT * (self._sizes[node] + extra)
        return np.asarray(extra + own + count * rule.underflow)


# -- in float64 -------------------------------------------------------------------------------------------------------


def terms(node: Node) -> int:
    """K."""
    if node.op == "sum":
        return int(node.inputs[0].shape[node.attrs["axes"][0]])
    if node.op == "conv":
        return int(np.prod(_window_first(node, np.empty(node.inputs[1].shape, np.bool_)).shape[:3]))
    return int(node.inputs[0].shape[-1])


def _exact(node: Node, operands: Sequence[np.ndarray]) -> np.ndarray:
    if node.op == "attention":
        return _attention(node, *operands)[0]
    if node.op in _SUMS:
        return _SUMS[node.op](node, *operands)
    return _POINTWISE[node.op](node, *operands)


def _convolved(node: Node, image: np.ndarray, weight: np.ndarray) -> np.ndarray:
    window = _window_first(node, weight)
    groups, steps, apart = node.attrs["groups"], node.attrs["stride"], node.attrs["dilation"]
    reach = [(taps - 1) * step + 1 for taps, step in zip(window.shape[:2], apart, strict=True)]
    windows = sliding_window_view(_bordered(node, image), reach, axis=(1, 2))
    windows = windows[:, :: steps[0], :: steps[1], :, :: apart[0], :: apart[1]]
    batch, high, wide, channels = windows.shape[:4]
    of_group = windows.reshape(batch, high, wide, groups, channels // groups, *window.shape[:2])
    weights = window.reshape(*window.shape[:3], groups, -1)
    if groups == 1:
        rows = np.moveaxis(windows, 3, -1).reshape(batch * high * wide, -1)
        result = rows @ window.reshape(-1, window.shape[-1])
    else:
        result = np.einsum("nyxgcij,ijcgo->nyxgo", of_group, weights)
    result = result.reshape(batch, high, wide, -1)
    return result if node.attrs["layout"] == "channels_last" else np.moveaxis(result, -1, 1)


def _bordered(node: Node, image: np.ndarray) -> np.ndarray:
    """The image with its padding, channels last."""
    last = image if node.attrs["layout"] == "channels_last" else np.moveaxis(image, 1, -1)
    return np.pad(last, [(0, 0), *node.attrs["padding"], (0, 0)])


def _window_first(node: Node, weight: np.ndarray) -> np.ndarray:
    """[height, width, channels of a group, outputs]"""
    return weight if node.attrs["layout"] == "channels_last" else weight.transpose(2, 3, 1, 0)


def _channel_axis(node: Node) -> int:
    return 3 if node.attrs["layout"] == "channels_last" else 1


def _attention(
    node: Node, query: np.ndarray, key: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    scores = node.attrs["scale"] * query @ key.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value, weights


_SUMS: Mapping[str, Callable[..., np.ndarray]] = {
    "matmul": lambda node, a, b: a @ b,
    "linear": lambda node, a, b: a @ b.T,
    "conv": _convolved,
    "sum": lambda node, a: a.sum(axis=tuple(node.attrs["axes"]), keepdims=node.attrs["keepdims"]),
}
_MOVED: Mapping[str, Callable[[Node, np.ndarray], np.ndarray]] = {
    "relu": lambda node, error: error,
    "clamp": lambda node, error: error,
    "pad": lambda node, error: np.pad(error, list(zip(node.attrs["low"], node.attrs["high"], strict=True))),
}
_POINTWISE: Mapping[str, Callable[..., np.ndarray]] = {
    "add": lambda node, a, b: a + b,
    "relu": lambda node, a: np.maximum(a, 0),
    "clamp": lambda node, a: np.clip(a, node.attrs["min"], node.attrs["max"]),
    "pad": _MOVED["pad"],
}


# -- bounds -----------------------------------------------------------------------------------------------------------


def largest_in_tiles(node: Node, image: np.ndarray, weight: np.ndarray, outputs: int) -> np.ndarray:
    """Sum over channels: the largest element that the tile of a result reads, times the sum of its weights; of
    absolute values."""
    last = node.attrs["layout"] == "channels_last"
    high, wide = node.shape[1:3] if last else node.shape[2:]
    image = _bordered(node, image)
    side, counts = outputs + 2, (-(-high // outputs), -(-wide // outputs))
    more = [count * outputs + 2 - extent for count, extent in zip(counts, image.shape[1:3], strict=True)]
    image = np.pad(image, [(0, 0), (0, more[0]), (0, more[1]), (0, 0)])
    tiles = sliding_window_view(image, (side, side), axis=(1, 2))[:, ::outputs, ::outputs]
    sums = tiles.max(axis=(-1, -2)) @ _window_first(node, weight).sum(axis=(0, 1))
    result = sums.repeat(outputs, axis=1).repeat(outputs, axis=2)[:, :high, :wide]
    return np.asarray(result if last else np.moveaxis(result, -1, 1))


def _error_of_attention(node: Node, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Both products' bounds: that of the scores moves weights, between values that differ."""
    scale, width, keys = abs(node.attrs["scale"]), query.shape[-1], key.shape[-2]
    result, weights = _attention(node, query, key, value)
    sizes = scale * np.abs(query) @ np.abs(key).swapaxes(-1, -2)
    moved = (width + 4) * UNIT * sizes + _EXPONENTIAL
    apart = np.abs(value[..., None, :, :] - result[..., :, None, :])
    through_scores = np.einsum("...qk,...qkv->...qv", weights * np.expm1(moved), apart)
    own = (keys + 4) * UNIT * (weights @ np.abs(value))
    return np.asarray(2.0 * through_scores + own + keys * _UNDERFLOW_SCALED)
