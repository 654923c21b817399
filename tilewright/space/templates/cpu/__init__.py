"""Hardware-native templates for processors."""

from tilewright.space.template import Template
from tilewright.space.templates.cpu.attention import Attention
from tilewright.space.templates.cpu.contraction import Contraction
from tilewright.space.templates.cpu.depthwise import Depthwise
from tilewright.space.templates.cpu.separable import SeparableChain
from tilewright.space.templates.cpu.winograd import Winograd

TEMPLATES: tuple[Template, ...] = (Attention(), Contraction(), Depthwise(), SeparableChain(), Winograd())
