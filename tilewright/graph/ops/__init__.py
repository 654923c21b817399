"""The op table's contents, one file per family. Importing this fills the table; `graph.op` looks things up in it.

Adding an operator is one `register(Op(...))` in the file of its family and one case in `tests/graph/ops`.
"""

from tilewright.graph.ops import (
    composites,
    contractions,
    creation,
    elementwise,
    movement,
    ordering,
    reductions,
    resize,
    scatter,
    windows,
)

__all__ = [
    "composites",
    "contractions",
    "creation",
    "elementwise",
    "movement",
    "ordering",
    "reductions",
    "resize",
    "scatter",
    "windows",
]
