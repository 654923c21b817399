"""The derivation rules, in the order in which they are tried; users add theirs with `register`, or with an entry point
of the group `tilewright.rules`: a callable that registers them."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.errors import SketchError
from tilewright.hw.machine import KINDS
from tilewright.space import registration
from tilewright.space.sketches.rules.blocks import ThreadTiling, WarpTiling
from tilewright.space.sketches.rules.cache_write import CacheWrite
from tilewright.space.sketches.rules.cross_thread import CrossThread, GpuRows
from tilewright.space.sketches.rules.elementwise import Elementwise
from tilewright.space.sketches.rules.fetch import SharedFetch
from tilewright.space.sketches.rules.inline import Inline, InlineAgain
from tilewright.space.sketches.rules.matmul_norm import MatmulNorm
from tilewright.space.sketches.rules.matrices import AsMatrices
from tilewright.space.sketches.rules.micro_kernel import MicroKernel
from tilewright.space.sketches.rules.pack import PackConstant, PackCopy
from tilewright.space.sketches.rules.rfactor import ReductionFactorisation
from tilewright.space.sketches.rules.row_reduction import RowReduction
from tilewright.space.sketches.rules.skip import Skip
from tilewright.space.sketches.rules.softmax import MatmulSoftmax
from tilewright.space.sketches.rules.stage import StageOperand
from tilewright.space.sketches.rules.tensorise import Tensorise
from tilewright.space.sketches.rules.tiling import MultiLevelTiling
from tilewright.space.sketches.sketch import Rule
from tilewright.support.plugins import register_installed

RULES: list[Rule] = [
    AsMatrices(),
    MatmulNorm(),
    WarpTiling(),
    ThreadTiling(),
    SharedFetch(),
    GpuRows(),
    CrossThread(),
    Tensorise(),
    Elementwise(),
    Inline(),
    MicroKernel(),
    MultiLevelTiling(),
    MatmulSoftmax(),
    CacheWrite(),
    ReductionFactorisation(),
    RowReduction(),
    PackConstant(),
    PackCopy(),
    StageOperand(),
    InlineAgain(),
    Skip(),
]
_BUILT_IN = tuple(RULES)
ENTRY_POINTS = "tilewright.rules"


def rules_for(kind: str) -> Sequence[Rule]:
    """The rules for a kind of machine, with those of installed packages."""
    register_installed(ENTRY_POINTS)
    return [rule for rule in RULES if kind in kinds_of(rule)]


def kinds_of(rule: Rule) -> Sequence[str]:
    """The kinds of machine that a rule is for; a rule that names none is for processors."""
    return getattr(rule, "kinds", ("cpu",))


def is_built_in(rule: Rule) -> bool:
    return any(rule is other for other in _BUILT_IN)


def register(rule: Rule, module: str | None = None) -> None:
    """Add a rule, which is tried before all others. `module`: the module that registers it on import, for worker
    processes; by default, the one that defines its class."""
    for part in ("name", "alone", "apply"):
        if not hasattr(rule, part):
            raise SketchError(f"a sketch rule has a {part}, and {rule!r} has none")
    for kind in kinds_of(rule):
        if kind not in KINDS:
            raise SketchError(
                f"the kinds of sketch rule {rule.name!r} must be among {', '.join(KINDS)}, got {kind!r}"
            )
    if any(rule.name == other.name for other in RULES):
        raise SketchError(f"there is a sketch rule {rule.name!r} already")
    RULES.insert(0, rule)
    registration.remember(f"sketch rule {rule.name!r}", rule, module)


def unregister(name: str) -> None:
    """Remove the rule of this name."""
    RULES[:] = [rule for rule in RULES if rule.name != name]
    registration.forget(f"sketch rule {name!r}")
