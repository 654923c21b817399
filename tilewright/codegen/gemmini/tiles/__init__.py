"""Kernels of the tile language on Gemmini: `lower.py` makes loops of a launch, `loops/passes/pipeline.py` gives its
tiles two buffers, `select.py` matches the loops to instructions, and `executor.py` runs them."""
