"""Former names of templates and knobs, for configs recorded under them.

Databases and lock files name configs by template and knobs. Readers of such files pass each config through
`current_config`, so that records made before a renaming are still found. No other module knows the former names.
"""

from __future__ import annotations

from tilewright.space.space import Config

TEMPLATES = {
    "planes": "depthwise_channels_first",
    "sketch:shared-sums": "sketch:block-reduction",
    "strassen_copied": "strassen_packed",
    "strassen_turned": "strassen_transposed",
    "tensor-attention": "tensor-core-attention",
    "tensor-product": "tensor-core-matmul",
    "tensor-sums": "tensor-core-matmul-reduction",
    "turned": "contraction_transposed",
}

_OF_SKETCHES = {"piece": "k_block"}
_OF_GPU_SKETCHES = {"ahead": "prefetch", "beside": "results", "depth": "instruction_k"}
KNOBS = {
    "attention": {"together": "shared_blocks"},
    "contraction": {"tap_block": "k_block"},
    "contraction_int8": {"tap_block": "k_block"},
    "contraction_transposed": {"tap_block": "k_block"},
    "strassen": {"pieces": "k_blocks"},
    "strassen_packed": {"pieces": "k_blocks"},
    "strassen_transposed": {"pieces": "k_blocks"},
    "winograd": {"shares": "panel_groups"},
    "sketch:block-reduction": _OF_GPU_SKETCHES,
    "sketch:tensorised": _OF_GPU_SKETCHES,
    # Decompositions have the knobs of their inner template.
    "fused-reduction": _OF_GPU_SKETCHES,
    "separate-prologue": _OF_GPU_SKETCHES,
    "split-k": _OF_GPU_SKETCHES,
    "two-pass-reduction": _OF_GPU_SKETCHES,
}


def current_config(config: Config) -> Config:
    """Return `config` under the names of this version. Users' templates are left unchanged."""
    template = TEMPLATES.get(config.template, config.template)
    knobs = KNOBS.get(template, _OF_SKETCHES if template.startswith("sketch:") else {})
    values = tuple((knobs.get(name, name), value) for name, value in config.values)
    return config if (template, values) == (config.template, config.values) else Config(template, values)
