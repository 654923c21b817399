"""Channel layouts of images: the values of the attribute `layout` of convolutions and pooling.

- "channels_first": N C spatial
- "channels_last": N spatial C
- "channels_by_16", or any other number: N C/16 spatial 16. Each block of 16 channels is stored as a channels-last
  image. A block of 1 is channels first, a block of all channels is channels last.
"""

from __future__ import annotations

from typing import Any

from tilewright.graph.ops.common import expect

FIRST, LAST = "channels_first", "channels_last"
_BY = "channels_by_"


def by(block: int) -> str:
    """The layout with blocks of this many channels."""
    return f"{_BY}{block}"


def block_of(layout: str) -> int:
    """Channels per block; 0 if there are no blocks."""
    return int(layout.removeprefix(_BY)) if layout.startswith(_BY) else 0


def expect_layout(value: Any) -> str:
    number = value.removeprefix(_BY) if isinstance(value, str) and value.startswith(_BY) else ""
    blocked = number.isascii() and number.isdigit() and not number.startswith("0")
    expect(
        value in (FIRST, LAST) or blocked,
        f"layout must be one of {FIRST}, {LAST}, {by(16)} (or another number); got {value!r}",
    )
    return str(value)


def spatial_axes(rank: int, layout: str) -> range:
    """The spatial axes of an image of this rank."""
    if layout == LAST:
        return range(1, rank - 1)
    return range(2, rank - 1) if block_of(layout) else range(2, rank)


def channels_of(shape: tuple[int, ...], layout: str) -> int:
    if block_of(layout):
        return shape[1] * shape[-1]
    return shape[-1] if layout == LAST else shape[1]
