"""Gemmini: programs of instructions for matmuls and convolutions, a cycle-level simulator, and RTL in SystemVerilog.

What a program computes is `runtime/gemmini/functional.py`; `rtl.py` runs the same encoded words in Verilator.
"""
