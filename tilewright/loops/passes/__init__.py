"""Passes over loop programs: each takes a `Program` and returns another that computes the same."""
