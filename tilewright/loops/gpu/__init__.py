"""GPU schedules: formulas as blocks of threads."""
