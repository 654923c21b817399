"""Decompositions: a task computed by several of Tilewright's kernels. Each kind is a template like any other."""

from tilewright.space.decompositions.fused_reduction import FusedReduction
from tilewright.space.decompositions.separate_prologue import SeparatePrologue
from tilewright.space.decompositions.split_k import SplitK
from tilewright.space.decompositions.two_pass_reduction import TwoPassReduction
from tilewright.space.template import Template

DECOMPOSITIONS: tuple[Template, ...] = (SplitK(), SeparatePrologue(), TwoPassReduction(), FusedReduction())
