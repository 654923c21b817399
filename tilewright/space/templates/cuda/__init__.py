"""Hand-written kernels for NVIDIA GPUs: templates whose holes are filled with generated code."""

from tilewright.space.template import Template
from tilewright.space.templates.cuda.attention import TensorCoreAttention
from tilewright.space.templates.cuda.chain import TensorCoreChain
from tilewright.space.templates.cuda.matmul import TensorCores
from tilewright.space.templates.cuda.matmul_reduction import TensorMatmulReduction
from tilewright.space.templates.cuda.norms import TensorCoreNorm

TEMPLATES: tuple[Template, ...] = (
    TensorCores(),
    TensorMatmulReduction(),
    TensorCoreAttention(),
    TensorCoreChain(),
    TensorCoreNorm(),
)
