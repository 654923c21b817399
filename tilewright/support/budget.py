"""Limits for importing a model, checked in advance: memory, nodes, work and nesting.

A model file of a few bytes can demand terabytes (a window of a billion elements), years (a loop of empty loops) or
more stack than there is. Importers announce each allocation, computation or descent here first; beyond a limit, a
`ModelSizeError` that names the limit and the option that raises it ends the import.

    budget = Budget.of_options()
    budget.hold(array_bytes, "the weight 'w'")       # kept until the import ends
    budget.fits(table_bytes, "an index table")       # needed for a moment
    budget.count(1, "loop iterations")               # nodes that are built, iterations, calls of functions
    budget.work(flops, "a value that a shape needs") # operations computed while the model is imported
    with budget.nested("If"): ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tilewright import knobs
from tilewright.errors import ModelSizeError

# Additional work allowed per element of the model's own data: folding and converting weights is proportional to their
# size.
WORK_PER_ELEMENT = 16
MAX_NAME = 1 << 16  # characters of a name, an operator's or a value's
MAX_RANK = 32  # axes of a tensor; as many as NumPy 1 has


@dataclass(frozen=True)
class Limits:
    memory: int  # bytes
    nodes: int  # of the model and of its graph, with unrolled loops and expanded functions
    work: int  # elementary operations computed while the model is imported
    depth: int  # of nested subgraphs and functions

    @staticmethod
    def of_options(memory: int | None = None) -> Limits:
        """The limits that the options set; `memory`: the caller's own limit."""
        return Limits(
            memory=knobs.get("import_memory") if memory is None else memory,
            nodes=knobs.get("import_nodes"),
            work=knobs.get("import_work"),
            depth=knobs.get("import_depth"),
        )


class Budget:
    """The spending of one import against its limits. Raises ModelSizeError beyond a limit."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = 0
        self.nodes = 0
        self.worked = 0
        self.allowed_work = limits.work
        self.depth = 0

    @staticmethod
    def of_options(memory: int | None = None) -> Budget:
        return Budget(Limits.of_options(memory))

    # -- memory --------------------------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        return self.held + size <= self.limits.memory

    def fits(self, size: int, what: str) -> None:
        """Announce `size` bytes of temporary memory."""
        if not self.has_room(size):
            kept = f" alongside the {self.held} already in use" if self.held else ""
            raise over(
                f"{what} needs {size} bytes{kept}, more than the limit of {self.limits.memory}",
                "import_memory",
            )

    def hold(self, size: int, what: str) -> None:
        """Announce `size` bytes of memory that is kept."""
        self.fits(size, what)
        self.held += size

    def release(self, size: int) -> None:
        self.held -= size

    def data(self, size: int, elements: int, what: str) -> None:
        """Announce reading `elements` of the model's own data, `size` bytes, and allow work on them."""
        self.hold(size, what)
        self.allowed_work += WORK_PER_ELEMENT * elements

    # -- nodes, work, nesting ------------------------------------------------------------------------------------

    def count(self, number: int, what: str) -> None:
        """Announce `number` nodes or iterations."""
        self.nodes += number
        if self.nodes > self.limits.nodes:
            raise over(
                f"{what}: the model comes to more than {self.limits.nodes} nodes, with loops unrolled and functions"
                " expanded",
                "import_nodes",
            )

    def can_work(self, operations: int) -> bool:
        return self.worked + operations <= self.allowed_work

    def work(self, operations: int, what: str) -> None:
        """Announce `operations` on elements."""
        if not self.can_work(operations):
            raise over(
                f"{what} would take {operations} operations while the model is imported, more than is left of"
                f" {self.allowed_work}",
                "import_work",
            )
        self.worked += operations

    @contextmanager
    def nested(self, what: str) -> Iterator[None]:
        """Enclose the inside of a subgraph or a function."""
        self.depth += 1
        try:
            self.check_depth(self.depth, what)
            yield
        finally:
            self.depth -= 1

    def check_depth(self, depth: int, what: str) -> None:
        if depth > self.limits.depth:
            raise over(f"{what} nested more than {self.limits.depth} deep", "import_depth")


def over(message: str, option: str) -> ModelSizeError:
    """The error for an exceeded limit, with the option that raises it."""
    variable = knobs.variable(option)
    return ModelSizeError(
        message,
        remedy=f"check the sizes in the model; where they are meant, set {variable} to a higher limit",
    )


@contextmanager
def exhaustion(what: str) -> Iterator[None]:
    """Convert running out of memory or Python stack, which no limit foresaw, to one error."""
    try:
        yield
    except MemoryError:
        raise ModelSizeError(
            f"{what} needs more memory than this process may take",
            remedy=f"free memory, or set {knobs.variable('import_memory')} to a lower limit to be told where",
        ) from None
    except RecursionError:
        raise ModelSizeError(
            f"{what} needs a deeper stack than Python's {sys.getrecursionlimit()} calls",
            remedy="compile the model in parts, or raise sys.setrecursionlimit",
        ) from None
