"""Hardware-native templates for processors."""

from tilewright.space.template import Template
from tilewright.space.templates.cpu.attention import Attention
from tilewright.space.templates.cpu.contraction import Contraction
from tilewright.space.templates.cpu.contraction_int8 import ContractionInt8
from tilewright.space.templates.cpu.depthwise import Depthwise
from tilewright.space.templates.cpu.paired import Paired
from tilewright.space.templates.cpu.planes import Planes
from tilewright.space.templates.cpu.separable import SeparableChain
from tilewright.space.templates.cpu.strassen import Strassen
from tilewright.space.templates.cpu.strassen_copied import StrassenCopied
from tilewright.space.templates.cpu.strassen_turned import StrassenTurned
from tilewright.space.templates.cpu.turned import Turned
from tilewright.space.templates.cpu.winograd import Winograd

TEMPLATES: tuple[Template, ...] = (
    Attention(),
    Contraction(),
    ContractionInt8(),
    Depthwise(),
    Paired(),
    Planes(),
    SeparableChain(),
    Strassen(),
    StrassenCopied(),
    StrassenTurned(),
    Turned(),
    Winograd(),
)
