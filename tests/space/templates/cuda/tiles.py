"""Configs of the tensor-core templates that the tests try."""

from tilewright.loops.gpu.tensor import MatrixTiles

TILES = [
    MatrixTiles(64, 64, 32, 2, 2, 2),
    MatrixTiles(64, 128, 64, 1, 4, 3),
    MatrixTiles(128, 64, 64, 2, 2, 3),
    MatrixTiles(32, 64, 64, 2, 2, 4),
]
LARGE = [MatrixTiles(128, 128, 64, 2, 2, 3), MatrixTiles(128, 256, 32, 2, 4, 4)]
SPLIT = [MatrixTiles(64, 64, 32, 2, 2, 3, 4), MatrixTiles(16, 64, 64, 1, 2, 4, 2)]
