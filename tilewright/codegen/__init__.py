"""Programs to Kernels: one slice per target."""
