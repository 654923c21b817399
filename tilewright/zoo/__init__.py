"""The models of the papers as plain PyTorch modules, for demos, tests and benchmarks.

    model = zoo.build("resnet50")
    inputs = zoo.example_inputs("resnet50", batch=8)
    model(*inputs)

One file per family, `init.py` for the random weights, `registry.py` for the table. This room imports torch and nothing
else of the project; only the command line, the tests and the benchmarks import it.
"""

from .registry import Entry, UnknownModelError, UnknownOptionError, build, entry, example_inputs, names

__all__ = ["Entry", "UnknownModelError", "UnknownOptionError", "build", "entry", "example_inputs", "names"]
