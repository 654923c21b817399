"""The names of templates and knobs as numbers: a fixed one for each name that Tilewright has, a hashed one for others.

A name's number selects the row of weights that the network has learned for it, and the column of the adaptation. So two
names of one config must not have the same number. A change of a list changes the features: raise `tokens.VERSION` and
train anew.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

BUCKETS = 128

TEMPLATES: tuple[str, ...] = (
    "default", "tile",
    # processors
    "attention", "contraction", "contraction_int8", "contraction_transposed", "depthwise",
    "depthwise_channels_first", "paired", "row_block_chain", "separable", "strassen", "strassen_packed",
    "strassen_transposed", "winograd", "sketch:micro", "sketch:micro+copy", "sketch:micro+pack",
    "sketch:micro+rfactor+stage+rfactor+softmax+micro+copy",
    "sketch:micro+rfactor+stage+rfactor+softmax+micro+copy+copy",
    "sketch:micro+rfactor+stage+rfactor+softmax+rfactor",
    "sketch:micro+rfactor+stage+rfactor+softmax+rfactor+copy", "sketch:micro+stage",
    "sketch:micro+stage+cache+tile+again+pack+pack", "sketch:micro+stage+cache+tile+stage+pack+pack",
    "sketch:micro+stage+copy", "sketch:micro+stage+pack", "sketch:rfactor+rfactor+softmax+micro+pack",
    "sketch:tile+again+pack", "sketch:tile+pack", "sketch:tile+stage+pack",
    # GPUs
    "cublaslt", "cudnn", "fused-reduction", "sdpa", "separate-prologue", "sketch:block-reduction",
    "sketch:tensorised", "sketch:tiled", "split-k", "tensor-core-attention", "tensor-core-chain",
    "tensor-core-matmul", "tensor-core-matmul-reduction", "two-pass-reduction",
)  # fmt: skip
KNOBS: tuple[str, ...] = (
    # processors
    "ahead", "block", "blocks", "channels", "chunk", "chunks", "columns", "copy", "expand", "k_block",
    "k_block0", "k_block1", "k_blocks", "outputs", "paired", "panel_groups", "planes", "prefetch",
    "prefetch0", "prefetch1", "prefetch2", "project", "rows", "rows2", "shared_blocks", "stage", "step",
    "strip", "tile0", "tile1", "tiles", "unroll", "unroll2", "vectors", "vectors2",
    # GPUs
    "algorithm", "bk", "bm", "bn", "count", "fused", "group", "instruction", "instruction_k", "keys",
    "lanes", "mapping", "padded_channels", "parts", "persistent", "resident", "results", "rm", "rn", "split",
    "stages", "tm", "tn", "transposed_weight", "vm", "vn", "warps", "warps_m", "warps_n", "wm", "wn",
)  # fmt: skip
# Knobs that came after the shipped weights were trained: hashed, until the next training puts them into KNOBS.
UNTRAINED: tuple[str, ...] = ("left_at", "right_at", "roles")

_OTHER_TEMPLATES = 4  # numbers for templates that are not in the list
_KNOWN_TEMPLATES = {name: number for number, name in enumerate(TEMPLATES)}
_KNOWN_KNOBS = {name: len(TEMPLATES) + _OTHER_TEMPLATES + number for number, name in enumerate(KNOBS)}
_FIRST_OTHER = len(TEMPLATES) + _OTHER_TEMPLATES + len(KNOBS)
OTHER_KNOBS = BUCKETS - _FIRST_OTHER  # numbers for knobs that are not in the list


def of_template(name: str) -> int:
    known = _KNOWN_TEMPLATES.get(name)
    return len(TEMPLATES) + zlib.crc32(name.encode()) % _OTHER_TEMPLATES if known is None else known


def of_knobs(names: Sequence[str]) -> list[int]:
    """The numbers of the knobs of one space. A number that another of its knobs has is passed over, so that they
    differ unless the space has more than OTHER_KNOBS knobs that are not in the list."""
    found: list[int] = []
    taken: set[int] = set()
    for name in names:
        number = _KNOWN_KNOBS.get(name)
        if number is None:
            hashed = zlib.crc32(name.encode())
            tries = (_FIRST_OTHER + (hashed + step) % OTHER_KNOBS for step in range(OTHER_KNOBS))
            number = next((each for each in tries if each not in taken), _FIRST_OTHER + hashed % OTHER_KNOBS)
        taken.add(number)
        found.append(number)
    return found
