"""Targets: the stages of the pipeline that depend on the kind of machine, one file each; `resolve.py` names them."""
