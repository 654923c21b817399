"""Templates for CPUs."""

from tilewright.space.template import Template
from tilewright.space.templates.cpu import fast_algebra
from tilewright.space.templates.cpu.attention import Attention
from tilewright.space.templates.cpu.chain import RowBlockChain
from tilewright.space.templates.cpu.contraction import Contraction
from tilewright.space.templates.cpu.contraction_int8 import ContractionInt8
from tilewright.space.templates.cpu.contraction_transposed import ContractionTransposed
from tilewright.space.templates.cpu.depthwise import Depthwise
from tilewright.space.templates.cpu.depthwise_channels_first import DepthwiseChannelsFirst
from tilewright.space.templates.cpu.separable import SeparableChain
from tilewright.space.templates.cpu.winograd import Winograd


def _by_name(*templates: Template) -> tuple[Template, ...]:
    """Templates sorted by name: if two configs are predicted to be equally fast, the first template wins. Of two
    templates with one name, the later one replaces the earlier."""
    named = {template.name: template for template in templates}
    return tuple(named[name] for name in sorted(named))


TEMPLATES = _by_name(
    Attention(),
    Contraction(),
    ContractionInt8(),
    Depthwise(),
    DepthwiseChannelsFirst(),
    RowBlockChain(),
    SeparableChain(),
    ContractionTransposed(),
    Winograd(),
    *fast_algebra.TEMPLATES,
)
