"""Kernels on NVIDIA GPUs, through the driver alone."""
