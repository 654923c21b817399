"""Kernels for NVIDIA GPUs, structured by hand: templates with holes that generated code fills."""
