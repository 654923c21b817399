"""Checking, timing and calibrating: everything that runs a kernel to learn something about it."""
