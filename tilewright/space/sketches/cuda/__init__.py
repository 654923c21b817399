"""Sketches for NVIDIA GPUs: structures that rules derive from a task's expressions, down to instructions."""

from tilewright.space.sketches.cuda.block_reduction import BlockReduction
from tilewright.space.sketches.cuda.tensorised import Tensorised
from tilewright.space.sketches.cuda.tiled import Tiled
from tilewright.space.template import Template

SKETCHES: tuple[Template, ...] = (Tensorised(), Tiled(), BlockReduction())
