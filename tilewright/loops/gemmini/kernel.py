"""A task, or a part of one, as Gemmini computes it: what code generation makes a program of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilewright.loops.gemmini.layer import Layer, Tiling

Role = Literal["data", "weights", "bias", "residual"]


@dataclass(frozen=True)
class GemminiKernel:
    """A layer applied to each of `images`. `roles`: what each operand is to it. `own_weights`: each image has its own,
    as where a matmul multiplies two batches."""

    name: str
    layer: Layer
    tiling: Tiling
    roles: tuple[Role, ...]
    images: int = 1
    own_weights: bool = False

    @property
    def decisions(self) -> str:
        tile = self.tiling
        taps = tile.kernel(self.layer)
        part = "" if taps == self.layer.kernel else f", {taps[0]}x{taps[1]} of the kernel"
        stays = "weights stay" if tile.inner == "pixels" else "data stay"
        buffers = f"buffers {tile.buffers.data}+{tile.buffers.weights}+{tile.buffers.results}"
        return f"tiles {tile.rows}x{tile.cols}, {tile.in_blocks} x {tile.out_blocks} blocks{part}, {stays}, {buffers}"

    def bytes_of(self, role: Role) -> int:
        """The bytes of one image."""
        layer = self.layer
        pixels = layer.rows * layer.cols
        return {
            "data": layer.height * layer.width * layer.in_channels,
            "weights": layer.kernel[0] * layer.kernel[1] * layer.in_channels * layer.out_channels,
            "bias": 4 * layer.out_channels,
            "residual": pixels * layer.out_channels,
        }[role]

    @property
    def result_bytes(self) -> int:
        rows, cols = self.layer.stored
        return rows * cols * self.layer.out_channels * (4 if self.layer.full else 1)

    def is_per_image(self, role: Role) -> bool:
        return role in ("data", "residual") or (role == "weights" and self.own_weights)
