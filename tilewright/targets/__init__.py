"""What differs from one kind of machine to another on the pipeline of a model, one file each; `resolve.py` names
them."""
