"""Tile kernels as machine code of processors."""
