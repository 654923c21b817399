"""Sketches for NVIDIA GPUs: structures written by hand, three for contractions and reductions of any form, and one for
two GEMMs in one kernel by the instructions of warpgroups.

Unlike those for processors, no rules derive them from a task's expressions. Users register theirs with
`register_sketch`.
"""

from tilewright.space.sketches.cuda.block_reduction import BlockReduction
from tilewright.space.sketches.cuda.tensorised import Tensorised
from tilewright.space.sketches.cuda.tiled import Tiled
from tilewright.space.sketches.cuda.warpgroup_chain import WarpgroupChain
from tilewright.space.template import Template

SKETCHES: tuple[Template, ...] = (Tensorised(), Tiled(), BlockReduction(), WarpgroupChain())
