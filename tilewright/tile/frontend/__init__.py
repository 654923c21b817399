"""From a Python function to the tile IR."""
