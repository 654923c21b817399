"""Library calls as templates: cuBLASLt, cuDNN and the framework's attention, with kernels around them where needed."""

from tilewright.space.libraries.cublaslt import CublasLt
from tilewright.space.libraries.cudnn import Cudnn
from tilewright.space.libraries.sdpa import Sdpa
from tilewright.space.template import Template

LIBRARIES: tuple[Template, ...] = (CublasLt(), Cudnn(), Sdpa())
