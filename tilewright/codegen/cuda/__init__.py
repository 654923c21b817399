"""Programs for GPUs -> CUDA C++ -> machine code."""
