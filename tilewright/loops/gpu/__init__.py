"""Schedules for GPUs: formulas as blocks of threads."""
