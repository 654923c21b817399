"""Targets: the stages of the pipeline that depend on the kind of machine, one file per kind; `resolve.py` selects
one."""
