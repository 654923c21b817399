"""A sketch: the decisions of the rules about a task so far, and those left to a config.

A structure without numbers. `start` is the schedule after the primitives that need no number; each `Move` is the part
of the structure that does, with its knobs. A config gives the numbers, and the moves, done in order, the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from tilewright.loops.schedule import Schedule
from tilewright.space.sketches.analysis import Extents
from tilewright.space.space import Knob, Value
from tilewright.space.template import Terms, Work

if TYPE_CHECKING:
    from tilewright.space.sketches.gemm import Tiled

Values = Mapping[str, Value]
Box = Callable[[Values], Extents]


@dataclass(frozen=True)
class Move:
    """Primitives that a config's values complete."""

    act: Callable[[Schedule, Values], Schedule]
    knobs: tuple[Knob, ...] = ()
    legal: Callable[[Values], bool] = lambda values: True
    scratch: Callable[[Values], int] = lambda values: 0  # bytes, of what it keeps between other loops
    together: tuple[tuple[str, ...], ...] = ()
    last: bool = False  # after those of all other rules: what holds only when nothing else is changed
    rule: str = ""  # who made it


class Frame(Protocol):
    """How the loops of the output are arranged, and where in them other stages find their place."""

    @property
    def block_loop(self) -> str | None:
        """The loop in each iteration of which a block of the output is computed; None: there is no loop at all."""

    def at_block(self, values: Values) -> Extents:
        """The extents of the output in one iteration of it."""

    def terms(self, sketch: Sketch) -> Callable[[Values], Terms] | None:
        """What each config of a finished sketch costs; None where it is not known in closed form."""


@dataclass(frozen=True)
class Sketch:
    """`left`: the stages and inputs that no rule has visited yet, the next one first; producers after consumers.
    `boxes`: of each stage that has its place in a block of the output, how much the block needs of it. `operands`: of
    each operand of a product that is put elsewhere before it is read, a word for how. `bare`: placed stages whose own
    loops are as they were, for the rule that tiles them."""

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

    @property
    def stage(self) -> str:
        """What is to be visited."""
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
        """The sketch after its next stage was dealt with.

        By these moves, from another `start`, in a `frame` of which the others are to be part. `boxes` has the stages
        that got a place; `then`, stages made by the primitives of `start` that are to be visited next."""
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
        """A name for a knob that no other has."""
        taken = {each.name for move in self.moves for each in move.knobs}
        name, number = knob, 2
        while name in taken:
            name, number = f"{knob}{number}", number + 1
        return name


class Rule(Protocol):
    """A way to go on with a sketch. `alone`: where it applies, the rules after it are not asked."""

    name: str
    alone: bool

    def apply(self, sketch: Sketch) -> Sequence[Sketch]:
        """The sketches in which `sketch.stage` has been visited; none where the rule does not apply."""
