"""A sketch: the rules' decisions about a task so far, and the decisions left to a config.

A sketch is a structure without sizes. `start` is the schedule after the primitives that need no sizes; each `Move` is
a part that needs them, with its knobs. A config gives the sizes, and applying the moves in order gives the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from tilewright.loops.schedule import Schedule
from tilewright.space.sketches.analysis import Extents
from tilewright.space.space import Knob, Value
from tilewright.space.template import Work
from tilewright.space.terms import Counted

if TYPE_CHECKING:
    from tilewright.space.sketches.gemm import Tiled

Values = Mapping[str, Value]
Box = Callable[[Values], Extents]


@dataclass(frozen=True)
class Move:
    """Schedule primitives whose sizes come from a config."""

    act: Callable[[Schedule, Values], Schedule]
    knobs: tuple[Knob, ...] = ()
    legal: Callable[[Values], bool] = lambda values: True
    scratch: Callable[[Values], int] = lambda values: 0  # bytes of buffers that it keeps between other loops
    together: tuple[tuple[str, ...], ...] = ()
    last: bool = False  # applied after all other rules' moves, since nothing may change afterwards
    rule: str = ""  # the rule that made it


class Frame(Protocol):
    """The loop structure of the output, and where in it other stages are placed."""

    @property
    def block_loop(self) -> str | None:
        """The loop that computes a block of the output in each iteration; None if there is no loop."""

    def at_block(self, values: Values) -> Extents:
        """The extents of the output in one iteration of the block loop."""

    def terms(self, sketch: Sketch) -> Callable[[Values], Counted] | None:
        """The cost of each config of a finished sketch; None if there is no closed form."""


@dataclass(frozen=True)
class Sketch:
    """The state of a derivation.

    - `left`: the stages and inputs that no rule has visited yet, the next one first; producers after consumers.
    - `boxes`: how much of each placed stage a block of the output needs.
    - `operands`: how each copied operand of a product is stored.
    - `bare`: placed stages whose own loops are unchanged, for the rule that tiles them.
    - `users`: whether a rule that a user registered had a part in it.
    """

    work: Work
    start: Schedule
    left: tuple[str, ...]
    moves: tuple[Move, ...] = ()
    names: tuple[str, ...] = ()
    frame: Frame | None = None
    boxes: Mapping[str, Box] = field(default_factory=dict)
    operands: Mapping[str, str] = field(default_factory=dict)
    products: tuple[Tiled, ...] = ()
    bare: frozenset[str] = frozenset()
    users: bool = False

    @property
    def stage(self) -> str:
        """The stage to visit next."""
        return self.left[0]

    @property
    def output(self) -> str:
        return self.start.nest.output.name

    def visited(
        self,
        *moves: Move,
        name: str = "",
        start: Schedule | None = None,
        frame: Frame | None = None,
        boxes: Mapping[str, Box] | None = None,
        operand: str = "",
        gemm: Tiled | None = None,
        bare: bool = False,
        then: Sequence[str] = (),
    ) -> Sketch:
        """The sketch after its next stage was handled by these moves, from another `start`, in a `frame`.

        `boxes` has the stages that were placed; `then` has stages created by the primitives of `start`, to be visited
        next.
        """
        return replace(
            self,
            start=start or self.start,
            left=(*then, *self.left[1:]),
            moves=(*self.moves, *moves),
            names=(*self.names, name) if name else self.names,
            frame=frame or self.frame,
            boxes={**self.boxes, **(boxes or {})},
            operands={**self.operands, self.stage: operand} if operand else self.operands,
            products=self.products if gemm is None else (*self.products, gemm),
            bare=self.bare | {self.stage} if bare else self.bare,
        )

    def unused(self, knob: str) -> str:
        """A name that no other knob has."""
        taken = {each.name for move in self.moves for each in move.knobs}
        name, number = knob, 2
        while name in taken:
            name, number = f"{knob}{number}", number + 1
        return name


class Rule(Protocol):
    """A derivation rule. `alone`: if it applies, the rules after it are not tried."""

    name: str
    alone: bool

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        """The sketches after visiting `sketch.stage`; none if the rule does not apply."""
