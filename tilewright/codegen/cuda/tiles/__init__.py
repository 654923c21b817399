"""Tile kernels as CUDA C++."""
