"""Sketches for NVIDIA GPUs: structures written by hand, for contractions and reductions of any form, and for two GEMMs
in one kernel by the instructions of warpgroups.

Unlike those for processors, no rules derive them from a task's expressions. Users register theirs with
`register_sketch`.
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
