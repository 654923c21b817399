"""Made-up times, for tests of what a rewrite does with them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.dtypes import DType
from tilewright.graph.ir import Node, TensorType
from tilewright.graph.ops.layouts import by, channels_of
from tilewright.graph.task import Task
from tilewright.rewrites.oracle import Price
from tilewright.space.template import normal_form


@dataclass(frozen=True)
class Whims:
    """Times without any sense, the same for the same question."""

    seed: int = 0

    def seconds(self, task: Task) -> float:
        return int(task.key[self.seed : self.seed + 3], 16) / 4096

    def kernel_seconds(self) -> float:
        return 0.0

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        return self.seconds(task), True

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        return type.bytes * (2e-4 if alone else 1e-4)

    def block(self, channels: int, dtype: DType) -> int:
        return 2 if channels % 2 == 0 else 0


@dataclass(frozen=True)
class Priced:
    """A price for each operator with a layout, by what it is, and one for each byte moved. The layout of a convolution
    with all channels in one block is "turning": it reads channels first and writes channels last."""

    prices: Mapping[tuple[str, int, str], float]  # operator, channels of the result, layout
    per_byte: float
    size: int = 0  # of blocks of channels

    def seconds(self, task: Task) -> float:
        return sum(self.price(node) for node in task.graph.nodes())

    def kernel_seconds(self) -> float:
        return 0.0

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        return self.seconds(task), True

    def price(self, node: Node) -> float:
        if "layout" not in node.attrs:
            return 0.0
        layout = node.attrs["layout"]
        channels = channels_of(node.shape, layout)
        return self.prices[node.op, channels, "turning" if layout == by(channels) else layout]

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        return self.per_byte * type.bytes

    def block(self, channels: int, dtype: DType) -> int:
        return self.size if self.size and channels % self.size == 0 else 0


@dataclass(frozen=True)
class Dice:
    """Times without any sense that send every operator every way, and blocks of all sizes that divide the channels.
    Most seeds have a kind of layout that they favour: what stands between two operators is then in it as well."""

    seed: int

    @property
    def favourite(self) -> str:
        return ("channels_by_", "channels_by_", "channels_first", "channels_last", "none")[self.seed % 5]

    def _throw(self, *what: object) -> float:
        return zlib.crc32(repr((self.seed, *what)).encode()) / 2**32

    def seconds(self, task: Task) -> float:
        blocks = self.favourite == "channels_by_" and task.output.type.rank > 4  # of whatever is no window
        favoured = blocks or any(
            node.attrs.get("layout", "").startswith(self.favourite) for node in task.graph.nodes()
        )
        return self._throw(task.key) * (0.1 if favoured else 1.0)

    def kernel_seconds(self) -> float:
        return 0.0

    def upper_bound(self, task: Task) -> tuple[float, bool]:
        return self.seconds(task), True

    def permute_seconds(self, type: TensorType, axes: Sequence[int], *, alone: bool = True) -> float:
        return max(0.0, 0.1 * self._throw(type.shape, tuple(axes), alone) - 0.05)

    def channel_multiple(self, dtype: DType) -> int:
        return (8, 16)[self.seed % 2]

    def block(self, channels: int, dtype: DType) -> int:
        sizes = [0, *(size for size in range(2, 25) if channels % size == 0)]
        return sizes[int(self._throw("block", channels) * len(sizes))]


@dataclass
class RandomPrices:
    """Made-up times of groups. Every group whose formula has no nested reduction is legal, and `calls` counts the
    questions for each task."""

    seed: int = 0
    favours: float = 1.0  # a factor for groups with several operators: below 1, they are made more often
    measured: bool = True  # without a margin
    calls: Counter[str] = field(default_factory=Counter)

    def can_compute(self, task: Task) -> bool:
        return normal_form(task, "fast") is not None

    def prepare(self, tasks: Collection[Task]) -> None:
        pass

    def decided(self) -> Mapping[Task, bool]:
        return {}

    def price(self, task: Task) -> Price | None:
        self.calls[task.key] += 1
        several = sum(not (node.is_input or node.is_constant) for node in task.graph.nodes()) > 1
        seconds = 1e-6 + zlib.crc32(f"{self.seed} {task.key}".encode()) / 2**32 * 1e-4
        return Price(seconds * (self.favours if several else 1.0), self.measured)

    def traffic_seconds(self, bytes: float) -> float:
        return 1.0  # nothing is ruled out by an estimate
