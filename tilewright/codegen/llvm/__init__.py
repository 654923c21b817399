"""The CPU slice: loop programs to object code through LLVM.

`emit` writes LLVM IR for a program and `math` the elementary functions, `toolchain` turns IR into object code, `cache`
keeps object code on disk, `build` puts them together.
"""
