"""Configs of the tensor-core templates that the tests try."""

from tilewright.loops.gpu.tensor import MatrixTiles

# What a kernel may spill: left to weigh registers against blocks, the compiler puts a few addresses on the stack rather
# than run one block less. Sums and fragments would be hundreds.
FEW_BYTES = 32

TILES = [
    MatrixTiles(64, 64, 32, 2, 2, 2),
    MatrixTiles(64, 128, 64, 1, 4, 3),
    MatrixTiles(128, 64, 64, 2, 2, 3),
    MatrixTiles(32, 64, 64, 2, 2, 4),
]
LARGE = [MatrixTiles(128, 128, 64, 2, 2, 3), MatrixTiles(128, 256, 32, 2, 4, 4)]
SPLIT = [MatrixTiles(64, 64, 32, 2, 2, 3, 4), MatrixTiles(16, 64, 64, 1, 2, 4, 2)]
PERSISTENT = [
    MatrixTiles(32, 32, 32, 1, 2, 3, persistent=True),
    MatrixTiles(64, 64, 64, 2, 2, 2, persistent=True),
]
