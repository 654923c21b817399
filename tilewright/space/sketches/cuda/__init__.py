"""Sketches for NVIDIA GPUs: structures written by hand, for contractions and reductions of any form, and for two GEMMs
in one kernel by the instructions of warpgroups.

Rules derive the same structures (`rules/blocks.py`, `rules/cross_thread.py`) with these sizes and terms. Both are
candidates: for some shapes the written ones have fewer instructions (benchmarks/results/gpu_sketch_rules.md). Users
register theirs with `register_sketch`, or a rule.
"""

from tilewright.space.sketches.cuda.block_reduction import BlockReduction
from tilewright.space.sketches.cuda.tensorised import Tensorised
from tilewright.space.sketches.cuda.tiled import Tiled
from tilewright.space.sketches.cuda.warpgroup_chain import WarpgroupChain
from tilewright.space.sketches.cuda.warpgroups import WarpgroupMatmul
from tilewright.space.template import Template

SKETCHES: tuple[Template, ...] = (
    Tensorised(),
    WarpgroupMatmul(),
    Tiled(),
    BlockReduction(),
    WarpgroupChain(),
)
