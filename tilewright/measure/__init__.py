"""Checking, timing and calibrating: everything that runs kernels to learn about them."""
