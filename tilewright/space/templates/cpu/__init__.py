"""Hardware-native templates for processors."""

from tilewright.space.template import Template
from tilewright.space.templates.cpu import fast_algebra
from tilewright.space.templates.cpu.attention import Attention
from tilewright.space.templates.cpu.contraction import Contraction
from tilewright.space.templates.cpu.contraction_int8 import ContractionInt8
from tilewright.space.templates.cpu.depthwise import Depthwise
from tilewright.space.templates.cpu.planes import Planes
from tilewright.space.templates.cpu.separable import SeparableChain
from tilewright.space.templates.cpu.turned import Turned
from tilewright.space.templates.cpu.winograd import Winograd

_ALL: tuple[Template, ...] = (
    Attention(),
    Contraction(),
    ContractionInt8(),
    Depthwise(),
    Planes(),
    SeparableChain(),
    Turned(),
    Winograd(),
    *fast_algebra.TEMPLATES,
)

# By name: of configs that are predicted to be equally fast, those of the first template are taken. Of two templates of
# one name the later one does what the other does, and more.
TEMPLATES: tuple[Template, ...] = tuple({t.name: t for t in sorted(_ALL, key=lambda t: t.name)}.values())
