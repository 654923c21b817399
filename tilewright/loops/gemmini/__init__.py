"""Kernels of Gemmini as data: layers, tilings, and which operand of a task is which."""
