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
        buffers = "two buffers" if tile.buffers == 2 else "one buffer"
        return f"tiles {tile.rows}x{tile.cols}, {tile.in_blocks} x {tile.out_blocks} blocks, {buffers}"

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
