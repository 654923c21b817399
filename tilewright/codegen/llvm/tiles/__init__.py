"""Tile kernels as machine code of processors, straight to LLVM IR.

They do not go through the loop IR: its loops have fixed extents over buffers of known size, and its verifier proves
every access inside. Tile kernels have bounds and addresses that are values, and `while`; a loop IR that took them could
prove nothing for everybody else. What both share lies below: scalar functions, shuffles, conversions, the toolchain,
the cache, the launcher. `emit.py` says what becomes a loop, what stays in registers, and what is kept in a buffer.
"""
