"""Patches: runs of neighbouring elements at regular distances, which a tile in registers holds without the gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright import te
from tilewright.te.index import Linear


@dataclass(frozen=True)
class Patches:
    """`count` runs of `width` elements, `step` apart."""

    width: int
    step: int
    count: int

    @property
    def size(self) -> int:
        return self.width * self.count

    @property
    def span(self) -> int:
        return (self.count - 1) * self.step + self.width

    def at(self, position: te.Expr) -> te.Expr:
        """The index of the element at a position."""
        if self.width == 1:
            return position * self.step
        return position // self.width * self.step + position % self.width

    def position(self, index: Linear) -> Linear:
        """The position of an index that is made of steps and of what is within a run."""
        terms = {
            atom: factor // self.step * self.width if factor % self.step == 0 else factor
            for atom, factor in index.terms.items()
        }
        return Linear(terms, index.constant)


def patches_of(indices: Sequence[Linear]) -> Patches | None:
    """The patches that hold all of these indices, which begin at 0; None if they are one run, or not regular."""
    for form in indices:
        if form.constant or any(not isinstance(a, te.Var) or f <= 0 for a, f in form.terms.items()):
            return None
    for step in sorted({factor for form in indices for factor in form.terms.values()}):
        width, count, regular = 1, 1, True
        for form in indices:
            inside = outside = 1
            for atom, factor in form.terms.items():
                assert isinstance(atom, te.Var)
                if factor < step:
                    inside += factor * (atom.extent - 1)
                else:
                    outside += factor // step * (atom.extent - 1)
                    regular = regular and factor % step == 0
            width, count = max(width, inside), max(count, outside)
        if regular and width < step and count > 1:
            return Patches(width, step, count)
    return None
