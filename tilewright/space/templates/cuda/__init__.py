"""Kernels for NVIDIA GPUs, structured by hand: templates with holes that generated code fills."""

from tilewright.space.templates.cuda.attention import TensorCoreAttention
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.space.templates.cuda.sums import TensorSums
from tilewright.space.templates.cuda.template import GpuTemplate

TEMPLATES: tuple[GpuTemplate, ...] = (TensorCores(), TensorSums(), TensorCoreAttention())
