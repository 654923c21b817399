"""Graph passes, one per file, and `pipeline.py`, which lists them in order: a Graph in, a Partition out."""
