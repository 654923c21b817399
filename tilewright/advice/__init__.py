"""Advice to the designer of a model: what would make its layers faster on this machine, with measured times."""
