"""Graph passes, one a file, and `pipeline.py`, the list of them in order: a Graph in, a Partition out."""
