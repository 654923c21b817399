"""Hardware-native templates for processors."""

from tilewright.space.template import Template
from tilewright.space.templates.cpu.contraction import Contraction

TEMPLATES: tuple[Template, ...] = (Contraction(),)
