"""The contents of the op table, one file per family. Importing this fills the table; `graph.op` reads it.

To add an operator, add one `register(Op(...))` to the file of its family and one case to `tests/graph/ops`.
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
    tile_kernels,
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
    "tile_kernels",
    "windows",
]
