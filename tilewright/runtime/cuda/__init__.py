"""Run kernels on NVIDIA GPUs through the driver API only."""
