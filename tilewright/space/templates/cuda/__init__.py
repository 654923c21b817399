"""Kernels for NVIDIA GPUs, structured by hand: templates with holes that generated code fills."""

from tilewright.space.template import Template
from tilewright.space.templates.cuda.attention import TensorCoreAttention
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.space.templates.cuda.matmul_reduction import TensorMatmulReduction

TEMPLATES: tuple[Template, ...] = (TensorCores(), TensorMatmulReduction(), TensorCoreAttention())
