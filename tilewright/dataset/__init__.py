"""Data sets of measured configs: collected task by task, kept in the record format, split by task, and learned from.

`tasks.py` has the tasks, `collect.py` measures their configs, `store.py` keeps the records in files, `split.py` says
which tasks are near copies of each other, and `train.py` trains the weights of `cost/attention.py`.
"""
